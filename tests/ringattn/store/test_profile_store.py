"""A store: what is pushed is found under its kind, ranks and content, and nothing else is taken for a profile."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from machine_samples import A100, EPYC, H100, H200, dense_entry, measured

from ringattn.errors import ProfileError, StoreError
from ringattn.hardware.facts import fingerprint_name
from ringattn.profile.schema import Fingerprint, LinkSpeed, Profile
from ringattn.profile.yaml_io import dump_profile, parse_profile
from ringattn.store.backends.folder import Folder
from ringattn.store.names import ProfileName, kind_of
from ringattn.store.store import Store

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Folder(tmp_path))


def test_the_key_is_the_tuners_name_of_the_machine() -> None:
    for facts in (H100, H200, A100, EPYC):
        assert kind_of(Fingerprint.of(facts)) == fingerprint_name(facts)


def test_what_is_pushed_comes_back_one_file_for_each_number_of_ranks(store: Store) -> None:
    profile = measured(H100, dense_entry(1024), dense_entry(2048, world=8), dense_entry(4096, world=8))
    speeds = (LinkSpeed(4, 1, 100.0, 5.0), LinkSpeed(8, 1, 90.0, 6.0))
    profile = replace(profile, fingerprint=replace(profile.fingerprint, link_speeds=speeds))
    names = store.push(profile)
    assert [(name.kind, name.world) for name in names] == [("nvidia-h100-sxm-80g", 1), ("nvidia-h100-sxm-80g", 8)]
    assert set(store.names()) == set(names)
    assert store.names("nvidia-h100-sxm-80g", 8) == names[1:]
    assert store.names("nvidia-h200-sxm-141g") == ()
    single, eight = map(store.profile, names)
    assert single.plans + eight.plans == profile.plans
    assert (single.fingerprint.link_speeds, eight.fingerprint.link_speeds) == ((), speeds[1:])
    assert store.push(profile) == names
    assert len(store.names()) == 2


def test_only_measured_profiles_are_pushed(store: Store) -> None:
    from ringattn.profile.resolve import built_in_heuristic

    for profile in (built_in_heuristic("cpu"), measured(H100)):
        with pytest.raises(ProfileError, match=r"mine\.yaml: holds no measured plans"):
            store.push(profile, "mine.yaml")
    assert store.names() == ()


def test_a_damaged_or_misnamed_file_is_refused_in_one_line(store: Store) -> None:
    (name,) = store.push(measured(H100, dense_entry()))
    content = store.content(name)
    store.backend.put(str(name), content[:-10])
    with pytest.raises(StoreError, match=r"its content is not that of its name; `ringtune forget .*` removes it"):
        store.profile(name)
    for wrong in (replace(name, kind="nvidia-h200-sxm-141g"), replace(name, world=4)):
        store.backend.put(str(wrong), content)
        with pytest.raises(ProfileError, match=r"not of the kind in its name|as its name says"):
            store.profile(wrong)


def test_other_files_are_no_profiles(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "profiles" / "nvidia-h100-sxm-80g"
    folder.mkdir(parents=True)
    for name in ("x1-abc.yaml", "README.md", f"x0-{'0' * 64}.yaml", f"x1-{'A' * 64}.yaml", f"x1-{'0' * 64}.yaml.tmp"):
        (folder / name).write_bytes(b"")
    assert store.names() == ()


def test_a_name_may_be_cut_short_but_must_mean_one(store: Store) -> None:
    (one,) = store.push(measured(H100, dense_entry(1024)))
    (other,) = store.push(measured(H200, dense_entry(1024)))
    for text in (str(one), one.short, one.digest[:10], "nvidia-h100"):
        assert store.named(text) == one
    with pytest.raises(StoreError, match="means 2 profiles"):
        store.named("nvidia")
    with pytest.raises(StoreError, match="is not there; `ringtune list`"):
        store.named("cpu")
    for text in ("../../etc/passwd", "a\0", "", "profiles/../x"):
        with pytest.raises(StoreError, match="is no name in a store"):
            store.named(text)
    store.forget([one])
    assert store.names() == (other,)


PUSH_MANY = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, "tests/support/ringattn")
from machine_samples import H100, dense_entry, measured
from ringattn.store.backends.folder import Folder
from ringattn.store.store import Store
for length in range(int(sys.argv[2]), int(sys.argv[3])):
    Store(Folder(Path(sys.argv[1]))).push(measured(H100, dense_entry(1024 + length)))
"""


def test_two_writers_at_once_lose_nothing(store: Store, tmp_path: Path) -> None:
    """Their ranges overlap, so that both also write the same files."""
    ranges = (("0", "30"), ("20", "50"))
    writers = [subprocess.Popen([sys.executable, "-c", PUSH_MANY, str(tmp_path), *r], cwd=ROOT) for r in ranges]
    seen: set[ProfileName] = set()
    while any(writer.poll() is None for writer in writers):
        for name in set(store.names()) - seen:
            store.profile(name)  # whole, whenever it is seen
            seen.add(name)
    assert [writer.returncode for writer in writers] == [0, 0]
    profiles = [store.profile(name) for name in store.names()]
    assert sorted(profile.plans[0].workload.seq_len for profile in profiles) == list(range(1024, 1074))


def test_a_pushed_file_is_a_profile_of_its_own(store: Store, tmp_path: Path) -> None:
    profile = measured(H100, dense_entry())
    (name,) = store.push(profile)
    read: Profile = parse_profile((tmp_path / str(name)).read_bytes(), "file")
    assert dump_profile(read) == dump_profile(profile)
