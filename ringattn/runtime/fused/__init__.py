"""Gathers, merges and sums between kernels as one GPU kernel each, in Triton."""
