"""Lanes that are calls of this rank's own program are gathered and merged by it, with the branches that stay."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from oracle import DENSE, Case, pattern_of
from pool import Pool
from ring_cases import RingCase, check_exact
from test_ring_faults import _assert_told, _Breaking, _leaves, _told

from ringattn import Pattern
from ringattn.kernels import KERNELS

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


@pytest.mark.parametrize(
    ("length", "pattern", "spread", "joins"),
    [
        (48, NESTED, "contiguous", [True, True]),
        (50, NESTED, "contiguous", [False, False]),  # 25 positions: heads select unequally many
        (48, NESTED, "zigzag", [False, False]),
        (48, pattern_of([12, 36], [1, 2]), "contiguous", [True, False]),  # the second holds parts of two segments
        (48, DENSE, "contiguous", [False, False]),  # nothing to merge
    ],
    ids=["nested", "ragged", "zigzag", "uneven", "dense"],
)
def test_what_joins(
    length: int, pattern: Pattern, spread: str, joins: list[bool], ranks: Callable[[int], Pool]
) -> None:
    """Every rank decides for itself: what travels is the same either way."""
    ring = RingCase(Case(length, 4, 4, 4, 1, pattern, True), "ring", spread)
    assert ranks(2).run(_joins, ring) == [[each] for each in joins]


FAULTY = RingCase(Case(72, 4, 4, 4, 1, NESTED, True), "all-gather", "contiguous")


def _one_rank_breaks(at: int) -> tuple[str, str, float]:
    module = FAULTY.module()
    kernel, breaking = KERNELS["math"], _Breaking(at, ValueError("kernel broke"))
    rank = torch.distributed.get_rank()
    if rank == 1:
        object.__setattr__(kernel, "load", breaking.load)
    try:
        leaves = _leaves(module, FAULTY.case)
        told = _told(lambda: module(*leaves).sum().backward())
    finally:
        object.__setattr__(kernel, "load", breaking.original)
    assert told[0], "the call went through"
    torch.distributed.barrier()
    check_exact([FAULTY])  # the group is as good as before
    return told


@pytest.mark.parametrize("at", [1, 3, 5, 8, 10])
def test_an_exception_beside_what_travels(at: int, ranks: Callable[[int], Pool]) -> None:
    """Also in a branch that stays: what travels meanwhile is taken in all the same."""
    _assert_told(ranks(3).run(_one_rank_breaks, at), "ValueError", "kernel broke")
