"""Mistakes with a store: a file in its place, a misspelled scheme or bucket, files in it that are no profiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import measured_entry, one_line_error, profile_of_this_machine, ringtune
from network_hosts import s3_server

from ringattn.errors import StoreError
from ringattn.profile.yaml_io import load_profile
from ringattn.store.backends.backend import open_backend
from ringattn.store.backends.folder import Folder
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


# --- trust ------------------------------------------------------------------------------------------------------


@pytest.fixture
def exposed(tmp_path: Path) -> Path:
    """A store to which everybody may write, with a profile of this machine."""
    shared = tmp_path / "shared"
    shared.mkdir()
    Store(Folder(shared)).push(profile_of_this_machine(measured_entry()))
    shared.chmod(0o777)
    return shared


READING = {
    "which": ("which", "-v", "--device", "cpu"),
    "report": ("which", "--report", "--device", "cpu"),
    "list": ("list",),
    "pull": ("pull", "--device", "cpu"),
    "probe": ("probe", "--if-missing", "--device", "cpu"),
}


@pytest.mark.parametrize("command", READING)
def test_a_store_that_others_may_write_is_said_once(
    exposed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    done = ringtune(*READING[command], "--store", exposed)
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stderr.splitlines() if str(exposed) in line]
    assert f"{exposed}: others may change its profiles: {exposed} may be written by everybody" in line


@pytest.mark.parametrize("command", sorted(READING.keys() - {"report"}))
def test_a_store_that_others_may_write_is_refused_where_signatures_are_asked_for(
    exposed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "signers").touch(mode=0o644)
    for variable, value in (("TRUST", "signed"), ("ALLOWED_SIGNERS", "signers"), ("SIGNING_KEY", "key")):
        monkeypatch.setenv(f"RINGTUNE_{variable}", value if variable == "TRUST" else str(tmp_path / value))
    done = ringtune(*READING[command], "--store", exposed)
    assert done.exit_code == (4 if command == "which" else 1), done.output
    (line,) = [line for line in done.stderr.splitlines() if str(exposed) in line]
    assert f"{exposed}: skipped, since RINGTUNE_TRUST is signed and others may change its profiles" in line


@pytest.mark.parametrize("command", READING)
def test_an_unknown_policy_is_one_line(exposed: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("RINGTUNE_TRUST", "signd")
    line = one_line_error(ringtune(*READING[command], "--store", exposed), 1)
    assert line == "Error: RINGTUNE_TRUST: is 'signd'; use any, checksum or signed"


def test_which_needs_no_store_to_say_an_unknown_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTUNE_TRUST", "none")
    line = one_line_error(ringtune("which", "--device", "cpu"), 1)
    assert line == "Error: RINGTUNE_TRUST: is 'none'; use any, checksum or signed"


def test_pull_takes_what_was_edited_where_any_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared").mkdir()
    (name,) = Store(Folder(tmp_path / "shared")).push(profile_of_this_machine(measured_entry()))
    path = tmp_path / "shared" / str(name)
    path.write_text(path.read_text().replace("causal: true", "causal: false"))
    pull = ("pull", "--device", "cpu", "--store", tmp_path / "shared", "--output", tmp_path / "pulled")
    refused = ringtune(*pull)
    assert refused.exit_code == 4
    assert "its content is not that of its name" in refused.stderr
    monkeypatch.setenv("RINGTUNE_TRUST", "any")
    assert ringtune(*pull).exit_code == 0
    (pulled,) = (tmp_path / "pulled").iterdir()
    assert not load_profile(pulled).plans[0].workload.causal
