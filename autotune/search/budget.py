"""Time: how much each effort may take, who gets which part of it, and when it will be over.

Seconds come from a Clock, so the same code runs on replayed machines in simulated time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from autotune.measure.evaluator import Clock
from ringattn.workload import Workload

RESERVE_S = 4.0  # of a probe, for writing, reloading and running every cell once


@dataclass(frozen=True, slots=True)
class EffortPreset:
    """Effort of a probe. Counts are paired blocks unless a unit is named.

    ``budget_s`` leaves what starting Python and torch twice takes (5 s, 10 on a busy machine), to end within a round
    number.
    """

    name: str
    budget_s: float
    final_min_blocks: int
    final_max_blocks: int
    sample_target_ms: float  # a sample repeats its call until it is about this long
    ragged_lengths: int  # random lengths at which a winner is proven
    refine_anchors: bool
    compile_finalists: bool

    def with_budget(self, budget_s: float | None) -> EffortPreset:
        return self if budget_s is None else replace(self, budget_s=budget_s)


EFFORTS: Mapping[str, EffortPreset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            EffortPreset("quick", 55.0, 6, 128, 10.0, 8, refine_anchors=False, compile_finalists=False),
            EffortPreset("standard", 170.0, 8, 128, 10.0, 8, refine_anchors=True, compile_finalists=False),
            EffortPreset("full", 1800.0, 20, 120, 20.0, 8, refine_anchors=True, compile_finalists=True),
        )
    }
)


@dataclass(frozen=True, slots=True)
class CellNeed:
    """Seconds that a cell would take, stage by stage.

    ``base_s`` (gate, race, final) must be paid for any answer, ``improve_s`` finds what a mix of kernels and gathers
    gains; ``explore_s`` buys less and less per second, so it is served after the others are.
    """

    base_s: float
    improve_s: float = 0.0
    explore_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.base_s + self.improve_s + self.explore_s


def allot(needs: Sequence[CellNeed], available_s: float) -> tuple[float, ...]:
    """Return each cell's seconds of ``available_s``, by expected gain: bases and improvement first, then the rest.

    With all bases served before any improvement the longest dense cell of an H100 got 22 of 128 s, and LongNet ones
    had hardly been searched.

    A tier that cannot be served whole is split by the square roots of the needs, which makes the sum of the variances
    least: split by the needs themselves, one cell of 0.35 s a call took 63 of 170 s on a CPU, and those of 5 ms were
    decided by two blocks. Never sums to more than ``available_s``; what no cell needs is not handed out.
    """
    shares = [0.0] * len(needs)
    left = max(0.0, available_s)
    for tier in (("base_s", "improve_s"), ("explore_s",)):
        wanted = [sum(getattr(need, part) for part in tier) for need in needs]
        handed_out = _by_square_roots(wanted, left)
        shares = [share + seconds for share, seconds in zip(shares, handed_out, strict=True)]
        left = max(0.0, left - sum(handed_out))
    return tuple(shares)


def _by_square_roots(wanted: Sequence[float], available: float) -> list[float]:
    """Return as much of ``available`` for each as its square root says, but no more than it wants."""
    shares = [0.0] * len(wanted)
    smallest_first = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for position, index in enumerate(smallest_first):  # what one leaves, those that want more get
        weights = sum(math.sqrt(wanted[other]) for other in smallest_first[position:])
        fair = available * math.sqrt(wanted[index]) / weights if weights > 0 else 0.0
        shares[index] = min(wanted[index], fair)
        available -= shares[index]
    return shares


SPARED = 0.25  # of its share a cell gives to one before it, for what that pays for all


def spare_s(shares: Sequence[float], available_s: float) -> float:
    """Return what the first of ``shares`` may have beyond its own, for what it should not pay for alone.

    All that no cell needs, and part of what the others get: crashes, compilation and loading may fall to any cell,
    but none after it is left without time.
    """
    return max(0.0, available_s - sum(shares)) + SPARED * sum(shares[1:])


class _WorkingClock:
    """Stands still while time is lost, as long as it can be spared."""

    def __init__(self, clock: Clock, lost_s: Callable[[], float], spare_s: float) -> None:
        self._clock, self._lost_s, self._spare_s = clock, lost_s, max(0.0, spare_s)
        self._lost_before_s = lost_s()

    def now(self) -> float:
        return self._clock.now() - min(self._spare_s, self._lost_s() - self._lost_before_s)


class Budget:
    """One probe's seconds: started once, spent by everyone.

    ``reserve_s`` is kept for what comes after the last cell (writing, reloading, running once), so that the whole
    ends inside ``total_s``.
    """

    def __init__(self, total_s: float, clock: Clock, *, reserve_s: float = 0.0, spent_s: float = 0.0) -> None:
        self.total_s = total_s
        self.reserve_s = min(reserve_s, total_s / 4)
        self._clock = clock
        self._start = clock.now() - spent_s

    def keep(self, seconds: float) -> None:
        """Keep at least so much for the end, as far as a quarter of the whole goes."""
        self.reserve_s = min(max(self.reserve_s, seconds), self.total_s / 4)

    def elapsed_s(self) -> float:
        return self._clock.now() - self._start

    def available_s(self) -> float:
        """Return what cells may still use; never negative."""
        return max(0.0, self.total_s - self.reserve_s - self.elapsed_s())

    def deadline(self, seconds: float) -> Deadline:
        """Return a deadline ``seconds`` from now, but never beyond what is available."""
        return Deadline(self._clock, self._clock.now() + min(seconds, self.available_s()))

    def working_deadline(self, seconds: float, lost_s: Callable[[], float], spare_s: float) -> Deadline:
        """Return a deadline after ``seconds`` of work: what ``lost_s`` counts from now is added, up to ``spare_s``."""
        seconds = min(seconds, self.available_s())
        clock = _WorkingClock(self._clock, lost_s, min(spare_s, self.available_s() - seconds))
        return Deadline(clock, clock.now() + seconds)


class Deadline:
    """A moment not to be passed; stages hand shorter ones to their parts."""

    def __init__(self, clock: Clock, at: float) -> None:
        self.clock = clock
        self.at = at

    def remaining_s(self) -> float:
        return max(0.0, self.at - self.clock.now())

    def passed(self) -> bool:
        return self.clock.now() >= self.at

    def allows(self, seconds: float) -> bool:
        """Return whether something of that length, started now, would end in time."""
        return self.clock.now() + seconds <= self.at

    def part(self, fraction: float) -> Deadline:
        """Return a deadline at ``fraction`` of what remains."""
        return Deadline(self.clock, self.clock.now() + fraction * self.remaining_s())

    def earlier_by(self, seconds: float) -> Deadline:
        return Deadline(self.clock, self.at - seconds)


class Progress:
    """Fraction done and seconds left, from the needs of the cells, corrected by how the finished ones went.

    Cells that end early or late scale the estimate of those to come; the budget caps it.
    """

    def __init__(self, budget: Budget, needs: Mapping[Workload, CellNeed]) -> None:
        self._budget = budget
        self._open = {cell: need.total_s for cell, need in needs.items()}
        self._planned_s = 0.0
        self._taken_s = 0.0

    def finish(self, cell: Workload, taken_s: float) -> None:
        self._planned_s += self._open.pop(cell, taken_s)
        self._taken_s += taken_s

    def add(self, cell: Workload, need: CellNeed) -> None:
        self._open[cell] = need.total_s

    def remaining_s(self, current: Workload | None = None, current_taken_s: float = 0.0) -> float:
        """Estimate the seconds left; ``current`` is the cell at work, ``current_taken_s`` what it has taken so far."""
        # Two seconds of prior weight: the first short cell must not set the pace alone.
        pace = (self._taken_s + 2.0) / (self._planned_s + 2.0)
        ahead = sum(self._open.values()) * pace
        if current is not None and current in self._open:
            ahead -= min(current_taken_s, self._open[current] * pace)
        return min(ahead, self._budget.available_s()) + self._budget.reserve_s

    def fraction(self, current: Workload | None = None, current_taken_s: float = 0.0) -> float:
        elapsed = self._budget.elapsed_s()
        whole = elapsed + self.remaining_s(current, current_taken_s)
        return 1.0 if whole <= 0 else min(1.0, elapsed / whole)
