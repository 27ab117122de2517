"""Defaults that stayed without a validation at other lengths get it out of the time that is left.

They are what the runtime takes there in any case; one that fails makes room for another plan.
"""

from __future__ import annotations

from autotune.search.loop import CellSearch

from .runs import CellRuns


def validate_pending(runs: CellRuns) -> None:
    """Validate pending defaults, the cheapest first, as many as there is time for."""
    budget, rows = runs.budget, runs.rows
    pending = [search for search in runs.searched if search.state.owes_validation]
    pending += _pending_of_earlier_run(runs)
    broken: list[CellSearch] = []
    for search in sorted(pending, key=lambda search: search.state.validation_s()):
        if budget.available_s() < search.state.validation_s():
            continue
        with runs.shared.lease_again(search.cell) as taken:
            if not taken:  # another worker does
                continue
            if search.validate_default() is None:
                rows.validated(search.cell)
                runs.observer.time_left()
            else:
                broken.append(search)
    for index, search in enumerate(broken):
        share_s = budget.available_s() / (len(broken) - index)
        with runs.shared.lease_again(search.cell) as taken:
            if taken:
                result = search.run_without_default(budget.deadline(share_s))
                runs.finish(result, rows.reports[result.workload].elapsed_s)


def _pending_of_earlier_run(runs: CellRuns) -> list[CellSearch]:
    """Return cells that an interrupted probe finished, or another worker, without the validation of their default."""
    return [search for search in runs.recalled if runs.rows.reports[search.cell].validation_pending]
