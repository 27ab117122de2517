"""Strict reading of studies: each attribute has a type and bounds, and what has not is told with study and field.

A study is a file or a database that anybody may have edited, and that another version or program may have written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.exit_codes import ProbeFailure
from autotune.measure.evaluator import Checked, Direction, FailureKind, Fault, Proven, Sample
from ringattn.errors import ProfileError
from ringattn.profile.plain_data import from_plain

MOST_NUMBER = 10**6  # of a block or a trial of one cell: the longest probe so far had 400 blocks
LARGEST_LOG = 50.0  # of a ratio of two times, e^50: further away no float holds their quotient's square
LONGEST_MS = 1e9  # eleven days
NO_JOURNAL = (LookupError, TypeError, ValueError, AssertionError, AttributeError)  # what Optuna ends with on one


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


def milliseconds(value: object, where: str) -> float:
    """Return a time above zero and within bounds."""
    number: float = typed(value, float, where)
    return _within(number, 1e-9, LONGEST_MS, where)


def block(name: str, value: object, where: str) -> tuple[int, int, dict[int, tuple[Sample, ...]]]:
    """Return the number of a block, the trial of its default, and the samples of every trial in it."""
    if not isinstance(value, Mapping) or value.keys() != {"default", "samples"}:
        raise BadStudy(where, "must be a mapping of default and samples")
    if not isinstance(value["samples"], Mapping):
        raise BadStudy(f"{where}.samples", "must be a mapping of trials")
    samples = {
        _number(trial, f"{where}.samples"): tuple(_samples(read, f"{where}.samples[{str(trial)[:20]}]"))
        for trial, read in value["samples"].items()
    }
    default: int = typed(value["default"], int, f"{where}.default")
    if not samples.get(default):
        raise BadStudy(f"{where}.default", f"is {default}, of which there is no sample")
    return _number(name, where, least=1), default, samples


def _number(text: object, where: str, least: int = 0) -> int:
    number = int(text) if isinstance(text, str) and text.isdecimal() and len(text) <= len(str(MOST_NUMBER)) else -1
    if not least <= number <= MOST_NUMBER:
        raise BadStudy(where, f"its number must be an integer from {least} to {MOST_NUMBER}")
    return number


def _samples(value: object, where: str) -> Iterator[Sample]:
    if not isinstance(value, list) or not 1 <= len(value) <= 2 or any(not isinstance(x, list) for x in value):
        raise BadStudy(where, "must be one or two lists of ms and host_us")
    for number, pair in enumerate(value):
        if len(pair) != 2:
            raise BadStudy(f"{where}[{number}]", "must be two numbers")
        host_us: float = typed(pair[1], float, f"{where}[{number}][1]")
        within = _within(host_us, 0, 1e3 * LONGEST_MS, f"{where}[{number}][1]")
        yield Sample(milliseconds(pair[0], f"{where}[{number}][0]"), within)


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
        "direction": attribute(attrs, "direction", Direction, where),
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
