"""Over 2, 3 and 4 ranks every schedule gives what one rank gives, in float64 to 1e-10: out, LSE and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import pytest
import torch
from combinations import covering
from oracle import DENSE, Case, pattern_of
from pool import Pool
from ring_cases import RingCase, check_exact, check_keys_that_are_none

PATTERNS = {
    "dense": DENSE,
    "crossing": pattern_of([8, 24, 96], [1, 2, 3]),
    "uneven": pattern_of([5, 7, 33], [2, 1, 5], "blocked"),
    "long": pattern_of([1000, 1000], [1, 4]),
}
SCHEDULES = ("ring", "all-gather", "ulysses", "ulysses-ring")


RANKS = [(world, name) for world in (2, 3, 4) for name in SCHEDULES if name != "ulysses-ring" or world == 4]
SPREADS = ("contiguous", "zigzag")
EITHER = (True, False)


@functools.cache
def _tried() -> list[tuple[Any, ...]]:
    """Combinations in which any three parameters meet, the last ones being causal, ragged and grouped."""
    return covering(3, RANKS, SPREADS, list(PATTERNS), EITHER, EITHER, EITHER)


def _cases(schedule: str, spread: str, world: int) -> list[RingCase]:
    """Causal or not, equal lengths or not; with grouped queries and without."""
    found = []
    unit = world if schedule.startswith("ulysses") else 1
    for ranks, spread_there, pattern, causal, ragged, grouped in _tried():
        if (ranks, spread_there) != ((world, schedule), spread):
            continue
        heads, kv_heads = (4 * unit, 2 * unit) if grouped else (3 * unit, 3 * unit)
        length = 12 * world + (5 if ragged else 0)
        case = Case(length, heads, kv_heads, 4, 2 if grouped else 1, PATTERNS[pattern], causal, seed=length)
        ulysses = 2 if schedule == "ulysses-ring" else 0
        head_groups = 2 if schedule == "all-gather" and causal else 0
        found.append(RingCase(case, schedule, spread, ulysses, head_groups, ragged=ragged))
    return found


def test_any_three_parameters_meet_in_what_is_tried() -> None:
    parameters = RANKS, SPREADS, list(PATTERNS), EITHER, EITHER, EITHER
    for places in combinations(range(len(parameters)), 3):
        met = {tuple(each[place] for place in places) for each in _tried()}
        assert met == set(product(*(parameters[place] for place in places)))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("world", "schedule"), RANKS)
def test_as_on_one_rank(world: int, schedule: str, spread: str, ranks: Callable[[int], Pool]) -> None:
    cases = _cases(schedule, spread, world)
    assert ranks(world).run(check_exact, cases) == [len(cases)] * world


@pytest.mark.parametrize("schedule", ["ring", "all-gather"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("segment", "length", "spread"), [(4, 36, "zigzag"), (2, 14, "contiguous")], ids=["zigzag", "contiguous"]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_whole_segments_beside_crossing_ones(
    batch: int, segment: int, length: int, spread: str, causal: bool, schedule: str, ranks: Callable[[int], Pool]
) -> None:
    """One rank's rows are two whole segments or more, all of them one chunk, while another rank's segments cross."""
    case = Case(length, 2, 2, 4, batch, pattern_of([segment], [1]), causal)
    assert ranks(3).run(check_exact, [RingCase(case, schedule, spread, ragged=length % 3 > 0)]) == [1] * 3


@pytest.mark.parametrize(("kernel", "dtype"), [("math", torch.float64), ("flash-cpu", torch.float32)], ids=str)
@pytest.mark.parametrize("schedule", ["ring", "all-gather", "ulysses"])
def test_keys_of_minus_infinity_are_no_keys(
    schedule: str, kernel: str, dtype: torch.dtype, ranks: Callable[[int], Pool]
) -> None:
    """The last shard's keys at -inf gave 1.33 for 2.0 on flash-cpu, and NaN on math."""
    cases = [
        RingCase(Case(24, 4, 2, 4, 1, pattern, causal), schedule, spread)
        for causal, spread, pattern in (
            (False, "contiguous", DENSE),
            (True, "zigzag", DENSE),
            (True, "contiguous", PATTERNS["crossing"]),
        )
    ]
    assert ranks(2).run(check_keys_that_are_none, cases, kernel, dtype) == [len(cases)] * 2
