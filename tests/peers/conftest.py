"""Ranks that tests share."""

from shared_ranks import ranks

__all__ = ["ranks"]
