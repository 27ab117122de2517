"""Verification of recorded winners: each is re-timed against its default and runners-up, nothing is searched."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from autotune.exit_codes import ExitCode, ProbeFailure
from autotune.journal.study.entry import Entry
from autotune.measure.evaluator import Evaluator, Interference, largest_of_each
from autotune.search.budget import Budget, Deadline
from autotune.search.cell import CALLS_BEFORE_HANG, CellState, DefaultBroken
from autotune.search.deciding.choose import NOISY_SIGMA, gain_margin
from autotune.search.deciding.decision import REFUSED_SIGMA
from autotune.search.deciding.retime import retime
from autotune.search.settings import SearchSettings
from autotune.trial_outcome import TrialOutcome
from ringattn.errors import PlanError
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.plan import build_plan
from ringattn.profile.resolve import tier_of
from ringattn.profile.schema import Choice, PlanEntry, Profile
from ringattn.workload import Tunables, describe

from .probe_context import ProbeContext
from .request import VerifiedCell, VerifyResult

STAGE = "verify"
NO_TIME = "no time was left for it; give a larger --budget"
NO_TIME_TWICE = "no time was left to time it twice; give a larger --budget"
HANG_S, HANG_SHARE = 30.0, 0.4  # a plan that ran here before may take so long, or so much of the budget, to answer


def check_same_silicon(profile: Profile, facts: HardwareFacts, path: Path, ranks: int = 1) -> None:
    """Raise ProbeFailure for a profile that the runtime takes for another machine's: its winners say nothing here."""
    tier, why = tier_of(profile, facts, ranks)
    if tier not in ("exact", "same-silicon"):
        raise ProbeFailure(
            f"{path}: was measured on {profile.fingerprint.device_name}, this is {facts.device_name}: {why}; "
            "run: ringtune probe",
            ExitCode.NO_PROFILE,
        )


def entries_over(profile: Profile, ranks: int, path: Path) -> tuple[PlanEntry, ...]:
    """Return the rows for so many ranks; raises ProbeFailure (no matching profile) where there are none."""
    found = tuple(entry for entry in profile.plans if entry.workload.world == ranks)
    if not found:
        worlds = {entry.workload.world for entry in profile.plans}
        numbers = "1 rank" if worlds == {1} else f"{', '.join(map(str, sorted(worlds)))} ranks"
        raise ProbeFailure(
            f"{path}: its plans are for {numbers}, not {ranks}; run: {how_to_verify(worlds, path)}",
            ExitCode.NO_PROFILE,
        )
    return found


def how_to_verify(worlds: Collection[int], path: Path) -> str:
    """Return the commands that judge rows over these numbers of ranks."""
    options = (f"--nproc {world} " if world > 1 else "" for world in sorted(worlds))
    return " or ".join(f"ringtune verify {each}{path}" for each in options)


def verify_cells(
    context: ProbeContext, profile: Profile, entries: Sequence[PlanEntry], *, tell_end: bool = True
) -> VerifyResult:
    """Re-time ``entries``; refusals and rows that were never measured are left out. Never changes a file.

    The cheapest go first: a cell is not begun where less of the budget is left than checking the one before took.
    """
    timed = sorted((entry for entry in entries if entry.evidence is not None), key=lambda entry: _call_s(entry.choice))
    left_out = sum(entry.choice is not None for entry in entries) - len(timed)
    preset, environment, observer = context.preset, context.environment, context.observer
    budget = Budget(preset.budget_s, environment.clock)
    observer.plan([entry.workload for entry in timed], preset.budget_s)
    cells: list[VerifiedCell] = []
    inconclusive: list[str] = []
    evaluator = environment.evaluator(environment.facts, context.request, preset)
    interference: list[Interference] = []
    try:
        check_s = 0.0
        for number, entry in enumerate(timed):
            observer.stage(entry.workload, STAGE)
            left_s = budget.available_s()
            verification = _Verification(context, entry, evaluator, budget.deadline(left_s))
            deadline = budget.deadline(left_s / (len(timed) - number))
            outcome = verification.run(deadline) if left_s > check_s else NO_TIME
            interference += verification.state.disturbances
            # The first of all starts the worker, which says nothing of the others.
            check_s = min(verification.checks_s[0 if number else 1 :], default=check_s)
            if isinstance(outcome, str):
                inconclusive.append(f"{entry.workload}: {outcome}")
            else:
                cells.append(outcome)
            elapsed = budget.elapsed_s()
            left = elapsed / (number + 1) * (len(timed) - number - 1)
            observer.eta((number + 1) / len(timed), min(left, budget.available_s()))
    finally:
        evaluator.close()
    stale = tuple(f"{cell.workload}: {cell.note}" for cell in cells if cell.stale)
    seen = tuple(map(str, largest_of_each(interference)))
    result = VerifyResult(stale, tuple(cells), budget.elapsed_s(), tuple(inconclusive), seen, left_out)
    if tell_end:
        observer.finished(result)
    return result


def _call_s(choice: Choice | None) -> float:
    return choice.evidence.median_ms / 1e3 if choice is not None and choice.evidence is not None else 0.0


