"""RINGTUNE_TRUST: what each policy asks of profiles in stores and folders, and places that others may write."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from machine_samples import H100, dense_entry, measured

from ringattn.errors import ProfileError, StoreError
from ringattn.hardware.facts import HardwareFacts
from ringattn.profile.access import other_writers
from ringattn.profile.locations import collect
from ringattn.profile.schema import Profile
from ringattn.profile.yaml_io import load_profile, save_profile
from ringattn.store.backends.folder import Folder
from ringattn.store.lookup import find_profiles, stored_profiles
from ringattn.store.store import Store

PROFILE = measured(H100, dense_entry())
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others")


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("RINGTUNE_TRUST", "RINGTUNE_PROFILE", "RINGTUNE_PROFILE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    for variable, folder in (("CACHE_HOME", "cache"), ("CONFIG_HOME", "user"), ("CONFIG_DIRS", "system")):
        monkeypatch.setenv(f"XDG_{variable}", str(tmp_path / folder))
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("RINGTUNE_STORE", str(tmp_path / "shared"))
    (tmp_path / "signers").touch(mode=0o644)
    monkeypatch.setenv("RINGTUNE_ALLOWED_SIGNERS", str(tmp_path / "signers"))
    yield
    stored_profiles.cache_clear()


@pytest.fixture
def shared(tmp_path: Path) -> Store:
    return Store(Folder(tmp_path / "shared"))


def ask(facts: HardwareFacts = H100) -> tuple[list[tuple[str, Profile]], tuple[str, ...]]:
    """As another process would; what comes with the package is left out."""
    stored_profiles.cache_clear()
    located, notes = find_profiles(None, facts)
    return [(entry.origin, entry.profile) for entry in located if entry.origin != "shipped"], notes


def edited(path: Path) -> None:
    """Another length by hand, which no checksum fits."""
    path.write_text(path.read_text().replace("seq_len: 4096", "seq_len: 2048"))


EDITED = measured(H100, replace(dense_entry(), workload=replace(dense_entry().workload, seq_len=2048)))


# --- the three policies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["any", "checksum", ""])
def test_what_was_edited_serves_where_any_is_believed(
    shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv("RINGTUNE_TRUST", policy)
    (name,) = shared.push(PROFILE)
    save_profile(PROFILE, tmp_path / "user" / "ringtune" / "p.yaml")
    assert ask() == ([("user", PROFILE), ("store", PROFILE)], ())
    edited(tmp_path / "shared" / str(name))
    edited(tmp_path / "user" / "ringtune" / "p.yaml")
    found, notes = ask()
    if policy == "any":
        assert (found, notes) == ([("user", EDITED), ("store", EDITED)], ())
    else:  # the copy of what was there before serves
        assert found == [("store", PROFILE)]
        assert "does not match the content" in " ".join(notes)


def test_a_copy_of_what_any_believed_is_not_believed_by_a_stricter_policy(
    shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGTUNE_TRUST", "any")
    (name,) = shared.push(PROFILE)
    edited(tmp_path / "shared" / str(name))
    assert ask()[0] == [("store", EDITED)]
    (tmp_path / "shared").rename(tmp_path / "gone")
    assert ask()[0] == [("store", EDITED)]  # out of the copy
    for policy in ("checksum", "signed"):
        monkeypatch.setenv("RINGTUNE_TRUST", policy)
        assert ask()[0] == []


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_named_file_needs_no_checksum_where_any_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    named = tmp_path / "p.yaml"
    save_profile(PROFILE, named)
    edited(named)
    named.write_text("".join(line for line in named.open() if not line.startswith("checksum")))
    if how == "variable":
        monkeypatch.setenv("RINGTUNE_PROFILE", str(named))
    argument = named if how == "argument" else None
    with pytest.raises(ProfileError, match="checksum: is missing"):
        find_profiles(argument, H100)
    monkeypatch.setenv("RINGTUNE_TRUST", "any")
    assert find_profiles(argument, H100)[0][0].profile == EDITED
    monkeypatch.delenv("RINGTUNE_TRUST")
    with pytest.raises(ProfileError, match="checksum: is missing"):  # nothing remembers that it was read
        find_profiles(argument, H100)


def test_any_still_reads_strictly(shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTUNE_TRUST", "any")
    (name,) = shared.push(PROFILE)
    path = tmp_path / "shared" / str(name)
    text = path.read_text()
    for bad, told in (
        (text.replace("world", "wrold"), "is not a known key"),
        (text.replace("heads: ", "heads: 1000"), "it must be an integer"),
        (text.replace("sku: h100", "sku: h200"), "not of the kind in"),
        (text.replace("world: 1", "world: 4"), "holds other rows than those for 1 rank"),
    ):
        assert bad != text
        path.write_text(bad)
        found, notes = ask()
        assert found == []
        assert told in " ".join(notes)


@pytest.mark.parametrize("policy", ["any", "checksum", "signed"])
def test_what_came_with_the_package_serves_under_every_policy(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv("RINGTUNE_TRUST", policy)
    located, _ = find_profiles(None, H100)
    assert {entry.profile.source for entry in located if entry.origin == "shipped"} == {"measured", "heuristic"}


@pytest.mark.parametrize("named", [True, False])
def test_an_unknown_policy_is_one_line_also_where_no_store_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setenv("RINGTUNE_TRUST", "sgined")
    monkeypatch.delenv("RINGTUNE_STORE")
    save_profile(PROFILE, tmp_path / "p.yaml")
    with pytest.raises(StoreError) as raised:
        find_profiles(tmp_path / "p.yaml" if named else None, H100)
    assert str(raised.value) == "RINGTUNE_TRUST: is 'sgined'; use any, checksum or signed"


# --- places that others may write -------------------------------------------------------------------------------

Exposing = Callable[[Path], str]


def writable(path: Path) -> str:
    path.chmod(0o777)
    return f"{path} may be written by everybody"


def sticky(path: Path) -> str:
    path.chmod(0o1777)  # anybody may still add to it
    return f"{path} may be written by everybody"


def of_a_group(path: Path) -> str:
    if os.geteuid() == 0:
        os.chown(path, -1, 12345)
    path.chmod(0o775)
    return f"{path} may be written by its group"


def of_another(path: Path) -> str:
    os.chown(path, 12345, -1)
    return f"{path} belongs to user 12345"


def below_a_writable_one(path: Path) -> str:
    path.parent.chmod(0o777)
    return f"{path.parent} may be written by everybody"


def through_a_link_of_another(path: Path) -> str:
    real = path.rename(path.with_name("real"))
    path.symlink_to(real)
    os.chown(path, 12345, -1, follow_symlinks=False)
    return f"{path} belongs to user 12345"


def through_a_link_in_a_writable_folder(path: Path) -> str:
    real = path.rename(path.with_name("real"))
    between = path.with_name("between")
    between.mkdir()
    (between / "link").symlink_to(real)
    path.symlink_to(between / "link")
    between.chmod(0o777)
    return f"{between} may be written by everybody"


def behind_a_link(path: Path) -> str:
    real = path.rename(path.with_name("real"))
    path.symlink_to(real)
    return sticky(real)


EXPOSED = [
    writable,
    sticky,
    below_a_writable_one,
    through_a_link_in_a_writable_folder,
    behind_a_link,
    pytest.param(of_a_group, marks=as_root),
    pytest.param(of_another, marks=as_root),
    pytest.param(through_a_link_of_another, marks=as_root),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder whose parent is this test's alone, and nobody else's."""
    made = tmp_path / "parent" / "place"
    made.mkdir(parents=True, mode=0o755)
    for path in (made, made.parent):
        path.chmod(0o755)
    return made


