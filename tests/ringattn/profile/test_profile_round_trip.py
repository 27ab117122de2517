"""Whatever is written is read back equal, and people can read it too."""

from __future__ import annotations

import json
import string
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from machine_samples import H100, dense_entry, measured, rich_profile
from profile_samples import RICH, RICH_TEXT, resealed, text

from ringattn.errors import InputError, ProfileError
from ringattn.profile import strict_yaml as yaml_strict
from ringattn.profile.bounds import BOUNDS
from ringattn.profile.schema import (
    Choice,
    Evidence,
    Failure,
    Fingerprint,
    KernelLists,
    LaunchBound,
    LinkSpeed,
    PlanEntry,
    Policy,
    Profile,
    Provenance,
)
from ringattn.profile.yaml_io import dump_profile, parse_profile
from ringattn.tunables import TABLE, Tunable
from ringattn.workload import INPUT_DTYPES, MOST, BranchTunables, Pattern, Tunables, Workload, not_narrower

names = st.text(st.sampled_from(string.ascii_lowercase + string.digits + ".-_"), min_size=1, max_size=12)
positive = st.integers(1, 1 << 20)
amounts = st.floats(0, 1e12, allow_nan=False)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    low, high = sorted((draw(amounts), draw(amounts)))
    return Evidence(
        *(draw(amounts), draw(amounts), low, high),
        peak_bytes=draw(st.integers(0, 1 << 45)),
        error=draw(amounts),
        first_call_ms=draw(amounts),
        host_us=draw(amounts),
        blocks=draw(st.integers(0, 999)),
    )


def values_of(entry: Tunable) -> st.SearchStrategy[Any]:
    """Everything that a plan may hold."""
    if entry.allowed:
        return st.sampled_from(entry.allowed)
    if entry.least is None:
        return names if entry.required else names | st.just(entry.plain)
    integers = st.integers(entry.least, min(1 << 20, BOUNDS[Tunables][entry.name]))
    return integers | st.none() if entry.plain is None else integers


@st.composite
def choices(draw: st.DrawFn, branches: int) -> Choice:
    params = draw(st.dictionaries(text, st.integers(-9, 1 << 40) | st.booleans() | text, max_size=3))
    of_a_branch = {entry.name: values_of(entry) for entry in TABLE.values() if entry.per_branch}
    of_the_plan = {entry.name: values_of(entry) for entry in TABLE.values() if not entry.per_branch}
    tunables = Tunables(
        branches=tuple(BranchTunables(**draw(st.fixed_dictionaries(of_a_branch))) for _ in range(branches)),
        params=tuple(sorted(params.items())),
        **draw(st.fixed_dictionaries(of_the_plan)),
    )
    return Choice(tunables, draw(st.none() | evidences()))


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    offset = draw(st.sampled_from(["interleaved", "blocked"]))
    branches = draw(st.lists(st.tuples(positive, positive), max_size=3))
    if not branches:
        return Pattern((), offset)
    return Pattern.of([w for w, _ in branches], [r for _, r in branches], offset)


@st.composite
def entries(draw: st.DrawFn) -> PlanEntry:
    kv_heads = draw(st.integers(1, 8))
    workload = Workload(
        mode=draw(st.sampled_from(["train", "infer"])),
        causal=draw(st.booleans()),
        seq_len=draw(positive),
        heads=kv_heads * draw(st.integers(1, 8)),
        head_dim=draw(st.integers(1, MOST["head_dim"])),
        dtype=draw(st.sampled_from(INPUT_DTYPES)),
        kv_heads=kv_heads,
        batch=draw(positive),
        pattern=draw(patterns()),
        world=draw(st.integers(1, 8)),
    )
    branches = max(1, len(workload.pattern.branches))
    failures = st.builds(Failure, text, st.sampled_from(["oom", "wrong", "timeout"]), text)
    kept = tuple(draw(st.lists(failures, max_size=2)))
    if draw(st.booleans()):
        return PlanEntry(workload, refusal=draw(text.filter(bool)), failures=kept)
    one = choices(branches)
    return PlanEntry(
        workload,
        draw(one),
        runners_up=tuple(draw(st.lists(one, max_size=2))),
        auto=draw(st.none() | one),
        front=tuple(draw(st.lists(one, max_size=2))),
        default=draw(st.none() | one),
        failures=kept,
        under_load=draw(st.booleans()),
    )


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    dtypes = tuple((name, draw(st.sampled_from(not_narrower(name)))) for name in INPUT_DTYPES)
    kernels = st.lists(names.filter(lambda name: name != "math"), max_size=3, unique=True)
    forward, backward = ((*draw(kernels), "math") for _ in range(2))
    few = st.builds(LaunchBound, st.floats(0.1, 1e3), st.just(forward), st.just(backward))
    packed = st.builds(KernelLists, st.just(forward), st.just(backward))
    return Policy(dtypes, forward, backward, draw(st.integers(2, 64)), draw(st.none() | few), draw(st.none() | packed))


