"""Workers beside the measuring one: what they do is as if one had done it, and nothing of them stays."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import FACTS, plan, workload
from patience import LIMIT_S

from autotune.measure.bench import BenchSettings
from autotune.measure.evaluator import Checked, Fault, Proven, Sample
from autotune.measure.pool.pooled_evaluator import PooledEvaluator
from autotune.measure.pool.worker_pool import pool_size
from autotune.measure.worker_evaluator import WorkerBug, WorkerEvaluator
from autotune.space.first_calls import Call
from ringattn.workload import Workload

CELL = workload(512, mode="infer")
SMALL = Workload("train", True, 64, 2, 16, "fp32")
BENCH = "faulty_bench:FaultyBench"
SPLIT = "faulty_bench:ProvingInParts"
CROWDED = "faulty_bench:Crowded"
LAST_CALL_S = 0.5


def settings(device: str = "cpu", ragged_lengths: int = 8) -> BenchSettings:
    return BenchSettings(device, FACTS, seed=0, sample_target_ms=1.0, ragged_lengths=ragged_lengths)


_made: list[PooledEvaluator] = []


def pooled(workers: int = 2, bench: str = BENCH, device: str = "cpu") -> PooledEvaluator:
    _made.append(
        PooledEvaluator(settings(device), workers=workers, bench=bench, pool_bench=bench, last_call_s=LAST_CALL_S)
    )
    return _made[-1]


@pytest.fixture(autouse=True)
def _bench_is_found_and_everything_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support" / "autotune"))
    yield
    while _made:
        _made.pop().close()


@pytest.fixture
def evaluator() -> PooledEvaluator:
    return pooled()


def of(*kernels: str) -> list[Call]:
    return [(CELL.at(512 + number), plan(CELL, kernel)) for number, kernel in enumerate(kernels)]


@pytest.mark.parametrize(
    ("cores", "memory_mib", "host_mib", "workers"),
    [
        (32, 81079, 128000, 8),
        (4, 81079, 128000, 2),
        (32, 24000, 128000, 2),
        (32, 81079, 13000, 3),
        (1, 81079, 128000, 0),
        (64, 4000, 128000, 0),
    ],
)
def test_neither_cores_nor_memory_are_exhausted(cores: int, memory_mib: int, host_mib: int, workers: int) -> None:
    assert pool_size(cores, memory_mib, host_mib) == workers


# --- first calls ------------------------------------------------------------------------------------------------------


def test_all_are_made_whatever_becomes_of_some(evaluator: PooledEvaluator) -> None:
    evaluator.begin_first_calls(of("quick", "segfault", "error", "quick", "swift"))
    note = evaluator.end_first_calls(LIMIT_S)
    assert "2 first calls made ahead failed, one so: " in note
    assert "SIGSEGV" in note or "ValueError" in note
    assert evaluator._pool._calls.empty()
    assert evaluator.starts == 0  # the measuring worker has nothing to do with it


def test_what_hangs_ends_with_the_wait_and_its_worker_is_replaced(evaluator: PooledEvaluator) -> None:
    evaluator.begin_first_calls(of("hang", "quick", "hang"))
    until = time.monotonic() + LIMIT_S
    while not evaluator._pool._calls.empty() and time.monotonic() < until:
        time.sleep(0.05)
    hanging = [h.evaluator._process.pid for h in evaluator._pool._workers if h.evaluator._process is not None]
    assert evaluator.end_first_calls(0.5) == ""
    assert len(evaluator._pool._workers) == 2
    for pid in hanging:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_bug_of_ours_is_raised_where_the_calls_are_waited_for() -> None:
    broken = pooled(1, device="bug-at-start")
    broken.begin_first_calls(of("quick"))
    with pytest.raises(WorkerBug, match="a bug of ours"):
        broken.end_first_calls(LIMIT_S)


def test_an_ended_worker_begins_nothing_more() -> None:
    worker = WorkerEvaluator(settings(), bench=BENCH)
    worker.interrupt()
    assert isinstance(worker.first_call(CELL, plan(CELL, "quick"), timeout_s=LIMIT_S), Fault)
    assert worker.starts == 0


@pytest.mark.parametrize("moment", ["made", "starting"])
def test_a_worker_that_is_ended_while_it_starts_is_not_started_again(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = WorkerEvaluator(settings(), bench=BENCH)
    launch = subprocess.Popen

    def launch_and_end(*arguments: Any, **more: Any) -> Any:
        if moment == "made":
            worker.interrupt()
        else:
            threading.Timer(0.02, worker.interrupt).start()  # it takes longer to import anything
        return launch(*arguments, **more)

    monkeypatch.setattr(subprocess, "Popen", launch_and_end)
    assert isinstance(worker.first_call(CELL, plan(CELL, "hang"), timeout_s=3600.0), Fault)
    assert worker.starts == 1
    assert worker.running_pid is None


def test_a_check_that_lacks_memory_beside_first_calls_is_made_again_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROWD_FOLDER", str(tmp_path))
    made = pooled(2, CROWDED)
    made.begin_first_calls(of(*["hang"] * 5))
    until = time.monotonic() + LIMIT_S
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert isinstance(made.check(CELL, plan(CELL, "quick"), timeout_s=LIMIT_S), Checked)
    assert made.end_first_calls(0.0) == ""
    assert made.validation_workers == 1
    assert made._pool_processes() == ()


def test_a_first_call_is_of_the_real_module() -> None:
    real = PooledEvaluator(settings(), workers=1)
    real.begin_first_calls([(SMALL, plan(SMALL, "math", dtype="fp32"))])
    assert real.end_first_calls(LIMIT_S) == ""
    assert real.validation_workers == 2
    real.close()


# --- proofs -----------------------------------------------------------------------------------------------------------


def started(workers: int, bench: str) -> PooledEvaluator:
    made = pooled(workers, bench)
    made.begin_first_calls(of(*["quick"] * workers))
    until = time.monotonic() + LIMIT_S
    while made.validation_workers <= workers and time.monotonic() < until:
        time.sleep(0.02)
    assert made.end_first_calls(LIMIT_S) == ""
    return made


def test_workers_of_the_pool_that_never_started_are_not_started_for_a_validation(evaluator: PooledEvaluator) -> None:
    assert evaluator.validate(CELL, plan(CELL, "quick"), timeout_s=LIMIT_S) == Proven(2.0)
    assert evaluator.validation_workers == 1


@pytest.mark.usefixtures("fresh_interpreters")  # which end with the thread that started them
def test_the_worker_knows_who_waits_beside_it() -> None:
    """Or their contexts on the GPU would be foreign load."""
    alone = pooled()
    made = started(2, BENCH)
    for evaluator, pool_processes in ((alone, 0.0), (made, 2.0)):
        (sample,) = evaluator.block(CELL, [plan(CELL, "who-else")], timeout_s=LIMIT_S).results
        assert isinstance(sample, Sample)
        assert sample.host_us == pool_processes


def test_a_worker_of_the_pool_that_ended_waits_beside_nobody() -> None:
    """Or a process of somebody else would pass for it, and it for somebody else once it is back."""
    made = started(2, BENCH)
    worker = made._pool._workers[0]
    fault = worker.do(lambda worker: worker.first_call(CELL, plan(CELL, "segfault"), timeout_s=LIMIT_S)).result()
    assert isinstance(fault, Fault)
    assert len(made._pool_processes()) == 1


@pytest.mark.parametrize("wrong_part", [None, 0, 1, 2])
def test_every_length_is_validated_by_somebody(wrong_part: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_PART", "" if wrong_part is None else str(wrong_part))
    made = started(2, SPLIT)
    result = made.validate(CELL, plan(CELL, "quick"), timeout_s=LIMIT_S)
    if wrong_part is None:
        assert result == Proven(2.0)  # of the call that is made afterwards, alone
    else:
        assert result == Fault("wrong", f"WrongAnswer: part {wrong_part} of 3 errs")


def test_what_a_worker_of_the_pool_finds_wrong_is_wrong_whatever_becomes_of_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WRONG_PART", "2")
    made = started(2, SPLIT)
    fault = made.validate(CELL, plan(CELL, "error"), timeout_s=LIMIT_S)
    assert fault == Fault("wrong", "WrongAnswer: part 2 of 3 errs")


def test_a_worker_that_somebody_kills_after_a_validation_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCE_FILE", str(tmp_path / "done"))
    assert started(1, SPLIT).validate(CELL, plan(CELL, "killed-once"), timeout_s=LIMIT_S) == Proven(3.0)


def test_what_a_worker_of_the_pool_has_no_memory_for_is_validated_by_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HELPER_LACKS_MEMORY", "1")
    made = started(2, SPLIT)
    monkeypatch.delenv("HELPER_LACKS_MEMORY")  # for the measuring worker, which starts now
    assert made.validate(CELL, plan(CELL, "quick"), timeout_s=LIMIT_S) == Proven(2.0)


def test_what_the_worker_has_no_memory_for_beside_the_pool_it_validates_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROWD_FOLDER", str(tmp_path))
    assert started(2, CROWDED).validate(CELL, plan(CELL, "quick"), timeout_s=LIMIT_S) == Proven(2.0)


def test_a_worker_of_the_pool_that_the_device_takes_no_more_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = started(2, SPLIT)
    assert made.validate(CELL, plan(CELL, "quick"), timeout_s=LIMIT_S) == Proven(2.0)
    for worker in made._pool._workers:
        assert worker.evaluator._process is not None
        worker.evaluator._process.kill()
        worker.evaluator._process.wait()
    monkeypatch.setenv("NO_DEVICE", "1")
    assert made.validate(CELL, plan(CELL, "quick"), timeout_s=LIMIT_S) == Proven(2.0)
    assert made.validation_workers == 1


def test_the_parts_of_a_validation_are_all_of_its_lengths() -> None:
    real = WorkerEvaluator(settings(ragged_lengths=5))
    try:
        for part in ((0, 2), (1, 2), (7, 9)):
            assert real.validate(SMALL, plan(SMALL, "math", dtype="fp32"), timeout_s=LIMIT_S, part=part) == Proven(0.0)
    finally:
        real.close()


def test_nothing_is_left_of_the_pool() -> None:
    made = started(2, SPLIT)
    pids = [h.evaluator._process.pid for h in made._pool._workers if h.evaluator._process is not None]
    assert len(pids) == 2
    made.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not [t for t in threading.enumerate() if t.name.startswith("ringtune-pool")]
