"""Mistakes with a store: a file in its place, a misspelled scheme or bucket, files in it that are no profiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import measured_entry, one_line_error, profile_of_this_machine, ringtune
from network_hosts import s3_server

from ringattn.errors import StoreError
from ringattn.store.backend import open_backend
from ringattn.store.folder import Folder
from ringattn.store.lookup import stored_profiles
from ringattn.store.store import Store


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stored_profiles.cache_clear()
    yield
    stored_profiles.cache_clear()


def test_a_file_in_the_place_of_a_store_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        line = one_line_error(ringtune("list", "--store", tmp_path / name), 1)
        assert line == f"Error: {tmp_path / name}: is a file or a broken link; a store is a folder or a URL"
    assert "mkdir -p" in one_line_error(ringtune("list", "--store", tmp_path / "absent"), 1)


@pytest.mark.parametrize("place", ["file", "absent", "foo://bucket"])
def test_which_says_a_fault_of_a_store_once(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    store = place if "://" in place else str(tmp_path / place)
    result = ringtune("which", "-v", "--device", "cpu", "--store", store)
    assert sum(store in line for line in result.stderr.splitlines()) == 1, result.stderr


def test_a_named_profile_does_not_hide_the_fault_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No store is asked for this kind then, so that the look at the others must say it."""
    from ringattn.profile.yaml_io import save_profile

    save_profile(profile_of_this_machine(measured_entry()), tmp_path / "p.yaml")
    monkeypatch.setenv("RINGTUNE_PROFILE", str(tmp_path / "p.yaml"))
    result = ringtune("which", "-v", "--device", "cpu", "--store", tmp_path / "absent")
    assert "no such folder" in result.stderr


def test_a_scheme_that_nobody_knows_has_a_remedy() -> None:
    with pytest.raises(StoreError, match="fsspec knows no foo://; use a folder, or a URL such as s3://"):
        open_backend("foo://bucket/x")
    with pytest.raises(StoreError, match="is it github://"):
        open_backend("gihub://x")


def test_files_that_are_no_profiles_are_counted_and_said_once(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (name,) = Store(Folder(shared)).push(profile_of_this_machine(measured_entry()))
    (shared / "by-hand.yaml").touch()
    (shared / "profiles" / name.kind / "h100.yaml").touch()
    (shared / str(name.signature)).touch()  # of a profile that is there
    (shared / "profiles" / name.kind / ".hidden").touch()
    listed = ringtune("list", "--store", shared)
    assert listed.exit_code == 0
    (line,) = listed.stderr.splitlines()
    assert line.startswith(
        f"warning: {shared}: 2 files, by-hand.yaml for one, are passed over: a profile's name in a store"
    )
    assert "`ringtune push FILE` gives it" in line
    used = ringtune("which", "-v", "--device", "cpu", "--store", shared)
    assert used.exit_code == 0
    (line,) = used.stderr.splitlines()
    assert f"profiles/{name.kind}/h100.yaml is passed over" in line
    (line,) = ringtune("list", name.kind, "--store", shared).stderr.splitlines()
    assert f"profiles/{name.kind}/h100.yaml is passed over" in line


def test_a_misspelled_bucket_is_no_empty_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        good, misspelled = open_backend("s3://bucket/ringtune"), open_backend("s3://bukket/ringtune")
        assert good.names("profiles") == ()
        assert good.loose_files() == ()
        assert good.lease_refusal() == ""
        assert good.create("leases/k/1", b"")
        assert not good.create("leases/k/1", b"")
        for act in (lambda: misspelled.names("profiles"), lambda: misspelled.put("a/b", b"")):
            with pytest.raises(StoreError, match=r"s3://bukket/ringtune: .*bucket"):
                act()
        line = one_line_error(ringtune("list", "--store", "s3://bukket/ringtune"), 1)
        assert "no such bucket bukket" in line
