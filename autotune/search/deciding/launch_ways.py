"""The last blocks of a cell by each way to launch: eager calls wait for their host, captured ones for the device alone.

Either time has a choice of its own, and neither choice may be surely slower than the plan to which torch dispatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune import statistics
from autotune.journal.study.entry import Entry
from autotune.measure.evaluator import Proven
from autotune.search.budget import Deadline
from autotune.search.cell import CellState
from autotune.search.proposing.queued_plans import graphed
from autotune.search.readings import Readings
from ringattn.planning.preference import TIE
from ringattn.workload import Tunables

from .alternatives import candidate_of
from .choose import NOISY_SIGMA, REPRODUCIBLE, Candidate, NothingAllowed, choose


@dataclass(frozen=True, slots=True)
class LaunchWays:
    """Plans re-timed from the block ``since`` on; validations end by ``deadline``."""

    state: CellState
    since: int
    deadline: Deadline

    def count(self, entry: Entry) -> int:
        """Count the entry's blocks of the final."""
        return sum(block >= self.since for block in entry.log_ratios)

    def differ(self, entries: Sequence[Entry]) -> bool:
        """Return whether another of these plans is the best where calls are launched in the other way."""
        best = set()
        for readings in self.state.ways():
            there = [readings.entry(entry.tunables) for entry in entries]
            usable = [e for e in there if readings.may_be_chosen(e) and e.log_ratios]
            best.add(min(usable, key=readings.median).tunables if usable else self.state.default)
        return len(best) > 1

    def finals(self, readings: Readings, entries: Sequence[Entry]) -> Mapping[Tunables, Candidate]:
        """Return the re-timed plans other than the default, by the time that a program waits which launches so."""
        others = [e for e in entries if e.tunables != self.state.default and e.fault is None and self.count(e) >= 2]
        timed = [readings.entry(e.tunables) for e in others if readings.suits(e.tunables)]
        gains = readings.intervals(timed, self.since)
        return {e.tunables: candidate_of(self.state, e, gain) for e, gain in zip(timed, gains, strict=True)}

    def captured(self, entries: Sequence[Entry], default: Candidate) -> Candidate | None:
        """Return the choice by the device's time; None where that is the only one, or nothing allowed is right."""
        state, readings = self.state, self.state.under("captured")
        if readings is state.under("eager"):
            return None
        finals = self.finals(readings, entries)
        left = [c for plan, c in finals.items() if state.is_main(plan) and not state.entry(plan).failure]
        while True:
            if not self.deadline.allows(state.validation_s()):
                left = [candidate for candidate in left if self._has_passed(candidate.tunables)]
            try:
                best = choose(
                    state.workload,
                    default,
                    left,
                    noisy=readings.is_noisy(NOISY_SIGMA),
                    prefer=state.settings.prefer,
                    sigma=readings.sigma(),
                )
            except NothingAllowed:
                return None
            best = self.no_slower_than_torch(readings, best, left)
            if best is default or self._has_passed(best.tunables) or state.validate(best.tunables) is None:
                return best
            left.remove(best)

    def no_slower_than_torch(self, readings: Readings, winner: Candidate, others: Sequence[Candidate]) -> Candidate:
        """Return the winner, or torch's own plan where that is surely faster: nobody should pay for a preference.

        A winner that gives the same bits in every call may be as much slower as ``choose`` lets it be.
        """
        state = self.state
        torch = next((c for c in others if c.tunables == state.torch and c.allowed), None)
        if torch is None or winner.tunables == torch.tunables or state.settings.prefer != "time":
            return winner
        most = REPRODUCIBLE if torch.varies and not winner.varies else TIE
        return torch if self.is_surely_slower(readings, winner.tunables, torch.tunables, most) else winner

    def is_surely_slower(self, readings: Readings, plan: Tunables, other: Tunables, most: float = TIE) -> bool:
        """Return whether the blocks of the final say that ``plan`` is slower than ``other``, by a log-ratio > most."""
        apart = readings.difference(readings.entry(plan), readings.entry(other), self.since)
        if len(apart) < 2:
            return False
        behind = statistics.interval_of(apart, seed=self.state.settings.seed)
        return behind.low > 0 and behind.median > most

    def _has_passed(self, plan: Tunables) -> bool:
        """Return whether it was validated, or a graph of its launches was."""
        known = [self.state.entries.get(p) for p in (plan, graphed(plan))]
        return any(entry is not None and isinstance(entry.validated, Proven) for entry in known)
