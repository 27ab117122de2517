"""Reads and writes hardware profiles, strictly: a profile is loaded whole and understood whole, or refused.

The format follows the dataclasses of ``schema`` and ``workload`` by their type hints, see ``plain_data``, so there is
no second description of it here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from ringattn.errors import ProfileError

from .plain_data import Fault, decode, encode_fields, kind
from .schema import SCHEMA_VERSION, Profile
from .strict_yaml import Quoted, YamlError, read_yaml, write_yaml
from .whole_file import read_regular, replace_file

MAX_FILE_BYTES = 4 * 2**20

# The order in the file; the checksum comes last, so that a file cut short has none.
_TOP_LEVEL = ("schema", "source", "fingerprint", "software", "policy", "provenance", "plans")
_CHECKSUM = "checksum"
NOT_A_FILE = "is a URL, and profiles are read from files: URLs need a store. Download it, and name the file"
_NO_PROFILE = (
    "so that it is no hardware profile; `ringtune which -v` lists those there are, `ringtune probe` writes one"
)


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
        raise ProfileError(
            str(path), "no such file; `ringtune which` names those here, and `ringtune probe --output FILE` writes one"
        ) from None
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
    except Fault as fault:
        raise ProfileError(source, fault.message, fault.key) from None


def dump_profile(profile: Profile) -> str:
    """Return ``profile`` as YAML, with its checksum: ``parse_profile`` gives back an equal one. Raises ProfileError."""
    encoded = encode_fields(profile, "")
    plain = {name: encoded[name] for name in _TOP_LEVEL if name in encoded}
    assert len(plain) == len(encoded), f"_TOP_LEVEL lacks {encoded.keys() - plain.keys()}"
    try:
        assert decode(Profile, plain, "") == profile
    except Fault as fault:  # what could not be read back is not written
        raise ProfileError("profile", fault.message, fault.key) from None
    versions = {name: Quoted(version) for name, version in profile.software}
    return write_yaml({**plain, **({"software": versions} if versions else {}), _CHECKSUM: checksum_of(plain)})


def checksum_of(plain: dict[str, Any]) -> str:
    """Return ``sha256:`` over the content as canonical JSON, so that comments and layout are free."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()


def _profile_of(plain: object, checksum: bool) -> Profile:
    if not isinstance(plain, dict):
        found = kind(plain) if plain is None or isinstance(plain, list) else "one value"
        raise Fault("", f"holds {found}, {_NO_PROFILE}")
    if not plain.keys() & {*_TOP_LEVEL, _CHECKSUM}:
        raise Fault("", f"has none of the keys of a profile, {_NO_PROFILE}")
    schema = _required(plain, "schema")
    if type(schema) is not int:
        shown = "text" if isinstance(schema, str) else kind(schema)
        raise Fault("schema", f"is {shown}; it must be an integer")
    if schema != SCHEMA_VERSION:
        raise Fault(
            "schema",
            f"is {schema}, and this version reads {SCHEMA_VERSION}; write it anew with "
            "`ringtune probe --fresh --output FILE`, or use the ringtune that wrote it",
        )
    if checksum and _CHECKSUM not in plain:
        raise Fault(_CHECKSUM, "is missing; the file was cut short, or written by hand without one")
    given = decode(str, plain.get(_CHECKSUM, ""), _CHECKSUM)
    content = {key: value for key, value in plain.items() if key != _CHECKSUM}
    profile: Profile = decode(Profile, content, "")
    if not checksum:
        return profile
    actual = checksum_of(content)
    if given != actual:
        raise Fault(
            _CHECKSUM,
            "does not match the content: the file was damaged or edited; "
            f"write it anew with `ringtune probe --fresh --output FILE`, or if the edit was meant, put {actual} here",
        )
    return profile


def _required(plain: dict[str, Any], key: str) -> object:
    if key not in plain:
        raise Fault(key, "is missing")
    return plain[key]
