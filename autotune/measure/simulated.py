"""A recorded machine in place of a real one: trial tables, simulated time, and trouble laid on top.

The search cannot tell the difference: a ``ReplayEvaluator`` answers the Evaluator protocol from a table of true
times, with noise, outliers, drift and crashes of its own seed, and moves a simulated clock by what each answer
would have cost.
"""

from __future__ import annotations

import functools
import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np

from autotune.space.space import Machine, Space, Value, candidate_key, encode, from_key
from ringattn.profile.yaml_io import load_profile
from ringattn.workload import Branch, Pattern, Tunables, Workload

from .evaluator import Block, Checked, Fault, Interference, InterferenceKind, Killed, Proven, Sample

TABLE_SCHEMA = 1


class SimulatedClock:
    """Seconds that pass only when something is said to take time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now += seconds


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of a recorded cell: all its repetitions in ms, or how it failed."""

    tunables: Tunables
    times_ms: tuple[float, ...] = ()
    checked: Checked | None = None
    fault: Fault | None = None

    @property
    def median_ms(self) -> float:
        return float(np.median(self.times_ms)) if self.times_ms else math.inf


@dataclass(frozen=True, slots=True)
class Table:
    """Every plan of one cell on one machine; the first knob values are the plainest."""

    workload: Workload
    default: Tunables
    rows: Mapping[Tunables, Row]

    def space(self) -> Space:
        """The space whose plans are exactly the rows."""
        machine = Machine(
            kernels=tuple(dict.fromkeys(branch.forward for plan in self.rows for branch in plan.branches)),
            reasons=lambda workload, plan: () if plan in self.rows else ("is not in the table",),
            identity=lambda workload, plan: plan,
        )
        knobs: dict[str, dict[Value, None]] = {}
        plans = [encode(self.workload, plan) for plan in [self.default, *self.rows]]
        for name in dict.fromkeys(name for plan in plans for name in plan):
            # A parameter that a plan does not name has the kernel's own value.
            knobs[name] = dict.fromkeys(plan.get(name) for plan in plans)
        uniform = [plan for plan in self.rows if self._is_uniform(plan)]
        return Space(
            self.workload,
            machine,
            self.default,
            {name: tuple(values) for name, values in knobs.items()},
            tuple(dict.fromkeys([self.default, *uniform])),
            (),
        )

    def _is_uniform(self, plan: Tunables) -> bool:
        """One kernel pair on all branches, everything else as in the default."""
        if len({(branch.forward, branch.backward) for branch in plan.branches}) > 1:
            return False
        turned = {name for name in encode(self.workload, plan) if name.startswith(("forward", "backward", "dtype"))}
        here, there = encode(self.workload, plan), encode(self.workload, self.default)
        return all(here[name] == there.get(name) for name in here.keys() - turned)

    def best_ms(self, dtypes: Iterable[str] | None = None) -> float:
        """The exhaustive best: the median of the fastest row."""
        allowed = None if dtypes is None else frozenset(dtypes)
        return min(row.median_ms for row in self.rows.values() if allowed is None or row.tunables.dtype in allowed)


def save_tables(tables: Sequence[Table], path: Path, *, machine: str, software: Mapping[str, str]) -> None:
    """Writes gzipped JSON; ``machine`` and ``software`` say where the numbers are from."""
    document = {
        "schema": TABLE_SCHEMA,
        "machine": machine,
        "software": dict(software),
        "cells": [
            {
                "workload": _workload_document(table.workload),
                "default": candidate_key(table.default),
                "rows": [_row_document(row) for row in table.rows.values()],
            }
            for table in tables
        ],
    }
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(json.dumps(document, separators=(",", ":")).encode())


def load_tables(path: Path) -> tuple[Table, ...]:
    """Reads what ``save_tables`` wrote; raises ValueError for another schema."""
    with gzip.open(path, "rt") as file:
        document = json.load(file)
    if document.get("schema") != TABLE_SCHEMA:
        raise ValueError(f"{path}: schema is {document.get('schema')!r}; this version reads {TABLE_SCHEMA}")
    return tuple(_table_of(cell) for cell in document["cells"])


def _workload_document(workload: Workload) -> dict[str, Any]:
    fields = {name: getattr(workload, name) for name in Workload.__slots__ if name != "pattern"}
    branches = [[branch.segment, branch.rate] for branch in workload.pattern.branches]
    return fields | {"pattern": [branches, workload.pattern.head_offset]}


def _workload_of(document: Mapping[str, Any]) -> Workload:
    branches, rule = document["pattern"]
    pattern = Pattern(tuple(Branch(w, r) for w, r in branches), rule)
    return Workload(**{name: value for name, value in document.items() if name != "pattern"}, pattern=pattern)


