"""Files that are no profile: hostile, huge, not text, not files. Each is refused in one line, and soon."""

from __future__ import annotations

import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from profile_samples import RICH_TEXT, assert_one_line

from ringattn.errors import ProfileError
from ringattn.profile import strict_yaml as yaml_strict
from ringattn.profile.yaml_io import MAX_FILE_BYTES, load_profile, parse_profile

ALIAS_BOMB = "a: &a [x, x]\n" + "\n".join(f"{new}: &{new} [*{old}, *{old}]" for old, new in pairwise("abcdefghij"))
HOSTILE = {
    "alias bomb": (ALIAS_BOMB, "anchors"),
    "alias": ("schema: *one", "alias"),
    "anchor": ("schema: &one 1", "anchors"),
    "merge key": ("schema: 1\n<<: {source: measured}", "meaning of its own"),
    "object tag": ("schema: !!python/object/apply:os.system ['true']", "tags"),
    "object tag as root": ("!!python/object:os.path {}", "tags"),
    "name tag": ("schema: !!python/name:os.system ''", "tags"),
    "standard tag": ("schema: !!int 1", "tags"),
    "local tag": ("!profile\nschema: 1", "tags"),
    "binary": ("schema: !!binary aGk=", "tags"),
    "two equal keys": ("schema: 1\nschema: 1", "line 2: key 'schema' appears twice"),
    "equal keys deep down": ("schema: 1\nplans: [{a: 1, b: 2, a: 1}]", "appears twice"),
    "key that is no text": ("schema: 1\n2: x", "a key must be text"),
    "key that is a list": ("? [a]\n: 1", "a key must be text"),
    "two documents": ("schema: 1\n---\nschema: 1", "second document"),
    "date": ("schema: 2026-11-27", "put it in quotes"),
    "deep lists": ("[" * 100_000, "nest"),
    "deep mappings": ("{a: " * 100_000, "nest"),
    "deep blocks": ("\n".join(" " * depth + "a:" for depth in range(500)), "nest"),
    "deep dashes": ("- " * 100_000, "nest"),
    "many values": ("[" + "1," * 1_000_000 + "]", "more than 200000 values"),
    "long number": ("schema: " + "9" * 5000, "must be an integer"),
    "base 60": ("schema: 1" + ":59" * 100_000, "must be an integer"),
    "no number": ("schema: 0b_", "is not a number"),
    "not yaml": ("schema: [1", "not valid YAML"),
    "tab": ("schema:\n\t- 1", "not valid YAML"),
    "control character": ("schema: \x01", "not valid YAML"),
    "escaped surrogate": ('schema: "\\ud800"', "not valid YAML|must be an integer"),
    "empty": ("", "empty"),
    "only a comment": ("# nothing\n", "empty"),
    "a scalar": ("hello", "holds one value, so that it is no hardware profile"),
    "a list": ("- schema: 1", "holds a list, so that it is no hardware profile"),
    "null": ("~", "holds nothing, so that it is no hardware profile"),
}


@pytest.mark.parametrize("loader", [getattr(yaml, "CSafeLoader", yaml.SafeLoader), yaml.SafeLoader])
@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.timeout(60)  # a parser without bounds takes hours
def test_hostile_text_is_refused(monkeypatch: pytest.MonkeyPatch, loader: Any, content: str, message: str) -> None:
    if loader is yaml.SafeLoader and len(content) > 1_000_000:
        pytest.skip("the same bound, with a parser that takes seconds to get there")
    monkeypatch.setattr(yaml_strict, "_Loader", loader)
    with pytest.raises(ProfileError, match=message) as caught:
        parse_profile(content, "p.yaml")
    assert_one_line(caught.value, "p.yaml")


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "huge.yaml"
    with file.open("wb") as sparse:
        sparse.truncate(100 * 2**20)
    monkeypatch.setattr(os, "fdopen", None)
    with pytest.raises(ProfileError, match=f"has 104857600 bytes, more than {MAX_FILE_BYTES}"):
        load_profile(file)


def test_a_file_that_grows_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    small = os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, 10, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda descriptor: small)
    with pytest.raises(ProfileError, match="more than"):
        load_profile(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe" + RICH_TEXT.encode("utf-16-le"), r"not UTF-8 text \(byte 0\)"),
        (RICH_TEXT.replace("clocks", "cl\u00f6cks").encode("latin-1"), "not UTF-8 text"),
        (b"\x00" * 64, "not valid YAML"),
    ],
)
def test_what_is_not_utf8_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(content)
    with pytest.raises(ProfileError, match=message):
        load_profile(file)


@pytest.mark.parametrize("url", ["https://example.com/h100.yaml", "s3://bucket/h100.yaml"])
@pytest.mark.parametrize("given", [str, Path], ids=["text", "path"])
def test_a_url_is_said_to_be_one(url: str, given: Any) -> None:
    """And not that there is no file whose name is that of a path made of it."""
    with pytest.raises(ProfileError, match="URLs need a store") as caught:
        load_profile(given(url))
    assert_one_line(caught.value, url)


def test_paths_that_are_no_profile(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in [("", "is a directory"), ("none.yaml", "no such file"), ("pipe", "not a regular file")]:
        with pytest.raises(ProfileError, match=message) as caught:
            load_profile(tmp_path / name)
        assert_one_line(caught.value, str(tmp_path / name))
        assert str(caught.value).count(str(tmp_path)) == 1
    for path in (tmp_path / "none.yaml" / "p.yaml", "nul\0l.yaml", tmp_path / ("x" * 300)):
        with pytest.raises(ProfileError):
            load_profile(path)
