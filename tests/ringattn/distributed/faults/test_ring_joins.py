"""Chunks that are calls of this rank's own program are gathered and merged by it, with the branches that stay."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from faults import Breaking, Told, assert_told, call_until_told, group_to_break, leaves_of
from oracle import DENSE, Case, pattern_of
from pool import Pool
from ring_cases import RingCase, check_exact

import ringattn.distributed.ring
from ringattn import Pattern
from ringattn.kernels.registry import KERNELS
from ringattn.runtime.merge import TorchOps

NESTED = pattern_of([12, 24, 48, 96], [1, 2, 3, 4])
ONLY_CROSSING = pattern_of([48, 96], [2, 3])
WHOLE_CROSSING = pattern_of([12, 48], [2, 1])  # the branch that crosses selects everything


def _cases(schedule: str, pattern: Pattern, world: int) -> list[RingCase]:
    return [
        RingCase(Case(24 * world, 4, kv_heads, 4, batch, pattern, causal), schedule, "contiguous")
        for causal, (kv_heads, batch) in product((True, False), ((4, 1), (2, 2)))
    ]


def _joins(ring: RingCase) -> list[bool]:
    module = ring.module()
    q, k, v = (module.shard(x.detach()).clone() for x in ring.case.inputs())
    module(q, k, v, total_length=ring.case.length)
    return [each._setting.joins for program in module._programs.values() for each in program._rings]


@pytest.mark.parametrize("schedule", ["ring", "all-gather"])
@pytest.mark.parametrize("pattern", [NESTED, ONLY_CROSSING, WHOLE_CROSSING], ids=["nested", "crossing", "whole"])
@pytest.mark.parametrize("world", [2, 4])
def test_as_on_one_rank(world: int, pattern: Pattern, schedule: str, ranks: Callable[[int], Pool]) -> None:
    cases = _cases(schedule, pattern, world)
    assert ranks(world).run(check_exact, cases) == [len(cases)] * world


SPARSE = pattern_of([2, 8, 8], [1, 9, 1])  # of 8 positions the first four, one for each head, are in the second branch
SPARSER = pattern_of([8], [9])


@pytest.mark.parametrize("pattern", [SPARSE, SPARSER, pattern_of([2, 8], [1, 9])], ids=["among", "alone", "beside"])
@pytest.mark.parametrize("schedule", ["ring", "all-gather"])
def test_a_branch_that_selects_nothing_on_one_rank(
    schedule: str, pattern: Pattern, ranks: Callable[[int], Pool]
) -> None:
    cases = [
        RingCase(Case(8, 4, kv_heads, 4, batch, pattern, causal), schedule, spread)
        for causal, (kv_heads, batch), spread in product((True, False), ((4, 1), (2, 2)), ("contiguous", "zigzag"))
    ]
    assert ranks(2).run(check_exact, cases) == [len(cases)] * 2


def test_heads_that_select_nothing(ranks: Callable[[int], Pool]) -> None:
    """The blocked rule gives the last four heads, which rank 1 computes, offsets behind the end of every segment."""
    pattern = pattern_of([2, 4], [9, 9], "blocked")
    cases = [
        RingCase(Case(4, 8, 8, 2, 2, pattern, True), "ulysses", "contiguous", head_groups=groups) for groups in (0, 2)
    ]
    assert ranks(2).run(check_exact, cases) == [2] * 2


@pytest.mark.parametrize(
    ("length", "pattern", "spread", "joins"),
    [
        (48, NESTED, "contiguous", [True, True]),
        (50, NESTED, "contiguous", [False, False]),  # 25 positions: heads select unequally many
        (48, NESTED, "zigzag", [False, False]),
        (48, pattern_of([12, 36], [1, 2]), "contiguous", [True, False]),  # the second holds parts of two segments
        (48, DENSE, "contiguous", [False, False]),  # nothing to merge
        (8, SPARSE, "contiguous", [True, False]),  # the second holds no row of a branch that travels
    ],
    ids=["nested", "ragged", "zigzag", "uneven", "dense", "sparse"],
)
def test_what_joins(
    length: int, pattern: Pattern, spread: str, joins: list[bool], ranks: Callable[[int], Pool]
) -> None:
    """Every rank decides for itself: what travels is the same either way."""
    ring = RingCase(Case(length, 4, 4, 4, 1, pattern, True), "ring", spread)
    assert ranks(2).run(_joins, ring) == [[each] for each in joins]


FAULTY = RingCase(Case(72, 4, 4, 4, 1, NESTED, True), "all-gather", "contiguous")


def _one_rank_breaks(at: int) -> Told:
    with group_to_break() as group:
        module = FAULTY.module(group=group)
        kernel, breaking = KERNELS["math"], Breaking(at, ValueError("kernel broke"))
        if torch.distributed.get_rank() == 1:
            object.__setattr__(kernel, "load", breaking.load)
        try:
            leaves = leaves_of(module, FAULTY.case)
            return call_until_told(lambda: module(*leaves).sum().backward())
        finally:
            object.__setattr__(kernel, "load", breaking.original)


@pytest.mark.parametrize("at", [1, 3, 5, 8, 10])
def test_an_exception_beside_what_travels(at: int, ranks: Callable[[int], Pool]) -> None:
    """Also in a branch that stays."""
    assert_told(ranks(3).run(_one_rank_breaks, at), "ValueError", "kernel broke")


def _memory_runs_out(ring: RingCase, step: str, at: int) -> Told:
    """On rank 1, in call ``at`` of what brings rows together or results back."""
    calls = 0
    place = TorchOps if hasattr(TorchOps, step) else ringattn.distributed.ring
    original = getattr(place, step)

    def breaking(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == at:
            raise torch.OutOfMemoryError("out of memory")
        return original(*args)

    if torch.distributed.get_rank() == 1:
        setattr(place, step, breaking)
    try:
        with group_to_break() as group:
            module = ring.module(group=group)
            leaves = leaves_of(module, ring.case)
            return call_until_told(lambda: module(*leaves).sum().backward())
    finally:
        setattr(place, step, original)


APART = RingCase(Case(75, 4, 4, 4, 1, NESTED, True), "ring", "contiguous", ragged=True)
SPREAD = RingCase(Case(72, 6, 6, 4, 2, pattern_of([12, 72], [2, 3]), True), "ulysses-ring", "contiguous", ulysses=2)


@pytest.mark.parametrize(
    ("ring", "step", "at"),
    [
        (FAULTY, "gather", 1),
        (FAULTY, "gather", 2),
        (FAULTY, "merge", 1),
        (FAULTY, "gather_backward", 1),
        (FAULTY, "scatter_sum", 1),
        (APART, "gather_rows", 1),
        (APART, "merge_rows", 1),
        (APART, "gather_lse", 1),
        (APART, "add_rows", 1),
        (SPREAD, "gather_rows", 1),
        (SPREAD, "merge_rows", 1),
        (SPREAD, "gather_lse", 1),
        (SPREAD, "add_rows", 1),
    ],
    ids=lambda value: f"{value.schedule}-{value.case.length}" if isinstance(value, RingCase) else None,
)
def test_memory_that_runs_out_around_the_kernels(
    ring: RingCase, step: str, at: int, ranks: Callable[[int], Pool]
) -> None:
    """Before the first message as after the last: the others are told."""
    told = ranks(4 if ring is SPREAD else 3).run(_memory_runs_out, ring, step, at)
    assert_told(told, "OutOfMemoryError", "out of memory")
