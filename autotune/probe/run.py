"""One probe from its cells to the profile that the runtime obeys.

The order of things is decided here; measuring, searching and writing are others'.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.display_text import format_duration
from autotune.journal.storage.journal_file import journal_path
from autotune.journal.store import FINISHED, Store
from autotune.measure.evaluator import Evaluator, KnowsLinks
from autotune.probe.cells.adopting import adopt_all
from autotune.probe.cells.compiling import STILL_COMPILING, end_compilers
from autotune.probe.cells.leanest import keep_leanest
from autotune.probe.cells.pending_validation import validate_pending
from autotune.probe.cells.refining import refine
from autotune.probe.cells.rows import Rows
from autotune.probe.cells.runs import CellRuns, SpaceOf
from autotune.probe.cells.search_outcome import SearchOutcome, agreed_outcome, outcome_of
from autotune.probe.cells.searching import search_cells
from autotune.probe.cells.sharing import SharedBudget
from autotune.probe.cells.space import space_or_refusal
from autotune.probe.output.earlier_profile import check_rows, earlier_profile, profiles_before, verified_instead
from autotune.probe.output.joined_layout import joined_layout
from autotune.probe.output.writer import merged, merged_speeds, save_loaded
from autotune.probe.workloads.grid import Cell
from autotune.search.budget import RESERVE_S
from autotune.space.space import Space
from ringattn import __version__
from ringattn.errors import PlanError
from ringattn.hardware.facts import HardwareFacts
from ringattn.profile.schema import LinkSpeed, Profile
from ringattn.wording import plural
from ringattn.workload import Workload

from .probe_context import ProbeContext
from .request import VALIDATION_PENDING, ProbeRequest, ProbeResult, inconclusive_lines


class ProbeRun:
    """One run, whose profile goes to ``path``."""

    def __init__(self, context: ProbeContext, path: Path, cells: Sequence[Cell]) -> None:
        self._context = context
        self._path = path
        self._cells = tuple(cells)

    def run(self) -> ProbeResult:
        """Search, or verify where this machine's profile has every cell already."""
        context, environment = self._context, self._context.environment
        began = environment.clock.now()
        cells = self._cells
        old = earlier_profile(context, self._path)
        check_rows(self._path, old, cells)
        new = {cell.workload for cell in cells}

        def layout_of(cell: Workload) -> str:
            return joined_layout(cell, context.request.layout, old, new | {cell}, self._path)

        for workload in new:
            layout_of(workload)  # raises before anything is measured
        if old is not None and context.request.resume:
            outcome = verified_instead(old, context, self._path, cells)
            if isinstance(outcome, ProbeResult):
                context.observer.finished(outcome)
                return outcome
            cells = outcome if context.request.storage is None else cells  # other nodes may find others stale
        before = profiles_before(self._path, environment, context.request.ranks)
        return self._search(began, cells, old, before, layout_of, self._space_of)

    def _space_of(self, cell: Cell, layout: str) -> Space | PlanError:
        return space_or_refusal(cell, self._context.environment, layout)

    def _search(
        self,
        began: float,
        cells: Sequence[Cell],
        old: Profile | None,
        before: Sequence[Profile],
        layout_of: Callable[[Workload], str],
        space_of: SpaceOf,
    ) -> ProbeResult:
        """Search the cells, each in the space that ``space_of`` gives, and write what comes of it."""
        context, environment = self._context, self._context.environment
        with self._store(before, old) as store:
            for note in store.notes:
                context.observer.note(note)
            if store.resumed:
                done = f"{store.finished(cell.workload for cell in cells)} of {plural(len(cells), 'cell')}"
                used = format_duration(store.used_s)
                beside = f", beside {', '.join(others)}" if (others := store.worker.others()) else ""
                context.observer.note(f"continues {store.place}: {done} done, {used} used{beside}")
            evaluator = environment.evaluator(environment.facts, context.request, context.preset)
            try:
                spent_s = environment.clock.now() - began
                speed = _link_speed(store, evaluator)  # starts the ranks' workers, which the budget does not pay for
                budget = SharedBudget(
                    store, context.preset.budget_s, environment.clock, reserve_s=RESERVE_S, spent_s=spent_s
                )
                rows = Rows(context, merged_speeds(old, speed))
                runs = CellRuns(context, cells, rows, store, evaluator, budget, layout_of, space_of, before)
                with store.seconds.counting(budget.own_s):
                    outcome = self._measured(runs, store, evaluator)
                result = self._end(runs, store, evaluator, old, outcome)
                end_compilers(runs)
            finally:
                evaluator.close()
        context.observer.finished(result)
        return result

    def _store(self, before: Sequence[Profile], old: Profile | None) -> Store:
        """Open the studies of this probe: the journal beside the profile, or what several workers share."""
        request = self._context.request
        return Store(
            journal_path(self._path),
            identity=self._identity(before, old),
            fresh=not request.resume,
            url=request.storage,
            again=lambda store: outcome_of(store) is None or self._has_all(old),
        )

    def _identity(self, before: Sequence[Profile], old: Profile | None) -> str:
        # Nodes have earlier profiles of their own; those of the first are in the storage.
        shared = self._context.request.storage is not None
        return journal_identity(self._context.request, self._context.environment.facts, () if shared else before)

    def _has_all(self, old: Profile | None) -> bool:
        """Return whether this node has what a finished search came to, and is to search again."""
        rows = set() if old is None else {entry.workload for entry in old.plans}
        return {cell.workload for cell in self._cells} <= rows

    def _measure(self, runs: CellRuns) -> None:
        """Search every cell, as far as other workers have not."""
        search_cells(runs)
        validate_pending(runs)  # before finer anchors: what the profile holds already should be proven
        if self._context.preset.refine_anchors:
            refine(runs)
            validate_pending(runs)
        keep_leanest(runs)

    def _measured(self, runs: CellRuns, store: Store, evaluator: Evaluator) -> SearchOutcome:
        """Measure, and agree with the other workers that the search is over; then all rows are the studies'."""
        if outcome_of(store) is None:
            self._measure(runs)
        rows = runs.rows
        rows.notes.extend(getattr(evaluator, "unmonitored", ()))
        rows.notes.extend(f"not tried any further: {why}" for why in runs.transfer.traps.lost.values())
        if compiling := runs.transfer.compilers.waited_for():
            rows.notes.append(f"{STILL_COMPILING}: {', '.join(compiling)}")
        outcome = agreed_outcome(
            store,
            rows.all_notes(),
            runs.budget.elapsed_s,
            self._context.environment.today.isoformat(),
            runs.budget.idle,
        )
        if store.shared:
            adopt_all(runs)
        return outcome

    def _end(
        self, runs: CellRuns, store: Store, evaluator: Evaluator, old: Profile | None, outcome: SearchOutcome
    ) -> ProbeResult:
        """Write the profile with the new rows beside those of ``old``."""
        rows, budget = runs.rows, runs.budget
        inconclusive = inconclusive_lines(rows.reports.values())
        if all(report.status == "inconclusive" for report in rows.reports.values()):
            store.remember(FINISHED, True)  # the next run must measure anew, not read the same numbers again
            stays = "no profile was written" if old is None else f"{self._path.name} stays as it was"
            raise runs.nothing_measured(stays, inconclusive)
        pending = sum(report.validation_pending for report in rows.reports.values())
        if pending:
            said = f"{plural(pending, 'cell')}: {VALIDATION_PENDING}"
            outcome = dataclasses.replace(outcome, notes=(*outcome.notes, said))
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
            self._context.observer.note(f"{self._path.name}: {stay} measured before and not this time: kept")
        profile = rows.profile(plans, outcome)
        save_loaded(profile, self._path, written, evaluator)
        store.remember(FINISHED, True)
        return ProbeResult(self._path, profile, tuple(rows.reports.values()), budget.here_s(), inconclusive)


def journal_identity(request: ProbeRequest, facts: HardwareFacts, before: Sequence[Profile] = ()) -> str:
    """Hash what a search belongs to: machine, software, request, earlier profiles and the version of the tool.

    How a node names its device and reaches the storage says nothing of the search.
    """
    asked = dataclasses.asdict(
        dataclasses.replace(request, output=None, resume=True, dry_run=False, storage=None, device=None)
    )
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
