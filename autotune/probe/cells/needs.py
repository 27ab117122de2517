"""Time that searches of cells would take, and which of them there is time for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autotune.search.budget import CellNeed
from autotune.search.loop import CellSearch
from ringattn.workload import Workload

# Of what an answer takes in comfort, two blocks of the default and what is nearest to it take so much.
LEAST_OF_BASE = 0.4


def affordable(needs: Mapping[Workload, CellNeed], available_s: float) -> list[Workload]:
    """Return the cells to share the time: all, in their order, or as many of the cheapest as can have an answer.

    On a busy CPU 60 s, half of them gone into the defaults of 20 cells, were too little for any but three.
    """
    cheapest = sorted(needs, key=lambda workload: needs[workload].base_s)
    spent_s = itertools.accumulate(LEAST_OF_BASE * needs[workload].base_s for workload in cheapest)
    count = max(1, sum(seconds <= available_s for seconds in spent_s))
    return list(needs) if count >= len(cheapest) else cheapest[:count]


def needs_of(searches: Mapping[Workload, CellSearch]) -> dict[Workload, CellNeed]:
    """Return what the searches of these cells would take."""
    return {workload: search.need() for workload, search in searches.items()}


def needs_of_all(
    workloads: Sequence[Workload], searches: Mapping[Workload, CellSearch], told: Mapping[str, CellNeed]
) -> dict[Workload, CellNeed]:
    """Return what cells would take: those of ``searches``, those that other workers ``told``, by name, and the rest.

    Of one whose default nobody knows yet it is as much as that of the costliest.
    """
    known = {str(each): need for each, need in needs_of(searches).items()}
    known = {**told, **known}
    there = [known[str(each)] for each in workloads if str(each) in known]
    costliest = max(there, key=lambda need: need.total_s, default=CellNeed(0.0))
    return {each: known.get(str(each), costliest) for each in workloads}
