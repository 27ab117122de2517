"""Profiles that came with the package for other vendors: told of and counted, but their rows are not read."""

from __future__ import annotations

from pathlib import Path

import pytest
from machine_samples import EPYC, H100, dense_entry, measured

from ringattn.errors import ProfileError
from ringattn.hardware.facts import HardwareFacts
from ringattn.profile import locations
from ringattn.profile.locations import collect
from ringattn.profile.resolve import resolve
from ringattn.profile.yaml_io import load_head, save_profile
from ringattn.store.lookup import find_profiles


@pytest.mark.parametrize("facts", [EPYC, H100], ids=["cpu", "h100"])
def test_a_machine_resolves_the_same_without_the_rows_of_other_vendors(facts: HardwareFacts, tmp_path: Path) -> None:
    every, _ = collect(environ={}, home=tmp_path)
    own, notes = collect(environ={}, home=tmp_path, vendor=facts.vendor)
    assert not notes
    assert [entry.path for entry in own] == [entry.path for entry in every]
    assert resolve(own, facts) == resolve(every, facts)
    others = [entry.profile for entry in own if entry.profile.fingerprint.vendor != facts.vendor]
    assert others
    assert not any(profile.plans for profile in others)
    assert any(entry.profile.plans for entry in own) == (facts is H100)


def test_what_is_looked_for_on_a_machine_leaves_those_rows_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGTUNE_PROFILE", raising=False)
    for path in sorted(locations.shipped_folder().glob("nvidia-*.yaml")):
        assert [entry.profile for entry in find_profiles(None, EPYC)[0] if entry.path == str(path)] == [load_head(path)]


def test_the_head_of_a_file_is_all_but_its_rows(tmp_path: Path) -> None:
    made = measured(H100, dense_entry())
    path = tmp_path / "p.yaml"
    save_profile(made, path)
    text = path.read_text()
    path.write_text(text[: text.index("plans:")] + "plans: &anchor ][")
    head = load_head(path)
    assert not head.plans
    assert (head.source, head.fingerprint, head.software) == (made.source, made.fingerprint, made.software)
    path.write_text(text.replace("vendor: nvidia", "vendor: [nvidia"))
    with pytest.raises(ProfileError, match="not valid YAML"):
        load_head(path)
