"""Which rows of a profile answer a module: what must match, what may be near, and the note that says so."""

from __future__ import annotations

from dataclasses import replace

from machine_samples import H100, dense_entry, measured

from ringattn.planning.matching import entries_for
from ringattn.planning.table import ModuleShape
from ringattn.profile.schema import PlanEntry, Profile
from ringattn.workload import Pattern

LONGNET = Pattern.of([2048, 8192], [1, 4])


def ask(profile: Profile, **changes: object) -> tuple[tuple[PlanEntry, ...], str]:
    return entries_for(profile, replace(ModuleShape(16, 16, 128, True, Pattern()), **changes))  # type: ignore[arg-type]


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


def test_head_counts_match_by_nearest_and_the_note_says_so() -> None:
    few, many = dense_entry(heads=8, kv_heads=8), dense_entry(heads=64, kv_heads=64)
    profile = measured(H100, few, many)
    assert ask(profile)[0] == (few,)
    assert ask(profile, heads=40, kv_heads=40)[0] == (many,)
    assert ask(profile)[1].endswith("measured with 8/8 heads where 16/16 were asked for")
    assert "measured with" not in ask(profile, heads=64, kv_heads=64)[1]


def test_head_groups_are_part_of_nearest() -> None:
    grouped, plain = dense_entry(heads=32, kv_heads=8), dense_entry(heads=16, kv_heads=16)
    profile = measured(H100, grouped, plain)
    assert ask(profile, heads=16, kv_heads=4)[0] == (grouped,)
    assert ask(profile, heads=32, kv_heads=32)[0] == (plain,)


def test_nearest_is_found_for_each_mode_and_dtype_and_keeps_every_length() -> None:
    here = [dense_entry(length, heads=16) for length in (1024, 4096)]
    elsewhere = dense_entry(4096, mode="infer", heads=8, kv_heads=8)
    profile = measured(H100, *here, dense_entry(8192, heads=8, kv_heads=8), elsewhere)
    rows, note = ask(profile)
    assert set(rows) == {*here, elsewhere}
    assert "measured with 8/8, 16/16 heads" in note


def test_one_row_for_each_length_the_smallest_batch() -> None:
    one, two = dense_entry(batch=1), dense_entry(batch=2)
    assert ask(measured(H100, two, one))[0] == (one,)
