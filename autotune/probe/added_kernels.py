"""Kernels added to a profile: their plans are measured against the plan that stands in each row, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune.exit_codes import ExitCode, ProbeFailure, UsageFailure
from autotune.journal.store import FINISHED, Store
from autotune.measure.evaluator import Evaluator
from autotune.probe.cells.pending_validation import validate_pending
from autotune.probe.cells.runs import CellRuns
from autotune.probe.cells.search_outcome import SearchOutcome
from autotune.probe.cells.searching import search_cells
from autotune.probe.output.writer import rounded, save_loaded
from autotune.probe.workloads.grid import Cell, cell_of
from autotune.search.deciding.choose import undominated
from autotune.space.space import Machine, Space, build_space
from ringattn.errors import PlanError
from ringattn.kernels.registry import KERNELS
from ringattn.profile.precedence import origin_of, rows_for, rows_with_origin
from ringattn.profile.row_origin import RowOrigin
from ringattn.profile.schema import RUNNERS_UP, Choice, Evidence, Fingerprint, PlanEntry, Profile
from ringattn.profile.yaml_io import load_profile
from ringattn.wording import plural
from ringattn.workload import Tunables, Workload, describe

from .request import ProbeResult, inconclusive_lines
from .run import ProbeRun, journal_identity


class AddedKernels(ProbeRun):
    """Measurement of the kernels ``request.add_kernels`` for the rows of the profile at ``path``."""

    def run(self) -> ProbeResult:
        """Write the rows whose plan lost; ProbeFailure without a profile, UsageFailure for a kernel of no use here."""
        request, environment = self._context.request, self._context.environment
        began = environment.clock.now()
        added = request.add_kernels
        if unknown := [name for name in added if name not in environment.machine.kernels]:
            known = ", ".join(environment.machine.kernels)
            raise UsageFailure(f"--add-kernel {unknown[0]}: is no kernel; it may be one of {known}")
        old = self._earlier()
        rows = tuple(entry for entry in old.plans if self._is_asked(entry))
        if not rows:
            raise self._nothing("it has no measured rows for this request")
        spaces = {entry.workload: self._space(entry) for entry in rows}
        cells = [cell_of(workload, request) for workload, space in spaces.items() if len(space.kernel_plans) > 1]
        for name in added:
            if not any(name in plan.kernels for space in spaces.values() for plan in space.kernel_plans[1:]):
                raise UsageFailure(f"--add-kernel {name}: cannot run here: {self._why_not(name, rows)}")
        if len(cells) < len(rows):
            self._context.observer.note(f"{plural(len(rows) - len(cells), 'row')} that it cannot run left as they are")

        def space_of(cell: Cell, layout: str) -> Space | PlanError:
            return spaces[cell.workload]

        self._cells = tuple(cells)
        return self._search(began, self._cells, old, (), lambda workload: "auto", space_of)

    def _earlier(self) -> Profile:
        """Return the profile whose rows stand: of this machine and its software, but for what the kernels came with."""
        if not self._path.exists():
            raise self._nothing("there is no profile")
        profile, facts = load_profile(self._path), self._context.environment.facts
        packages = {KERNELS[name].package for name in self._context.request.add_kernels if name in KERNELS}
        there, here = (
            {name: version for name, version in software if name not in packages}
            for software in (profile.software, facts.software)
        )
        if profile.source != "measured" or profile.fingerprint != Fingerprint.of(facts):
            raise self._nothing("it is of another machine")
        if differ := sorted({name for name, _ in there.items() ^ here.items()}):
            said = ", ".join(f"{name} {there.get(name, 'none')}, here {here.get(name, 'none')}" for name in differ)
            raise self._nothing(f"it is of other software ({said})")
        return profile

    def _nothing(self, why: str) -> ProbeFailure:
        return ProbeFailure(
            f"{self._path}: {why}, so there is nothing to add a kernel to; run: ringtune probe", ExitCode.NO_PROFILE
        )

    def _is_asked(self, entry: PlanEntry) -> bool:
        request, workload = self._context.request, entry.workload
        asked = workload.world == request.ranks and (not request.modes or workload.mode in request.modes)
        return asked and entry.evidence is not None

    def _space(self, entry: PlanEntry) -> Space:
        """Return the space around the plan that stands, of plans that use one of the kernels."""
        assert entry.choice is not None
        cell, standing = cell_of(entry.workload, self._context.request), entry.choice.tunables
        machine = self._context.environment.machine
        if reasons := machine.reasons(entry.workload, standing):
            raise ProbeFailure(
                f"{self._path}: {entry.workload}: its plan {describe(standing)} cannot run here "
                f"({'; '.join(reasons)}); run: ringtune probe --fresh"
            )
        dtypes = tuple(dict.fromkeys((*cell.main_dtypes, standing.dtype, *cell.narrow_dtypes)))
        return build_space(
            entry.workload, using(machine, self._context.request.add_kernels, standing), standing, dtypes
        )

    def _why_not(self, name: str, rows: Sequence[PlanEntry]) -> str:
        """Return why the first row's plan cannot run on a kernel."""
        entry = rows[0]
        assert entry.choice is not None
        plan = entry.choice.tunables
        branches = tuple(
            replace(branch, forward=name, backward=name if branch.backward else "") for branch in plan.branches
        )
        reasons = self._context.environment.machine.reasons(entry.workload, replace(plan, branches=branches, params=()))
        return "; ".join(reasons) or f"no plan of {entry.workload} uses it in another way than the one that stands"

    def _identity(self, before: Sequence[Profile], old: Profile | None) -> str:
        assert old is not None
        return journal_identity(
            self._context.request, self._context.environment.facts, (old,)
        )  # its plans are the measure

    def _has_all(self, old: Profile | None) -> bool:
        return False  # or its plans would be others

    def _measure(self, runs: CellRuns) -> None:
        runs.teaches = False
        search_cells(runs)
        validate_pending(runs)

    def _end(
        self, runs: CellRuns, store: Store, evaluator: Evaluator, old: Profile | None, outcome: SearchOutcome
    ) -> ProbeResult:
        """Write the profile with the rows whose plan lost; the others stay as they are."""
        assert old is not None
        reports = tuple(runs.rows.reports.values())
        inconclusive = inconclusive_lines(reports)
        if len(inconclusive) and all(report.status == "inconclusive" for report in reports):
            store.remember(FINISHED, True)
            raise runs.nothing_measured(f"{self._path.name} stays as it was", inconclusive)
        changed = {
            entry.workload: replace(won_by(entry, new), origin=RowOrigin(origin_of(old, entry).effort, outcome.date))
            for entry in old.plans
            if (new := runs.rows.entries.get(entry.workload)) is not None and is_won(entry, new)
        }
        profile, software = old, tuple(sorted(self._context.environment.facts.software))
        if changed or software != old.software:
            names = ", ".join(self._context.request.add_kernels)
            note = f"{names} added on {outcome.date}: {len(changed)} of {plural(len(reports), 'row')} changed"
            notes = (*old.provenance.notes, note, *outcome.notes)
            provenance = replace(old.provenance, date=outcome.date, notes=notes)
            rows = (changed.get(entry.workload, entry) for entry in rows_with_origin(old))
            profile = replace(old, software=software, plans=rows_for(provenance, rows), provenance=provenance)
            save_loaded(profile, self._path, changed.values(), evaluator)
        self._context.observer.note(f"{self._path.name}: {len(changed)} of {plural(len(reports), 'row')} changed")
        store.remember(FINISHED, True)
        return ProbeResult(self._path, profile, reports, runs.budget.here_s(), inconclusive)


