"""Which rows of a profile answer a module: what must match, what may be near, and the note that says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_samples import H100, dense_entry, measured

from ringattn.planning.matching import distance, entries_for, entry_for
from ringattn.profile.schema import PlanEntry, Profile
from ringattn.workload import Pattern, Workload

LONGNET = Pattern.of([2048, 8192], [1, 4])


def ask(profile: Profile, **changes: object) -> tuple[tuple[PlanEntry, ...], str]:
    module = Workload("train", True, 4096, 16, 128, "bf16")
    return entries_for(profile, replace(module, **changes))  # type: ignore[arg-type]


def test_pattern_causal_head_dim_and_world_match_exactly_or_not_at_all() -> None:
    dense, dilated = dense_entry(), dense_entry(pattern=LONGNET)
    profile = measured(H100, dense, dilated)
    assert ask(profile) == ((dense,), "1 plan for dense causal D128")
    assert ask(profile, pattern=LONGNET)[0] == (dilated,)
    for changes, asked in (
        ({"pattern": Pattern.of([2048, 8192], [1, 2])}, "[2048,8192]/[1,2] causal D128"),
        ({"causal": False}, "dense full D128"),
        ({"head_dim": 64}, "dense causal D64"),
        ({"world": 2}, "dense causal D128 world=2"),
    ):
        assert ask(profile, **changes) == ((), f"no plan for {asked}")


def test_the_offset_rule_is_part_of_a_dilated_pattern_only() -> None:
    profile = measured(H100, dense_entry(), dense_entry(pattern=LONGNET))
    assert len(ask(profile, pattern=Pattern((), "blocked"))[0]) == 1
    assert ask(profile, pattern=replace(LONGNET, head_offset="blocked"))[0] == ()
    local = measured(H100, dense_entry(pattern=Pattern.of([1024], [1])))
    assert len(ask(local, pattern=Pattern.of([1024], [1], "blocked"))[0]) == 1


def serving(profile: Profile, **changes: object) -> PlanEntry | None:
    module = replace(Workload("train", True, 4096, 16, 128, "bf16"), **changes)  # type: ignore[arg-type]
    return entry_for(entries_for(profile, module)[0], module, H100.sm_count)


def test_head_counts_match_by_nearest_and_the_note_says_so() -> None:
    few, many = dense_entry(heads=8, kv_heads=8), dense_entry(heads=64, kv_heads=64)
    profile = measured(H100, few, many)
    assert serving(profile) == few
    assert serving(profile, heads=40, kv_heads=40) == many
    assert ask(profile)[1].endswith("measured with 8/8, 64/64 heads where 16/16 were asked for")
    assert "measured with" not in ask(measured(H100, many), heads=64, kv_heads=64)[1]


def test_head_groups_are_part_of_nearest() -> None:
    grouped, plain = dense_entry(heads=32, kv_heads=8), dense_entry(heads=16, kv_heads=16)
    profile = measured(H100, grouped, plain)
    assert serving(profile, heads=16, kv_heads=4) == grouped
    assert serving(profile, heads=32, kv_heads=32) == plain


def test_a_length_that_the_nearest_heads_do_not_reach_is_served_by_others() -> None:
    here = [dense_entry(length) for length in (1024, 4096)]
    longer = dense_entry(8192, heads=8, kv_heads=8)
    profile = measured(H100, *here, longer)
    assert [serving(profile, seq_len=length) for length in (1024, 4096, 5700)] == [here[0], here[1], here[1]]
    assert [serving(profile, seq_len=length) for length in (5800, 8192, 11500)] == [longer] * 3
    assert serving(profile, seq_len=11600) is None
    assert serving(profile, seq_len=700) is None
    far = measured(H100, dense_entry(197, heads=12, kv_heads=12), dense_entry(1024))
    assert serving(far, seq_len=400) == far.plans[0]  # which neither reaches alone


def test_batch_and_heads_count_by_their_product() -> None:
    one, many = dense_entry(197), dense_entry(197, heads=12, kv_heads=12, batch=64)
    profile = measured(H100, one, many)
    for batch, served in ((1, one), (2, one), (32, many), (48, many), (500, many)):
        assert serving(profile, seq_len=197, batch=batch) == served
    exchanged = measured(H100, dense_entry(heads=16), dense_entry(heads=2, kv_heads=2, batch=8))
    for heads, batch, served in ((16, 1, 0), (8, 2, 0), (4, 4, 1), (2, 8, 1)):  # equal work: the nearer batch
        assert serving(exchanged, heads=heads, kv_heads=heads, batch=batch) == exchanged.plans[served]


def test_the_work_of_a_full_device_counts_before_the_length() -> None:
    """A launch-bound plan for 1 x 1024 took 4 sequences of 2048, 64 heads, 1.87 times as long as that for 4096."""
    rows = [dense_entry(length) for length in (1024, 4096, 16384)]
    profile = measured(H100, *rows)
    assert serving(profile, seq_len=2048, batch=4, heads=64, kv_heads=8) == rows[1]
    assert serving(profile, seq_len=1024, batch=64, heads=16) == rows[1]
    assert serving(profile, seq_len=1100, batch=1, heads=12, kv_heads=12) == rows[0]
    assert serving(profile, seq_len=5000) == rows[1]  # its own batch and heads: the nearest length


def test_occupancy_counts_until_the_device_is_full() -> None:
    """At 2 blocks a head 66 heads fill 132 multiprocessors: 132 heads are more work, 33 less of both."""
    half, double = dense_entry(256, heads=33, kv_heads=33), dense_entry(256, heads=132, kv_heads=132)
    assert serving(measured(H100, half, double), seq_len=256, heads=66, kv_heads=66) == double
    half, double = dense_entry(256, heads=6, kv_heads=6), dense_entry(256, heads=24, kv_heads=24)
    assert serving(measured(H100, half, double), seq_len=256, heads=12, kv_heads=12) == half


def test_over_several_ranks_one_head_count_serves_every_length_of_a_mode_and_dtype() -> None:
    here = [dense_entry(length, world=2) for length in (1024, 4096)]
    elsewhere = dense_entry(4096, mode="infer", heads=8, kv_heads=8, world=2)
    profile = measured(H100, *here, dense_entry(8192, heads=8, kv_heads=8, world=2), elsewhere)
    rows, note = ask(profile, world=2)
    assert set(rows) == {*here, elsewhere}
    assert "measured with 8/8, 16/16 heads" in note


workloads = st.builds(
    lambda group, kv_heads, **fields: Workload("train", True, heads=group * kv_heads, kv_heads=kv_heads, **fields),
    group=st.sampled_from((1, 2, 4, 8)),
    kv_heads=st.integers(1, 64),
    seq_len=st.integers(1, 100_000),
    head_dim=st.just(64),
    dtype=st.just("bf16"),
    batch=st.integers(1, 64),
)


@given(workloads, workloads, workloads, st.integers(0, 200))
def test_the_distance_is_one(one: Workload, other: Workload, third: Workload, multiprocessors: int) -> None:
    there = distance(one, other, multiprocessors)
    assert there == pytest.approx(distance(other, one, multiprocessors))
    assert distance(one, one, multiprocessors) == 0
    assert there <= distance(one, third, multiprocessors) + distance(third, other, multiprocessors) + 1e-9
