"""Defaults of cells, checked and validated before any search: the yardstick of the budget, and of everything else."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.probe.workloads.grid import Cell
from autotune.search.loop import CellSearch
from ringattn.workload import Workload

from .needs import affordable, needs_of
from .runs import CellRuns

KEPT_OF_SETTLING = 0.25


def settle_defaults(runs: CellRuns, cells: Sequence[Cell]) -> dict[Workload, CellSearch]:
    """Return the searches of the cells whose defaults run; of a shared search, of those that no other worker has."""
    searches: dict[Workload, CellSearch] = {}
    worker_started_s = runs.budget.elapsed_s()
    kept_s = 0.5 * runs.context.preset.budget_s  # half of the time, at most, may go into yardsticks
    started = False
    for cell in cells:
        if runs.shared.is_settled(cell.workload):
            continue
        with runs.shared.lease(cell.workload) as taken:
            if not taken or runs.recall(search := runs.new_search(cell)):
                continue
            if len(affordable(needs_of(searches), runs.budget.available_s())) < len(searches):
                runs.leave_for_time(search)
                continue
            if runs.settle(search, runs.budget.available_s() - kept_s):
                searches[cell.workload] = search
            if not started:  # the worker was started for it, which is nobody's yardstick
                started = True
                kept_s = min(kept_s, 0.5 * runs.budget.available_s())
                worker_started_s = runs.budget.elapsed_s()
    # The rows are run once more at the end, which takes longer on a busy machine, as the checks did.
    runs.budget.keep(KEPT_OF_SETTLING * (runs.budget.elapsed_s() - worker_started_s))
    return searches
