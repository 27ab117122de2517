"""The worker process: every way a candidate can fail costs one trial, and is told apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import FACTS, plan, workload
from patience import LIMIT_S, patient

from autotune.accuracy.reference_timeout import reference_limit_s
from autotune.measure.bench import BenchSettings, PeerWrong, WrongAnswer
from autotune.measure.evaluator import (
    Cause,
    Checked,
    Fault,
    KernelUnavailable,
    Killed,
    PeerFailed,
    Proven,
    Sample,
    Stopped,
)
from autotune.measure.worker import cause_of, classify, one_line
from autotune.measure.worker_evaluator import LOADING_OF_START, WorkerBug, WorkerEvaluator, WorkerTimeouts
from ringattn.distributed.peer_errors import PeerError
from ringattn.errors import DeviceError, KernelLoadError, PlanError

CELL = workload(512, mode="infer")
BENCH = "faulty_bench:FaultyBench"
LOST = "kernel lost cannot be loaded: lost: import lost: no. Install it"
REPO = Path(__file__).resolve().parents[3]
SUPPORT = REPO / "tests" / "support" / "autotune"
SOON = WorkerTimeouts(stopped_s=0.5, look_s=0.1)


def settings(device: str = "cpu") -> BenchSettings:
    return BenchSettings(device, FACTS, seed=0, sample_target_ms=1.0, ragged_lengths=2)


@pytest.fixture
def evaluator(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerEvaluator]:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    made = WorkerEvaluator(settings(), bench=BENCH, times=SOON)
    yield made
    made.close()


def check(evaluator: WorkerEvaluator, kernel: str, timeout_s: float = LIMIT_S) -> Checked | Fault:
    return evaluator.check(CELL, plan(CELL, kernel), timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("kernel", "kind", "cause", "text", "restarts"),
    [
        ("segfault", "crash", Killed(signal.SIGSEGV), "SIGSEGV", 1),
        ("killed", "crash", Killed(signal.SIGKILL), "SIGKILL", 2),  # the first may have been somebody else's doing
        ("exit", "crash", None, "exit code 3 (the library's last words)", 1),
        ("sticky", "crash", None, "illegal memory access", 1),
        ("oom", "oom", None, "out of memory", 0),
        ("too-much", "oom", None, "", 0),
        ("wrong", "wrong", None, "S=3001, negative inputs", 0),
        ("compile", "compile", None, "unsupported tile", 0),
        ("error", "error", None, "ValueError: several", 0),
        ("unloadable", "error", KernelUnavailable("lost", LOST), LOST, 0),
        ("mentions-kills", "error", None, "SIGKILL", 0),
    ],
)
def test_each_way_to_fail_is_told_apart_and_costs_one_trial(
    evaluator: WorkerEvaluator, kernel: str, kind: str, cause: Cause | None, text: str, restarts: int
) -> None:
    assert isinstance(check(evaluator, "quick"), Checked)
    fault = check(evaluator, kernel)
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.cause) == (kind, cause)
    assert fault.from_outside is (kernel == "killed")
    assert text in fault.message
    assert "\n" not in fault.message
    assert isinstance(check(evaluator, "swift"), Checked)
    assert evaluator.starts == 1 + restarts


@pytest.mark.parametrize("way", ["hang", "segfault", "sticky"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_pass_that_hung_or_crashed_is_told(evaluator: WorkerEvaluator, way: str, direction: str) -> None:
    train = workload(512, mode="train")
    kernels = (way, "quick") if direction == "forward" else ("quick", way)
    evaluator.check(train, plan(train, "quick", "quick"), timeout_s=LIMIT_S)
    fault = evaluator.check(train, plan(train, *kernels), timeout_s=0.5 if way == "hang" else LIMIT_S)
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.direction) == ("timeout" if way == "hang" else "crash", direction)


def test_a_hang_is_ended_and_the_next_candidate_runs(evaluator: WorkerEvaluator) -> None:
    assert isinstance(check(evaluator, "quick"), Checked)
    first_start_s = evaluator.start_s
    fault = check(evaluator, "hang", timeout_s=0.5)
    message = f"no answer within {0.5 + LOADING_OF_START * first_start_s:.1f} s"
    assert fault == Fault("timeout", message, direction="forward")
    assert isinstance(check(evaluator, "quick"), Checked)


def test_what_a_new_process_loads_for_a_kernel_is_no_hang(
    evaluator: WorkerEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the worker that follows one which a hang has cost, and in the midst of a block."""
    limit_s = patient(0.5)
    monkeypatch.setenv("LOAD_S", str(2 * limit_s))
    monkeypatch.setattr("autotune.measure.worker_evaluator.LOADING_OF_START", 1e4)
    for _ in range(2):
        assert isinstance(check(evaluator, "loads", timeout_s=limit_s), Checked)
        assert evaluator.running_pid is not None
        os.kill(evaluator.running_pid, signal.SIGKILL)
    plans = [plan(CELL, kernel) for kernel in ("loads", "segfault", "loads")]
    first, fault, last = evaluator.block(CELL, plans, timeout_s=limit_s).results
    assert first == last == Sample(5.0, 10.0)
    assert isinstance(fault, Fault)
    assert fault.kind == "crash"


