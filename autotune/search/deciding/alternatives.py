"""Plans that a profile keeps beside its choice: runners-up, the front of time and memory, a narrower dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.journal.study.entry import Entry
from autotune.journal.study.result import AT_PAR
from autotune.measure.evaluator import Proven
from autotune.search.budget import Deadline
from autotune.search.cell import CellState
from autotune.statistics import Interval
from ringattn.planning.preference import cost
from ringattn.workload import Tunables

from .choose import Candidate, pareto_front

FRONT_KEPT = 4
RUNNERS_UP = 2
LEANEST_BLOCKS = 4  # of the leanest plan at most: two that count, and two that are disturbed or in which it dies
NARROW_GAIN = 0.01  # log-ratio by which a narrower dtype must surely be faster


def candidate_of(state: CellState, entry: Entry, gain: Interval) -> Candidate:
    """Return the candidate of an entry that was checked."""
    checked = entry.checked
    assert checked is not None
    return Candidate(entry.tunables, gain, checked.peak_bytes, state.keeps_limits(entry), checked.varies)


def validated_already(state: CellState, candidates: Sequence[Candidate]) -> list[Candidate]:
    return [c for c in candidates if isinstance(state.entry(c.tunables).validated, Proven)]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Plans timed in a cell, beside its choice; validations end by ``deadline``."""

    state: CellState
    default: Entry
    deadline: Deadline

    def _timed(self, finals: Sequence[Candidate] = ()) -> list[Candidate]:
        """Return what may be chosen: ``finals``, and of what was timed before all that they do not hold."""
        state, eager = self.state, self.state.under("eager")
        known = {candidate.tunables: candidate for candidate in finals}
        entries = [
            e for e in eager.timed() if e.tunables not in known and len(e.log_ratios) >= 2 and eager.may_be_chosen(e)
        ]
        for entry, gain in zip(entries, eager.intervals(entries), strict=True):
            known[entry.tunables] = candidate_of(state, entry, gain)
        if self.default.tunables not in known and state.may_be_chosen(self.default):
            known[self.default.tunables] = candidate_of(state, self.default, AT_PAR)
        return list(known.values())

    def has_leaner(self) -> bool:
        """Return whether something that was timed balances time and memory otherwise than the fastest plan does."""
        front = pareto_front(self._timed())
        if len(front) < 2:
            return False
        costs = [cost("balanced", candidate.gain.median, candidate.peak_bytes) for candidate in front]
        return min(costs[1:]) < costs[0]

    def torch(self, default: Candidate, finals: Sequence[Candidate]) -> Candidate | None:
        """Return what was measured of torch's own plan."""
        return next((c for c in (default, *self._timed(finals)) if c.tunables == self.state.torch), None)

    def narrow(self, winner: Candidate, gains: Mapping[Tunables, Candidate]) -> Candidate | None:
        """Return the best plan with a narrower dtype, where it is surely faster than the winner."""
        state = self.state
        surely = [
            c
            for plan, c in gains.items()
            if not state.is_main(plan) and c.allowed and c.gain.high < winner.gain.median - NARROW_GAIN
        ]
        if not state.end.allows(state.validation_s()):
            surely = validated_already(state, surely)
        best = min(surely, key=lambda c: c.gain.median, default=None)
        return best if best is not None and state.validate(best.tunables) is None else None

    def front(self, finals: Sequence[Candidate]) -> list[Candidate]:
        """Time against memory over everything timed, validated while there is time: what balances the two first."""
        front = pareto_front(self._timed(finals))
        balanced = sorted(front, key=lambda c: cost("balanced", c.gain.median, c.peak_bytes))
        kept = self._validated(balanced, FRONT_KEPT)
        return [candidate for candidate in front if candidate in kept]

    def leanest(self, below_bytes: float) -> Candidate | None:
        """Time the leanest right plan below so many bytes twice, and validate it, while there is time; None otherwise.

        The search lets a slow plan go after the call of its check, whatever memory it needs.
        """
        state, eager = self.state, self.state.under("eager")
        for _ in range(LEANEST_BLOCKS):
            peaks = {
                plan: entry.checked.peak_bytes
                for plan, entry in state.entries.items()
                if entry.checked is not None and entry.checked.peak_bytes < below_bytes and state.may_be_chosen(entry)
            }
            lean = [eager.entry(plan) for plan, peak in peaks.items() if 0.99 * peak < min(peaks.values())]
            if not lean or any(e.tunables == self.default.tunables or len(e.log_ratios) >= 2 for e in lean):
                break
            plan = min(lean, key=lambda e: (-len(e.log_ratios), eager.first_look(e) or 0.0)).tunables
            if not self.deadline.allows(state.block_s([plan]) + state.validation_s(plan)):
                break
            state.block([state.entry(plan)])
        leaner = [c for c in pareto_front(self._timed())[::-1] if c.peak_bytes < below_bytes]
        return next(iter(self._validated(leaner, 1)), None)

    def runners_up(self, winner: Candidate, finals: Sequence[Candidate]) -> list[Candidate]:
        """Return the next two: finalists first, then what was timed before, validated while there is time."""
        wanted = [c for c in self._timed(finals) if c.tunables != winner.tunables and c.allowed]
        wanted.sort(key=lambda c: (c not in finals, c.gain.median))
        return self._validated(wanted, RUNNERS_UP)

    def _validated(self, candidates: Sequence[Candidate], wanted: int) -> list[Candidate]:
        """Return the first of those that are right at ragged lengths; what there is no time to validate is left out."""
        kept: list[Candidate] = []
        for candidate in candidates:
            entry = self.state.entry(candidate.tunables)
            if len(kept) == wanted:
                break
            if entry.validated is None and not self.deadline.allows(self.state.validation_s(entry.tunables)):
                continue
            if self.state.validate(entry.tunables) is None:
                kept.append(candidate)
        return kept

    def singles(self, finals: Sequence[Candidate]) -> list[Candidate]:
        """Return the fastest plan of each kernel that was timed alone, in both directions and every branch."""
        best: dict[str, Candidate] = {}
        for candidate in sorted(self._timed(finals), key=lambda c: c.gain.median):
            if len(candidate.tunables.kernels) == 1 and self.state.is_main(candidate.tunables):
                best.setdefault(min(candidate.tunables.kernels), candidate)
        return list(best.values())
