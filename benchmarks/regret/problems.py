"""Cells to tune: a space, true times, noise, and the best plan's true time."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.measure.launch_overhead import waited_ms
from autotune.measure.simulated import (
    FirstCalls,
    ReplayEvaluator,
    SimulatedClock,
    Table,
    Trouble,
    TrueTime,
    first_calls_of,
    load_tables,
    truth_of,
    with_graphs,
)
from autotune.space.space import Machine, Space, build_space, decode
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload

from .machines import INSTANCES, KINDS
from .synthetic import SyntheticMachine

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
CELLS = 20  # of a standard probe, which share its budget and what is loaded and compiled once
CELL_BUDGET_S = 8.0
HANG_S = 0.1 * CELL_BUDGET_S  # before which no call counts as hung: a tenth of the budget, as in a probe
RESTART_S = 1.0
HILL_CLIMBS = 60
SYNTHETIC = "synthetic"

_OUTLIERS = {"outlier_share": 0.05, "outlier_low": 0.2, "outlier_high": 1.0}
NOISES: Mapping[str, Trouble] = {
    "drift": Trouble(sigma=0.03, drift=0.05, **_OUTLIERS),
    "bimodal": Trouble(sigma=0.01, drift=0.0, mode=0.05, mode_dwell_s=0.3, **_OUTLIERS),
    "periodic": Trouble(sigma=0.01, drift=0.0, burst=0.3, burst_period_s=0.5, burst_share=0.2, **_OUTLIERS),
}


@dataclass(frozen=True)
class Problem:
    """One cell to tune: its space, its truth, and the true ms of the best plan that is right."""

    machine: str
    cell: str
    noise: str
    space: Space
    truth: TrueTime
    best_ms: float
    first_calls: FirstCalls | None = None

    def evaluator(self, clock: SimulatedClock, seed: int) -> ReplayEvaluator:
        return ReplayEvaluator(
            self.truth,
            clock,
            seed,
            NOISES[self.noise],
            restart_s=RESTART_S,
            first_calls=self.first_calls,
            one_off_share=1 / CELLS,
        )

    def true_ms(self, plan: Tunables) -> float:
        """Return what a loop of calls waits for."""
        row = with_graphs(self.truth)(self.space.workload, plan)
        assert row.checked is not None
        return waited_ms(row.median_ms, row.checked.host_us, "eager") if self.asynchronous else row.median_ms

    @property
    def asynchronous(self) -> bool:
        """Whether its host and device work side by side; a recording knows the time of the call alone."""
        return self.machine in KINDS

    def is_right(self, plan: Tunables) -> bool:
        """Return whether the plan passes its check and is right at other lengths."""
        row = with_graphs(self.truth)(self.space.workload, plan)
        return row.fault is None and row.unproven is None

    @property
    def default_ms(self) -> float:
        return self.true_ms(self.space.default)


def working_clock() -> SimulatedClock:
    """Return a clock that charges the CPU time of this process beside what the machine takes."""
    return SimulatedClock(own_s=time.process_time)


def names() -> tuple[str, ...]:
    """Return the machines there are: invented kinds, recorded tables, and the synthetic one."""
    recorded = (path.name.partition(".")[0] for path in sorted(DATA.glob("*.json.gz")))
    return (*KINDS, *recorded, SYNTHETIC)


def problem_of(machine: str, noise: str, seed: int) -> Problem:
    """Return the cell that a seed tunes: instances of a machine in turn, so that several seeds tune each."""
    if machine in KINDS:
        return _invented(machine, noise, seed % INSTANCES)
    if machine == SYNTHETIC:
        return _synthetic(noise, seed % INSTANCES)
    return _recorded(machine, noise, seed % len(_tables(machine)))


@functools.cache
def _best_of_instance(kind: str, number: int) -> float:
    return KINDS[kind](number).best_ms()


def _invented(kind: str, noise: str, number: int) -> Problem:
    machine = KINDS[kind](number)
    cell = f"{number}: {machine.space.workload}"
    return Problem(kind, cell, noise, machine.space, machine.row, _best_of_instance(kind, number))


@functools.cache
def _tables(name: str) -> tuple[Table, ...]:
    return load_tables(DATA / f"{name}.json.gz")


def _recorded(name: str, noise: str, number: int) -> Problem:
    tables = _tables(name)
    table = tables[number]
    best_ms = table.best_ms({table.default.dtype})
    costs = first_calls_of(tables)
    return Problem(name, str(table.workload), noise, table.space(), truth_of([table]), best_ms, costs)


def _synthetic(noise: str, number: int) -> Problem:
    """Return a dilated training cell on a machine nobody has; see SyntheticMachine."""
    machine, space = _synthetic_machine(number)
    return Problem(SYNTHETIC, f"{number}: {space.workload}", noise, space, machine.row, _best_synthetic(number))


def _synthetic_machine(number: int) -> tuple[SyntheticMachine, Space]:
    workload = Workload("train", True, 16384, 16, 128, "bf16", pattern=Pattern.of([2048, 4096, 8192], [1, 2, 4]))
    machine = Machine(("cudnn", "flash", "efficient"), lambda cell, plan: (), lambda cell, plan: plan)
    default = Tunables("bf16", tuple(BranchTunables("cudnn", "cudnn") for _ in range(3)))
    space = build_space(workload, machine, default, ("bf16",))
    return SyntheticMachine(workload, space.knobs, number, main=0.05, interaction=0.06), space


@functools.cache
def _best_synthetic(number: int) -> float:
    """Return what many hill climbs on the truth find."""
    machine, space = _synthetic_machine(number)
    climbs = (_climb(space, machine.log_ratio, np.random.default_rng((number, n))) for n in range(HILL_CLIMBS))
    return machine.base_ms * math.exp(min(climbs))


def _climb(space: Space, log_ratio: Callable[[Tunables], float], rng: np.random.Generator) -> float:
    """Return the value at the end of a steepest descent from a random plan."""
    knobs = list(space.knobs)
    plan = decode(space.workload, {name: space.knobs[name][rng.integers(len(space.knobs[name]))] for name in knobs})
    here = log_ratio(plan)
    while True:
        values = {move.tunables: log_ratio(move.tunables) for move in space.neighbours(plan)}
        best = min(values, key=values.__getitem__)
        if values[best] >= here:
            return here
        plan, here = best, values[best]
