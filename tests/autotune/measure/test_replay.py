"""Recorded machines: tables that survive the disk, and trouble that behaves as it says."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest
from machines import plan, row_of, workload
from regret.synthetic import SyntheticMachine

from autotune.journal.store import Store
from autotune.measure.evaluator import Block, Checked, Fault, Killed, Proven, Sample
from autotune.measure.simulated import (
    QUIET,
    ReplayEvaluator,
    Row,
    SimulatedClock,
    Table,
    Trouble,
    first_calls_of,
    load_tables,
    save_tables,
    truth_of,
)
from autotune.search.budget import EFFORTS, Budget
from autotune.search.loop import CellSearch
from autotune.search.settings import NoListener, SearchSettings
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
    assert replay.validate(CELL, QUICK, timeout_s=10) == Proven(9.0)
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
    faults = [result for block in blocks for result in block.results if isinstance(result, Fault)]
    assert {fault.cause for fault in faults} == {Killed(SIGKILL)}  # as a real worker's, whom somebody else killed
    assert len(faults) / 2000 == pytest.approx(0.1, rel=0.3)
    assert sum(bool(block.disturbances) for block in blocks) / 200 == pytest.approx(0.5, rel=0.3)


def test_the_same_seed_is_the_same_machine() -> None:
    assert np.array_equal(readings(Trouble(), 50, seed=4), readings(Trouble(), 50, seed=4))
    assert not np.array_equal(readings(Trouble(), 50, seed=4), readings(Trouble(), 50, seed=5))


# --- the clock -------------------------------------------------------------------------------------------------------


class Work:
    """Seconds of CPU time that a test says have passed."""

    def __init__(self) -> None:
        self.s = 5.0

    def __call__(self) -> float:
        return self.s


def test_a_clock_charges_the_work_around_a_simulation_and_not_that_of_it() -> None:
    work = Work()
    clock = SimulatedClock(own_s=work)
    work.s += 2.0
    assert clock.now() == 2.0
    work.s += 1.0
    with clock.uncharged():
        work.s += 10.0
        with clock.uncharged():
            work.s += 10.0
        work.s += 10.0
        clock.advance(0.5)
        assert clock.now() == 3.5
    work.s += 0.25
    assert clock.now() == 3.75
    assert clock.charged_s == 3.25


def test_the_work_of_answering_is_not_the_tuners() -> None:
    work = Work()

    def truth(cell: Workload, tunables: Tunables) -> Row:
        work.s += 100.0
        return TABLE.rows[tunables]

    replay = ReplayEvaluator(truth, SimulatedClock(own_s=work))
    replay.check(CELL, QUICK, timeout_s=10)
    replay.block(CELL, [QUICK, SWIFT], timeout_s=10)
    replay.validate(CELL, QUICK, timeout_s=10)
    assert replay.clock.now() < 5
    assert replay.clock.charged_s == 0.0


def test_a_plan_that_hangs_costs_the_timeout_and_a_new_worker_wherever_it_is_asked() -> None:
    hung = Row(QUICK, fault=Fault("timeout", "no answer"))
    replay = ReplayEvaluator(lambda cell, tunables: hung, SimulatedClock(), restart_s=3.0)
    assert replay.check(CELL, QUICK, timeout_s=7) == hung.fault
    assert replay.clock.now() == pytest.approx(replay.check_s + 7 + 3)
    began = replay.clock.now()
    assert replay.block(CELL, [QUICK], timeout_s=7).results == (hung.fault,)
    assert replay.clock.now() - began == pytest.approx(7 + 3)


def test_a_plan_may_pass_its_check_and_fail_at_other_lengths() -> None:
    fault = Fault("wrong", "out errs at S=3001")
    row = Row(QUICK, (5.0,), CHECKED, unproven=fault)
    replay = ReplayEvaluator(lambda cell, tunables: row, SimulatedClock())
    assert isinstance(replay.check(CELL, QUICK, timeout_s=10), Checked)
    assert replay.validate(CELL, QUICK, timeout_s=10) == fault


# --- machines drawn from a seed --------------------------------------------------------------------------------------

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


# --- first calls -----------------------------------------------------------------------------------------------------


def row(forward: str, backward: str, cold_ms: float) -> tuple[Tunables, Row]:
    tunables = plan(CELL, forward, backward)
    return tunables, Row(tunables, (5.0,), Checked(5.0, 1e-3, 2**20, cold_ms, 20.0))


COLD = Table(
    CELL,
    QUICK,
    dict([row("quick", "quick", 105.0), row("swift", "quick", 3005.0), row("quick", "swift", 8005.0)]),
)


def test_the_first_row_with_a_kernel_paid_for_it() -> None:
    costs = first_calls_of([COLD])
    assert costs.one_off_s == {("swift", "forward"): pytest.approx(3.0), ("swift", "backward"): pytest.approx(8.0)}
    assert costs.new_length_s == {
        ("quick", "forward"): pytest.approx(0.05), ("quick", "backward"): pytest.approx(0.05),
    }  # fmt: skip


def test_loading_is_paid_once_and_a_new_length_in_every_cell() -> None:
    truth = row_of(lambda cell, tunables: 0.0)
    replay = ReplayEvaluator(truth, SimulatedClock(), first_calls=first_calls_of([COLD]), one_off_share=0.5)

    def cold_s(cell: Workload, tunables: Tunables) -> float:
        result = replay.check(cell, tunables, timeout_s=60)
        assert isinstance(result, Checked)
        return result.cold_ms / 1e3 - 0.005

    swift = plan(CELL, "swift", "quick")
    assert cold_s(CELL, swift) == pytest.approx(0.5 * 3.0 + 0.05)
    assert cold_s(CELL, swift) == pytest.approx(0.0)
    assert cold_s(CELL.at(8192), swift) == pytest.approx(0.05)
    began = replay.clock.now()
    replay.validate(CELL, swift, timeout_s=60)
    assert replay.clock.now() - began == pytest.approx(replay.prove_s + 8 * (0.05 + 0.005))


# --- recorded machines -----------------------------------------------------------------------------------------------

RECORDED = sorted((Path(__file__).parents[2] / "data").glob("*.json.gz"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_tables_are_complete_and_say_nothing_of_their_owner(path: Path) -> None:
    text = gzip.decompress(path.read_bytes()).decode()
    assert not [word for word in ("/home/", "/root", "/tmp", "hostname", "serial", "uuid") if word in text]
    assert len(path.read_bytes()) < 100_000
    for table in load_tables(path):
        rows = table.rows
        assert table.default in rows
        assert set(rows) == set(table.space().all_plans() or ())  # every combination of what is varied
        timed = [one for one in rows.values() if one.times_ms]
        default_ms = rows[table.default].median_ms
        assert all(len(one.times_ms) >= 9 or one.median_ms > 5 * default_ms for one in timed)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
@pytest.mark.parametrize("seed", range(2))
def test_recorded_machines_are_tuned_near_their_best_in_a_cells_share(path: Path, seed: int) -> None:
    """The bars over 200 seeds are the business of benchmarks/tuner_regret.py; this is what no seed may miss."""
    tables = load_tables(path)
    regrets = []
    for table in tables:
        clock = SimulatedClock()
        evaluator = ReplayEvaluator(
            truth_of([table]), clock, seed, Trouble(), first_calls=first_calls_of(tables), one_off_share=1 / 20
        )
        search = CellSearch(
            table.space(),
            evaluator,
            Store(None),
            SearchSettings(EFFORTS["standard"], seed),
            NoListener(),
            clock,
            main_dtypes=(table.default.dtype,),
        )
        budget = Budget(8.0, clock)
        assert search.settle(budget.deadline(8.0)) is None
        result = search.run(budget.deadline(8.0))
        assert clock.now() <= 8.0 * 1.15
        assert result.choice is not None
        chosen_ms, default_ms = table.rows[result.choice.tunables].median_ms, table.rows[table.default].median_ms
        assert chosen_ms <= 1.02 * default_ms
        regrets.append(chosen_ms / table.best_ms([table.default.dtype]) - 1)
    assert float(np.median(regrets)) <= 0.02
