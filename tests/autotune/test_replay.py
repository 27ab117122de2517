"""Recorded machines: tables that survive the disk, and trouble that behaves as it says."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from machines import plan, workload

from autotune.evaluator import Block, Checked, Fault, Proven, Sample
from autotune.replay import (
    QUIET,
    ReplayEvaluator,
    Row,
    SimulatedClock,
    SyntheticMachine,
    Table,
    Trouble,
    load_tables,
    save_tables,
    truth_of,
)
from ringattn.workload import Pattern, Tunables, Workload

CELL = workload(pattern=Pattern())
QUICK, SWIFT, MATH = (plan(CELL, name) for name in ("quick", "swift", "math"))
CHECKED = Checked(5.0, 1e-3, 2**20, 9.0, 20.0)
TABLE = Table(
    CELL,
    QUICK,
    {
        QUICK: Row(QUICK, (5.0, 5.1, 4.9), CHECKED),
        SWIFT: Row(SWIFT, (4.0, 4.0, 4.2), CHECKED),
        MATH: Row(MATH, fault=Fault("oom", "out of memory")),
    },
)


def evaluator(trouble: Trouble = QUIET, seed: int = 0) -> ReplayEvaluator:
    return ReplayEvaluator(truth_of([TABLE]), SimulatedClock(), seed, trouble)


def test_tables_survive_the_disk_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "machine.json.gz"
    save_tables([TABLE], path, machine="Invented", software={"torch": "2.13.0"})
    assert load_tables(path) == (TABLE,)
    first = path.read_bytes()
    save_tables(load_tables(path), path, machine="Invented", software={"torch": "2.13.0"})
    assert path.read_bytes() == first


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"schema": 99, "cells": []}).encode()))
    with pytest.raises(ValueError, match="schema is 99"):
        load_tables(path)


def test_the_space_of_a_table_is_its_rows() -> None:
    space = TABLE.space()
    assert set(space.all_plans() or ()) == set(TABLE.rows)
    assert space.default == QUICK
    assert set(space.kernel_plans) == set(TABLE.rows)
    assert TABLE.best_ms() == 4.0


def test_answers_are_the_rows_and_cost_simulated_time() -> None:
    replay = evaluator()
    assert replay.check(CELL, QUICK, timeout_s=10) == CHECKED
    assert replay.clock.now() > 0
    assert replay.check(CELL, MATH, timeout_s=10) == Fault("oom", "out of memory")
    assert replay.prove(CELL, QUICK, timeout_s=10) == Proven(9.0)
    block = replay.block(CELL, [QUICK, SWIFT, QUICK], timeout_s=10)
    assert block == Block((Sample(5.0, 20.0), Sample(4.0, 20.0), Sample(5.0, 20.0)))


def test_a_candidate_slower_than_the_timeout_times_out() -> None:
    slow = Row(QUICK, (60_000.0,), CHECKED)
    replay = ReplayEvaluator(lambda cell, tunables: slow, SimulatedClock())
    fault = replay.check(CELL, QUICK, timeout_s=5)
    assert isinstance(fault, Fault)
    assert fault.kind == "timeout"
    assert replay.clock.now() < 12


def readings(trouble: Trouble, count: int = 4000, seed: int = 0) -> np.ndarray:
    block = evaluator(trouble, seed).block(CELL, [SWIFT] * count, timeout_s=10)
    return np.log([result.ms / 4.0 for result in block.results if isinstance(result, Sample)])


def test_noise_is_as_large_as_it_says() -> None:
    assert readings(Trouble(outlier_share=0, drift=0)).std() == pytest.approx(0.03, rel=0.05)
    logs = readings(Trouble(sigma=0.001, drift=0))
    outliers = logs[logs > 0.1]
    assert len(outliers) / len(logs) == pytest.approx(0.05, rel=0.2)
    assert math.log(1.19) < outliers.min() < outliers.max() < math.log(2.01)
    drift = readings(Trouble(sigma=0, outlier_share=0), count=20_000)
    assert np.ptp(drift) == pytest.approx(0.05, rel=0.05)
    assert np.abs(np.diff(drift)).max() < 1e-3  # slow


def test_a_step_happens_once_at_its_time() -> None:
    logs = readings(Trouble(sigma=0, outlier_share=0, drift=0, step=0.2, step_at_s=1.0), count=300)
    assert set(np.round(logs, 9)) == {0.0, round(math.log(1.2), 9)}
    assert np.all(np.diff(logs) >= 0)


def test_crashes_and_disturbances_come_at_their_rate() -> None:
    replay = evaluator(Trouble(crash_share=0.1, disturbed_share=0.5))
    blocks = [replay.block(CELL, [QUICK] * 10, timeout_s=1) for _ in range(200)]
    crashes = sum(isinstance(result, Fault) for block in blocks for result in block.results)
    assert crashes / 2000 == pytest.approx(0.1, rel=0.3)
    assert sum(bool(block.disturbances) for block in blocks) / 200 == pytest.approx(0.5, rel=0.3)


def test_the_same_seed_is_the_same_machine() -> None:
    assert np.array_equal(readings(Trouble(), 50, seed=4), readings(Trouble(), 50, seed=4))
    assert not np.array_equal(readings(Trouble(), 50, seed=4), readings(Trouble(), 50, seed=5))


KNOBS = {"checkpoint": ("selective", "full", "offload"), "pattern_cache": (True, False), "compile": (False, True)}


def with_knobs(cell: Workload, **values: object) -> Tunables:
    return plan(cell, "quick", **values)


def test_a_synthetic_machine_has_main_effects_and_interactions_and_a_default_at_zero() -> None:
    machine = SyntheticMachine(CELL, KNOBS, seed=3)  # type: ignore[arg-type]
    assert machine.log_ratio(QUICK) == 0.0
    full, bare = (
        machine.log_ratio(with_knobs(CELL, checkpoint="full")),
        machine.log_ratio(with_knobs(CELL, pattern_cache=False)),
    )
    both = machine.log_ratio(with_knobs(CELL, checkpoint="full", pattern_cache=False))
    assert both != pytest.approx(full + bare)  # they interact
    plain = SyntheticMachine(CELL, KNOBS, seed=3, interaction=0.0)  # type: ignore[arg-type]
    assert plain.log_ratio(with_knobs(CELL, checkpoint="full", pattern_cache=False)) == pytest.approx(full + bare)
    assert machine.row(CELL, QUICK).median_ms == 5.0


def test_interactions_have_the_size_that_was_asked_for() -> None:
    both = []
    for seed in range(400):
        machine = SyntheticMachine(CELL, KNOBS, seed, main=0.0, interaction=0.06)  # type: ignore[arg-type]
        both.append(machine.log_ratio(with_knobs(CELL, checkpoint="full", pattern_cache=False)))
    assert float(np.std(both)) == pytest.approx(0.06, rel=0.15)
