"""New anchors, while time remains, between neighbouring lengths whose winners differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autotune.probe.workloads.grid import Cell, between
from ringattn.workload import Tunables, Workload

from .rows import Rows
from .runs import CellRuns


def refine(runs: CellRuns) -> None:
    """Search the cells half way between those that disagree, as far as no other worker does."""
    budget, rows = runs.budget, runs.rows
    for middle, agree in middles(runs.cells, rows):
        if agree or runs.space(middle) is None:
            continue
        if budget.available_s() < rows.typical_cell_s():
            return
        with runs.shared.lease(middle.workload) as taken:
            if not taken or runs.recall(search := runs.new_search(middle)):
                continue
            if search.settle(budget.deadline(budget.available_s())) is not None:
                continue
            need = search.need()
            runs.observer.add(middle.workload, need)
            share_s = min(need.total_s, budget.available_s())
            runs.search(search, share_s, budget.available_s() - share_s)


def middles(cells: Sequence[Cell], rows: Rows) -> list[tuple[Cell, bool]]:
    """Return the cells half way between neighbours that have a plan, and whether those agree."""
    found = []
    by_question: dict[Workload, list[Cell]] = {}
    for cell in cells:
        if rows.reports[cell.workload].status in ("tuned", "default"):
            by_question.setdefault(cell.workload.at(1), []).append(cell)
    for group in by_question.values():
        group.sort(key=lambda cell: cell.workload.seq_len)
        for shorter, longer in itertools.pairwise(group):
            middle = between(shorter, longer)
            if middle is not None:
                winners = rows.winners[shorter.workload], rows.winners[longer.workload]
                found.append((middle, _agree(*winners)))
    return found


def _agree(one: Tunables, other: Tunables) -> bool:
    """Return whether the same kernels and schedule won; lesser knobs are not worth another anchor."""
    return all(getattr(one, name) == getattr(other, name) for name in ("dtype", "branches", "schedule"))