@pytest.mark.parametrize("expose", EXPOSED)
def test_others_who_may_write_are_found(place: Path, expose: Exposing) -> None:
    assert other_writers(place) == ""
    why = expose(place)
    assert other_writers(place) == why
    (place / "p.yaml").touch(mode=0o644)
    assert other_writers(place / "p.yaml") == ("" if expose is sticky or expose is behind_a_link else why)


@as_root
def test_what_is_under_a_sticky_folder_is_its_owners(place: Path) -> None:
    place.parent.chmod(0o1777)
    assert other_writers(place) == ""
    os.chown(place, 12345, -1)
    assert other_writers(place) == f"{place} belongs to user 12345"


@pytest.mark.parametrize(("members", "name", "own"), [([], "me", True), (["you"], "me", False), ([], "team", False)])
def test_the_group_that_a_user_has_alone_is_no_other(
    place: Path, monkeypatch: pytest.MonkeyPatch, members: list[str], name: str, own: bool
) -> None:
    place.chmod(0o775)
    gid = place.stat().st_gid
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me", pw_gid=gid))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=members))
    assert other_writers(place) == ("" if own else f"{place} may be written by its group")


def test_places_that_lead_nowhere_have_no_writers(place: Path) -> None:
    (place / "loop").symlink_to("../place/loop")
    (place / "gone").symlink_to("nowhere")
    for name in ("loop", "gone", "absent", "loop/x"):
        assert other_writers(place / name) == ""


