"""Writes counts and sizes in sentences. Plain text; imports nothing."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Return ``1 cell``, ``3 cells``, ``2 entries`` or ``2 branches``."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}es" if noun.endswith(("ch", "sh", "s", "x")) else f"{count} {noun}s"


def needs_package(what: str, package: str, extra: str = "") -> str:
    """Return what to say where a package is not installed that ``extra``, or the plain installation, brings."""
    if extra:
        return f"{what} need {package}; install the extra: pip install '.[{extra}]'"
    return f"{what} needs {package}, which is not installed; pip install . brings it"


def format_bytes(count: int) -> str:
    """Format bytes as ``512 B``, ``3.00 KiB``, ``1.50 GiB``."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{three_digits(value)} {unit}"


def three_digits(value: float) -> str:
    """Format a number with three digits, or with all those of its whole part."""
    if value >= 1e6:
        return f"{value:.3g}"
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"
