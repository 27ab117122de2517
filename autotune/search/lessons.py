"""What one cell of a probe teaches that holds for the next: kernels that cannot be loaded, and what first calls cost.

A ``Pupil`` stands between a cell and its evaluator and notices; the ``Lessons`` are the probe's.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autotune.journal.store import Store
from autotune.measure.evaluator import Block, Checked, Clock, Evaluator, Fault, KernelUnavailable, Proven
from autotune.space.space import Space
from ringattn.workload import Tunables, Workload

from .ledger import Pace

# Per branch and direction: cuDNN's plan for a new shape takes 0.06 to 0.13 s on an H100. Much more than that went into
# loading or compiling, which nobody pays for again; and a single first call does not say how much of it was that.
NEW_SHAPE_S, MOST_NEW_SHAPE_S = 0.075, 0.25
_REMEMBERED = "kernels that cannot be loaded"


Part = tuple[str, str]  # "forward" or "backward", and a kernel


@dataclass(slots=True)
class Lessons:
    """``one_off_s`` went into loading and compiling, on behalf of all cells; ``lost`` says why of kernels."""

    store: Store | None = None
    lost: dict[str, str] = field(default_factory=dict)
    one_off_s: float = 0.0
    sigmas: list[float] = field(default_factory=list)  # of one paired log-ratio, of every finished cell
    pace: Pace = field(default_factory=Pace)  # of blocks
    _first_call_s: dict[tuple[Workload, object], float] = field(default_factory=dict)
    _met: set[object] = field(default_factory=set)
    _proof_s: dict[Workload, tuple[float, float]] = field(default_factory=dict)  # and the call's then
    _proven_parts: dict[Workload, set[Part]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.store is not None:
            self.lost |= self.store.recall(_REMEMBERED) or {}

    # --- kernels ------------------------------------------------------------------------------------------------

    def failed(self, fault: Fault) -> None:
        cause = fault.cause
        if isinstance(cause, KernelUnavailable) and cause.kernel not in self.lost:
            self.lost[cause.kernel] = cause.reason
            if self.store is not None:
                self.store.remember(_REMEMBERED, self.lost)

    def lost_parts(self) -> set[Part]:
        return {(direction, kernel) for kernel in self.lost for direction in ("forward", "backward")}

    def has_lost(self, plan: Tunables) -> bool:
        """Whether a kernel of the plan is known not to load."""
        return not self.lost.keys().isdisjoint(plan.kernels)

    def usual_sigma(self, assumed: float) -> float:
        """What a cell that has timed nothing may expect; ``assumed`` where no other cell has either."""
        return statistics.median(self.sigmas) if self.sigmas else assumed

    # --- time ---------------------------------------------------------------------------------------------------

    def first_call(self, cell: Workload, plan: Tunables, checked: Checked) -> None:
        """What of a first call was a one-off, and what any new shape costs: the least of all lengths.

        Only the first plan with its kernels says so at a length: for the next ones there is nothing left to do.
        """
        seconds = max(0.0, checked.cold_ms - checked.call_ms) / 1e3
        if seconds > MOST_NEW_SHAPE_S * _shapes(plan):
            self.one_off_s += seconds
        key = (cell.at(1), _kernels(plan))
        if (cell, key) in self._met:
            return
        self._met.add((cell, key))
        self._first_call_s[key] = min(seconds, self._first_call_s.get(key, math.inf))

    def proved(self, cell: Workload, plan: Tunables, call_s: float, seconds: float) -> None:
        self._proven_parts.setdefault(cell, set()).update(parts_of(plan))
        slowest, _ = self._proof_s.get(cell.at(1), (0.0, 0.0))
        if seconds >= slowest:
            self._proof_s[cell.at(1)] = seconds, call_s

    def has_proven(self, cell: Workload, plan: Tunables) -> bool:
        """Whether all of its kernels passed in this cell, and so are compiled for odd lengths and strides.

        On an H200 the first proof of a flash-attn-4 plan around 262144 positions took 10.7 s, the second 0.7 s.
        """
        return parts_of(plan) <= self._proven_parts.get(cell, set())

    def proof_s(self, cell: Workload, plan: Tunables, call_s: float, lengths: int, *, compiled: bool = False) -> float:
        """About what proving the plan takes: what it took at another length, or a first call at each ragged one.

        What it took says nothing of a plan whose kernels are ``compiled``.
        """
        if cell.at(1) in self._proof_s and not compiled:
            seconds, then_s = self._proof_s[cell.at(1)]
            return seconds + lengths * 2 * max(0.0, call_s - then_s)
        known_s = self._first_call_s.get((cell.at(1), _kernels(plan)), math.inf)
        first_s = min(known_s, NEW_SHAPE_S * _shapes(plan))
        return 0.3 + lengths * (first_s + 2 * call_s)


def _kernels(plan: Tunables) -> object:
    return tuple((branch.forward, branch.backward) for branch in plan.branches)


def _shapes(plan: Tunables) -> int:
    return sum(2 if branch.backward else 1 for branch in plan.branches)


def without(space: Space, parts: Collection[Part]) -> Space:
    """The space without some kernels in some directions ("forward", "backward"); the default stays what it is."""
    if not parts:
        return space
    knobs = {
        name: tuple(value for value in values if (name.partition(".")[0], value) not in parts) or values[:1]
        for name, values in space.knobs.items()
    }
    plans = [plan for plan in space.kernel_plans if plan == space.default or parts_of(plan).isdisjoint(parts)]
    return dataclasses.replace(space, knobs=knobs, kernel_plans=tuple(plans))


def parts_of(plan: Tunables) -> set[Part]:
    """Kernels with their directions."""
    forward = {("forward", branch.forward) for branch in plan.branches}
    return forward | {("backward", branch.backward) for branch in plan.branches if branch.backward}


@dataclass(slots=True)
class Pupil:
    """An evaluator that notices what the answers of another teach."""

    evaluator: Evaluator
    lessons: Lessons
    clock: Clock
    _calls_s: dict[tuple[Workload, Tunables], float] = field(default_factory=dict)

    @property
    def lost_s(self) -> float:
        """Seconds that this cell should not pay for alone: crashes, hangs, and one-offs."""
        lost: float = getattr(self.evaluator, "lost_s", 0.0)
        return lost + self.lessons.one_off_s

    @property
    def validation_workers(self) -> int:
        """How many processes share a proof."""
        validation_workers: int = getattr(self.evaluator, "validation_workers", 1)
        return validation_workers

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        result = self.evaluator.check(cell, candidate, timeout_s=timeout_s, pace_ms=pace_ms)
        if isinstance(result, Fault):
            self.lessons.failed(result)
        else:
            self._calls_s[cell, candidate] = result.call_ms / 1e3
            self.lessons.first_call(cell, candidate, result)
        return result

    def validate(self, cell: Workload, candidate: Tunables, *, timeout_s: float) -> Proven | Fault:
        began = self.clock.now()
        result = self.evaluator.validate(cell, candidate, timeout_s=timeout_s)
        if isinstance(result, Proven):
            self.lessons.proved(cell, candidate, self._calls_s.get((cell, candidate), 0.0), self.clock.now() - began)
        return result

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        return self.evaluator.block(cell, order, timeout_s=timeout_s)

    def run_profile(self, cell: Workload, profile_path: str, *, timeout_s: float) -> Tunables | Fault:
        return self.evaluator.run_profile(cell, profile_path, timeout_s=timeout_s)

    def close(self) -> None:
        self.evaluator.close()
