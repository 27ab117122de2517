"""Reads and writes hardware profiles, strictly: a profile is loaded whole and understood whole, or refused.

The format follows the dataclasses of ``profile`` and ``workload`` by their type hints, so there is no second
description of it here. What is absent takes the field's default, what is unknown is an error.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ringattn.errors import FieldError, InputError, ProfileError
from ringattn.workload import Branch, HeadOffset, Pattern

from .bounds import MAX_TEXT, check_bounds
from .schema import SCHEMA_VERSION, Profile
from .strict_yaml import Quoted, YamlError, read_yaml, write_yaml
from .whole_file import read_regular, replace_file

MAX_FILE_BYTES = 4 * 2**20
MOST_INTEGER = 2**63 - 1

# The order in the file; the checksum comes last, so that a file cut short has none.
_TOP_LEVEL = ("schema", "source", "fingerprint", "software", "policy", "provenance", "plans")
_CHECKSUM = "checksum"
NOT_A_FILE = "is a URL, and profiles are read from files: URLs need a store. Download it, and name the file"
_NO_PROFILE = (
    "so that it is no hardware profile; `ringtune which -v` lists those there are, `ringtune probe` writes one"
)
_PLAIN_KEY = re.compile(r"[\w.+-]{1,60}")


# --- files ------------------------------------------------------------------------------------------------------


def load_profile(path: str | os.PathLike[str], *, checksum: bool = True) -> Profile:
    """Return the profile in the file ``path``; ProfileError (one line: file, key path, fault) for anything else.

    ``checksum`` as in ``parse_profile``.
    """
    return parse_profile(_read_bounded(Path(path)), os.fspath(path), checksum=checksum)


def load_head(path: str | os.PathLike[str]) -> Profile:
    """Return the profile in a file without its rows, which are not read; ProfileError as for ``load_profile``.

    The checksum, which counts the rows, is not compared.
    """
    return parse_profile(_read_bounded(Path(path)), os.fspath(path), checksum=False, until="plans")


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write ``profile`` to ``path`` in one step, making its folder if need be.

    The text goes to a new file beside the target, which takes the target's place only when it is on the disk. If
    anything fails ProfileError is raised, an old file is as it was, and nothing new lies about.
    """
    content = dump_profile(profile).encode("utf-8")
    if len(content) > MAX_FILE_BYTES:
        raise ProfileError(os.fspath(path), f"would be {len(content)} bytes, above the limit of {MAX_FILE_BYTES}")
    try:
        target = _resolved(Path(path))
        if target.is_dir():
            raise ProfileError(os.fspath(path), "is a directory; name a file in it")
        if target.exists() and not target.is_file():  # a device or pipe, which a file would replace
            raise ProfileError(os.fspath(path), "is not a regular file; name another one")
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, content)
    except OSError as error:
        what = error.strerror or str(error)
        raise ProfileError(
            os.fspath(path), f"cannot be written: {what}; what was there is unchanged. Write to another place"
        ) from error


def _resolved(path: Path) -> Path:
    """Return where a path leads, through symbolic links, which stay; OSError where it leads nowhere."""
    try:
        return path.resolve()
    except RuntimeError:  # what Python 3.11 and 3.12 make of ELOOP
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a NUL", ascii(str(path))) from None


def url_in(text: str) -> str:
    """Return ``text`` as the URL that it is, also where a Path has made one slash of two; empty where it is none."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+", text)
    return f"{match[1]}://{text[match.end() :]}" if match else ""


def _read_bounded(path: Path) -> bytes:
    """Return the bytes of a regular file of at most MAX_FILE_BYTES."""
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        if url := url_in(str(path)):
            raise ProfileError(url, NOT_A_FILE) from None
        raise ProfileError(str(path), "no such file; write one with `ringtune probe --output FILE`") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ProfileError(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}") from error


# --- text to profile and back -----------------------------------------------------------------------------------


def parse_profile(content: str | bytes, source: str, *, checksum: bool = True, until: str = "") -> Profile:
    """Return the profile in a YAML text; ``source`` names it in the ProfileError that everything invalid raises.

    Without ``checksum`` it need have none, nor one that fits. ``until`` is the key from which on nothing is read.
    """
    if isinstance(content, bytes):
        try:
            content = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ProfileError(source, f"is not UTF-8 text (byte {error.start})") from None
    try:
        plain = read_yaml(content, until=until)
    except YamlError as fault:
        raise ProfileError(source, str(fault)) from None
    try:
        return _profile_of(plain, checksum)
    except _Fault as fault:
        raise ProfileError(source, fault.message, fault.key) from None


def dump_profile(profile: Profile) -> str:
    """Return ``profile`` as YAML, with its checksum: ``parse_profile`` gives back an equal one. Raises ProfileError."""
    encoded = _encode_fields(profile, "")
    plain = {name: encoded[name] for name in _TOP_LEVEL if name in encoded}
    assert len(plain) == len(encoded), f"_TOP_LEVEL lacks {encoded.keys() - plain.keys()}"
    try:
        assert _decode(Profile, plain, "") == profile
    except _Fault as fault:  # what could not be read back is not written
        raise ProfileError("profile", fault.message, fault.key) from None
    versions = {name: Quoted(version) for name, version in profile.software}
    return write_yaml({**plain, **({"software": versions} if versions else {}), _CHECKSUM: checksum_of(plain)})


def to_plain(value: Any) -> dict[str, Any]:
    """Return a dataclass of plain data in the format of profiles, for ``from_plain`` to give back an equal one."""
    return _encode_fields(value, "")


def from_plain(cls: Any, plain: object, source: str) -> Any:
    """Return the inverse, as strict as a profile is read; ``source`` names it in the ProfileError."""
    try:
        return _decode(cls, plain, "")
    except _Fault as fault:
        raise ProfileError(source, fault.message, fault.key) from None


def checksum_of(plain: dict[str, Any]) -> str:
    """Return ``sha256:`` over the content as canonical JSON, so that comments and layout are free."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()


