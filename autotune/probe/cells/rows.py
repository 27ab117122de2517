"""Rows and reports of a probe's cells: a row of the profile and a report for each, as they come."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence

from autotune.journal.study.result import CellResult
from autotune.measure.evaluator import Interference, largest_of_each
from autotune.probe.output.writer import build_profile, entry_of, report_of
from autotune.probe.probe_context import ProbeContext
from autotune.probe.request import CellReport
from ringattn.errors import PlanError
from ringattn.profile.schema import LinkSpeed, PlanEntry, Profile
from ringattn.workload import Tunables, Workload

from .search_outcome import SearchOutcome


class Rows:
    """The rows as they stand; what an interrupted probe finished is in the studies of its cells."""

    def __init__(self, context: ProbeContext, link_speeds: Sequence[LinkSpeed]) -> None:
        self._context = context
        self._link_speeds = link_speeds
        self.entries: dict[Workload, PlanEntry] = {}
        self.reports: dict[Workload, CellReport] = {}
        self.winners: dict[Workload, Tunables] = {}
        self.notes: list[str] = []  # for the provenance, as are disturbances
        self._disturbances: list[Interference] = []

    def profile(self, entries: Mapping[Workload, PlanEntry], outcome: SearchOutcome) -> Profile:
        """Return a profile of these entries, with what the workers agreed on."""
        return build_profile(
            self._context.environment.facts,
            entries,
            self._context.request,
            budget_s=self._context.preset.budget_s,
            elapsed_s=outcome.elapsed_s,
            notes=outcome.notes,
            today=datetime.date.fromisoformat(outcome.date),
            link_speeds=self._link_speeds,
        )

    def all_notes(self) -> tuple[str, ...]:
        """Return what the provenance says of this worker's part."""
        return (*map(str, largest_of_each(self._disturbances)), *dict.fromkeys(self.notes))

    # --- a row comes ----------------------------------------------------------------------------------------------

    def refuse(self, cell: Workload, why: PlanError) -> None:
        """Enter that nothing can run the cell."""
        self._set(PlanEntry(cell, refusal=str(why)), CellReport(cell, "refused", note=str(why)))

    def finish(self, result: CellResult, taken_s: float) -> None:
        self._set(entry_of(result), report_of(result, taken_s))
        self._disturbances.extend(result.disturbances)

    def _set(self, entry: PlanEntry, report: CellReport) -> None:
        cell = entry.workload
        self.entries[cell], self.reports[cell] = entry, report
        if entry.choice is not None:
            self.winners[cell] = entry.choice.tunables

    def forget(self) -> None:
        """Forget the rows that studies have; what nothing can run stays refused."""
        refused = {cell for cell, report in self.reports.items() if report.status == "refused" and not report.trials}
        self.entries = {cell: self.entries[cell] for cell in refused}
        self.reports = {cell: self.reports[cell] for cell in refused}
        self.winners.clear()

    def validated(self, cell: Workload) -> None:
        """Enter that the default of this cell, whose validation was pending, has passed it."""
        self.reports[cell] = dataclasses.replace(self.reports[cell], validation_pending=False)

    # --- what they say of other cells -----------------------------------------------------------------------------

    def seeds(self, cell: Workload) -> tuple[Tunables, ...]:
        """Return winners at other lengths of the same question, nearest first."""
        alike = [done for done in self.winners if done.at(cell.seq_len) == cell and done != cell]
        alike.sort(key=lambda done: abs(done.seq_len - cell.seq_len))
        return tuple(dict.fromkeys(self.winners[done] for done in alike[:2]))

    def typical_cell_s(self) -> float:
        taken = sorted(report.elapsed_s for report in self.reports.values() if report.elapsed_s > 0)
        return taken[len(taken) // 2] if taken else 0.0
