"""The end of a cell: finalists are re-timed, and what is written is validated; only these numbers decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune.journal.study.cell_study import FINAL, CellStudy
from autotune.journal.study.entry import Entry
from autotune.journal.study.result import AT_PAR, CellResult, Measured
from autotune.journal.study.result import CellState as State
from autotune.measure.evaluator import Checked, Fault, Proven, Sample, largest_of_each
from autotune.search.budget import Deadline
from autotune.search.cell import CellState
from autotune.search.proposing.beliefs import Beliefs
from autotune.search.readings import Readings
from autotune.search.suspects import GIVEN_UP
from autotune.search.transfer import parts_of
from autotune.space.space import Space
from autotune.statistics import Interval
from ringattn.planning.preference import TIE
from ringattn.workload import describe

from .alternatives import Alternatives, candidate_of, validated_already
from .choose import NOISY_SIGMA, Candidate, NothingAllowed, choose, gain_margin
from .finalists import finalists
from .launch_ways import LaunchWays
from .reserve import MOST_RESERVED, VALIDATION_MARGIN, validation_kept_s
from .retime import retime

LIKELY = 0.5  # odds of passing its validation from which a plan may be a missed gain
WIDE = 0.10  # a possible gain (log-ratio) that a kept default must be able to exclude
REFUSED_SIGMA = 0.5  # noise of one paired log-ratio from which no verdict is given


class Final:
    """The last blocks of a search, its choice, and the result."""

    def __init__(self, state: CellState, beliefs: Beliefs, study: CellStudy, space: Space, deadline: Deadline) -> None:
        self.state, self.deadline = state, deadline
        self._beliefs, self._study, self._space = beliefs, study, space
        self.default = state.entry(state.default)
        self._beside = Alternatives(state, self.default, deadline)
        since = study.noted_final()
        # What failed its validation is not what the earlier final compared with.
        self.since = state.next_block() if since is None or self.default.failure is not None else since
        self._ways = LaunchWays(state, self.since, deadline)

    def run(self) -> CellResult:
        """Re-time, choose, validate; a choice that fails gives way to the next that does not share its traits."""
        state = self.state
        state.deadline = self.deadline
        self._study.note(FINAL, self.since)
        entries = [self.default, *filter(state.check, map(state.entry, finalists(state, self._beliefs)))]
        # Whatever is left, one validation is worth more than more blocks: without it no gain counts.
        most_s = max(MOST_RESERVED * self.deadline.remaining_s(), VALIDATION_MARGIN * state.validation_s())
        kept_s = validation_kept_s(state, self.deadline, self._validations_wanted(entries))
        racing = self.deadline.earlier_by(min(kept_s, most_s))
        retime(state, entries, self.since, racing)
        beyond_s = min(state.undecided_s, state.end.remaining_s() - self.deadline.remaining_s())
        if beyond_s > 0 and math.isfinite(beyond_s) and self._noise_hides_a_gain(entries):
            retime(state, entries, self.since, racing.earlier_by(-beyond_s))
        if self._ways.count(self.default) < 2:
            return self.inconclusive("no time was left to time it twice")
        return self._decide(entries)

    @property
    def _eager(self) -> Readings:
        """Return the readings that a profile's ratios are of, whichever time was searched by."""
        return self.state.under("eager")

    def _validations_wanted(self, entries: Sequence[Entry]) -> int:
        """Count those of the choices, a narrower one and a leaner plan: a front of one leaves nothing to prefer."""
        open_ = {self.state.is_main(entry.tunables) for entry in entries if entry.validated is None}
        # A kernel that nobody validated here may fail, and then another choice has to pass.
        new = any(
            not parts_of(entry.tunables) <= self.state.validations.passed | parts_of(self.state.default)
            for entry in entries
        )
        return len(open_) + self._beside.has_leaner() + new + self._ways.differ(entries)

    # --- the choice -------------------------------------------------------------------------------------------------

    def _decide(self, entries: Sequence[Entry]) -> CellResult:
        state = self.state
        sigma = self._eager.noise_sigma()
        if sigma > REFUSED_SIGMA:
            return self.inconclusive(f"one plan timed twice differs by {100 * sigma:.0f} % here; quieten the machine")
        noisy = self._eager.is_noisy(NOISY_SIGMA)
        finals = self._ways.finals(self._eager, entries)
        default = candidate_of(state, self.default, replace(AT_PAR, count=self._ways.count(self.default)))
        others = [c for plan, c in finals.items() if state.is_main(plan) and not state.entry(plan).failure]
        try:
            winner = self._validated_choice(default, others, noisy)
        except NothingAllowed:
            return self._without_choice()
        if self.default.failure is not None:
            return self._stood_in(winner)
        usable = [c for c in others if state.entry(c.tunables).failure is None]
        result = self.result("default" if winner is default else "tuned")
        result.choice, result.default = self._measured(winner), self._measured(default)
        captured = self._ways.captured(entries, default)
        result.captured = self._measured(captured) if captured and captured.tunables != winner.tunables else None
        torch = self._beside.torch(default, list(finals.values()))
        result.torch = self._measured(torch) if torch is not None else None
        narrow = self._beside.narrow(winner, finals)
        result.auto = self._measured(narrow) if narrow is not None else None
        result.front = tuple(map(self._measured, self._beside.front([default, *usable])))
        result.runners_up = tuple(map(self._measured, self._beside.runners_up(winner, [default, *usable])))
        result.singles = tuple(map(self._measured, self._beside.singles(list(finals.values()))))
        return self._with_doubts(result, winner, usable, noisy)

    def with_leanest(self, result: CellResult) -> CellResult | None:
        """Return the result with its leanest right plan in the front; None where it has that, or there is no time."""
        kept = [measured for measured in (result.choice, *result.runners_up, *result.front) if measured is not None]
        found = self._beside.leanest(0.99 * min(measured.checked.peak_bytes for measured in kept))
        return None if found is None else replace(result, front=(*result.front, self._measured(found)))

    def _validated_choice(self, default: Candidate, others: Sequence[Candidate], noisy: bool) -> Candidate:
        """Return the choice among what passes validation; NothingAllowed when nothing is within the limits.

        A validation that starts late runs into the time of other cells, but not beyond the probe's end.
        """
        state = self.state
        left = list(others)
        state.owes_validation = False
        if self.default.failure is not None:
            default = replace(default, allowed=False)
            left = [*left, *self._further(left)]
        if not state.end.allows(state.validation_s()):
            left = validated_already(state, left)
        while True:
            free = [replace(c, gain=self._hoped(c)) for c in (left if default.allowed else self._likeliest(left))]
            winner = choose(
                state.workload,
                default,
                free,
                noisy=noisy,
                prefer=state.settings.prefer,
                sigma=self._eager.sigma(),
                usual=[*state.standing, *state.seeds],
                standing=next(iter(state.standing), None),
            )
            winner = next((c for c in left if c.tunables == winner.tunables), winner)
            winner = self._ways.no_slower_than_torch(self._eager, winner, left)
            if winner is default and self.default.validated is None:
                state.owes_validation = not self.deadline.allows(state.validation_s())
                if state.owes_validation:
                    return default
            if state.validate(winner.tunables) is None:
                return winner
            if winner is default:
                default = replace(default, allowed=False)
                left = [*left, *self._further(left)]
            else:
                left.remove(winner)
            if not left:
                left = [] if default.allowed else self._further([])
                continue
            # One validation, at most, is made after the end of the cell; more only for want of a right plan.
            until = self.deadline if default.allowed else state.end
            if not until.allows(state.validation_s()):
                left = validated_already(state, left)

    def _hoped(self, candidate: Candidate) -> Interval:
        """Return the candidate's gain, as far as it is likely to pass."""
        gain, odds = candidate.gain, self.state.validations.odds(candidate.tunables)
        if odds == 1.0 or gain.median >= 0:
            return gain
        behind = gain.median * (odds - 1)
        return replace(gain, low=gain.low + behind, median=gain.median + behind)

    def _likeliest(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return those most unlike what failed: without a default anything that is right is better than nothing."""
        odds = [self.state.validations.odds(candidate.tunables) for candidate in candidates]
        least = max(GIVEN_UP, 0.99 * max(odds, default=0.0))
        return [c for c, mine in zip(candidates, odds, strict=True) if mine >= least]

    def _further(self, known: Sequence[Candidate]) -> list[Candidate]:
        """Return every other plan that is right here: where the default is wrong elsewhere, any may stand in for it.

        Where all that were checked fail, the uniform plans that nobody tried yet.
        """
        state = self.state
        there = {candidate.tunables for candidate in known}
        right = [e for e in state.entries.values() if state.may_be_chosen(e) and e.tunables not in there]
        if not known and not right:
            for plan in self._space.kernel_plans:
                if not state.knows(plan) and state.is_main(plan) and state.end.allows(state.sample_s()):
                    state.check(state.entry(plan))
            right = [entry for entry in state.entries.values() if state.may_be_chosen(entry)]
        eager = self._eager
        timed = [eager.entry(entry.tunables) for entry in right if entry.log_ratios]
        gains = {e.tunables: gain for e, gain in zip(timed, eager.intervals(timed), strict=True)}
        others = [entry for entry in right if entry is not self.default]
        return [candidate_of(state, e, gains.get(e.tunables) or self._by_look(e)) for e in others]

    def _by_look(self, entry: Entry) -> Interval:
        """Return what the call of a check says, which is no evidence."""
        look = self._eager.first_look(entry)
        return Interval(-math.inf, look if look is not None else 0.0, math.inf, 0)

    def _stood_in(self, winner: Candidate) -> CellResult:
        """Return the choice in place of a default that is wrong: its gain would be over a plan that errs."""
        fault = self.default.failure
        assert fault is not None
        at_par = replace(winner, gain=replace(AT_PAR, count=winner.gain.count))
        self.state.note = f"the default failed ({fault.kind}: {fault.message}); {describe(winner.tunables)} stands in"
        result = self.result("default")
        result.choice = result.default = self._measured(at_par)
        return result

    def _measured(self, candidate: Candidate) -> Measured:
        """Return the candidate with everything a profile says of it."""
        entry = self.state.entry(candidate.tunables)
        checked = entry.checked
        assert checked is not None
        first_ms = entry.validated.first_call_ms if isinstance(entry.validated, Proven) else checked.cold_ms
        times = self._times(entry, checked)
        return Measured(candidate.tunables, checked, candidate.gain, times.ms, times.host_us, first_ms)

    def _times(self, entry: Entry, checked: Checked) -> Sample:
        """Return times of device and host: in the final's blocks, or by the ratio to the default in earlier ones."""
        state, device = self.state, self.state.under("captured")
        if self._ways.count(entry) or not entry.log_ratios:
            return state.typical(entry, self.since) if entry.log_ratios else Sample(checked.call_ms, checked.host_us)
        default_ms = state.typical(self.default).ms
        ms = default_ms * math.exp(device.median(device.entry(entry.tunables)))
        return Sample(ms, state.typical(entry).host_us)

    # --- results ----------------------------------------------------------------------------------------------------

    def result(self, state: State, note: str = "") -> CellResult:
        """Return a result with everything but its choices."""
        return CellResult(
            self.state.workload,
            state,
            failures=self.state.failures(),
            trials=sum(entry.is_known for entry in self.state.entries.values()),
            noise_sigma=self.state.noise_sigma(),
            note="; ".join(filter(None, (self.state.note, note))),
            disturbances=largest_of_each(self.state.disturbances),
            under_load=self.state.loaded,
        )

    def _default_failure(self) -> Fault | None:
        """Return what the heuristic's default failed of, also where another plan stands in for it."""
        return self.state.entry(self._space.default).failure

    def inconclusive(self, reason: str) -> CellResult:
        """Keep the default, without evidence that it deserves it, as no number can be believed."""
        result = self.result("inconclusive", reason)
        if self.state.keeps_limits(self.default) and self.default.failure is None:
            untimed = candidate_of(self.state, self.default, Interval(0.0, 0.0, 0.0, 0))
            assert self.default.checked is not None
            result.default = replace(self._measured(untimed), median_ms=self.default.checked.call_ms)
            result.choice = result.default
        return self._with_standing(result)

    def _with_standing(self, result: CellResult) -> CellResult:
        """Return the result without evidence with the plan that served before, where that is right here.

        Not one that is surely slower than the default or torch's own plan, whatever else noise hides.
        """
        rivals = [plan for plan in (self.state.default, self.state.torch) if plan is not None]
        rivals = [plan for plan in rivals if self.state.may_be_chosen(self.state.entry(plan))]
        for entry in map(self.state.entry, self.state.standing[:1]):
            slower = any(self._ways.is_surely_slower(self._eager, entry.tunables, plan) for plan in rivals)
            if self.state.may_be_chosen(entry) and not slower:
                assert entry.checked is not None
                untimed = candidate_of(self.state, entry, Interval(0.0, 0.0, 0.0, 0))
                result.choice = replace(self._measured(untimed), median_ms=entry.checked.call_ms)
        return result

    def _without_choice(self) -> CellResult:
        """Refuse where every plan was looked at, and none within the limits is right; else nobody knows."""
        state = self.state
        mains = [entry for plan, entry in state.entries.items() if state.is_main(plan)]
        allowed = [e for e in mains if state.keeps_limits(e)]
        untried = [
            p
            for p in self._space.kernel_plans
            if state.is_main(p) and (p not in state.entries or not state.entries[p].is_known)
        ]
        hoped = [e for e in allowed if not e.failure and state.validations.odds(e.tunables) >= GIVEN_UP]
        untried = [plan for plan in untried if state.validations.odds(plan) >= GIVEN_UP]
        if hoped or (allowed and untried):
            why, failure = (
                "no time was left to prove a plan within the limits; give a larger --budget",
                self._default_failure(),
            )
            return self.inconclusive(
                why if failure is None else f"the default fails: {failure.kind}, {failure.message}; {why}"
            )
        if allowed:
            fault = next(entry.failure for entry in allowed if entry.failure is not None)
            return self.result("refused", f"no plan within the limits is right: {fault.kind}, {fault.message}")
        missed = state.settings.limits.missed([e.checked for e in mains if e.checked is not None])
        if untried:
            return self.inconclusive(f"{missed}; no time was left for others: {len(untried)}, give a larger --budget")
        return self.result("refused", missed)

    def _noise_hides_a_gain(self, entries: Sequence[Entry]) -> bool:
        """Return whether the best is not sure enough: the cell would end inconclusive, or with a slower plan.

        Two outliers in six blocks of a modelled H100 gave way to a plan that was 5 % slower, and surely faster than
        the default.
        """
        state, eager = self.state, self._eager
        rivals = [e for e in entries if e is not self.default and self._ways.count(e) >= 2 and state.may_be_chosen(e)]
        least = gain_margin(noisy=eager.is_noisy(NOISY_SIGMA))
        gains = eager.intervals([eager.entry(entry.tunables) for entry in rivals], self.since)
        if not gains or min(gains, key=lambda gain: gain.median).high < least:
            return False
        best = min(gain.median for gain in gains)
        sure = [gain.median for gain in gains if gain.high < least]
        return best < min(sure) - TIE if sure else any(-gain.low > WIDE for gain in gains)

    def _with_doubts(
        self, result: CellResult, winner: Candidate, others: Sequence[Candidate], noisy: bool
    ) -> CellResult:
        """Say what must be said of the numbers, up to that they say nothing."""
        # A preference for lean plans leaves faster ones on purpose.
        prefers_time = self.state.settings.prefer == "time"
        likely = [c for c in others if c.allowed and self.state.validations.odds(c.tunables) > LIKELY]
        doubtful = [c for c in likely if c.gain.high >= 0 or prefers_time]
        missed = min(doubtful, key=lambda candidate: candidate.gain.low, default=None)
        notes = [result.note]
        if missed is not None and -missed.gain.low > WIDE and result.state == "default":
            result = self._with_standing(replace(result, state="inconclusive"))
            why = "noise hides" if missed.gain.high >= gain_margin(noisy=noisy) else "no time was left to prove"
            notes.append(f"{why} what may be a gain of up to {-100 * missed.gain.low:.0f} %")
        elif noisy:
            why = "under foreign load" if self.state.loaded else "noisy"
            notes.append(f"timed {why}: {100 * self._eager.noise_sigma():.1f} % a pair")
        if winner.tunables != self.state.default and prefers_time:
            sure = [c for c in others if c is not winner and c.allowed and c.gain.high < gain_margin(noisy=noisy)]
            twins = sorted((c for c in sure if c.gain.low < winner.gain.high), key=lambda c: c.gain.median)
            if twins and twins[0].gain.median < winner.gain.median + TIE:
                notes.append(f"indistinguishable from {describe(twins[0].tunables)}")
        result.note = "; ".join(filter(None, notes))
        return result
