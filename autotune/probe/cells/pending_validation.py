"""Defaults that stayed without a proof at other lengths get it out of the time that is left.

They are what the runtime takes there in any case; one that fails makes room for another plan.
"""

from __future__ import annotations

from autotune.measure.evaluator import Fault
from autotune.search.search import CellSearch

from .runs import CellRuns


def pay_owed_proofs(runs: CellRuns) -> None:
    """Cheapest first, as many as there is time for."""
    budget, rows = runs.budget, runs.rows
    owing = [search for search in runs.searched if search.context.owes_proof]
    owing += _owing_of_earlier_run(runs)
    broken: list[tuple[CellSearch, Fault]] = []
    for search in sorted(owing, key=lambda search: search.context.prove_s()):
        if budget.available_s() < search.context.prove_s():
            continue
        fault = search.pay()
        if fault is None:
            rows.validated(search.context.cell)
            runs.observer.time_left()
        else:
            broken.append((search, fault))
    for index, (search, fault) in enumerate(broken):
        share_s = budget.available_s() / (len(broken) - index)
        result = search.run_without_default(fault, budget.deadline(share_s))
        runs.conclude(search.context, result, rows.reports[result.workload].elapsed_s)


def _owing_of_earlier_run(runs: CellRuns) -> list[CellSearch]:
    """Cells that an interrupted probe finished and left owing, where their default is still found to be that."""
    budget = runs.budget
    searched = {search.context.cell for search in runs.searched}
    owing = []
    for cell in runs.cells:
        if cell.workload in searched or not runs.rows.reports[cell.workload].validation_pending:
            continue
        choice = runs.rows.entries[cell.workload].choice
        search = runs.new_search(cell)
        if search is None or choice is None or search.settle(budget.deadline(budget.available_s())) is not None:
            continue
        if search.context.default == choice.tunables:
            owing.append(search)
    return owing
