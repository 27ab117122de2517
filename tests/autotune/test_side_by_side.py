"""Steps in threads: never more than asked for, and no failure is lost."""

from __future__ import annotations

import threading
import time

import pytest
from machines import LONGNET

from autotune import benchmark
from autotune.benchmark import BenchSettings, DeviceBench, WrongAnswer, proving_inputs
from autotune.side_by_side import SideBySide
from ringattn import detect
from ringattn.workload import BranchTunables, Tunables, Workload


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_as_asked_for_and_each_once(count: int) -> None:
    lock, running, most, done = threading.Lock(), 0, 0, []

    def step(number: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
            done.append(number)

    with SideBySide(count) as threads:
        for number in range(10):
            threads.run(step, number)
    assert sorted(done) == list(range(10))
    assert most == count


def test_a_failure_is_raised_when_the_others_are_done() -> None:
    done = []

    def step(number: int) -> None:
        if number == 0:
            raise ValueError("first")
        time.sleep(0.02)
        done.append(number)

    def all_of_them() -> None:
        with SideBySide(4) as threads:
            for number in range(4):
                threads.run(step, number)

    with pytest.raises(ValueError, match="first"):
        all_of_them()
    assert sorted(done) == [1, 2, 3]


def test_an_error_of_whoever_starts_them_goes_first() -> None:
    def fails() -> None:
        with SideBySide(2) as threads:
            threads.run(lambda: time.sleep(0.01))
            raise KeyError("outside")

    with pytest.raises(KeyError):
        fails()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> DeviceBench:
    """Proofs on the CPU in three threads, as a GPU has them."""
    monkeypatch.setattr(DeviceBench, "_device_threads", lambda self, workload: 3)
    monkeypatch.setattr(DeviceBench, "_in_thread", lambda self, *args: self._answer(*args) and None)
    return DeviceBench(BenchSettings(device="cpu", facts=detect("cpu"), seed=1, sample_target_ms=1.0, ragged_lengths=5))


CELL = Workload("train", True, 96, 2, 16, "fp32", pattern=LONGNET)
PLAN = Tunables("fp32", tuple(BranchTunables("math", "math") for _ in LONGNET.branches))


def test_a_proof_in_threads_is_a_proof(bench: DeviceBench) -> None:
    phases: list[str] = []
    assert bench.prove(CELL, PLAN, phases.append).first_call_ms > 0
    assert phases.count("candidate") == 5


def test_a_wrong_answer_in_a_thread_names_its_input(bench: DeviceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_length, kind = proving_inputs(CELL, 5, 1)[2]
    right = benchmark._results

    def results(module, inputs, train):  # type: ignore[no-untyped-def]
        out, lse, grads = right(module, inputs, train)
        return (out + 1 if inputs.q.shape[1] == wrong_length else out), lse, grads

    monkeypatch.setattr(benchmark, "_results", results)
    with pytest.raises(WrongAnswer, match=f"out errs by .*S={wrong_length}, {kind} inputs, seed 1"):
        bench.prove(CELL, PLAN, lambda name: None)