@pytest.mark.parametrize("kernel", ["stopped", "stopped-at-reference"])
def test_a_stopped_worker_is_noticed_long_before_its_time_is_over(evaluator: WorkerEvaluator, kernel: str) -> None:
    """Also while it works on the reference."""
    assert isinstance(check(evaluator, "quick"), Checked)
    fault = check(evaluator, kernel, timeout_s=3600.0)
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.cause, fault.ended_from_outside) == ("timeout", Stopped(), True)
    assert fault.message.endswith(": the worker was stopped by a signal")
    assert ("at work on the reference" in fault.message) is (kernel == "stopped-at-reference")
    assert isinstance(check(evaluator, "swift"), Checked)


@pytest.mark.parametrize("kernel", ["killed-once", "stopped-once"])
def test_one_strike_from_outside_costs_its_candidate_nothing(
    evaluator: WorkerEvaluator, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCE_FILE", str(tmp_path / "done"))
    result = check(evaluator, kernel)
    assert isinstance(result, Checked)
    assert result.call_ms == 3.0
    (tmp_path / "done").unlink()
    plans = [plan(CELL, name) for name in ("quick", kernel, "swift")]
    samples = evaluator.block(CELL, plans, timeout_s=LIMIT_S).results
    assert [sample.ms for sample in samples if isinstance(sample, Sample)] == [2.0, 3.0, 1.0]
    assert evaluator.starts >= 3


def test_a_reference_may_take_as_long_as_its_work() -> None:
    def limit(seq_len: int, device: str = "cpu", *, gradients: bool = True) -> float:
        return reference_limit_s(workload(seq_len), device, gradients=gradients, first=False)

    assert limit(64) < 1
    assert 10 < limit(16384) < 600
    assert limit(16384, "cuda:0") < limit(16384)
    assert limit(16384, gradients=False) < limit(16384) / 10
    assert reference_limit_s(workload(64), "cpu", gradients=True, first=True) >= 5  # something has to be loaded


def test_an_oom_that_the_others_caused_is_tried_again_alone(evaluator: WorkerEvaluator) -> None:
    result = check(evaluator, "oom-once")
    assert isinstance(result, Checked)
    assert result.call_ms == 4.0


def test_a_block_goes_on_after_a_candidate_that_kills_the_worker(evaluator: WorkerEvaluator) -> None:
    kernels = ["quick", "segfault", "swift", "sticky", "wrong", "hang", "quick"]
    block = evaluator.block(CELL, [plan(CELL, kernel) for kernel in kernels], timeout_s=patient(3.0))
    kinds = [r.kind if isinstance(r, Fault) else r.ms for r in block.results]
    assert kinds == [2.0, "crash", 1.0, "crash", "wrong", "timeout", 2.0]
    assert block.disturbances == ()
    assert evaluator.starts == 4


def test_a_block_times_a_plan_as_often_as_it_is_named(evaluator: WorkerEvaluator) -> None:
    block = evaluator.block(CELL, [plan(CELL, "quick")] * 2, timeout_s=LIMIT_S)
    assert block.results == (Sample(2.0, 10.0), Sample(2.0, 10.0))


def test_a_proof_passes_or_says_what_broke_it(evaluator: WorkerEvaluator) -> None:
    assert evaluator.validate(CELL, plan(CELL, "quick"), timeout_s=LIMIT_S) == Proven(2.0)
    fault = evaluator.validate(CELL, plan(CELL, "wrong"), timeout_s=LIMIT_S)
    assert isinstance(fault, Fault)
    assert fault.kind == "wrong"


def test_a_worker_killed_between_two_requests_is_nobodys_fault(evaluator: WorkerEvaluator) -> None:
    first = check(evaluator, "quick")
    assert isinstance(first, Checked)
    os.kill(int(first.host_us), signal.SIGKILL)  # the bench says its process id there
    time.sleep(0.2)
    assert isinstance(check(evaluator, "quick"), Checked)
    assert evaluator.starts == 2


def test_a_bug_of_ours_is_raised_and_never_recorded_as_a_candidates(evaluator: WorkerEvaluator) -> None:
    with pytest.raises(WorkerBug, match="a bug of ours"):
        check(evaluator, "bug")


def test_a_worker_that_cannot_start_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    with pytest.raises(WorkerBug, match="ZeroDivisionError"):
        WorkerEvaluator(settings("bug-at-start"), bench=BENCH).check(CELL, plan(CELL), timeout_s=LIMIT_S)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DeviceError, match="did not start"):
        WorkerEvaluator(settings(), bench=BENCH).check(CELL, plan(CELL), timeout_s=LIMIT_S)


