"""Time that searches of cells would take, and which of them there is time for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.probe.workloads.grid import first_step
from autotune.search.budget import CellNeed
from autotune.search.loop import CellSearch
from ringattn.workload import Workload

# Of what an answer takes in comfort, two blocks of the default and what is nearest to it take so much.
LEAST_OF_BASE = 0.4


def affordable(needs: Mapping[Workload, CellNeed], available_s: float) -> list[Workload]:
    """Return the cells to share the time: all, in their order, or as many as can have an answer.

    Those are the first steps, and then the cheapest: on a busy CPU 60 s, half of them gone into the defaults of 20
    cells, were too little for any but three.
    """
    left_s, found = available_s, []
    for workload in sorted(needs, key=lambda workload: (first_step(workload), needs[workload].base_s)):
        least_s = LEAST_OF_BASE * needs[workload].base_s
        if least_s <= left_s:
            left_s -= least_s
            found.append(workload)
    if len(found) == len(needs):
        return list(needs)
    return found or [min(needs, key=lambda workload: needs[workload].base_s)]


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
