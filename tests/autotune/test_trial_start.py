"""A worker that somebody stops while it starts costs seconds, and not all the time that a start may take."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from machines import FACTS, plan, workload

from autotune.bench import BenchSettings
from autotune.evaluator import Checked
from autotune.trial import ATTEMPTS, HELD_S, WorkerEvaluator
from ringattn.errors import DeviceError

pytestmark = pytest.mark.alone

CELL = workload(512, mode="infer")


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
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    settings = BenchSettings("cpu", FACTS, seed=0, sample_target_ms=1.0, ragged_lengths=2)
    return StoppedWhileStarting(settings, bench="faulty_bench:FaultyBench")


def test_a_worker_stopped_while_it_starts_is_replaced(evaluator: StoppedWhileStarting) -> None:
    begin = time.monotonic()
    result = evaluator.check(CELL, plan(CELL, "quick"), timeout_s=20.0)
    assert time.monotonic() - begin < 60  # a start may take 120 s
    evaluator.close()
    assert isinstance(result, Checked)
    assert evaluator.starts == 2


def test_workers_that_are_all_stopped_are_an_error(evaluator: StoppedWhileStarting) -> None:
    evaluator.stops = ATTEMPTS
    begin = time.monotonic()
    with pytest.raises(DeviceError, match=r"did not start: no answer within \d\.\d s: the worker was stopped by a"):
        evaluator.check(CELL, plan(CELL, "quick"), timeout_s=20.0)
    assert HELD_S < time.monotonic() - begin < 60