@pytest.mark.parametrize("inner", ["", "profiles", "profiles/nvidia-h100-sxm-80g"])
@pytest.mark.parametrize("policy", ["any", "checksum", "signed"])
def test_a_store_that_others_may_write_is_refused_where_signatures_are_asked_for(
    shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, inner: str
) -> None:
    monkeypatch.setenv("RINGTUNE_TRUST", policy)
    shared.push(PROFILE)
    (tmp_path / "shared" / inner).chmod(0o777)
    found, notes = ask()
    (note,) = notes
    skipped = "skipped, since RINGTUNE_TRUST is signed and others" if policy == "signed" else "others"
    assert note == (
        f"{tmp_path / 'shared'}: {skipped} may change its profiles: {(tmp_path / 'shared' / inner)} may be written by "
        "everybody; chown or chmod go-w that"
    )
    assert found == ([] if policy == "signed" else [("store", PROFILE)])


@pytest.mark.parametrize("origin", ["env-path", "user", "system"])
@pytest.mark.parametrize("what", ["folder", "file"])
@pytest.mark.parametrize("policy", ["any", "checksum", "signed"])
def test_a_folder_or_file_that_others_may_write_is_refused_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, what: str, origin: str
) -> None:
    monkeypatch.setenv("RINGTUNE_TRUST", policy)
    monkeypatch.delenv("RINGTUNE_STORE")
    monkeypatch.setenv("RINGTUNE_PROFILE_PATH", str(tmp_path / "env-path" / "ringtune"))
    folder = tmp_path / origin / "ringtune"
    (tmp_path / "env-path" / "ringtune").mkdir(parents=True)
    for name in ("one.yaml", "other.yaml"):
        save_profile(PROFILE, folder / name)
    exposed = folder if what == "folder" else folder / "one.yaml"
    exposed.chmod(0o777)
    found, notes = ask()
    (note,) = notes
    assert note.startswith(f"{exposed}: ")
    assert f"{exposed} may be written by everybody" in note
    assert note.startswith(f"{exposed}: skipped") == (policy == "signed")
    left = 2 if policy != "signed" else 0 if what == "folder" else 1
    assert found == [(origin, PROFILE)] * left
    monkeypatch.setenv("RINGTUNE_PROFILE", str(folder / "one.yaml"))  # a file that somebody named binds
    assert collect()[0][0].origin == "env"


def test_signers_whom_others_may_name_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Store) -> None:
    monkeypatch.setenv("RINGTUNE_TRUST", "signed")
    (tmp_path / "signers").chmod(0o666)
    with pytest.raises(StoreError, match=r"signers: others may change who signs: .* may be written by everybody"):
        find_profiles(None, H100)


def test_a_file_that_is_read_from_the_copy_can_be_loaded(shared: Store) -> None:
    shared.push(PROFILE)
    located, _ = find_profiles(None, H100)
    assert [load_profile(entry.path) for entry in located if entry.origin == "store"] == [PROFILE]
