"""Knowledge that passes from one cell of a probe to the next: traps, times of other calls, plans that won nearby."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import get_args

from autotune.journal.store import Store
from autotune.measure.evaluator import Checked, Direction, Fault, KernelUnavailable, StillCompiling
from autotune.space.space import Space, Value
from ringattn.workload import Tunables, Workload

from .compilers import Compilers

# Per branch and direction: cuDNN's plan for a new shape takes 0.06 to 0.13 s on an H100. Much more than that went into
# loading or compiling, which nobody pays for again; and a single first call does not say how much of it was that.
NEW_SHAPE_S, MOST_NEW_SHAPE_S = 0.075, 0.25
BLOCK_PACE = 1.15  # times its samples a block takes, until it is known: random order, flushes, messages, the record
LONGEST_PACE = 4.0  # a block that took longer was held up
LATEST_BLOCK = 0.2  # weight of the latest block in how long they take
HOPELESS = math.log(2.0)  # what was so far behind at a neighbouring length is not tried again
_TRAPS = "kernels given up"

Part = tuple[str, str]  # "forward" or "backward", and a kernel


def parts_of(plan: Tunables) -> frozenset[Part]:
    """Return the kernels with their directions."""
    forward = {("forward", branch.forward) for branch in plan.branches}
    return frozenset(forward | {("backward", branch.backward) for branch in plan.branches if branch.backward})


@dataclass(frozen=True, slots=True)
class LostKernel:
    """One kernel in one direction that nobody asks for again, as a study holds it."""

    direction: str
    kernel: str
    reason: str


@dataclass(slots=True)
class Traps:
    """Kernels, by direction, that hung, crashed or cannot be loaded, and why; nobody asks for them again.

    What ran in some plan is not to blame for another.
    """

    ran: set[Part] = field(default_factory=set)
    lost: dict[Part, str] = field(default_factory=dict)

    def learn(self, plan: Tunables, result: Checked | Fault) -> bool:
        """Return whether the plan's failure gave up on a kernel."""
        parts = parts_of(plan)
        if isinstance(result, Checked):
            self.ran |= parts
            return False
        cause = result.cause
        if isinstance(cause, KernelUnavailable):
            blamed, why = {part for part in parts if part[1] == cause.kernel}, cause.reason
        elif costs_a_worker(result):
            if result.direction == "backward":
                self.ran |= {part for part in parts if part[0] == "forward"}
            of = (result.direction,) if result.direction is not None else get_args(Direction)
            blamed = {part for part in parts - self.ran if part[0] in of}
            why = f"{result.kind}, {result.message}"
        else:
            return False
        self.lost |= {part: f"{part[1]} ({part[0]}): {why}" for part in sorted(blamed)}
        return bool(blamed)

    def holds(self, plan: Tunables) -> bool:
        return not self.lost.keys().isdisjoint(parts_of(plan))


def costs_a_worker(fault: Fault) -> bool:
    """Return whether a plan hung or crashed, of itself: each more like it costs as much."""
    return fault.kind in ("timeout", "crash") and not fault.ended_from_outside


