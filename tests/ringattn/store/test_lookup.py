"""Looking profiles up in stores: what is read, what a copy is for, and that no store holds anyone up."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machine_samples import H100, H200, dense_entry, measured

from ringattn.errors import StoreError
from ringattn.profile.resolve import resolve
from ringattn.profile.schema import Profile, Provenance
from ringattn.profile.yaml_io import load_profile, save_profile
from ringattn.store import lookup
from ringattn.store.backends.folder import Folder
from ringattn.store.lookup import LocalCopy, find_profiles, store_places, stored_profiles
from ringattn.store.store import Store

KIND = "nvidia-h100-sxm-80g"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stored_profiles.cache_clear()
    yield
    stored_profiles.cache_clear()


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("RINGTUNE_STORE", str(tmp_path / "shared"))
    return Store(Folder(tmp_path / "shared"))


def ask(tmp_path: Path, world: int = 1) -> tuple[list[Profile], tuple[str, ...]]:
    """Asked as another process would."""
    stored_profiles.cache_clear()
    found = stored_profiles((str(tmp_path / "shared"),), KIND, world, tmp_path / "cache")
    for entry in found.located:
        assert entry.origin == "store"
        assert load_profile(entry.path) == entry.profile
    return [entry.profile for entry in found.located], found.notes


def test_places_are_parted_by_blanks_and_quoted_as_in_a_shell() -> None:
    assert store_places({}) == store_places({"RINGTUNE_STORE": " "}) == ()
    text = "s3://bucket/a,b  /mnt/x:y 'a folder'\nmemory://x"
    assert store_places({"RINGTUNE_STORE": text}) == (
        "s3://bucket/a,b",
        "/mnt/x:y",
        str(Path.cwd() / "a folder"),
        "memory://x",
    )
    with pytest.raises(StoreError, match="RINGTUNE_STORE: cannot be taken apart"):
        store_places({"RINGTUNE_STORE": "'half"})


def test_a_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = os.fsdecode(os.fsencode(tmp_path) + b"/n\xffme \n'\"\xc3\xbc")
    Path(place).mkdir()
    monkeypatch.setenv("RINGTUNE_STORE", shlex.quote(place))
    assert find_profiles(None, H100)[1] == ()
    Store(Folder(Path(place))).push(measured(H100, dense_entry()))
    stored_profiles.cache_clear()  # as in another process
    located, notes = find_profiles(None, H100)
    assert notes == ()
    assert "store" in {entry.origin for entry in located}


def test_a_store_comes_after_the_users_folder_and_before_the_systems(
    shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "system"))
    for folder in ("user", "system"):
        save_profile(measured(H100, dense_entry()), tmp_path / folder / "ringtune" / "p.yaml")
    shared.push(measured(H100, dense_entry()))
    located, notes = find_profiles(None, H100)
    assert notes == ()
    assert [e.origin for e in located if e.origin != "shipped"] == ["user", "store", "system"]
    assert resolve(located, H100).path == str(tmp_path / "user" / "ringtune" / "p.yaml")


@pytest.mark.parametrize("how", ["argument", "variable", "heuristics"])
def test_no_store_is_asked_where_a_file_is_named(
    shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    shared.push(measured(H100, dense_entry()))
    named = tmp_path / "named.yaml"
    save_profile(measured(H100, dense_entry()), named)
    monkeypatch.setattr(lookup, "stored_profiles", None)
    if how == "variable":
        monkeypatch.setenv("RINGTUNE_PROFILE", str(named))
    located, _ = find_profiles(named if how == "argument" else None, H100, heuristics_only=how == "heuristics")
    assert "store" not in {entry.origin for entry in located}


def test_ranks_are_served_by_their_own_file(shared: Store, tmp_path: Path) -> None:
    one, four = measured(H100, dense_entry()), measured(H100, dense_entry(world=4))
    shared.push(one)
    shared.push(four)
    assert ask(tmp_path) == ([one], ())
    assert ask(tmp_path, 4) == ([four], ())
    assert ask(tmp_path, 2) == ([], ())


def test_rows_of_one_machine_are_merged(shared: Store, tmp_path: Path) -> None:
    for length in (1024, 2048):
        shared.push(measured(H100, dense_entry(length)))
    shared.push(replace(measured(H100, dense_entry()), software=(("torch", "9.9.9"),)))
    (one, other), notes = ask(tmp_path)
    assert notes == ()
    assert sorted(len(profile.plans) for profile in (one, other)) == [1, 2]


def test_of_ten_thousand_profiles_only_those_of_this_kind_are_opened(
    shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10_000):
        folder = tmp_path / "shared" / "profiles" / f"nvidia-h{number}"
        folder.mkdir(parents=True)
        (folder / f"x1-{number:064x}.yaml").touch()
    (mine,) = shared.push(measured(H100, dense_entry()))
    shared.push(measured(H100, dense_entry(world=8)))
    opened: list[str] = []
    read, names = Folder.read, Folder.names
    walked: list[str] = []

    def reading(self: Folder, name: str, limit: int) -> bytes:
        opened.append(f"{self.root.name}/{name}")
        return read(self, name, limit)

    def walking(self: Folder, folder: str) -> tuple[str, ...]:
        walked.append(folder)
        return names(self, folder)

    monkeypatch.setattr(Folder, "read", reading)
    monkeypatch.setattr(Folder, "names", walking)
    located, _ = find_profiles(None, H100)
    assert [entry.origin for entry in located if entry.origin == "store"] == ["store"]
    assert [name for name in opened if name.startswith("shared/")] == [f"shared/{mine}"]
    assert set(walked) == {f"profiles/{KIND}"}


def test_a_copy_serves_offline_and_is_said_once(shared: Store, tmp_path: Path) -> None:
    shared.push(measured(H100, dense_entry()))
    online, _ = ask(tmp_path)
    (tmp_path / "shared").rename(tmp_path / "gone")
    offline, notes = ask(tmp_path)
    assert offline == online != []
    (note,) = notes
    assert note == (
        f"{tmp_path / 'shared'}: no such folder; mount it, or make it with mkdir -p; "
        "1 profile read of it before will do"
    )
    again = stored_profiles((str(tmp_path / "shared"),), KIND, 1, tmp_path / "cache")
    assert again.notes == notes  # remembered: no second question in this process


def test_a_copy_follows_the_store(shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (old,) = shared.push(replace(measured(H100, dense_entry()), provenance=Provenance(date="2026-01-01")))
    ask(tmp_path)
    opened: list[str] = []
    content = Store.content
    monkeypatch.setattr(Store, "content", lambda self, name: (opened.append(self.url), content(self, name))[1])
    ask(tmp_path)
    assert str(tmp_path / "shared") not in opened  # the copy has it
    shared.forget([old])
    new = measured(H100, dense_entry(2048))
    shared.push(new)
    assert ask(tmp_path) == ([new], ())


def test_a_damaged_copy_is_fetched_again(shared: Store, tmp_path: Path) -> None:
    (name,) = shared.push(measured(H100, dense_entry()))
    before = ask(tmp_path)
    copy = LocalCopy(str(tmp_path / "shared"), tmp_path / "cache").root / str(name)
    copy.write_bytes(copy.read_bytes()[:-9])
    assert ask(tmp_path) == before
    assert copy.read_bytes() == shared.content(name)


def test_a_bad_file_costs_itself_alone(shared: Store, tmp_path: Path) -> None:
    good = measured(H100, dense_entry())
    (name,) = shared.push(good)
    folder = tmp_path / "shared" / "profiles" / KIND
    (folder / f"x1-{'1' * 64}.yaml").symlink_to("/etc/passwd")
    (folder / f"x1-{'2' * 64}.yaml").write_bytes(b"cut")
    shared.backend.put(str(replace(name, digest="3" * 64)), b"x" * (5 * 2**20))
    found, notes = ask(tmp_path)
    assert found == [good]
    assert [note.split(": ")[2].split(";")[0][:14] for note in notes] == [
        "is a link or l",
        "its content is",
        "has more than ",
    ]
    assert all(note.isprintable() and note.endswith("(skipped)") for note in notes)


def test_without_a_cache_folder_the_store_is_read_each_time(shared: Store, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    shared.push(measured(H100, dense_entry()))
    found = stored_profiles((str(tmp_path / "shared"),), KIND, 1, tmp_path / "cache")
    (entry,) = found.located
    assert load_profile(entry.path) == entry.profile
    assert any("is read by every process" in note for note in found.notes)


def test_a_copy_of_a_later_schema_is_skipped_offline_too(shared: Store, tmp_path: Path) -> None:
    (name,) = shared.push(measured(H100, dense_entry()))
    content = shared.content(name).replace(b"schema: 1", b"schema: 2")
    later = replace(name, digest=hashlib.sha256(content).hexdigest())
    shared.backend.put(str(later), content)
    for found, notes in (ask(tmp_path), ask(tmp_path)):
        assert found == [measured(H100, dense_entry())]
        assert any("schema: is 2" in note for note in notes)
        if (tmp_path / "shared").exists():
            (tmp_path / "shared").rename(tmp_path / "gone")


def test_a_copy_that_cannot_be_written_costs_no_profile(
    shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length in (1024, 2048):
        shared.push(measured(H100, dense_entry(length)))

    def full(self: Folder, name: str, content: bytes) -> None:
        raise StoreError(self.url, f"{name}: No space left on device")

    monkeypatch.setattr(Folder, "put", full)
    found = stored_profiles((str(tmp_path / "shared"),), KIND, 1, tmp_path / "cache")
    (entry,) = found.located
    assert len(entry.profile.plans) == 2
    assert Path(entry.path).exists()
    assert all("No space left on device" in note for note in found.notes)


def test_fsspec_is_imported_for_a_url_alone() -> None:
    code = """
