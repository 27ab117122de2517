"""Parses integers and dtypes of arguments, one rule each. No torch, so that the command line can use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

from .errors import FieldError, InputError

_LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_SHORT_NAMES = {spelling: short for short, long in _LONG_NAMES.items() for spelling in (short, long, f"torch.{long}")}


def is_integer(value: object) -> bool:
    """Tell whether it is an integer, numpy's too; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def integer(name: str, value: Any, least: int = 1, most: int | None = None, instead: str = "") -> int:
    """Return ``value`` as an int; InputError unless it is one from ``least`` to ``most``, where there is a most.

    ``instead`` names alternatives.
    """
    if not is_integer(value) or value < least or (most is not None and value > most):
        end = "" if most is None else f" and <= {most}"
        raise FieldError(f"is {shown(value)}; it must be {instead}an integer >= {least}{end}", field=name)
    return int(value)


def check_dropout(name: str, value: object) -> None:
    """Raise InputError unless it is a probability below 1, that a weight is dropped."""
    if not is_finite(value) or not 0.0 <= value < 1.0:
        raise FieldError(f"is {shown(value)}; it must be in [0, 1)", field=name)


def is_finite(value: object) -> TypeGuard[float]:
    """Tell whether it is a finite number that a float can hold; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def shown(value: object) -> str:
    """Return ``value`` for a message of one line: its repr, or the size of an integer of hundreds of digits."""
    if isinstance(value, int) and value.bit_length() > 256:  # repr raises beyond 4300 digits
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def is_list(value: object) -> bool:
    """Tell whether it is a sequence or a one-dimensional array: no text, and no tensor, which may be on a device."""
    return (isinstance(value, Sequence) and not isinstance(value, str | bytes)) or (
        type(value).__module__ == "numpy" and getattr(value, "ndim", 0) == 1
    )


def dtype_name(value: object) -> str | None:
    """Return the short name of a dtype of inputs, given as torch.dtype or by short or long name; None for another."""
    if not isinstance(value, str) and (type(value).__module__, type(value).__name__) != ("torch", "dtype"):
        return None
    return _SHORT_NAMES.get(str(value))


def input_dtype(value: object, *, also: str = "") -> str:
    """Return the short name of a dtype of inputs; InputError for another. ``also`` lists other values allowed."""
    name = dtype_name(value)
    if name is None:
        names = ", ".join(_LONG_NAMES)
        raise InputError(f"dtype is {value!r}; use {also}one of {names} or {dtype_choices()}")
    return name


def dtype_choices() -> str:
    return ", ".join(f"torch.{_LONG_NAMES[name]}" for name in _LONG_NAMES)