def test_unmonitored_of_the_bench_are_known_here(evaluator: WorkerEvaluator) -> None:
    check(evaluator, "quick")
    assert evaluator.unmonitored == ("nothing is watched here",)


def test_closing_ends_the_process(evaluator: WorkerEvaluator) -> None:
    result = check(evaluator, "quick")
    assert isinstance(result, Checked)
    evaluator.close()
    assert not _alive(int(result.host_us))


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_an_interrupt_does_not_wait_for_a_worker_at_work(
    monkeypatch: pytest.MonkeyPatch, evaluator: WorkerEvaluator
) -> None:
    assert isinstance(check(evaluator, "quick"), Checked)
    process, connection = evaluator._process, evaluator._connection
    assert process is not None
    assert connection is not None

    def interrupt(_: WorkerEvaluator) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkerEvaluator, "_is_stopped", interrupt)
    with pytest.raises(KeyboardInterrupt):
        check(evaluator, "hang")

    def send(request: object) -> None:
        raise AssertionError(f"{request}: it would be read in an hour")

    monkeypatch.setattr(connection, "send", send)
    evaluator.close()
    assert process.returncode == -signal.SIGKILL


PARENT = """
    import sys
    sys.path[:0] = {path!r}
    from test_worker_evaluator import BENCH, CELL, settings
    from machines import plan
    from autotune.measure.worker_evaluator import WorkerEvaluator
    WorkerEvaluator(settings(), bench=BENCH).check(CELL, plan(CELL, "late-orphan"), timeout_s={limit})
"""


def test_the_worker_dies_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = textwrap.dedent(PARENT).format(path=sys.path, limit=LIMIT_S)
    environ = os.environ | {
        "ORPHAN_FILE": str(told),
        "PYTHONPATH": str(SUPPORT),
    }
    parent = subprocess.Popen([sys.executable, "-c", code], env=environ)
    try:
        _wait_for(lambda: told.exists() and told.read_text() != "")
    finally:
        parent.kill()
        parent.wait()
    _wait_for(lambda: not _alive(int(told.read_text())))


def _wait_for(condition, limit_s: float = LIMIT_S) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("error", "kind", "usable"),
    [
        (MemoryError(), "oom", True),
        (RuntimeError("CUDA error: out of memory"), "oom", True),
        (RuntimeError("CUDA error: device-side assert triggered"), "crash", False),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), "crash", False),
        (RuntimeError("shapes do not match"), "error", True),
    ],
)
def test_exceptions_are_classified_by_what_can_be_done_after_them(error: Exception, kind: str, usable: bool) -> None:
    assert classify(error) == (kind, usable)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (PeerError("rank 2 failed: ValueError: no"), PeerFailed()),
        (PeerWrong("rank 2: out errs"), PeerFailed()),
        (WrongAnswer("PeerError: out errs"), None),
        (KernelLoadError("lost", "import lost: no", "Install it"), KernelUnavailable("lost", LOST)),
        (PlanError(f"PlanError: {LOST}", {}), None),
    ],
)
def test_causes_are_read_off_the_type_of_an_exception_and_never_off_its_words(
    error: Exception, cause: Cause | None
) -> None:
    assert cause_of(error) == cause


def test_messages_are_one_bounded_line() -> None:
    assert one_line(ValueError("\n\n  first \nsecond")) == "ValueError: first"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(one_line(ValueError("x" * 10_000))) == 300