def _profile_of(plain: object, checksum: bool) -> Profile:
    if not isinstance(plain, dict):
        found = _kind(plain) if plain is None or isinstance(plain, list) else "one value"
        raise _Fault("", f"holds {found}, {_NO_PROFILE}")
    if not plain.keys() & {*_TOP_LEVEL, _CHECKSUM}:
        raise _Fault("", f"has none of the keys of a profile, {_NO_PROFILE}")
    schema = _required(plain, "schema")
    if type(schema) is not int:
        shown = "text" if isinstance(schema, str) else _kind(schema)
        raise _Fault("schema", f"is {shown}; it must be an integer")
    if schema != SCHEMA_VERSION:
        raise _Fault(
            "schema",
            f"is {schema}, and this version reads {SCHEMA_VERSION}; write it anew with "
            "`ringtune probe --fresh --output FILE`, or use the ringtune that wrote it",
        )
    if checksum and _CHECKSUM not in plain:
        raise _Fault(_CHECKSUM, "is missing; the file was cut short, or written by hand without one")
    given = _decode(str, plain.get(_CHECKSUM, ""), _CHECKSUM)
    content = {key: value for key, value in plain.items() if key != _CHECKSUM}
    profile: Profile = _decode(Profile, content, "")
    if not checksum:
        return profile
    actual = checksum_of(content)
    if given != actual:
        raise _Fault(
            _CHECKSUM,
            "does not match the content: the file was damaged or edited; "
            f"write it anew with `ringtune probe --fresh --output FILE`, or if the edit was meant, put {actual} here",
        )
    return profile


def _required(plain: dict[str, Any], key: str) -> object:
    if key not in plain:
        raise _Fault(key, "is missing")
    return plain[key]


class _Fault(Exception):
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
        raise _Fault(_join(key, error.field), error.problem) from None
    except InputError as error:
        raise _Fault(key, str(error)) from None


# --- decoding: YAML data to dataclasses, by type hint -----------------------------------------------------------


def _decode(hint: Any, value: object, key: str) -> Any:
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
    return tuple(_decode(arguments[0], item, f"{key}[{index}]") for index, item in enumerate(value))


def _decode_fields(cls: Any, value: object, key: str) -> Any:
    if not isinstance(value, dict):
        _refuse(key, value, "a mapping")
    hints = _hints(cls)
    for name in value:
        if name not in hints:
            close = get_close_matches(name, hints, n=1)
            raise _Fault(_join(key, name), "is not a known key" + (f"; is it {close[0]}?" if close else ""))
    given: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in value:
            given[field.name] = _decode(hints[field.name], value[field.name], _join(key, field.name))
        elif field.default is MISSING and field.default_factory is MISSING:
            raise _Fault(_join(key, field.name), "is missing")
    with _constructing(key):
        made = cls(**given)
        check_bounds(made)
    return made


def _decode_scalar(hint: Any, value: Any, key: str) -> Any:
    if type(value) is int and abs(value) > MOST_INTEGER:
        raise _Fault(key, "is an integer of more than 64 bits")
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
        return _decode(members[0], value, key)
    if type(value) not in members:
        _refuse(key, value, "one of " + ", ".join(member.__name__ for member in members))
    return _decode_scalar(type(value), value, key)


def _decode_pairs(pair: tuple[Any, ...], value: object, key: str) -> tuple[tuple[str, Any], ...]:
    if not isinstance(value, dict):
        _refuse(key, value, "a mapping")
    for name in value:
        _check_text(name, key)
    return tuple(sorted((name, _decode(pair[1], item, _join(key, name))) for name, item in value.items()))


def _decode_pattern(value: object, key: str) -> Pattern:
    if value == "dense":
        return Pattern()
    if not isinstance(value, dict):
        _refuse(key, value, "`dense`, or a mapping of segment_lengths, dilation_rates and head_offset")
    for name in value:
        if name not in ("segment_lengths", "dilation_rates", "head_offset"):
            raise _Fault(_join(key, name), "is not a known key")
    head_offset = _decode(HeadOffset, value.get("head_offset", "interleaved"), f"{key}.head_offset")
    lists = [
        _decode(tuple[int, ...], value[name], f"{key}.{name}") if name in value else None
        for name in ("segment_lengths", "dilation_rates")
    ]
    with _constructing(key):
        pattern = Pattern.of(lists[0], lists[1], head_offset)
        check_bounds(pattern)
    return pattern


# --- encoding: the inverse --------------------------------------------------------------------------------------


def _encode_fields(value: Any, key: str) -> dict[str, Any]:
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
        return _encode_fields(value, key)
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
        raise _Fault(key, f"is text of {len(value)} characters; {MAX_TEXT} is the most")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        _refuse(key, value, "text without lone surrogates")


def _join(key: str, name: str) -> str:
    shown = _shown_key(name)
    return f"{key}.{shown}" if key else shown


@lru_cache(maxsize=1024)
def _shown_key(name: str) -> str:
    return name if _PLAIN_KEY.fullmatch(name) else ascii(name[:60])


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _refuse(key: str, value: object, wanted: str) -> NoReturn:
    raise _Fault(key, f"is {_kind(value)}; it must be {wanted}")


assert get_type_hints(Pattern)["branches"] == tuple[Branch, ...], "the pattern's own format above must follow"
