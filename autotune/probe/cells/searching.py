"""Every cell of a probe, one after the other: the default first, then a search within the cell's share of the time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autotune.probe.workloads.grid import Cell, first_step
from autotune.probe.workloads.recorded import call_gflop
from autotune.search.budget import CellNeed, Progress, allot, spare_s
from autotune.search.loop import CellSearch
from ringattn.workload import Workload

from .adopting import adopt_finished
from .compiling import calls_ahead, try_while_compiling
from .defaults import settle_defaults
from .needs import affordable, needs_of, needs_of_all
from .runs import CellRuns

# Of the time that no cell needs, for one that noise keeps from an answer: two ranks of a CPU gave up after 15 of 30 s.
# The rest is for validations that are pending.
UNDECIDED_SHARE = 0.5
UNDECIDED_MORE = 0.3  # of its own share it may have in any case: of eight blocks two are outliers in one cell of 100


def search_cells(runs: CellRuns) -> None:
    """Search all cells that have no result yet, the first steps and then the cheapest."""
    runs.context.observer.plan([cell.workload for cell in runs.cells], runs.context.preset.budget_s)
    runnable = [cell for cell in runs.cells if runs.space(cell) is not None]
    adopt_finished(runs, runnable)
    new = [cell for cell in runnable if cell.workload not in runs.rows.reports]
    # Patterns last, but for a CPU's first step: what they compile, 11 s of a first probe of an H100, helpers have
    # compiled until then. And the cheapest first, as on a busy machine there may be no time for all.
    new.sort(key=lambda c: (first_step(c.workload), not c.workload.pattern.dense, call_gflop(c.workload)))
    runs.transfer.compilers.begin(calls_ahead(runs, new))
    compiled_beside = runs.transfer.compilers.at_work
    searches = settle_defaults(runs, new)
    try_while_compiling(runs, searches)
    runs.observer.expect(Progress(runs.budget, needs_of(searches)))
    _search_all(
        runs, {cell.workload: cell for cell in new}, searches, frozenset(searches) if compiled_beside else frozenset()
    )


def _search_all(
    runs: CellRuns,
    cells: Mapping[Workload, Cell],
    searches: dict[Workload, CellSearch],
    looked_too_early: Collection[Workload],
) -> None:
    """Search one cell after the other, until each has a row, by whichever worker.

    ``looked_too_early``: their defaults were timed beside compilers at work.
    """
    order = sorted(cells, key=lambda w: (first_step(w), w.seq_len, w.mode, not w.pattern.dense, str(w.pattern)))
    while True:
        adopt_finished(runs, [cells[workload] for workload in order])
        order = [workload for workload in order if workload not in runs.rows.reports]
        if not order:
            return
        # Each finished cell shows how noisy it is here.
        needs = needs_of_all(order, searches, runs.shared.settled())
        chosen = affordable(needs, runs.budget.available_s())
        # What this worker settled itself comes first, then what no compiler works for: the training step of two H200s
        # over 8192 positions was over before flash-attn-4's backward was there. Last what there may be no time for.
        runs.transfer.hear_of_compilers()
        compilers = runs.transfer.compilers
        ranked = sorted(order, key=lambda w: (w not in chosen, w not in searches, compilers.compile_for(w)))
        workload = next((each for each in ranked if runs.shared.take(each)), None)
        if workload is None:
            runs.budget.idle()
            continue
        try:
            search = _begun(runs, cells[workload], searches.pop(workload, None), looked_too_early)
            if search is not None:
                _search_one(runs, search, [needs[each] for each in chosen if each != workload])
        finally:
            runs.shared.free(workload)


def _begun(
    runs: CellRuns, cell: Cell, search: CellSearch | None, looked_too_early: Collection[Workload]
) -> CellSearch | None:
    """Return the search of a cell, whose lease is held, with its default settled; None where it has its row by that."""
    if search is None or not runs.shared.untouched(cell.workload):
        search = runs.new_search(cell)
        if runs.recall(search) or not runs.settle(search, runs.budget.available_s()):
            return None
    elif cell.workload in looked_too_early:
        search.look_again()
    return search


def _search_one(runs: CellRuns, search: CellSearch, others: Sequence[CellNeed]) -> None:
    """Search a cell in its share of the time beside ``others``."""
    available_s = runs.budget.available_s()
    shares = allot([search.need(), *others], available_s)
    unneeded_s = UNDECIDED_SHARE * max(0.0, available_s - sum(shares))
    search.state.undecided_s = max(unneeded_s, UNDECIDED_MORE * shares[0])
    runs.search(search, shares[0], spare_s(shares, available_s))