def using(machine: Machine, kernels: Sequence[str], standing: Tunables) -> Machine:
    """Return the machine with a further constraint: a plan other than ``standing`` uses one of the kernels."""
    wanted = frozenset(kernels)
    unused = f"uses none of the added kernels, {', '.join(kernels)}"

    def reasons(workload: Workload, plan: Tunables) -> tuple[str, ...]:
        found = machine.reasons(workload, plan)
        return found if plan == standing or wanted & plan.kernels else (*found, unused)

    return replace(machine, reasons=reasons)


def is_won(entry: PlanEntry, new: PlanEntry) -> bool:
    """Return whether a plan with an added kernel beat the one that stands."""
    assert entry.choice is not None
    return new.evidence is not None and new.choice is not None and new.choice.tunables != entry.choice.tunables


def won_by(entry: PlanEntry, new: PlanEntry) -> PlanEntry:
    """Return a row with the plan that beat its own, which becomes the first runner-up.

    The new ratio is of the default of the row: the one against the plan that stood, times that plan's own.
    """
    assert entry.choice is not None
    assert new.choice is not None
    won = chained(new.choice, entry.choice)
    assert won.evidence is not None
    captured = entry.captured if entry.captured and entry.captured.tunables != won.tunables else None
    auto = entry.auto
    if auto is not None and (auto.evidence is None or auto.evidence.default_ratio >= won.evidence.default_ratio):
        auto = None
    return replace(
        entry,
        choice=won,
        runners_up=(entry.choice, *entry.runners_up)[:RUNNERS_UP],
        captured=captured,
        auto=auto,
        front=_front((*entry.front, won)) if entry.front else (),
        under_load=entry.under_load or new.under_load,
    )


def chained(new: Choice, stood: Choice) -> Choice:
    """Return a choice whose evidence is against the default of a row, from evidence against the choice of that row.

    Logarithms of ratios add up, and the squares of their intervals' arms, as the two were measured apart.
    """
    ours, theirs = new.evidence, stood.evidence
    assert ours is not None
    assert theirs is not None
    ratio = ours.default_ratio * theirs.default_ratio

    def arm(of: str) -> float:
        arms = [math.log(getattr(each, of) / each.default_ratio) for each in (ours, theirs)]
        return math.hypot(*arms)

    evidence: Evidence = replace(
        ours,
        default_ratio=rounded(ratio),
        ratio_low=rounded(ratio * math.exp(-arm("ratio_low"))),
        ratio_high=rounded(ratio * math.exp(arm("ratio_high"))),
        blocks=min(ours.blocks, theirs.blocks),
    )
    return Choice(new.tunables, evidence)


def _front(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the choices that no other one beats in both time and memory, the fastest first; none where one is both."""
    timed = [(choice, choice.evidence) for choice in choices if choice.evidence is not None]
    front = undominated(timed, lambda pair: (pair[1].default_ratio, pair[1].peak_bytes))
    return tuple(choice for choice, _ in front) if len(front) > 1 else ()
