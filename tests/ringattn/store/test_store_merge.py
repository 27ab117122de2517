"""Merging: for each workload the row of higher effort, then the newer; never an average, whatever the order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_samples import EVIDENCE, H100, H200, dense_entry, measured

from ringattn.profile.precedence import origin_of, rows_with_origin
from ringattn.profile.row_origin import RowOrigin
from ringattn.profile.schema import Choice, PlanEntry, Profile, Provenance
from ringattn.profile.yaml_io import dump_profile, parse_profile
from ringattn.store.merge import disagree, merge_profiles, merge_rows, same_machine_groups


def probed(effort: str, date: str, *entries: PlanEntry) -> Profile:
    return replace(measured(H100, *entries), provenance=Provenance("0.1.0", date, effort))


def timed(seq_len: int, kernel: str, low: float, high: float) -> PlanEntry:
    entry = dense_entry(seq_len, kernel)
    assert entry.choice is not None
    evidence = replace(EVIDENCE, default_ratio=(low + high) / 2, ratio_low=low, ratio_high=high)
    return replace(entry, choice=replace(entry.choice, evidence=evidence))


def unmeasured(seq_len: int, kernel: str) -> PlanEntry:
    entry = dense_entry(seq_len, kernel)
    assert entry.choice is not None
    return replace(entry, choice=Choice(entry.choice.tunables))


def refused(seq_len: int) -> PlanEntry:
    return PlanEntry(dense_entry(seq_len).workload, refusal="nothing runs it")


def test_higher_effort_then_the_newer_row_serves() -> None:
    full = probed("full", "2026-01-01", dense_entry(1024, "cudnn"))
    old = probed("quick", "2026-02-01", dense_entry(1024, "math"), dense_entry(2048, "math"))
    new = probed("quick", "2026-03-01", dense_entry(1024, "flash"), dense_entry(2048, "flash"))
    merged = merge_profiles([new, full, old])
    kernels = {e.workload.seq_len: e.choice.tunables.branches[0].forward for e in merged.profile.plans if e.choice}
    assert kernels == {1024: "cudnn", 2048: "flash"}
    assert merged.superseded == (old,)
    assert (merged.profile.provenance.effort, merged.profile.provenance.date) == ("quick", "2026-01-01")


@pytest.mark.parametrize("slower", [timed(1024, "cudnn", 0.99, 1.0), refused(1024), unmeasured(1024, "math")])
def test_of_one_effort_and_day_the_faster_winner_serves(slower: PlanEntry) -> None:
    found, missed = (probed("quick", "2026-01-01", row) for row in (timed(1024, "flash", 0.7, 0.8), slower))
    assert merge_profiles([found, missed]).profile is merge_profiles([missed, found]).profile is found


def test_of_rows_that_save_as_much_one_serves_whichever_files_they_are_in() -> None:
    """And so after a pull, which leaves one of them in a file with rows of another day."""
    ours, theirs = (probed("quick", "2026-01-03", timed(1024, kernel, 0.5, 0.6)) for kernel in ("flash", "cudnn"))
    older = probed("quick", "2026-01-01", timed(512, "flash", 0.5, 0.6))
    for first, second in ((ours, theirs), (theirs, ours)):
        pulled = merge_profiles([older, first]).profile
        assert rows_of(merge_profiles([pulled, second]).profile) == rows_of(
            merge_profiles([older, ours, theirs]).profile
        )


def test_what_was_measured_outlives_what_could_not_be() -> None:
    old = probed("quick", "2026-01-01", timed(1024, "flash", 0.7, 0.8))
    busy = probed("full", "2026-02-01", unmeasured(1024, "math"))
    assert merge_profiles([busy, old]).profile is old
    rows = {1: dense_entry(1024)}
    assert merge_rows(rows, {}) == rows  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize(
    ("one", "other", "conflict"),
    [
        (timed(1024, "flash", 0.7, 0.8), timed(1024, "cudnn", 0.85, 0.9), True),
        (timed(1024, "flash", 0.7, 0.8), timed(1024, "flash", 0.85, 0.9), True),
        (timed(1024, "flash", 0.7, 0.8), timed(1024, "cudnn", 0.8, 0.9), False),
        (timed(1024, "flash", 0.7, 0.8), refused(1024), True),
        (timed(1024, "flash", 0.7, 0.8), unmeasured(1024, "math"), False),
        (refused(1024), refused(1024), False),
    ],
)
def test_a_conflict_is_what_noise_does_not_explain(one: PlanEntry, other: PlanEntry, conflict: bool) -> None:
    assert disagree(one, other) is disagree(other, one) is conflict
    merged = merge_profiles([probed("quick", "2026-01-01", one), probed("quick", "2026-02-01", other)])
    assert len(merged.conflicts) == conflict
    if conflict:
        assert merged.conflicts[0].kept in merged.profile.plans
        assert str(merged.conflicts[0]).isprintable()


def test_other_silicon_and_other_software_stay_apart() -> None:
    here, there = measured(H100, dense_entry()), measured(H200, dense_entry())
    newer = replace(here, software=(("torch", "2.12.0"),))
    assert sorted(map(len, same_machine_groups([here, there, newer, here]))) == [1, 1, 2]


rows = st.builds(
    lambda length, kernel, low: timed(length, kernel, low, low + 0.1),
    st.sampled_from([512, 1024, 2048]),
    st.sampled_from(["flash", "cudnn", "math"]),
    st.sampled_from([0.5, 0.7, 0.9]),
)
profiles = st.builds(
    lambda effort, day, entries: probed(effort, f"2026-01-0{day}", *{e.workload: e for e in entries}.values()),
    st.sampled_from(["quick", "standard", "full", ""]),
    st.integers(1, 3),
    st.lists(rows, min_size=1, max_size=3),
)


@given(st.lists(profiles, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_order_does_not_matter_and_what_is_superseded_may_go(pushed: list[Profile], mix: random.Random) -> None:
    merged = merge_profiles(pushed)
    shuffled = list(pushed)
    mix.shuffle(shuffled)
    assert dump_profile(merge_profiles(shuffled).profile) == dump_profile(merged.profile)
    left = [profile for profile in pushed if profile not in merged.superseded]
    assert dump_profile(merge_profiles(left).profile) == dump_profile(merged.profile)
    every = [entry for profile in pushed for entry in rows_with_origin(profile)]
    assert all(entry in every for entry in rows_with_origin(merged.profile))
    assert {entry.workload for entry in merged.profile.plans} == {entry.workload for entry in every}


@given(st.lists(profiles, min_size=2, max_size=6), st.integers(1, 5))
def test_what_was_merged_may_be_merged_again(pushed: list[Profile], cut: int) -> None:
    """As ``pull`` does with what its file holds already: no row is lost to a lower or older one."""
    at_once = merge_profiles(pushed).profile
    pulled = merge_profiles(pushed[:cut]).profile
    assert rows_of(merge_profiles([pulled, *pushed[cut:]]).profile) == rows_of(at_once)
    assert rows_of(merge_profiles([pulled, *pushed]).profile) == rows_of(at_once)  # the store's come again


def rows_of(profile: Profile) -> set[PlanEntry]:
    return set(rows_with_origin(profile))


def test_a_row_keeps_its_effort_and_day_beside_lower_ones() -> None:
    own = probed("full", "2026-03-01", timed(1024, "flash", 0.7, 0.8))
    store = probed("quick", "2026-01-01", timed(2048, "math", 0.7, 0.8))
    pulled = merge_profiles([own, store]).profile
    assert (pulled.provenance.effort, pulled.provenance.date) == ("quick", "2026-01-01")
    assert [entry.origin for entry in pulled.plans] == [RowOrigin("full", "2026-03-01"), None]
    assert parse_profile(dump_profile(pulled), "file") == pulled
    later = probed("standard", "2026-02-01", timed(1024, "cudnn", 0.5, 0.6), timed(2048, "cudnn", 0.7, 0.8))
    merged = merge_profiles([pulled, later]).profile
    assert {
        (entry.workload.seq_len, entry.choice.tunables.branches[0].forward, origin_of(merged, entry).effort)
        for entry in merged.plans
        if entry.choice
    } == {(1024, "flash", "full"), (2048, "cudnn", "standard")}
