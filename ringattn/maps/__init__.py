"""Attention maps in memory linear in the length: sums over queries, and single rows, of the softmax P."""
