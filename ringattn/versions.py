"""Holds this package's version and parses versions of software, since rules about kernels hold for some releases."""

from __future__ import annotations

import re

__version__ = "0.1.0"  # of this package; the build reads it here

TESTED_TORCH = (2, 13)  # major, minor: the newest torch that the tests have run on

Release = tuple[int, int, int, int, int]

_STAGES = {"a": 0, "b": 1, "rc": 2, "": 3}
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:[._-]?(a|b|rc)[._-]?(\d+))?")


def release(text: str) -> Release | None:
    """Parse "9.19.0" or "4.0.0b36" as (major, minor, micro, stage, its number), which compare; None for no version."""
    match = _RELEASE.match(text)
    if match is None:
        return None
    major, minor, micro, stage, number = match.groups()
    return int(major), int(minor), int(micro or 0), _STAGES[stage or ""], int(number or 0)


def newer_than_tested(torch_version: str) -> bool:
    """Tell whether a torch is of a later minor release than ``TESTED_TORCH``; its micro releases are not."""
    found = release(torch_version)
    return found is not None and found[:2] > TESTED_TORCH
