"""Leanest plans of training cells, which ``prefer="memory"`` wants however slow, out of the time that is left."""

from __future__ import annotations

from .runs import CellRuns


def keep_leanest(runs: CellRuns) -> None:
    """Have a row's front hold the leanest plan that is right, cheapest first, as many as there is time for."""
    trained = [search for search in runs.searched if search.cell.train]
    for search in sorted(trained, key=lambda search: search.state.validation_s()):
        with runs.shared.lease_again(search.cell) as taken:
            if not taken:  # another worker has validated it meanwhile
                continue
            result = search.with_leanest(runs.results[search.cell], runs.budget.deadline(runs.budget.available_s()))
            if result is not None:
                runs.finish(result, runs.rows.reports[search.cell].elapsed_s)
