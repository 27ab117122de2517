"""Turns dataclasses into plain data in the format of profiles, and back by their type hints: whole, or refused.

What is absent takes the field's default, what is unknown is an error, and every fault has its key path.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ringattn.errors import FieldError, InputError, ProfileError
from ringattn.workload import Branch, HeadOffset, Pattern

from .bounds import MAX_TEXT, check_bounds

MOST_INTEGER = 2**63 - 1
_PLAIN_KEY = re.compile(r"[\w.+-]{1,60}")


def to_plain(value: Any) -> dict[str, Any]:
    """Return a dataclass of plain data in the format of profiles, for ``from_plain`` to give back an equal one."""
    return encode_fields(value, "")


def from_plain(cls: Any, plain: object, source: str) -> Any:
    """Return the inverse, as strict as a profile is read; ``source`` names it in the ProfileError."""
    try:
        return decode(cls, plain, "")
    except Fault as fault:
        raise ProfileError(source, fault.message, fault.key) from None


class Fault(Exception):
    """A fault at a key path."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key, self.message = key, message


@contextmanager
def _constructing(key: str) -> Iterator[None]:
    """Give what a dataclass refuses its key path."""
    try:
        yield
    except FieldError as error:
        raise Fault(_join(key, error.field), error.problem) from None
    except InputError as error:
        raise Fault(key, str(error)) from None


# --- decoding: YAML data to dataclasses, by type hint -----------------------------------------------------------


def decode(hint: Any, value: object, key: str) -> Any:
    """Return what the type hint says out of plain data at ``key``; raise Fault for anything else."""
    if hint in (int, float, str, bool):
        return _decode_scalar(hint, value, key)
    if hint is Pattern:
        return _decode_pattern(value, key)
    if is_dataclass(hint):
        return _decode_fields(hint, value, key)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments or not isinstance(value, str):
            _refuse(key, value, "one of " + ", ".join(arguments))
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, key)
    assert origin is tuple, hint
    assert len(arguments) == 2, hint
    assert arguments[1] is Ellipsis, hint
    if get_origin(arguments[0]) is tuple:
        return _decode_pairs(get_args(arguments[0]), value, key)
    if not isinstance(value, list):
        _refuse(key, value, "a list")
    return tuple(decode(arguments[0], item, f"{key}[{index}]") for index, item in enumerate(value))


def _decode_fields(cls: Any, value: object, key: str) -> Any:
    if not isinstance(value, dict):
        _refuse(key, value, "a mapping")
    hints = _hints(cls)
    for name in value:
        if name not in hints:
            close = get_close_matches(name, hints, n=1)
            raise Fault(_join(key, name), "is not a known key" + (f"; is it {close[0]}?" if close else ""))
    given: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in value:
            given[field.name] = decode(hints[field.name], value[field.name], _join(key, field.name))
        elif field.default is MISSING and field.default_factory is MISSING:
            raise Fault(_join(key, field.name), "is missing")
    with _constructing(key):
        made = cls(**given)
        check_bounds(made)
    return made


def _decode_scalar(hint: Any, value: Any, key: str) -> Any:
    if type(value) is int and abs(value) > MOST_INTEGER:
        raise Fault(key, "is an integer of more than 64 bits")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # not isinstance: True is an int to Python, and not to a profile
        _refuse(key, value, {int: "an integer", float: "a number", str: "text", bool: "true or false"}[hint])
    if hint is float and not math.isfinite(value):
        _refuse(key, value, "a finite number")
    if hint is str:
        _check_text(value, key)
    return value


def _decode_union(arguments: tuple[Any, ...], value: object, key: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    members = [member for member in arguments if member is not type(None)]
    if len(members) == 1:
        return decode(members[0], value, key)
    if type(value) not in members:
        _refuse(key, value, "one of " + ", ".join(member.__name__ for member in members))
    return _decode_scalar(type(value), value, key)


def _decode_pairs(pair: tuple[Any, ...], value: object, key: str) -> tuple[tuple[str, Any], ...]:
    if not isinstance(value, dict):
        _refuse(key, value, "a mapping")
    for name in value:
        _check_text(name, key)
    return tuple(sorted((name, decode(pair[1], item, _join(key, name))) for name, item in value.items()))


def _decode_pattern(value: object, key: str) -> Pattern:
    if value == "dense":
        return Pattern()
    if not isinstance(value, dict):
        _refuse(key, value, "`dense`, or a mapping of segment_lengths, dilation_rates and head_offset")
    for name in value:
        if name not in ("segment_lengths", "dilation_rates", "head_offset"):
            raise Fault(_join(key, name), "is not a known key")
    head_offset = decode(HeadOffset, value.get("head_offset", "interleaved"), f"{key}.head_offset")
    lists = [
        decode(tuple[int, ...], value[name], f"{key}.{name}") if name in value else None
        for name in ("segment_lengths", "dilation_rates")
    ]
    with _constructing(key):
        pattern = Pattern.of(lists[0], lists[1], head_offset)
        check_bounds(pattern)
    return pattern


# --- encoding: the inverse --------------------------------------------------------------------------------------


def encode_fields(value: Any, key: str) -> dict[str, Any]:
    """Return every field but those that are empty by default: a later change of a default changes no old profile.

    A field's metadata may say otherwise (``omit_default``): a field that is left out keeps its default for ever.
    """
    cls: Any = type(value)
    encoded: dict[str, Any] = {}
    for field in fields(cls):
        content = getattr(value, field.name)
        empty = not content and content is not False
        if content == field.default and field.metadata.get("omit_default", empty):
            continue
        plain = _encode(_hints(cls)[field.name], content, _join(key, field.name))
        if plain != {} or field.default_factory is MISSING:
            encoded[field.name] = plain
    return encoded


def _encode(hint: Any, value: Any, key: str) -> Any:
    if value is None:
        return None
    if isinstance(value, Pattern):
        return _encode_pattern(value)
    if is_dataclass(value):
        return encode_fields(value, key)
    if isinstance(value, tuple):
        item = get_args(hint)[0]
        if get_origin(item) is tuple:
            return dict(value)
        return [_encode(item, content, f"{key}[{index}]") for index, content in enumerate(value)]
    if isinstance(value, float):
        return float(value)  # also where it is numpy's
    return value


def _encode_pattern(pattern: Pattern) -> Any:
    if pattern == Pattern():
        return "dense"
    lists = {
        "segment_lengths": [branch.segment for branch in pattern.branches],
        "dilation_rates": [branch.rate for branch in pattern.branches],
    }
    return {**(lists if pattern.branches else {}), "head_offset": pattern.head_offset}


# --- small things -----------------------------------------------------------------------------------------------


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _check_text(value: str, key: str) -> None:
    if len(value) > MAX_TEXT:
        raise Fault(key, f"is text of {len(value)} characters; {MAX_TEXT} is the most")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        _refuse(key, value, "text without lone surrogates")


def _join(key: str, name: str) -> str:
    shown = _shown_key(name)
    return f"{key}.{shown}" if key else shown


@lru_cache(maxsize=1024)
def _shown_key(name: str) -> str:
    return name if _PLAIN_KEY.fullmatch(name) else ascii(name[:60])


def kind(value: object) -> str:
    """Return what a value is, in the words of a fault."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _refuse(key: str, value: object, wanted: str) -> NoReturn:
    raise Fault(key, f"is {kind(value)}; it must be {wanted}")


assert get_type_hints(Pattern)["branches"] == tuple[Branch, ...], "the pattern's own format above must follow"
