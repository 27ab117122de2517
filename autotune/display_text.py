"""Formats numbers and foreign text for people: one unit, three digits, one line. Imports nothing of the tuner."""

from __future__ import annotations

import html
import math

from ringattn.wording import format_bytes as format_bytes
from ringattn.wording import three_digits

_KIB = 1024


def plain(text: object) -> str:
    r"""Return ``text`` on one line, with everything that could steer a terminal written out (``\x1b``).

    Profiles are shared between machines, so their strings are other people's.
    """
    return "".join(
        c if c.isprintable() else " " if c in "\n\t" else c.encode("unicode_escape").decode() for c in str(text)
    )


def escape(text: object) -> str:
    """Escape ``plain`` text for HTML and SVG, in content and in quoted attributes alike."""
    return html.escape(plain(text), quote=True)


def format_ms(ms: float) -> str:
    """Format with three significant digits and a unit that keeps them short: ``24.1 us``, ``1.52 ms``, ``2.10 s``."""
    if ms < 0.1:
        return f"{three_digits(ms * 1e3)} us"
    if ms < 1e3:
        return f"{three_digits(ms)} ms"
    return f"{three_digits(ms / 1e3)} s"


def format_length(tokens: int) -> str:
    """Format a sequence length: ``8K`` for 8192, ``1M``, otherwise digits in groups."""
    if tokens >= _KIB**2 and tokens % _KIB**2 == 0:
        return f"{tokens // _KIB**2}M"
    if tokens >= _KIB and tokens % _KIB == 0:
        return f"{tokens // _KIB}K"
    return f"{tokens:,}"


def format_age(seconds: float) -> str:
    """Return how long ago something was: ``5 min ago``, ``3 h ago``, ``12 days ago``."""
    for most_s, unit_s, unit in ((3600, 60, "min"), (2 * 86400, 3600, "h"), (math.inf, 86400, "days")):
        if seconds < most_s:
            return f"{max(0, int(seconds // unit_s))} {unit} ago"
    raise AssertionError(seconds)


def format_duration(seconds: float) -> str:
    """Format seconds as ``8 s``, ``2 min 05 s``, ``1 h 12 min``."""
    whole = max(0, math.ceil(seconds - 0.5))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_factor(factor: float) -> str:
    """Format a factor as ``1.18x``; huge ones stay short."""
    return f"{factor:.2f}x" if factor < 1000 else f"{factor:.3g}x"