class _Verification:
    """Verification of one recorded cell, paired against the recorded winner itself."""

    def __init__(self, context: ProbeContext, entry: PlanEntry, evaluator: Evaluator, end: Deadline) -> None:
        """``end`` is that of the whole budget."""
        assert entry.choice is not None
        self.entry = entry
        self.winner = entry.choice.tunables
        self.context = context
        self.end = end
        self.checks_s: list[float] = []  # what each check took
        environment, preset = context.environment, context.preset
        hang_s = min(HANG_S, HANG_SHARE * preset.budget_s) + CALLS_BEFORE_HANG * _call_s(entry.choice)
        self._timeout_s = min(hang_s, end.remaining_s())
        settings = SearchSettings(
            preset, context.request.seed, hang_s=self._timeout_s, asynchronous=environment.facts.vendor != "cpu"
        )

        def told(plan: Tunables, outcome: TrialOutcome) -> None:
            context.observer.trial(entry.workload, describe(plan), outcome)

        never = Deadline(environment.clock, math.inf)
        self.state = CellState(entry.workload, self.winner, evaluator, settings, told, never)

    def run(self, deadline: Deadline) -> VerifiedCell | str:
        """Return the verdict, or why there is none."""
        state = self.state
        try:
            build_plan(self.entry.workload, self.winner, self.context.environment.facts)
        except PlanError as error:
            return self._stale(f"the recorded plan cannot run here any more: {error}")
        entries = []
        for plan in [self.winner, *self._rivals()]:
            if not deadline.allows(state.sample_s()):
                break
            entry, began = state.entry(plan), self.context.environment.clock.now()
            if state.check(entry, self._timeout_s):
                entries.append(entry)
            self.checks_s.append(self.context.environment.clock.now() - began)
        winner = state.entry(self.winner)
        if winner.fault is not None:
            if winner.fault.kind == "timeout" and self.end.passed():  # the limit was what was left
                return NO_TIME
            if winner.fault.from_outside:  # no verdict on the plan
                return winner.fault.message
            return self._stale(f"the recorded plan fails here: {winner.fault.kind}, {winner.fault.message}")
        if winner.checked is None:
            return NO_TIME
        if not self.end.allows(2 * state.block_s(entry.tunables for entry in entries)):
            return NO_TIME_TWICE
        state.be_patient(deadline.remaining_s())
        outcome = self._timed(entries, deadline)
        if isinstance(outcome, VerifiedCell) and outcome.is_slower and state.disturbances:
            outcome = self._timed_undisturbed(outcome, entries, deadline)
        return outcome

    def _timed_undisturbed(
        self, first: VerifiedCell, entries: Sequence[Entry], deadline: Deadline
    ) -> VerifiedCell | str:
        """Return the verdict of blocks of their own, in which nothing was seen; ``first`` is that of disturbed ones.

        Blocks too short to say anything count before it is seen what disturbed them, and so do all on a machine that
        stays busy: a plan that lost in those may be the faster one.
        """
        state, clock = self.state, self.end.clock
        fewest, since, seen = self.context.preset.final_min_blocks, state.next_block(), len(state.disturbances)
        again = [entry for entry in entries if entry.fault is None]
        needed_s = fewest * state.block_s(entry.tunables for entry in again)
        if self.end.allows(needed_s):
            later = Deadline(clock, min(self.end.at, max(deadline.at, clock.now() + 2 * needed_s)))
            state.be_patient(later.remaining_s())
            outcome = self._timed(again, later)
            decides = state.next_block() - since >= fewest  # fewer find nothing stale, whatever they are
            if isinstance(outcome, str) or (outcome.stale and not outcome.is_slower):
                return outcome
            if decides and not (outcome.stale and len(state.disturbances) > seen):
                return outcome
        found = ", ".join(map(str, largest_of_each(state.disturbances)))
        return f"{first.note}, but {found}; verify again on a quieter machine"

    def _timed(self, entries: Sequence[Entry], deadline: Deadline) -> VerifiedCell | str:
        """Return the verdict of blocks from now on, or why there is none."""
        state, since = self.state, self.state.next_block()
        try:
            standing = retime(state, entries, since, deadline)
        except DefaultBroken as broken:
            if broken.fault.from_outside:
                return broken.fault.message
            return self._stale(f"the recorded plan fails here: {broken.fault.kind}, {broken.fault.message}")
        if state.next_block() - since < 2:
            return NO_TIME_TWICE
        sigma = state.noise_sigma()
        if sigma > REFUSED_SIGMA:
            return f"one plan timed twice differs by {100 * sigma:.0f} %; quieten the machine"
        return self._verdict(standing, since)

    def _rivals(self) -> list[Tunables]:
        choices = [self.entry.default, *self.entry.runners_up]
        plans = [choice.tunables for choice in choices if choice is not None]
        return [plan for plan in dict.fromkeys(plans) if plan != self.winner]

    def _verdict(self, standing: Sequence[Entry], since: int) -> VerifiedCell:
        """Say that it is stale where something recorded beside the winner is surely faster by more than the margin.

        By the blocks from ``since`` on.
        """
        state = self.state
        margin = gain_margin(noisy=state.is_noisy(NOISY_SIGMA))
        rivals = [entry for entry in standing if entry.tunables != self.winner]
        rivals = [entry for entry in rivals if sum(block >= since for block in entry.log_ratios) >= 2]
        best = min(rivals, key=lambda entry: state.median(entry, since), default=None)
        if best is None:
            return VerifiedCell(self.entry.workload, self.winner, self.winner, 1.0, 1.0, 1.0, stale=False)
        (gain,) = state.intervals([best], since)
        stale = gain.high < margin
        return VerifiedCell(
            workload=self.entry.workload,
            recorded=self.winner,
            best=best.tunables if gain.median < 0 else self.winner,
            best_ratio=min(1.0, gain.ratio),
            ratio_low=gain.ratio_low,
            ratio_high=gain.ratio_high,
            stale=stale,
            note=f"{describe(best.tunables)} now takes {100 * gain.ratio:.0f} % of its time" if stale else "",
        )

    def _stale(self, note: str) -> VerifiedCell:
        return VerifiedCell(self.entry.workload, self.winner, self.winner, 1.0, 1.0, 1.0, stale=True, note=note)
