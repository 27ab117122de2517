"""Versions compare as their release orders say, and what is no version is none."""

from __future__ import annotations

import pytest

from ringattn.versions import release


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