versions = st.dictionaries(text, text, max_size=4).map(lambda pairs: tuple(sorted(pairs.items())))
provenances = st.builds(
    Provenance,
    tool_version=text,
    date=st.just("") | st.dates().map(str),
    effort=text,
    budget_s=st.none() | amounts,
    elapsed_s=st.none() | amounts,
    seed=st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    notes=st.lists(text, max_size=2).map(tuple),
)
counts = st.integers(0, 1 << 30)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    known = draw(st.booleans())
    some = text.filter(bool) if known else text
    fingerprint = Fingerprint(
        vendor=draw(st.sampled_from(["nvidia", "cpu"])),
        device_name=draw(some),
        sku=draw(some),
        arch=draw(some),
        sm_count=draw(positive if known else counts),
        memory_mib=draw(positive if known else counts),
        l2_mib=draw(counts),
        mig=draw(text),
        power_limit_w=draw(st.none() | counts),
        device_count=draw(positive),
        link=draw(text),
        isa=tuple(draw(st.lists(text, max_size=3))),
        threads=draw(counts),
    )
    software, provenance = draw(versions), draw(provenances)
    if not known:
        return Profile("heuristic", fingerprint, software, draw(policies()), provenance=provenance)
    plans = draw(st.lists(entries(), max_size=3, unique_by=lambda entry: entry.workload))
    return Profile("measured", fingerprint, software, draw(st.none() | policies()), tuple(plans), provenance)


@given(profiles())
@example(RICH)
def test_what_is_dumped_loads_equal(profile: Profile) -> None:
    dumped = dump_profile(profile)
    loaded = parse_profile(dumped, "p.yaml")
    assert loaded == profile
    assert hash(loaded) == hash(profile)
    assert dump_profile(loaded) == dumped


@given(profiles())
@settings(max_examples=15)
def test_the_parser_without_c_reads_the_same(profile: Profile) -> None:
    dumped = dump_profile(profile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_strict, "_Loader", yaml.SafeLoader)
        assert parse_profile(dumped, "p.yaml") == profile


def test_a_dump_is_what_safe_load_reads_and_people_can() -> None:
    plain = yaml.safe_load(RICH_TEXT)
    assert plain["schema"] == 1
    assert plain["software"]["cuda"] == "13.0"
    assert 'cuda: "13.0"' in RICH_TEXT
    assert "- {forward: cudnn, backward: cudnn, gather: view}" in RICH_TEXT
    assert "segment_lengths: [2048, 8192]" in RICH_TEXT
    assert [*plain][:: len(plain) - 1] == ["schema", "checksum"]
    assert max(len(line) for line in RICH_TEXT.splitlines()) <= 140


def test_every_tunable_is_written_so_that_a_later_default_changes_no_old_profile() -> None:
    plain = yaml.safe_load(dump_profile(measured(H100, dense_entry())))
    written = plain["plans"][0]["choice"]["tunables"]
    assert written["checkpoint"] == "selective"
    assert written["compile"] is False
    assert written["pattern_cache"] is True
    assert written["schedule"] == "local"


def test_comments_and_layout_are_free() -> None:
    lines = ["# by hand", *RICH_TEXT.splitlines(), "", "# the end"]
    assert parse_profile("\n\n".join(lines), "p.yaml") == RICH
    assert parse_profile(json.dumps(yaml.safe_load(RICH_TEXT)), "p.yaml") == RICH  # JSON is YAML


def test_single_is_a_profile_of_one_plan() -> None:
    entry = dense_entry()
    assert entry.choice is not None
    profile = Profile.single(H100, entry.workload, entry.choice.tunables)
    assert profile.plans == (PlanEntry(entry.workload, Choice(entry.choice.tunables)),)
    assert profile.fingerprint == Fingerprint.of(H100)
    assert profile.software == H100.software
    assert parse_profile(dump_profile(profile), "p") == profile


LINKS = (LinkSpeed(2, 1, 270.5, 21.0), LinkSpeed(16, 2, 24.25, 44.0))


def with_links(*speeds: LinkSpeed) -> Profile:
    return replace(RICH, fingerprint=replace(RICH.fingerprint, link_speeds=speeds))


def test_link_speeds_are_kept_and_tell_no_two_machines_apart() -> None:
    profile = parse_profile(dump_profile(with_links(*LINKS)), "p")
    assert profile.fingerprint.link_speeds == LINKS
    assert profile.fingerprint == RICH.fingerprint  # readings, never twice the same
    assert "link_speeds" not in dump_profile(RICH)  # nothing is written of what was not measured


@pytest.mark.parametrize(
    ("changes", "key", "told"),
    [
        ({"world": 1}, "fingerprint.link_speeds[0].world", "is 1"),
        ({"hosts": 3}, "fingerprint.link_speeds[0].hosts", "from 1 to world, 2"),
        ({"ring_gb_s": 0.0}, "fingerprint.link_speeds[0].ring_gb_s", "finite number > 0"),
        ({"latency_us": "fast"}, "fingerprint.link_speeds[0].latency_us", "must be a number"),
        ({"ring_GBps": 2.0}, "fingerprint.link_speeds[0].ring_GBps", "not a known key"),
    ],
)
def test_link_speeds_are_read_strictly(changes: dict[str, object], key: str, told: str) -> None:
    plain = yaml.safe_load(dump_profile(with_links(*LINKS)))
    plain["fingerprint"]["link_speeds"][0] |= changes
    with pytest.raises(ProfileError, match=told) as caught:
        parse_profile(resealed(plain), "p")
    assert caught.value.key == key


def test_each_number_of_ranks_has_one_link_speed() -> None:
    with pytest.raises(InputError, match=r"link_speeds holds worlds \[2, 2\]"):
        with_links(LINKS[0], LINKS[0])


def test_profiles_are_frozen_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        RICH.schema = 2  # type: ignore[misc]
    assert len({RICH, rich_profile()}) == 1