def _row_document(row: Row) -> dict[str, Any]:
    document: dict[str, Any] = {"plan": candidate_key(row.tunables)}
    if row.fault is not None:
        return document | {"fault": row.fault.plain()}
    assert row.checked is not None
    return document | {"ms": [float(f"{ms:.6g}") for ms in row.times_ms], "checked": asdict(row.checked)}


def _table_of(cell: Mapping[str, Any]) -> Table:
    rows = {}
    for document in cell["rows"]:
        plan = from_key(document["plan"])
        fault = Fault.of(document["fault"]) if "fault" in document else None
        checked = Checked(**document["checked"]) if "checked" in document else None
        rows[plan] = Row(plan, tuple(document.get("ms", ())), checked, fault)
    return Table(_workload_of(cell["workload"]), from_key(cell["default"]), rows)


# --- trouble ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is laid over true times. Shares and sizes are relative.

    ``step_at_s`` moves the clock of the machine by ``step`` once, as a power limit does.
    """

    sigma: float = 0.03  # lognormal, per reading
    outlier_share: float = 0.05
    outlier_low: float = 0.2
    outlier_high: float = 1.0
    drift: float = 0.05  # slow, peak to peak
    drift_period_s: float = 90.0
    step: float = 0.0
    step_at_s: float = math.inf
    crash_share: float = 0.0  # of single calls in a block
    disturbed_share: float = 0.0  # of blocks that foreign load touches


QUIET = Trouble(sigma=0.0, outlier_share=0.0, drift=0.0)

# --- first calls -----------------------------------------------------------------------------------------------------

ONE_OFF_S = 1.0  # a first call that took longer loaded or compiled something: cuDNN's plan for a new shape takes 0.1 s

Part = tuple[str, str]  # a kernel, and "forward" or "backward"


@dataclass(frozen=True, slots=True)
class FirstCalls:
    """What first calls cost beyond warm ones, by kernel and direction.

    ``one_off_s`` is paid once a worker, by whichever plan comes first: loading and compiling. ``new_length_s`` is paid
    by every branch at every length that was not met before.
    """

    one_off_s: Mapping[Part, float] = field(default_factory=dict)
    new_length_s: Mapping[Part, float] = field(default_factory=dict)


def parts_of(plan: Tunables) -> tuple[Part, ...]:
    """What runs in each branch, repeated where several branches run the same."""
    forward = [(branch.forward, "forward") for branch in plan.branches]
    return tuple(forward + [(branch.backward, "backward") for branch in plan.branches if branch.backward])


def first_calls_of(tables: Iterable[Table]) -> FirstCalls:
    """Read off recorded checks: in the order of a table, the first row with a new part paid for it.

    Of several tables the median counts for a new length, and the most for what is paid once.
    """
    one_off: dict[Part, float] = {}
    new_length: dict[Part, list[float]] = {}
    for table in tables:
        seen: set[Part] = set()
        for row in table.rows.values():
            new = [part for part in parts_of(row.tunables) if part not in seen]
            if row.checked is None or not new:
                continue
            seen.update(new)
            each_s = max(0.0, row.checked.cold_ms - row.checked.call_ms) / 1e3 / len(new)
            for part in dict.fromkeys(new):
                if each_s * len(new) > ONE_OFF_S:
                    one_off[part] = max(one_off.get(part, 0.0), each_s * new.count(part))
                else:
                    new_length.setdefault(part, []).append(each_s)
    return FirstCalls(one_off, {part: float(np.median(seconds)) for part, seconds in new_length.items()})


TrueTime = Callable[[Workload, Tunables], Row]


@dataclass(slots=True)
class ReplayEvaluator:
    """Answers from true rows; every answer costs simulated seconds.

    ``check_s`` and ``prove_s`` are what the reference costs beside the candidate's own calls, ``sample_target_s``
    how long a sample is made by repeating its call. ``unproven`` are plans that pass a check but not the ragged
    lengths. With ``first_calls`` these decide what a first call costs, instead of each row's own: in a recording only
    one row paid what whichever plan comes first has to pay. ``one_off_share`` of it is charged: a cell searched alone
    stands for one of many that share it.
    """

    truth: TrueTime
    clock: SimulatedClock
    seed: int = 0
    trouble: Trouble = QUIET
    check_s: float = 0.05
    prove_s: float = 0.2
    sample_target_s: float = 0.010
    restart_s: float = 3.0  # a new worker process after a crash or a hang
    unproven: Mapping[Tunables, Fault] = field(default_factory=dict)
    first_calls: FirstCalls | None = None
    one_off_share: float = 1.0
    calls: int = 0  # checks and readings
    _met: set[tuple[Part, Workload | None]] = field(default_factory=set)
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        row = self.truth(cell, candidate)
        self.calls += 1
        if row.fault is not None:
            hung = row.fault.kind == "timeout"
            self.clock.advance(self.check_s + (timeout_s if hung else 0.0) + self._restart_after(row.fault))
            return row.fault
        assert row.checked is not None
        slow = pace_ms is not None and row.median_ms > 2.5 * pace_ms
        checked = replace(row.checked, call_ms=row.median_ms * self._noise(), cold_ms=1e3 * self._cold_s(cell, row))
        seconds = self.check_s + checked.cold_ms / 1e3 + (2 if slow else 5) * row.median_ms / 1e3
        if seconds > timeout_s:
            self.clock.advance(timeout_s + self.restart_s)
            return Fault("timeout", f"no answer within {timeout_s:.1f} s")
        self.clock.advance(seconds)
        return checked

    def _cold_s(self, cell: Workload, row: Row) -> float:
        """The first call of a plan in a cell; kernels that ran before have nothing left to load."""
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
        row = self.truth(cell, candidate)
        assert row.checked is not None
        first_s = self._new_length_s(row)
        self.clock.advance(self.prove_s + 8 * first_s)
        return self.unproven.get(candidate) or Proven(1e3 * first_s)

    def run_profile(self, cell: Workload, profile_path: str, *, timeout_s: float) -> Tunables | Fault:
        entry = next(entry for entry in load_profile(profile_path).plans if entry.workload == cell)
        assert entry.choice is not None
        return entry.choice.tunables

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        self.calls += len(order)
        results = tuple(self._reading(cell, plan) for plan in order)
        disturbed = self._rng.random() < self.trouble.disturbed_share
        return Block(results, (Interference(InterferenceKind.FOREIGN_LOAD, 50.0),) if disturbed else ())

    def _reading(self, cell: Workload, plan: Tunables) -> Sample | Fault:
        row = self.truth(cell, plan)
        if row.fault is not None:
            self.clock.advance(self._restart_after(row.fault))
            return row.fault
        if self._rng.random() < self.trouble.crash_share:
            self.clock.advance(self.restart_s)
            return Fault("crash", "the worker was killed by SIGKILL (replayed)", Killed(SIGKILL))
        ms = row.median_ms * self._noise()
        self.clock.advance(max(self.sample_target_s, ms / 1e3) * 1.1)
        return Sample(ms, row.checked.host_us if row.checked is not None else 0.0)

    def _noise(self) -> float:
        trouble, now = self.trouble, self.clock.now()
        factor = math.exp(self._rng.normal(0.0, trouble.sigma)) if trouble.sigma else 1.0
        if self._rng.random() < trouble.outlier_share:
            factor *= 1 + self._rng.uniform(trouble.outlier_low, trouble.outlier_high)
        factor *= 1 + trouble.drift / 2 * math.sin(2 * math.pi * now / trouble.drift_period_s + self.seed)
        return factor * (1 + trouble.step if now >= trouble.step_at_s else 1.0)

    def _restart_after(self, fault: Fault) -> float:
        return self.restart_s if fault.kind in ("crash", "timeout") else 0.0

    def close(self) -> None:
        pass


def truth_of(tables: Iterable[Table]) -> TrueTime:
    """The rows of several tables by workload and plan; a plan outside them is a bug of the search."""
    by_workload = {table.workload: table.rows for table in tables}
    return lambda workload, plan: by_workload[workload][plan]


# --- machines that never were ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=100_000)
def _standard_normal(seed: int, where: tuple[int, ...]) -> float:
    """One draw per place, the same whenever and in whatever order it is asked for."""
    return float(np.random.default_rng((seed, *where)).standard_normal())


@dataclass(frozen=True, slots=True)
class SyntheticMachine:
    """Knobs with main effects and an interaction of every pair of their values, all drawn from a seed.

    log t = log base_ms + sum of main effects N(0, main) + sum over pairs N(0, interaction); a default plan of
    first values has neither.
    """

    workload: Workload
    knobs: Mapping[str, tuple[Value, ...]]
    seed: int
    main: float = 0.05
    interaction: float = 0.06
    base_ms: float = 5.0

    def log_ratio(self, plan: Tunables) -> float:
        """log(t / t_default), the truth."""
        chosen = encode(self.workload, plan)
        names = [name for name in self.knobs if len(self.knobs[name]) > 1]
        total = 0.0
        for i, name in enumerate(names):
            here = self.knobs[name].index(chosen[name])
            total += self._effect(self.main, i, here)
            for j in range(i):
                there = self.knobs[names[j]].index(chosen[names[j]])
                if here and there:
                    total += self._effect(self.interaction, i, here, j, there)
        return total

    def _effect(self, sigma: float, *where: int) -> float:
        return sigma * _standard_normal(self.seed, where) if where[1] else 0.0

    def row(self, workload: Workload, plan: Tunables) -> Row:
        ms = self.base_ms * math.exp(self.log_ratio(plan))
        return Row(plan, (ms,), Checked(ms, 1e-3, 2**20, ms, 30.0))
