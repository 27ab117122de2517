"""The Evaluator that answers from true times, in simulated time.

The search cannot tell the difference: it answers the Evaluator protocol with noise, outliers, drift and crashes of its
own seed, and moves a simulated clock by what each answer would have cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from signal import SIGKILL

import numpy as np

from autotune.measure.evaluator import Block, Checked, Fault, Interference, InterferenceKind, Killed, Proven, Sample
from ringattn.profile.yaml_io import load_profile
from ringattn.workload import Tunables, Workload

from .clock import SimulatedClock
from .first_calls import FirstCalls, Part, parts_of
from .tables import Row, TrueTime, with_graphs
from .trouble import QUIET, Noise, Trouble


@dataclass(slots=True)
class ReplayEvaluator:
    """Answers from true rows; every answer costs simulated seconds.

    ``check_s`` and ``prove_s`` are what the reference costs beside the candidate's own calls, ``sample_target_s``
    how long a sample is made by repeating its call. With ``first_calls`` these decide what a first call costs, instead
    of each row's own: in a recording only one row paid what whichever plan comes first has to pay. ``one_off_share``
    of it is charged: a cell searched alone stands for one of many that share it.
    """

    truth: TrueTime
    clock: SimulatedClock
    seed: int = 0
    trouble: Trouble = QUIET
    check_s: float = 0.05
    prove_s: float = 0.2
    sample_target_s: float = 0.010
    restart_s: float = 3.0  # a new worker process after a crash or a hang
    first_calls: FirstCalls | None = None
    one_off_share: float = 1.0
    calls: int = 0  # checks and readings
    _met: set[tuple[Part, Workload | None]] = field(default_factory=set)
    _rng: np.random.Generator = field(init=False)
    _noise: Noise = field(init=False)

    def __post_init__(self) -> None:
        self.truth = with_graphs(self.truth)
        self._rng = np.random.default_rng(self.seed)
        self._noise = Noise(self.trouble, self.seed, self._rng)

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        with self.clock.uncharged():
            return self._check(cell, candidate, timeout_s, pace_ms)

    def _check(self, cell: Workload, candidate: Tunables, timeout_s: float, pace_ms: float | None) -> Checked | Fault:
        row = self.truth(cell, candidate)
        self.calls += 1
        if row.fault is not None:
            self.clock.advance(self.check_s + self._lost_s(row.fault, timeout_s))
            return row.fault
        assert row.checked is not None
        slow = pace_ms is not None and row.median_ms > 2.5 * pace_ms
        checked = replace(row.checked, call_ms=row.median_ms * self._factor(), cold_ms=1e3 * self._cold_s(cell, row))
        seconds = self.check_s + checked.cold_ms / 1e3 + (2 if slow else 5) * row.median_ms / 1e3
        if seconds > timeout_s:
            self.clock.advance(timeout_s + self.restart_s)
            return Fault("timeout", f"no answer within {timeout_s:.1f} s")
        self.clock.advance(seconds)
        return checked

    def _cold_s(self, cell: Workload, row: Row) -> float:
        """Return the seconds of a plan's first call in a cell; kernels that ran before have nothing left to load."""
        assert row.checked is not None
        if self.first_calls is None:
            return row.checked.cold_ms / 1e3
        seconds = row.checked.call_ms / 1e3
        parts = parts_of(row.tunables)
        for part in dict.fromkeys(parts):
            if (part, None) not in self._met:
                seconds += self.one_off_share * self.first_calls.one_off_s.get(part, 0.0)
            if (part, cell) not in self._met:
                seconds += parts.count(part) * self.first_calls.new_length_s.get(part, 0.0)
            self._met |= {(part, None), (part, cell)}
        return seconds

    def _new_length_s(self, row: Row) -> float:
        assert row.checked is not None
        if self.first_calls is None:
            return row.checked.cold_ms / 1e3
        costs = self.first_calls.new_length_s
        return row.checked.call_ms / 1e3 + sum(costs.get(part, 0.0) for part in parts_of(row.tunables))

    def validate(self, cell: Workload, candidate: Tunables, *, timeout_s: float) -> Proven | Fault:
        with self.clock.uncharged():
            row = self.truth(cell, candidate)
        assert row.checked is not None
        first_s = self._new_length_s(row)
        self.clock.advance(self.prove_s + 8 * first_s)
        return row.unproven or Proven(1e3 * first_s)

    def run_profile(self, cell: Workload, profile_path: str, *, timeout_s: float) -> Tunables | Fault:
        entry = next(entry for entry in load_profile(profile_path).plans if entry.workload == cell)
        assert entry.choice is not None
        return entry.choice.tunables

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        self.calls += len(order)
        with self.clock.uncharged():
            results = tuple(self._reading(cell, plan, timeout_s) for plan in order)
        disturbed = self._rng.random() < self.trouble.disturbed_share
        return Block(results, (Interference(InterferenceKind.FOREIGN_LOAD, 50.0),) if disturbed else ())

    def _reading(self, cell: Workload, plan: Tunables, timeout_s: float) -> Sample | Fault:
        row = self.truth(cell, plan)
        if row.fault is not None:
            self.clock.advance(self._lost_s(row.fault, timeout_s))
            return row.fault
        if self._rng.random() < self.trouble.crash_share:
            self.clock.advance(self.restart_s)
            return Fault("crash", "the worker was killed by SIGKILL (replayed)", Killed(SIGKILL))
        ms = row.median_ms * self._factor()
        self.clock.advance(max(self.sample_target_s, ms / 1e3) * 1.1)
        return Sample(ms, row.checked.host_us if row.checked is not None else 0.0)

    def _factor(self) -> float:
        return self._noise.factor(self.clock.now())

    def _lost_s(self, fault: Fault, timeout_s: float) -> float:
        """Return what waiting for an answer and a new worker take."""
        hung = fault.kind == "timeout"
        return (timeout_s if hung else 0.0) + (self.restart_s if hung or fault.kind == "crash" else 0.0)

    def close(self) -> None:
        pass
