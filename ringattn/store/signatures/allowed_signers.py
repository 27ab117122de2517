"""Signers whom a file names, in the ``allowed_signers`` format of OpenSSH (ssh-keygen(1)). Pure.

A line that is passed over believes nobody: one for other namespaces, key types or certificates. What is not understood
is refused, since it might restrict what is believed.
"""

from __future__ import annotations

import base64
import binascii
import calendar
import math
import re
import time
from dataclasses import dataclass

from ringattn.errors import StoreError

from .ssh_signature import KEY_TYPE, NAMESPACE

_FIELD = re.compile(r'(?:[^\s"]|"[^"]*")+')
_TYPE = re.compile(r"(?:sk-)?(?:ssh|ecdsa)-\S+")
_OPTION = re.compile(r'([A-Za-z-]+)(?:="([^"]*)")?(?:,(?!$)|$)')
_FORMS = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}


@dataclass(frozen=True, slots=True)
class Signer:
    """One key in OpenSSH's encoding, whose it is, and from when to when it is valid, in seconds since 1970."""

    key: bytes
    principals: str
    valid_after_s: float = -math.inf
    valid_before_s: float = math.inf

    def is_valid(self, now_s: float) -> bool:
        return self.valid_after_s <= now_s <= self.valid_before_s

    @property
    def validity(self) -> str:
        """The time in which the key is valid, for people."""
        ends = (("from", self.valid_after_s), ("until", self.valid_before_s))
        shown = [f"{word} {time.strftime('%Y-%m-%d %H:%M', time.gmtime(at))}" for word, at in ends if math.isfinite(at)]
        return f"{' '.join(shown)} UTC" if shown else "always"


def parse_signers(text: str, source: str) -> tuple[Signer, ...]:
    """Return the Ed25519 keys that may sign profiles; StoreError, with the line, for what cannot be understood."""
    signers = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            signer = _parsed(line)
        except ValueError as error:
            raise StoreError(source, f"line {number}: {error}") from None
        if signer is not None:
            signers.append(signer)
    return tuple(signers)


def _parsed(line: str) -> Signer | None:
    """Return the key of a line, None where it signs no profiles; ValueError, which says why, for no such line."""
    fields = _FIELD.findall(line) if line.count('"') % 2 == 0 else []
    where = next((i for i, field in enumerate(fields) if _TYPE.fullmatch(field)), 0)
    if where not in (1, 2) or len(fields) <= where + 1:
        raise ValueError("is no line of principals, options, key type and key")
    options = _options(fields[1]) if where == 2 else {}
    after, before = (_seconds(options[name]) if name in options else None for name in ("valid-after", "valid-before"))
    try:
        key = base64.b64decode(fields[where + 1], validate=True)
    except binascii.Error:
        raise ValueError("its key is not base64") from None
    if "cert-authority" in options or fields[where] != KEY_TYPE.decode():
        return None
    if "namespaces" in options and not _matches(NAMESPACE, options["namespaces"]):
        return None
    return Signer(
        key,
        fields[0].strip('"'),
        -math.inf if after is None else after,
        math.inf if before is None else before,
    )


def _options(text: str) -> dict[str, str]:
    """Return the options of a line by their names in small letters; that of one without a value is empty."""
    options: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _OPTION.match(text, at)
        if match is None:
            raise ValueError(f"options {text} cannot be taken apart")
        name, value, at = match[1].lower(), match[2], match.end()
        if name not in ("cert-authority", "namespaces", "valid-after", "valid-before"):
            raise ValueError(f"option {match[1]} is not known here; remove it, or the line")
        if (value is None) != (name == "cert-authority"):
            raise ValueError(f"option {name} has {'no value' if value is None else 'a value'}")
        if name in options:
            raise ValueError(f"option {name} is given twice")
        options[name] = value or ""
    return options


def _matches(text: str, patterns: str) -> bool:
    """Tell whether one of the patterns fits, and none that starts with ``!``; ``*`` and ``?`` stand for others."""
    found = False
    for pattern in patterns.split(","):
        form = re.escape(pattern.removeprefix("!")).replace(r"\*", ".*").replace(r"\?", ".")
        if re.fullmatch(form, text):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _seconds(text: str) -> float:
    """Return a time such as 20260131, 202601311200 or 20260131120000 in seconds since 1970; UTC where Z follows."""
    digits = text.removesuffix("Z")
    try:
        parsed = time.strptime(digits, _FORMS[len(digits)] if digits.isascii() and digits.isdigit() else "")
        return float(calendar.timegm(parsed) if text.endswith("Z") else time.mktime(parsed))
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{text!r} is no time; write YYYYMMDD or YYYYMMDDHHMM, with Z for UTC") from None
