"""A profile is written whole or not at all, and nothing else is touched."""

from __future__ import annotations

import errno
import os
import resource
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machine_samples import EVIDENCE, H100, dense_entry, measured
from profile_samples import RICH, RICH_TEXT, assert_one_line

from ringattn.errors import ProfileError
from ringattn.profile import yaml_io as profile_io
from ringattn.profile.yaml_io import load_profile, save_profile


def test_save_then_load(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "folder" / "p.yaml"
    save_profile(RICH, file)
    assert load_profile(file) == RICH
    assert file.read_text() == RICH_TEXT
    assert [path.name for path in file.parent.iterdir()] == ["p.yaml"]


def test_save_leaves_the_permissions_to_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_profile(RICH, tmp_path / "p.yaml")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "p.yaml").stat().st_mode) == 0o644


def test_save_goes_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    link = tmp_path / "p.yaml"
    link.symlink_to(tmp_path / "shared" / "real.yaml")
    save_profile(RICH, link)
    assert link.is_symlink()
    assert load_profile(tmp_path / "shared" / "real.yaml") == RICH


def test_save_is_on_the_disk_before_it_takes_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    sync, put = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (steps.append("fsync"), sync(descriptor))[1])
    monkeypatch.setattr(Path, "replace", lambda self, target: (steps.append("replace"), put(self, target))[1])
    save_profile(RICH, tmp_path / "p.yaml")
    assert steps == ["fsync", "replace", "fsync"]


OLD = b"the old profile"


def fail_with(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("owner", "function", "code"),
    [
        (os, "open", errno.EROFS),
        (os, "open", errno.EACCES),
        (os, "fsync", errno.ENOSPC),
        (os, "fsync", errno.EIO),
        (Path, "replace", errno.EACCES),
    ],
)
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, function: str, code: int
) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(OLD)
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, fail_with(OSError(code, os.strerror(code))))
        with pytest.raises(ProfileError, match=f"cannot be written: {os.strerror(code)}") as caught:
            save_profile(RICH, file)
    assert_one_line(caught.value, str(file))
    assert file.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_cut_short_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as a disk with 100 bytes left
    try:
        with pytest.raises(ProfileError, match="cannot be written"):
            save_profile(RICH, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [file]


def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(OLD)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_with(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            save_profile(RICH, file)
    assert file.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [file]


def test_save_refuses_places_that_cannot_hold_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    with pytest.raises(ProfileError, match="is a directory"):
        save_profile(RICH, tmp_path)
    with pytest.raises(ProfileError, match="cannot be written"):
        save_profile(RICH, tmp_path / "file" / "p.yaml")
    assert (tmp_path / "file").read_bytes() == OLD


def test_save_never_replaces_a_pipe_or_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(ProfileError, match="not a regular file"):
            save_profile(RICH, tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_io, "MAX_FILE_BYTES", 100)
    with pytest.raises(ProfileError, match="above the limit of 100"):
        save_profile(RICH, tmp_path / "p.yaml")
    wrong = replace(EVIDENCE, peak_bytes=1.5)  # type: ignore[arg-type]
    entry = dense_entry()
    assert entry.choice is not None
    broken = measured(H100, replace(entry, choice=replace(entry.choice, evidence=wrong)))
    with pytest.raises(ProfileError, match=r"plans\[0\].choice.evidence.peak_bytes: is 1.5; it must be an integer"):
        save_profile(broken, tmp_path / "p.yaml")
    with pytest.raises(ProfileError, match="lone surrogates"):
        save_profile(replace(RICH, fingerprint=replace(RICH.fingerprint, device_name="\ud800")), tmp_path / "p.yaml")
    assert list(tmp_path.iterdir()) == []