import sys
import ringattn.store.lookup as lookup
lookup.open_backend("/tmp")
assert not {"fsspec", "torch", "autotune"} & set(sys.modules)
lookup.open_backend("memory://x")
assert "fsspec" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Blocked(Folder):
    """A file server that is gone: the call does not come back."""

    ended = threading.Event()

    def names(self, folder: str) -> tuple[str, ...]:
        self.ended.wait()
        return super().names(folder)


def test_a_store_that_blocks_holds_nobody_up(
    shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lookup, "ANSWER_S", 0.05)
    (tmp_path / "other").mkdir()
    good = measured(H100, dense_entry())
    Store(Folder(tmp_path / "other")).push(good)
    real: Any = lookup.open_backend
    made = lambda place: Blocked(Path(place)) if place.endswith("shared") else real(place)  # noqa: E731
    monkeypatch.setattr(lookup, "open_backend", made)
    places = (str(tmp_path / "shared"), str(tmp_path / "other"))
    try:
        # It returns at all; how soon is not asserted. What the other store says in time may or may not be in.
        found = stored_profiles(places, KIND, 1, tmp_path / "cache")
        again = stored_profiles(places, KIND, 1, tmp_path / "cache")
    finally:
        Blocked.ended.set()
    assert again == found
    assert found.unread >= {places[0]}
    assert found.notes[0] == f"{places[0]}: did not answer within 0.05 s; skipped"


def test_a_module_says_it_once(
    shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ringattn import RingAttention

    monkeypatch.setenv("RINGTUNE_STORE", str(tmp_path / "nowhere"))
    for _ in range(3):
        RingAttention(num_heads=2, head_dim=16, device="cpu")
    said = [record.getMessage() for record in caplog.records if "nowhere" in record.getMessage()]
    assert len(said) == 1
    assert "no such folder" in said[0]


def test_a_profile_of_another_kind_is_not_found(shared: Store) -> None:
    shared.push(measured(H200, dense_entry()))
    located, _ = find_profiles(None, H100)
    assert "store" not in {entry.origin for entry in located}
