"""Wraps attention packages that are not part of torch, one file for each."""
