"""Strict reading of studies: each attribute has a type and bounds, and what has not is told with study and field.

A study is a file or a database that anybody may have edited, and that another version or program may have written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.exit_codes import ProbeFailure
from autotune.measure.evaluator import Checked, FailureKind, Fault, Proven
from ringattn.errors import ProfileError
from ringattn.profile.yaml_io import from_plain

MOST_BLOCKS = 10**6  # of one cell: the longest probe so far had 400
LARGEST_LOG = 50.0  # of a ratio of two times, e^50: further away no float holds their quotient's square
LONGEST_MS = 1e9  # eleven days


class BadStudy(ProbeFailure):
    """A study that this program did not write as it is; ``where`` is the study, or a trial of it."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}; give --fresh to start over")


def attribute(attrs: Mapping[str, Any], name: str, hint: Any, where: str) -> Any:
    """Return a user attribute as a value of the type ``hint``, None where there is none; or BadStudy."""
    return None if name not in attrs else typed(attrs[name], hint, f"{where}: {name}")


def required(attrs: Mapping[str, Any], name: str, hint: Any, where: str) -> Any:
    """Return a user attribute as a value of the type ``hint``; BadStudy where there is none."""
    if name not in attrs:
        raise BadStudy(where, f"{name} is missing")
    return attribute(attrs, name, hint, where)


def typed(value: object, hint: Any, where: str) -> Any:
    """Return JSON data as a value of the type ``hint``; BadStudy where it is none."""
    try:
        return from_plain(hint, value, where)
    except ProfileError as error:
        raise BadStudy(where, error.problem) from None


def log_ratio(value: object, where: str) -> float:
    """Return a log of a ratio of times, within bounds."""
    number: float = typed(value, float, where)
    return _within(number, -LARGEST_LOG, LARGEST_LOG, where)


def milliseconds(value: object, where: str) -> float:
    """Return a time above zero and within bounds."""
    number: float = typed(value, float, where)
    return _within(number, 1e-9, LONGEST_MS, where)


def block(name: str, value: object, where: str) -> tuple[int, tuple[float, float | None]]:
    """Return the number of a block, and the default's ms in it with the log of its two readings' ratio."""
    number = int(name) if name.isdecimal() and len(name) <= len(str(MOST_BLOCKS)) else 0
    if not 1 <= number <= MOST_BLOCKS:
        raise BadStudy(where, f"its number must be an integer from 1 to {MOST_BLOCKS}")
    if not isinstance(value, list) or len(value) != 2:
        raise BadStudy(where, "must be a list of two numbers")
    repeated = None if value[1] is None else log_ratio(value[1], f"{where}[1]")
    return number, (milliseconds(value[0], f"{where}[0]"), repeated)


def checked(value: object, where: str) -> Checked:
    """Return the result of a check."""
    made: Checked = typed(value, Checked, where)
    milliseconds(made.call_ms, f"{where}.call_ms")
    for name in ("error", "peak_bytes", "cold_ms", "host_us"):
        _within(getattr(made, name), 0, math.inf, f"{where}.{name}")
    return made


def fault(attrs: Mapping[str, Any], where: str) -> Fault:
    """Return the fault that a mapping describes, which may hold other things, too."""
    plain = {
        "kind": required(attrs, "kind", FailureKind, where),
        "message": attribute(attrs, "message", str, where) or "",
        "cause": attrs.get("cause"),
    }
    try:
        return Fault.of(plain)
    except (LookupError, TypeError, ValueError):
        raise BadStudy(f"{where}: cause", f"is {str(attrs['cause'])[:60]}, which is none that is known") from None


def validation(value: object, where: str) -> Proven | Fault:
    """Return the result of a validation."""
    if isinstance(value, Mapping) and "kind" in value:
        return fault(value, where)
    made: Proven = typed(value, Proven, where)
    _within(made.first_call_ms, 0, math.inf, f"{where}.first_call_ms")
    return made


def _within(number: float, least: float, most: float, where: str) -> float:
    if not least <= number <= most:
        raise BadStudy(where, f"is {number}; it must be from {least:g} to {most:g}")
    return number


@contextlib.contextmanager
def read_by_optuna(where: str) -> Iterator[None]:
    """Raise BadStudy for what Optuna ends with on content that it did not write."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AssertionError, AttributeError) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise BadStudy(where, f"cannot be read by Optuna ({type(error).__name__}: {reason})") from error
