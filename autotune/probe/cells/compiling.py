"""Keeps a probe at work while kernels are being compiled beside it."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.probe.workloads.grid import Cell
from autotune.search.budget import Deadline
from autotune.search.loop import CellSearch
from autotune.search.transfer import without, without_inert
from autotune.space.first_calls import calls_worth_making
from ringattn.workload import Tunables, Workload

from .runs import CellRuns

STILL_COMPILING = "still being compiled when the time was over, and not tried; the next probe has what was finished"


def calls_ahead(runs: CellRuns, new: Sequence[Cell]) -> Sequence[tuple[Workload, Tunables]]:
    """Return the calls whose kernels are worth compiling before their turn."""
    spaces, standing = [], []
    for cell in new:
        plans, nearby = runs.plans_before(cell.workload)
        space = without_inert(runs.known_space(cell).including((*plans, *nearby)))
        spaces.append(without(space, runs.transfer.traps.lost.keys()))
        standing += [(cell.workload, plan) for plan in dict.fromkeys(plans) if space.holds(plan)]
    return calls_worth_making(spaces, standing)


def try_while_compiling(runs: CellRuns, searches: dict[Workload, CellSearch]) -> None:
    """Try what needs no compiler at work, and wait for those, as long as the cells have what any answer takes.

    Cells that another worker has touched leave ``searches``.
    """

    def left_beside_answers_s() -> float:
        return runs.budget.available_s() - sum(search.need().base_s for search in searches.values())

    while _is_compiling(runs) and (left_s := left_beside_answers_s()) > 0:
        deadline = runs.budget.deadline(left_s)
        tried = sum(_try_meanwhile(runs, searches, workload, deadline) for workload in tuple(searches))
        if not tried:
            runs.transfer.compilers.wait(min(left_s, left_beside_answers_s()))


def _try_meanwhile(
    runs: CellRuns, searches: dict[Workload, CellSearch], workload: Workload, deadline: Deadline
) -> bool:
    """Time one block of a cell; return whether there was one."""
    with runs.shared.lease_again(workload) as taken:
        if taken:
            return searches[workload].try_meanwhile(deadline)
    del searches[workload]
    return False


def _is_compiling(runs: CellRuns) -> bool:
    runs.transfer.hear_of_compilers()
    return runs.transfer.compilers.at_work


def end_compilers(runs: CellRuns) -> None:
    """Let what is being compiled end, as far as the budget goes and a little longer, and say what failed."""
    if kernels := runs.transfer.compilers.waited_for():
        runs.context.observer.note(f"{STILL_COMPILING}: {', '.join(kernels)}")
    if note := runs.transfer.compilers.end(runs.budget.available_s()):
        runs.context.observer.note(note)
