"""Attention packages that are not part of torch, one file for each."""
