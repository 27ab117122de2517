"""A worker that somebody stops while it starts is given up soon, and not after all the time that a start may take."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from machines import FACTS, plan, workload
from patience import LIMIT_S

from autotune.measure.bench import BenchSettings
from autotune.measure.evaluator import Checked
from autotune.measure.worker_evaluator import ATTEMPTS, WorkerEvaluator, WorkerTimeouts
from ringattn.errors import DeviceError

CELL = workload(512, mode="infer")
SOON = WorkerTimeouts(start_s=3600.0, stopped_s=0.5, look_s=0.1)


class StoppedWhileStarting(WorkerEvaluator):
    """Its first ``stops`` workers are stopped before they have said anything."""

    stops = 1

    def _launch(self) -> None:
        super()._launch()
        assert self._process is not None
        if self.starts <= self.stops:
            os.kill(self._process.pid, signal.SIGSTOP)


@pytest.fixture
def evaluator(monkeypatch: pytest.MonkeyPatch) -> StoppedWhileStarting:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support" / "autotune"))
    settings = BenchSettings("cpu", FACTS, seed=0, sample_target_ms=1.0, ragged_lengths=2)
    return StoppedWhileStarting(settings, bench="faulty_bench:FaultyBench", times=SOON)


def test_a_worker_stopped_while_it_starts_is_replaced(evaluator: StoppedWhileStarting) -> None:
    result = evaluator.check(CELL, plan(CELL, "quick"), timeout_s=LIMIT_S)
    evaluator.close()
    assert isinstance(result, Checked)
    assert evaluator.starts == 2


def test_workers_that_are_all_stopped_are_an_error(evaluator: StoppedWhileStarting) -> None:
    evaluator.stops = ATTEMPTS
    with pytest.raises(DeviceError, match=r"did not start: no answer within \d\.\d s: the worker was stopped by a"):
        evaluator.check(CELL, plan(CELL, "quick"), timeout_s=LIMIT_S)
    assert evaluator.starts == ATTEMPTS
