"""Reads the facts of this machine: the only device queries."""
