"""Which rows a call reads, checked against every position counted one by one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import DENSE, pattern_of, patterns

from ringattn.geometry.calls import Geometry, LayoutKey, build_geometry
from ringattn.geometry.pattern import (
    branch_calls,
    head_offset_of,
    head_runs,
    heads_without_rows,
    nests,
    run_view,
    selected_rows,
    window_bounds,
)
from ringattn.workload import Branch, HeadOffset, Pattern

rules = st.sampled_from(("interleaved", "blocked"))


@given(patterns(), st.integers(1, 9), st.integers(1, 3), st.none() | st.integers(1, 20))
def test_heads_without_rows_select_nothing_in_any_sequence(
    pattern: Pattern, kv_heads: int, group: int, longest: int | None
) -> None:
    length = longest or max((branch.segment for branch in pattern.branches), default=1)

    def selects(head: int) -> bool:
        return pattern.dense or any(
            p % branch.segment % branch.rate
            == head_offset_of(head // group, kv_heads, branch.rate, pattern.head_offset)
            for branch in pattern.branches
            for p in range(length)
        )

    heads = kv_heads * group
    assert heads_without_rows(pattern, heads, kv_heads, longest) == tuple(h for h in range(heads) if not selects(h))


@pytest.mark.parametrize(
    ("kv_heads", "rate", "rule", "offsets"),
    [
        (6, 1, "interleaved", [0] * 6),
        (6, 1, "blocked", [0] * 6),
        (6, 2, "interleaved", [0, 1, 0, 1, 0, 1]),
        (6, 2, "blocked", [0, 0, 0, 1, 1, 1]),
        (5, 3, "interleaved", [0, 1, 2, 0, 1]),
        (5, 3, "blocked", [0, 0, 1, 1, 2]),
        (3, 8, "interleaved", [0, 1, 2]),
        (3, 8, "blocked", [0, 1, 2]),
        (4, 3, "blocked", [0, 0, 1, 1]),  # ceil(4 / 3) heads share an offset, so the last offset has none
    ],
)
def test_offsets(kv_heads: int, rate: int, rule: HeadOffset, offsets: list[int]) -> None:
    assert [head_offset_of(head, kv_heads, rate, rule) for head in range(kv_heads)] == offsets


@given(st.integers(0, 60), st.integers(1, 12), st.integers(0, 11))
def test_selected_rows_counts_positions(length: int, rate: int, offset: int) -> None:
    offset %= rate
    assert selected_rows(length, rate, offset) == sum(p % rate == offset for p in range(length))


@given(st.integers(1, 40), st.integers(1, 20), rules)
def test_runs_hold_every_head_once_with_its_offset(kv_heads: int, rate: int, rule: HeadOffset) -> None:
    heads = []
    for run in head_runs(kv_heads, rate, rule):
        for j in range(run.count):
            head = run.first + j * run.step
            assert run.offset + j * run.offset_step == head_offset_of(head, kv_heads, rate, rule)
            heads.append(head)
    assert sorted(heads) == list(range(kv_heads))


def test_runs_are_few() -> None:
    assert len(head_runs(16, 4, "interleaved")) == 4
    assert len(head_runs(16, 16, "interleaved")) == 1  # one view over head and position at once
    assert len(head_runs(4, 64, "interleaved")) == 1
    assert len(head_runs(16, 4, "blocked")) == 4
    assert len(head_runs(7, 1, "blocked")) == 1


@st.composite
def layouts(draw: st.DrawFn) -> tuple[LayoutKey, tuple[int, ...]]:
    """A layout, and the strides of a (B, S, Hkv) tensor in which batch elements fold where it says so."""
    pattern = draw(patterns(longest=30))
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    kv_heads, group = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    folds = draw(st.booleans())
    gathers = tuple(
        draw(st.sampled_from(("view", "copy"))) if branch.rate > 1 else "view" for branch in pattern.resolved(length)
    )
    units = [branch.segment for branch in pattern.branches]
    window = max(units, default=0) * draw(st.integers(1, 3))
    if pattern.dense or not nests(pattern, window) or draw(st.booleans()):
        window = None
    key = LayoutKey(pattern, gathers, window, batch, length, kv_heads * group, kv_heads, folds)
    row = kv_heads * 5
    return key, ((length if folds else length + 3) * row, row, 5)


def positions_of(key: LayoutKey, geometry: Geometry, strides: tuple[int, ...]) -> list[Counter[tuple[int, ...]]]:
    """Per branch, how often its calls read each (batch, kv head, position), by following the strides."""
    read: list[Counter[tuple[int, ...]]] = [Counter() for _ in key.pattern.resolved(key.seq_len)]
    memory = torch.full(((key.batch + 1) * strides[0],), -1)
    held = torch.arange(key.batch * key.seq_len * key.kv_heads).view(key.batch, key.seq_len, key.kv_heads)
    memory.as_strided(held.shape, strides).copy_(held)
    for window in geometry.windows:
        for placed in window.calls:
            call = placed.call
            for run in call.runs:
                view = run_view(call, run, 1, strides, folded=False)
                rows = memory.as_strided(view.size, view.stride, view.offset)
                assert rows.shape == (call.batch, call.segments, call.rows, run.count, 1)
                if not call.copied:
                    assert len(call.runs) == 1
                    folded = run_view(call, run, 1, strides, folded=True)
                    in_place = memory.as_strided(folded.size, folded.stride, folded.offset)
                    assert torch.equal(in_place, rows.reshape(folded.size))
                for index in rows.flatten().tolist():
                    assert index >= 0, "a row outside the tensor"
                    b, rest = divmod(index, key.seq_len * key.kv_heads)
                    position, head = divmod(rest, key.kv_heads)
                    assert window.begin <= position < window.end
                    read[placed.branch][b, head, position] += 1
    return read


@given(layouts())
def test_the_calls_of_a_branch_read_every_selected_row_once(layout: tuple[LayoutKey, tuple[int, ...]]) -> None:
    key, strides = layout
    read = positions_of(key, build_geometry(key), strides)
    for branch, rows in zip(key.pattern.resolved(key.seq_len), read, strict=True):
        expected = {
            (b, head, position): 1
            for b in range(key.batch)
            for head in range(key.kv_heads)
            for position in range(key.seq_len)
            if position % branch.segment % branch.rate
            == head_offset_of(head, key.kv_heads, branch.rate, key.pattern.head_offset)
        }
        assert rows == expected


@given(layouts())
def test_a_call_holds_whole_segments_of_equal_rows(layout: tuple[LayoutKey, tuple[int, ...]]) -> None:
    key, _ = layout
    geometry = build_geometry(key)
    indices = [placed.index for window in geometry.windows for placed in window.calls]
    assert indices == list(range(len(indices)))
    for window in geometry.windows:
        for placed in window.calls:
            call, branch = placed.call, key.pattern.resolved(key.seq_len)[placed.branch]
            assert call.start % branch.segment == 0 or key.pattern.dense
            assert call.rows >= 1
            assert call.kv_heads == sum(run.count for run in call.runs)
            assert call.copied == (key.gathers[placed.branch] == "copy" and branch.rate > 1)
            for run in call.runs:
                for j in range(run.count):
                    assert selected_rows(call.length, call.rate, run.offset + j * run.offset_step) == call.rows


@given(layouts(), st.integers(1, 3))
def test_a_view_that_folds_covers_query_heads_too(layout: tuple[LayoutKey, tuple[int, ...]], extra: int) -> None:
    key, _ = layout
    group = key.heads // key.kv_heads
    row = key.heads * 2
    strides = ((key.seq_len if key.batch_folds else key.seq_len + extra) * row, row, 2)
    memory = torch.arange((key.batch + 1) * strides[0])
    for window in build_geometry(key).windows:
        for placed in window.calls:
            if placed.call.copied:
                continue
            (run,) = placed.call.runs
            loose, folded = (run_view(placed.call, run, group, strides, folded=f) for f in (False, True))
            rows = memory.as_strided(loose.size, loose.stride, loose.offset)
            assert torch.equal(memory.as_strided(folded.size, folded.stride, folded.offset), rows.reshape(folded.size))


def test_in_place_calls_are_few() -> None:
    def calls(batch: int, folds: bool, segment: int, length: int = 64, rate: int = 1, copy: bool = False) -> int:
        return len(
            branch_calls(
                Branch(segment, rate),
                begin=0,
                end=length,
                batch=batch,
                batch_folds=folds,
                kv_heads=4,
                group=2,
                rule="interleaved",
                copy=copy,
            )
        )

    assert calls(1, True, 16) == 1  # all segments are one batch axis
    assert calls(8, True, 16) == 1
    assert calls(8, False, 16) == 4  # one along the shorter axis
    assert calls(2, False, 16) == 2
    assert calls(8, False, 64) == 1
    assert calls(1, True, 16, rate=2) == 4  # groups of two that do not fold: each key/value head alone
    assert calls(1, True, 16, rate=2, copy=True) == 1
    assert calls(8, False, 16, rate=2, copy=True) == 1
    assert calls(1, True, 16, length=70) == 2  # and the tail
    assert calls(1, True, 16, length=70, rate=4, copy=True) == 3  # whose heads select 2 or 1 rows


@given(st.integers(1, 100), st.none() | st.integers(1, 120))
def test_windows_follow_each_other(length: int, window: int | None) -> None:
    bounds = window_bounds(length, window)
    assert [position for begin, end in bounds for position in range(begin, end)] == list(range(length))
    assert all(end - begin <= (window or length) for begin, end in bounds)


def test_nesting() -> None:
    assert nests(pattern_of([4, 8, 16], [1, 2, 4]), 16)
    assert nests(pattern_of([4, 6], [1, 1]), 24)
    assert not nests(pattern_of([4, 6], [1, 1]), 6)
    assert not nests(pattern_of([16], [1]), 8)
    assert not nests(DENSE, 8)


@pytest.mark.parametrize(
    ("pattern", "length", "folds", "batch", "direct"),
    [
        (DENSE, 10, True, 2, True),
        (pattern_of([5], [1]), 10, True, 2, True),
        (pattern_of([64], [1]), 10, False, 2, True),
        (pattern_of([5], [1]), 10, False, 2, False),  # two calls
        (pattern_of([4], [1]), 10, True, 1, False),  # a tail
        (pattern_of([5], [2]), 10, True, 1, False),  # positions without a result
        (pattern_of([10, 10], [1, 1]), 10, True, 1, False),
    ],
)
def test_one_call_over_everything_needs_no_merge(
    pattern: Pattern, length: int, folds: bool, batch: int, direct: bool
) -> None:
    gathers = ("view",) * max(1, len(pattern.branches))
    assert build_geometry(LayoutKey(pattern, gathers, None, batch, length, 2, 2, folds)).direct is direct


# --- views ---------------------------------------------------------------------------------------------------------


def key_at(length: int) -> LayoutKey:
    return LayoutKey(pattern_of([4], [2]), ("view",), None, 1, length, 2, 2, True)


def test_views_are_told_apart_by_strides_group_and_head_dim() -> None:
    geometry = build_geometry(key_at(8))
    placed = geometry.windows[0].calls[0]
    first = geometry.views(placed, 1, (64, 8, 4, 1), 4, folded=False)
    assert geometry.views(placed, 1, (64, 8, 4, 1), 4, folded=False) is first
    for other in (
        geometry.views(placed, 1, (64, 8, 4, 1), 2, folded=False),
        geometry.views(placed, 1, (128, 16, 8, 1), 4, folded=False),
        geometry.views(placed, 2, (64, 8, 4, 1), 4, folded=False),
        geometry.views(placed, 1, (64, 8, 4), None, folded=False),
        geometry.views(placed, 1, (64, 8, 4, 1), 4, folded=True),
    ):
        assert other != first
