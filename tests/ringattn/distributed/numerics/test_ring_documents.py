"""Documents over ranks: they equal the oracle of each alone wherever they are cut, and ``shard`` balances them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from combinations import covering
from document_cases import DocumentsCase, call_with, check_documents, positions_here
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DENSE, Case, pattern_of
from pool import Pool
from ring_cases import RingCase

from ringattn.geometry.documents import Document, document_shards
from ringattn.geometry.layout import length_of

PATTERNS = {"dense": DENSE, "dilated": pattern_of([4, 8, 24], [1, 2, 3]), "one": pattern_of([5], [1])}
SCHEDULES = ("ring", "all-gather", "ulysses", "ulysses-ring")
RANKS = [(world, name) for world in (2, 3, 4) for name in SCHEDULES if name != "ulysses-ring" or world == 4]
SPREADS = ("contiguous", "zigzag")
CUTS = [(0, 4, 7), (0, 1, 1, 9, 10, 33), (0, 30), (0, 2, 4, 6, 8, 10, 12, 30), None]  # the last: lengths of three rows
TAILS = (0, 5)  # positions after the last document


def _total(world: int, cut: tuple[int, ...] | None, tail: int) -> int:
    """Positions in a row."""
    return 4 * world if cut is None else cut[-1] + tail


def _every_rank_has_rows(
    ranks: tuple[int, str], spread: str, pattern: str, causal: bool, cut: tuple[int, ...] | None, tail: int
) -> bool:
    world, total = ranks[0], _total(ranks[0], cut, tail)
    return total >= 2 * world and (spread == "zigzag" or -(-total // world) * (world - 1) < total)


@functools.cache
def _tried() -> list[tuple[Any, ...]]:
    """Combinations in which any three parameters meet, the number of ranks and the schedule being one."""
    return covering(3, RANKS, SPREADS, list(PATTERNS), (True, False), CUTS, TAILS, allowed=_every_rank_has_rows)


def _cases(schedule: str, spread: str, world: int) -> list[DocumentsCase]:
    heads = 2 * world if schedule.startswith("ulysses") else 2
    ulysses = 2 if schedule == "ulysses-ring" else 0
    groups = 2 if schedule == "all-gather" else 0

    def ring(length: int, pattern: str, causal: bool, batch: int = 1) -> RingCase:
        case = Case(length, 2 * heads, heads, 4, batch, PATTERNS[pattern], causal, seed=length)
        return RingCase(case, schedule, spread, ulysses, groups)

    cases = []
    for ranks, spread_there, pattern, causal, cut, tail in _tried():
        if (ranks, spread_there) != ((world, schedule), spread):
            continue
        if cut is None:
            cases.append(DocumentsCase(ring(_total(world, cut, tail), pattern, causal, 3), lengths=(4 * world, 0, 5)))
        else:
            cases.append(DocumentsCase(ring(_total(world, cut, tail), pattern, causal), cut))
    return cases


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("world", "schedule"), RANKS)
def test_documents_over_ranks_equal_the_oracle(
    world: int, schedule: str, spread: str, ranks: Callable[[int], Pool]
) -> None:
    cases = _cases(schedule, spread, world)
    assert ranks(world).run(check_documents, cases) == [len(cases)] * world


@pytest.mark.parametrize("spread", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_no_token_of_4_and_3_on_two_ranks_is_lost(spread: str, causal: bool, ranks: Callable[[int], Pool]) -> None:
    """The last of 4 + 3 tokens on 2 ranks was dropped elsewhere (NVIDIA/TransformerEngine#1930)."""
    case = Case(7, 2, 2, 4, 1, DENSE, causal)
    held = ranks(2).run(positions_here, spread, causal, 7, (0, 4, 7))
    assert sorted(itertools.chain(*held)) == list(range(7))
    each = DocumentsCase(RingCase(case, "ring", spread), (0, 4, 7))
    assert ranks(2).run(check_documents, [each]) == [1, 1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 400), max_size=12), st.integers(0, 100), st.integers(1, 8))
def test_shards_hold_every_position_once_and_balance(lengths: list[int], tail: int, world: int) -> None:
    bounds = [0, *itertools.accumulate(lengths)]
    documents = [Document(0, *ends) for ends in itertools.pairwise(bounds)]
    total = bounds[-1] + tail
    shards = document_shards(documents, total, world)
    assert sorted(p for shard in shards for span in shard for p in range(*span)) == list(range(total))
    assert all(a.end < b.begin for shard in shards for a, b in itertools.pairwise(shard))
    whole = [n for n in lengths if n < total / (8 * world)]
    rows = [length_of(shard) for shard in shards]
    assert max(rows) - min(rows) <= max(whole, default=0) + 2 * len(lengths) + world


def test_long_documents_have_equal_work_on_every_rank() -> None:
    """Pairs of queries and keys under a causal mask, of 4 documents of 512 positions and many short ones."""
    bounds = [0, *itertools.accumulate([512] * 4 + [16] * 64)]
    documents = [Document(0, *ends) for ends in itertools.pairwise(bounds)]
    shards = document_shards(documents, bounds[-1], 4)

    def pairs(shard: object) -> int:
        positions = [p for span in shard for p in range(*span)]  # type: ignore[attr-defined]
        return sum(p - max(b for b in bounds if b <= p) + 1 for p in positions)

    work = [pairs(shard) for shard in shards]
    assert max(work) <= 1.02 * min(work)
    assert {length_of(shard) for shard in shards} == {bounds[-1] // 4}


@pytest.mark.parametrize(
    ("bounds", "length", "total", "message"),
    [
        (
            ((0, 4, 7),) * 2,
            5,
            7,
            r"the sequence has 5 positions here; of total_length 7 rank \d of 2 holds \d in zigzag",
        ),
        (((0, 9),) * 2, 4, None, "cu_seqlens ends at 9, and q has 8 positions"),
        (
            ((0, 1),) * 2,
            1,
            1,
            r"zigzag layout over 2 ranks would leave a rank nothing of Documents\(\[0, 1\]\); use layout",
        ),
        (
            ((0, 4, 8), (0, 5, 8)),
            4,
            None,
            "calls with batch 1, 4 positions of 8 in all, 2 documents [0-9a-f]{8}, float32",
        ),
    ],
)
def test_documents_that_do_not_fit_are_refused_on_every_rank(
    bounds: tuple[tuple[int, ...], ...],
    length: int,
    total: int | None,
    message: str,
    ranks: Callable[[int], Pool],
) -> None:
    with pytest.raises(AssertionError, match=message) as error:
        ranks(2).run(call_with, bounds, length, total)
    assert "rank 0:" in str(error.value)
    assert "rank 1:" in str(error.value)
