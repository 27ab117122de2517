"""Recorded trial tables: every plan of a cell with its repetitions, on disk and as a space."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.measure.evaluator import Checked, Fault
from autotune.space.space import Machine, Space, Value, candidate_key, encode, from_key
from ringattn.workload import Branch, Pattern, Tunables, Workload

TABLE_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of a cell: all its repetitions in ms, or how it failed.

    ``unproven`` is how it fails at other lengths, where it passes the check at its own.
    """

    tunables: Tunables
    times_ms: tuple[float, ...] = ()
    checked: Checked | None = None
    fault: Fault | None = None
    unproven: Fault | None = None

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
        """Return the space whose plans are exactly the rows."""
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
        """Return whether it has one kernel pair on all branches, and everything else as the default."""
        if len({(branch.forward, branch.backward) for branch in plan.branches}) > 1:
            return False
        turned = {name for name in encode(self.workload, plan) if name.startswith(("forward", "backward", "dtype"))}
        here, there = encode(self.workload, plan), encode(self.workload, self.default)
        return all(here[name] == there.get(name) for name in here.keys() - turned)

    def best_ms(self, dtypes: Iterable[str] | None = None) -> float:
        """Return the exhaustive best: the median of the fastest row."""
        allowed = None if dtypes is None else frozenset(dtypes)
        return min(row.median_ms for row in self.rows.values() if allowed is None or row.tunables.dtype in allowed)


def save_tables(tables: Sequence[Table], path: Path, *, machine: str, software: Mapping[str, str]) -> None:
    """Write gzipped JSON; ``machine`` and ``software`` say where the numbers are from."""
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
    """Read what ``save_tables`` wrote; raise ValueError for another schema."""
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


TrueTime = Callable[[Workload, Tunables], Row]
# Of the host, for a call whose launches are replayed: copies of the inputs, one launch and copies of the results, in
# each direction. A capture takes 50 ms, and what it writes to stays.
REPLAY_US, CAPTURE_MS, HELD = {"infer": 25.0, "train": 60.0}, {"infer": 50.0, "train": 100.0}, 2


def with_graphs(truth: TrueTime) -> TrueTime:
    """Return the truth with plans launched as CUDA graphs, for which the device does the same and the host less."""

    def row(workload: Workload, plan: Tunables) -> Row:
        if plan.launch == "eager":
            return truth(workload, plan)
        found = truth(workload, replace(plan, launch="eager"))
        checked = found.checked
        if checked is not None:
            checked = replace(
                checked,
                host_us=min(checked.host_us, REPLAY_US[workload.mode]),
                cold_ms=checked.cold_ms + CAPTURE_MS[workload.mode],
                peak_bytes=HELD * checked.peak_bytes,
            )
        return replace(found, tunables=plan, checked=checked)

    return row


def truth_of(tables: Iterable[Table]) -> TrueTime:
    """Return the rows of several tables by workload and plan; a plan outside them is a bug of the search."""
    by_workload = {table.workload: table.rows for table in tables}
    return lambda workload, plan: by_workload[workload][plan]
