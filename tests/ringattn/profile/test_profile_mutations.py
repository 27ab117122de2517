"""A profile that something has changed is read as what it says or refused in one line, never misread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_samples import PLAIN, RICH, RICH_TEXT, assert_one_line, mutated, resealed, text

from ringattn.errors import ProfileError
from ringattn.profile import strict_yaml as yaml_strict
from ringattn.profile.yaml_io import dump_profile, parse_profile


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in YAML data."""
    if path:
        yield path
    items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


PLACES = list(places(PLAIN))
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from(PLACES), st.sampled_from(["replace", "delete", "add"]), junk)
@settings(max_examples=100)
def test_a_mutated_profile_loads_equal_or_is_refused(path: tuple[Any, ...], change: str, value: Any) -> None:
    plain = mutated(path, change, value)
    try:
        loaded = parse_profile(yaml_strict.write_yaml(plain), "p.yaml")
    except ProfileError as error:
        assert_one_line(error, "p.yaml")
    else:
        assert loaded == RICH


@given(st.sampled_from(PLACES), st.sampled_from(["replace", "delete", "add"]), junk)
@settings(max_examples=100)
def test_a_mutated_profile_with_a_fitting_checksum_is_still_a_profile_or_refused(
    path: tuple[Any, ...], change: str, value: Any
) -> None:
    try:
        loaded = parse_profile(resealed(mutated(path, change, value)), "p.yaml")
    except ProfileError as error:
        assert_one_line(error, "p.yaml")
    else:
        assert parse_profile(dump_profile(loaded), "p.yaml") == loaded


@given(
    st.integers(0, len(RICH_TEXT)),
    st.integers(0, 3),
    st.text(max_size=3) | st.sampled_from("\t\n:-[]{}&*!#'\"%@,?|>\0"),
)
@settings(max_examples=100)
def test_a_mutated_text_loads_equal_or_is_refused(start: int, removed: int, inserted: str) -> None:
    content = RICH_TEXT[:start] + inserted + RICH_TEXT[start + removed :]
    try:
        loaded = parse_profile(content, "p.yaml")
    except ProfileError as error:
        assert_one_line(error, "p.yaml")
    else:
        assert loaded == RICH


@given(st.integers(0, len(RICH_TEXT.encode()) - 1))
@settings(max_examples=60)
def test_a_truncated_file_is_refused(length: int) -> None:
    content = RICH_TEXT.encode()[:length]
    if content.rstrip() == RICH_TEXT.encode().rstrip():
        return
    with pytest.raises(ProfileError):
        parse_profile(content, "p.yaml")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_one_line(content: bytes) -> None:
    with pytest.raises(ProfileError) as caught:
        parse_profile(content, "p.yaml")
    assert_one_line(caught.value, "p.yaml")
