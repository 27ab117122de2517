"""Writes counts in sentences. Plain text; imports nothing."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Return ``1 cell``, ``3 cells``, ``2 entries`` or ``2 branches``."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}es" if noun.endswith(("ch", "sh", "s", "x")) else f"{count} {noun}s"
