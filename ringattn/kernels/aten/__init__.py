"""Wraps the kernels that torch ships, one file for each."""
