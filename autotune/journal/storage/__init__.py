"""Keeps studies: a file of one process, one that nodes share, or a database."""
