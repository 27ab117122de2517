"""Rows of cells that an earlier run finished, or another worker."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.probe.workloads.grid import Cell

from .refining import middles
from .runs import CellRuns


def adopt_finished(runs: CellRuns, cells: Sequence[Cell]) -> None:
    """Take the rows of cells on which nobody works any more, but for those that somebody reads or validates now."""
    wanted = [cell for cell in cells if cell.workload not in runs.rows.reports]
    over = runs.shared.over() if wanted else set()
    for cell in wanted:
        if str(cell.workload) in over:
            with runs.shared.lease(cell.workload, reads=True) as taken:
                if taken:
                    _adopt(runs, cell)


def adopt_all(runs: CellRuns) -> None:
    """Take every row anew from the studies, which nobody changes any more; all workers get the same."""
    runs.rows.forget()
    _adopt_each(runs, runs.cells)
    over = runs.shared.over()
    _adopt_each(runs, [cell for cell, _ in middles(runs.cells, runs.rows) if str(cell.workload) in over])


def _adopt_each(runs: CellRuns, cells: Sequence[Cell]) -> None:
    for cell in cells:
        if runs.space(cell) is not None:
            with runs.store.worker.held(str(cell.workload), reads=True):
                _adopt(runs, cell)


def _adopt(runs: CellRuns, cell: Cell) -> None:
    recalled = runs.recall(runs.new_search(cell), left_too=True)
    assert recalled, f"{cell.workload} is over and has no result"