@dataclass(slots=True)
class Pace:
    """Times its samples a block takes; one for all cells of a probe, as all have the same machine around them."""

    factor: float = BLOCK_PACE

    def learn(self, taken_s: float, samples_s: float) -> None:
        self.factor += LATEST_BLOCK * (min(taken_s / samples_s, LONGEST_PACE) - self.factor)


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of a finished cell: log(t / t_best) of plans, by the device."""

    cell: Workload
    behind: dict[Tunables, float]


@dataclass(slots=True)
class Transfer:
    """Lessons of a probe's cells for each other. ``one_off_s`` went into loading and compiling, for all of them."""

    store: Store | None = None
    compilers: Compilers = field(default_factory=Compilers)
    traps: Traps = field(default_factory=Traps)
    one_off_s: float = 0.0
    pace: Pace = field(default_factory=Pace)  # of blocks
    sigmas: list[float] = field(default_factory=list)  # of one paired log-ratio, of every finished cell
    finished: list[Timed] = field(default_factory=list)
    _first_call_s: dict[tuple[Workload, object], float] = field(default_factory=dict)
    _met: set[object] = field(default_factory=set)
    _validation_s: dict[Workload, tuple[float, float]] = field(default_factory=dict)  # and the call's then
    _validated: dict[Workload, set[Part]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.store is not None:
            lost: tuple[LostKernel, ...] = self.store.recall(_TRAPS, tuple[LostKernel, ...]) or ()
            self.traps.lost |= {(each.direction, each.kernel): each.reason for each in lost}

    # --- traps --------------------------------------------------------------------------------------------------

    def learn(self, plan: Tunables, result: Checked | Fault) -> None:
        if not self.traps.learn(plan, result) or self.store is None:
            return
        if isinstance(result, Fault) and isinstance(result.cause, StillCompiling):
            return  # a probe that goes on with this one has time anew
        lost = [dataclasses.asdict(LostKernel(*part, why)) for part, why in self.traps.lost.items()]
        self.store.remember(_TRAPS, lost)

    # --- compilers ----------------------------------------------------------------------------------------------

    def hear_of_compilers(self) -> None:
        """Learn of the first calls that have ended beside the probe.

        What one failed of is no verdict, as its plan is checked here; but one that hung is not waited for once more.
        """
        for called, fault in self.compilers.news():
            if fault is None:
                self.traps.ran |= parts_of(called)
            elif fault.kind == "timeout":
                self.learn(called, fault)

    def waits_for_compiler(self, cell: Workload, plan: Tunables) -> bool:
        """Return whether the plan is to be tried later, as a kernel of it is being compiled beside the probe."""
        self.hear_of_compilers()
        return self.compilers.waits(cell, plan)

    def usual_sigma(self, assumed: float) -> float:
        """Return the noise to expect of a cell that has timed nothing; ``assumed`` where no other cell has either."""
        return statistics.median(self.sigmas) if self.sigmas else assumed

    # --- time ---------------------------------------------------------------------------------------------------

    def first_call(self, cell: Workload, plan: Tunables, checked: Checked) -> None:
        """Learn how much of a first call was a one-off, and what any new shape costs: the least of all lengths.

        Only the first plan with its kernels says so at a length: for the next ones there is nothing left to do.
        """
        seconds = max(0.0, checked.cold_ms - checked.call_ms) / 1e3
        if seconds > MOST_NEW_SHAPE_S * _shapes(plan):
            self.one_off_s += seconds
        key = (cell.at(1), _kernels(plan))
        if (cell, key) not in self._met:
            self._met.add((cell, key))
            self._first_call_s[key] = min(seconds, self._first_call_s.get(key, math.inf))

    def validated(self, cell: Workload, plan: Tunables, call_s: float, seconds: float) -> None:
        self._validated.setdefault(cell, set()).update(parts_of(plan))
        slowest, _ = self._validation_s.get(cell.at(1), (0.0, 0.0))
        if seconds >= slowest:
            self._validation_s[cell.at(1)] = seconds, call_s

    def has_validated(self, cell: Workload, plan: Tunables) -> bool:
        """Return whether all of its kernels passed in this cell, and so are compiled for odd lengths and strides."""
        return parts_of(plan) <= self._validated.get(cell, set())

    def validation_s(
        self, cell: Workload, plan: Tunables, call_s: float, lengths: int, reference_s: float = 0.0
    ) -> float:
        """Estimate what validating the plan takes: as at another length, or a first call at each ragged one.

        Before the first of a cell a reference at each length is added: on a CPU these take most of it.

        What it took says nothing of a plan whose kernels are compiled: on an H200 the first validation of a
        flash-attn-4 plan around 262144 positions took 10.7 s, the second 0.7 s.
        """
        if cell.at(1) in self._validation_s and not self.has_validated(cell, plan):
            seconds, then_s = self._validation_s[cell.at(1)]
            return seconds + lengths * 2 * max(0.0, call_s - then_s)
        known_s = self._first_call_s.get((cell.at(1), _kernels(plan)), math.inf)
        first_s = min(known_s, NEW_SHAPE_S * _shapes(plan))
        references = 0 if cell in self._validated else lengths
        return 0.3 + lengths * (first_s + 2 * call_s) + references * reference_s

    # --- plans --------------------------------------------------------------------------------------------------

    def alike(self, cell: Workload) -> list[Timed]:
        """Return the finished cells that differ in length only, nearest first."""
        alike = [done for done in self.finished if done.cell.at(cell.seq_len) == cell and done.cell != cell]
        return sorted(alike, key=lambda done: abs(done.cell.seq_len - cell.seq_len))

    def hopeless(self, space: Space) -> set[Part]:
        """Return kernels, by direction, that came nowhere near the best at the nearest length that tried them.

        Whatever else the plans had: one that is slow in place may be the fastest on copies. The default's stay.
        """
        best: dict[Part, float] = {}
        for timed in reversed(self.alike(space.workload)):
            here: dict[Part, float] = {}
            for plan, behind in timed.behind.items():
                for part in parts_of(plan):
                    here[part] = min(behind, here.get(part, math.inf))
            best |= here
        return {part for part, behind in best.items() if behind > HOPELESS} - parts_of(space.default)

    def hints(self, space: Space, count: int) -> list[Tunables]:
        """Return the best plans of the nearest length, as far as they can run here."""
        for timed in self.alike(space.workload):
            ranked = sorted(timed.behind, key=lambda plan: timed.behind[plan])
            return [plan for plan in ranked if space.holds(plan)][:count]
        return []


def _kernels(plan: Tunables) -> object:
    return tuple((branch.forward, branch.backward) for branch in plan.branches)


def _shapes(plan: Tunables) -> int:
    return sum(2 if branch.backward else 1 for branch in plan.branches)


def without(space: Space, parts: Collection[tuple[str, Value]]) -> Space:
    """Return the space without some values of knobs, such as a kernel in one direction; the default stays."""
    if not parts:
        return space
    knobs = {
        name: tuple(value for value in values if (name.partition(".")[0], value) not in parts) or values[:1]
        for name, values in space.knobs.items()
    }
    plans = [plan for plan in space.kernel_plans if plan == space.default or parts_of(plan).isdisjoint(parts)]
    return dataclasses.replace(space, knobs=knobs, kernel_plans=tuple(plans))


def without_inert(space: Space) -> Space:
    """Return the space without knobs that change nothing here: a dense plan never looks at a pool or a pattern."""
    here = space.identity(space.default)
    knobs = dict(space.knobs)
    for name, dependent in (("pattern_cache", ()), ("pool_threshold_mib", ("pool_strategy",))):
        turned = [space.combine(space.default, {name: value}) for value in knobs.get(name, ())]
        if all(plan is None or space.identity(plan) == here for plan in turned):
            for inert in (name, *dependent):
                knobs[inert] = (getattr(space.default, inert),)
    return dataclasses.replace(space, knobs=knobs)
