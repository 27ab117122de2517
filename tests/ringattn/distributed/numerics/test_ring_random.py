"""Random cases over 2 to 5 ranks against the float64 oracle: out, LSE and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from pool import Pool
from random_cases import faults_of, has_chunk_of_whole_segments, rows_of, trials

# Cases of each world: 60 in all, 500 where examples are to be many. With 2 ranks no segment crosses beside whole ones.
THOROUGH = settings().max_examples >= 1000
COUNTS = {2: 80, 3: 170, 4: 125, 5: 125} if THOROUGH else {2: 10, 3: 20, 4: 15, 5: 15}
BATCH = 25


@pytest.mark.parametrize("world", COUNTS)
def test_as_the_oracle(world: int, ranks: Callable[[int], Pool]) -> None:
    given = trials(world, COUNTS[world])
    faults = []
    for first in range(0, len(given), BATCH):
        some = given[first : first + BATCH]
        faults += faults_of(some, ranks(world).run(rows_of, some, limit_s=120))
    assert not faults, "\n".join(f"{trial}: {fault}" for trial, fault in faults)


def test_cases_follow_from_their_numbers() -> None:
    assert trials(3, 20) == trials(3, 30)[:20]


def test_what_the_cases_reach() -> None:
    """Every schedule and layout, grouped heads, batches, unequal shards; and whole segments beside crossing ones."""
    given = [trial for world, count in COUNTS.items() for trial in trials(world, count)]
    rings = [trial.ring for trial in given]
    cases = [ring.case for ring in rings]
    assert {ring.schedule for ring in rings} == {"ring", "all-gather", "ulysses", "ulysses-ring"}
    for reached in (
        [ring.spread == "zigzag" for ring in rings],
        [ring.ragged for ring in rings],
        [case.heads > case.kv_heads for case in cases],
        [case.batch > 1 for case in cases],
        [case.causal for case in cases],
        [len(case.pattern.branches) > 1 for case in cases],
        [any(branch.rate > 1 for branch in case.pattern.branches) for case in cases],
        [trial.dtype != "fp64" for trial in given],
    ):
        assert 0.1 < sum(reached) / len(given) < 0.9
    assert sum(map(has_chunk_of_whole_segments, given)) / len(given) > 0.08
