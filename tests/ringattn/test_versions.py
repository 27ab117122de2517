"""Versions compare as their release orders say, and what is no version is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringattn.versions import TESTED_TORCH, newer_than_tested, release

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def test_releases_are_in_order() -> None:
    ordered = ["8.9.7", "9.9.0", "9.10.0", "9.10.2", "9.19.0", "10.0"]
    ordered_stages = ["4.0.0a1", "4.0.0b9", "4.0.0b36", "4.0.0rc1", "4.0.0", "4.0.1b1"]
    for texts in (ordered, ordered_stages):
        releases = [release(text) for text in texts]
        assert None not in releases
        assert releases == sorted(releases)  # type: ignore[type-var]
        assert len(set(releases)) == len(texts)


@pytest.mark.parametrize(
    ("one", "other"), [("4.0.0.b36", "4.0.0b36"), ("4.0.0-beta", "4.0.0"), ("2.11.0+cu130", "2.11.0")]
)
def test_spellings_and_local_versions(one: str, other: str) -> None:
    assert release(one) == release(other)


@pytest.mark.parametrize("text", ["", "unknown", "9", "v9.1"])
def test_what_is_no_version(text: str) -> None:
    assert release(text) is None


def test_the_torch_that_was_tested_is_the_one_that_is_pinned() -> None:
    (pinned,) = re.findall(r"^torch==(\S+)$", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    found = release(pinned)
    assert found is not None
    assert found[:2] == TESTED_TORCH


@pytest.mark.parametrize(
    ("text", "newer"),
    [
        ("2.11.0", False),
        ("2.13.0", False),
        ("2.13.1+cu130", False),
        ("2.14.0", True),
        ("2.14.0a0+git12ab", True),
        ("3.0.0", True),
        ("unknown", False),
    ],
)
def test_a_later_minor_release_is_newer_than_tested(text: str, newer: bool) -> None:
    assert newer_than_tested(text) is newer
