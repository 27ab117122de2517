"""One probe from its cells to the profile that the runtime obeys.

The order of things is decided here; measuring, searching and writing are others'.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from autotune.exit_codes import NothingMeasured
from autotune.formats import format_duration
from autotune.journal.file import journal_path
from autotune.journal.store import Store
from autotune.measure.evaluator import Evaluator, KnowsLinks
from autotune.probe.cells.leanest import keep_leanest
from autotune.probe.cells.pending_validation import validate_pending
from autotune.probe.cells.refining import refine
from autotune.probe.cells.rows import Rows
from autotune.probe.cells.runs import STILL_COMPILING, CellRuns
from autotune.probe.output.earlier_profile import earlier_profile, profiles_before, verified_instead
from autotune.probe.output.joined_layout import joined_layout
from autotune.probe.output.writer import merged, merged_speeds, save_loaded
from autotune.search.budget import RESERVE_S, Budget
from ringattn import __version__
from ringattn.hardware.facts import HardwareFacts
from ringattn.profile.schema import LinkSpeed, Profile
from ringattn.wording import plural
from ringattn.workload import Workload

from .grid import Cell
from .request import VALIDATION_PENDING, ProbeRequest, ProbeResult, inconclusive_lines
from .task import Task


class ProbeRun:
    """One run, whose profile goes to ``path``."""

    def __init__(self, task: Task, path: Path, cells: Sequence[Cell]) -> None:
        self._task = task
        self._path = path
        self._cells = tuple(cells)

    def run(self) -> ProbeResult:
        """Search, or verify where this machine's profile has every cell already."""
        task, environment = self._task, self._task.environment
        began = environment.clock.now()
        cells = self._cells
        old = earlier_profile(task, self._path)
        new = {cell.workload for cell in cells}

        def layout_of(cell: Workload) -> str:
            return joined_layout(cell, task.request.layout, old, new | {cell}, self._path)

        for workload in new:
            layout_of(workload)  # raises before anything is measured
        if old is not None and task.request.resume:
            outcome = verified_instead(old, task, self._path, cells)
            if isinstance(outcome, ProbeResult):
                task.observer.finished(outcome)
                return outcome
            cells = outcome
        journal = journal_path(self._path)
        before = profiles_before(self._path, environment, task.request.ranks)
        identity = journal_identity(task.request, environment.facts, before)
        with Store(journal, identity=identity, fresh=not task.request.resume, url=task.request.storage) as store:
            if store.recall("finished", bool):  # of an earlier probe that came to its end: nothing to go on with
                store.start_over()
            for note in store.notes:
                task.observer.note(note)
            if store.resumed:
                done = f"{store.finished(cell.workload for cell in cells)} of {plural(len(cells), 'cell')}"
                used = format_duration(store.used_s)
                task.observer.note(f"continues {store.place}: {done} done, {used} used")
            evaluator = environment.evaluator(environment.facts, task.request, task.preset)
            try:
                spent_s = environment.clock.now() - began
                speed = _link_speed(store, evaluator)  # starts the ranks' workers, which the budget does not pay for
                budget = Budget(task.preset.budget_s, environment.clock, reserve_s=RESERVE_S, spent_s=spent_s)
                rows = Rows(task, merged_speeds(old, speed))
                runs = CellRuns(task, cells, rows, store, evaluator, budget, layout_of, before)
                with store.counting(budget.elapsed_s):
                    runs.run()
                    validate_pending(runs)  # before finer anchors: what the profile holds already should be proven
                    if task.preset.refine_anchors:
                        refine(runs)
                        validate_pending(runs)
                    keep_leanest(runs)
                result = self._end(runs, store, evaluator, old)
                runs.end_compilers()
            finally:
                evaluator.close()
        task.observer.finished(result)
        return result

    def _end(self, runs: CellRuns, store: Store, evaluator: Evaluator, old: Profile | None) -> ProbeResult:
        """Write the profile with the new rows beside those of ``old``."""
        rows, budget = runs.rows, runs.budget
        inconclusive = inconclusive_lines(rows.reports.values())
        if all(report.status == "inconclusive" for report in rows.reports.values()):
            store.remember("finished", True)  # the next run must measure anew, not read the same numbers again
            raise NothingMeasured(f"no cell could be measured, so no profile was written: {'; '.join(inconclusive)}")
        rows.notes.extend(getattr(evaluator, "unmonitored", ()))
        pending = sum(report.validation_pending for report in rows.reports.values())
        if pending:
            rows.notes.append(f"{plural(pending, 'cell')}: {VALIDATION_PENDING}")
        rows.notes.extend(f"not tried any further: {why}" for why in runs.transfer.traps.lost.values())
        if compiling := runs.transfer.compilers.waited_for():
            rows.notes.append(f"{STILL_COMPILING}: {', '.join(compiling)}")
        # A row without a plan makes the runtime refuse: only what nothing can run may be one.
        entries = {
            workload: entry
            for workload, entry in rows.entries.items()
            if entry.choice is not None or rows.reports[workload].status == "refused"
        }
        plans = merged(old, entries)
        written = [entry for workload, entry in entries.items() if plans[workload] is entry]
        if len(written) < len(entries):
            stay = plural(len(entries) - len(written), "row")
            self._task.observer.note(f"{self._path.name}: {stay} measured before and not this time: kept")
        profile = rows.profile(plans, budget.elapsed_s())
        save_loaded(profile, self._path, written, evaluator)
        store.remember("finished", True)
        return ProbeResult(self._path, profile, tuple(rows.reports.values()), budget.elapsed_s(), inconclusive)


def journal_identity(request: ProbeRequest, facts: HardwareFacts, before: Sequence[Profile] = ()) -> str:
    """Hash what a journal belongs to: machine, software, request, earlier profiles and the version of the tool."""
    asked = dataclasses.asdict(dataclasses.replace(request, output=None, resume=True, dry_run=False))
    plans = [dataclasses.asdict(profile)["plans"] for profile in before]
    text = json.dumps([__version__, asked, dataclasses.asdict(facts), plans], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _link_speed(store: Store, evaluator: Evaluator) -> LinkSpeed | None:
    """Return how fast the ranks exchange messages, once a probe; an interrupted one has it in its journal."""
    if not isinstance(evaluator, KnowsLinks):
        return None
    kept: LinkSpeed | None = store.recall("links", LinkSpeed)
    if kept is None:
        kept = evaluator.links()
        store.remember("links", dataclasses.asdict(kept))
    return kept
