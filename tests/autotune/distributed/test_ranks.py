"""Two ranks asked as one, on CPUs: each way in which one of them can fail costs one trial, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_rank_bench import SLOW_MS
from machines import FACTS, plan, workload
from patience import LIMIT_S, patient

from autotune.distributed import coordinator as coordinating
from autotune.distributed.coordinator import Coordinator
from autotune.distributed.evaluator import RanksEvaluator
from autotune.distributed.first_calls import calls_on_one_rank
from autotune.distributed.protocol import Hello, accept, connect, listen
from autotune.exit_codes import NoDevice, ProbeFailure, UsageFailure
from autotune.measure.bench import BenchSettings
from autotune.measure.evaluator import CallsAhead, Checked, Fault, Interference, InterferenceKind, Proven, Sample
from autotune.measure.messages import REAL_BENCH
from autotune.measure.worker_evaluator import WorkerBug
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload

CELL = workload(512, mode="infer")
BENCH = "faulty_rank_bench:FaultyRankBench"
REPO = Path(__file__).resolve().parents[3]
SUPPORT = REPO / "tests" / "support" / "autotune"
HANG_S = patient(3.0)  # for what hangs, which is waited for; beside it everything else has to answer


def evaluator_of(coordinator: Coordinator, bench: str = BENCH) -> RanksEvaluator:
    settings = BenchSettings("cpu", FACTS, seed=0, sample_target_ms=1.0, ragged_lengths=2)
    return RanksEvaluator(coordinator, settings, bench=bench)


@pytest.fixture
def evaluator(coordinator: Coordinator) -> Iterator[RanksEvaluator]:
    made = evaluator_of(coordinator)
    yield made
    made.close()


def check(evaluator: RanksEvaluator, kernel: str, timeout_s: float = LIMIT_S) -> Checked | Fault:
    return evaluator.check(CELL, plan(CELL, kernel), timeout_s=timeout_s)


def test_the_slowest_rank_counts(evaluator: RanksEvaluator) -> None:
    result = check(evaluator, "slow@1")
    assert isinstance(result, Checked)
    assert result.call_ms == SLOW_MS
    assert evaluator.validate(CELL, plan(CELL, "slow@0"), timeout_s=LIMIT_S) == Proven(SLOW_MS)
    block = evaluator.block(CELL, [plan(CELL, "slow@1"), plan(CELL, "quick")], timeout_s=LIMIT_S)
    assert block.results == (Sample(SLOW_MS, 10.0), Sample(2.0, 10.0))
    heat = {Interference(kind) for kind in (InterferenceKind.THERMAL, InterferenceKind.POWER_BRAKE)}
    assert set(block.disturbances) == {Interference(InterferenceKind.STEAL, 11.0), *heat}
    assert evaluator.unmonitored == ("nothing is watched here",)
    speed = evaluator.links()
    assert (speed.world, speed.hosts, speed.ring_gb_s, speed.latency_us) == (2, 1, 3.36, 10.0)


@pytest.mark.parametrize(
    ("kernel", "kind", "told", "restarts"),
    [
        ("segfault@1", "crash", "rank 1: the worker was killed by SIGSEGV", True),
        ("late-hang@1", "timeout", "rank 1: no answer within ", True),
        ("wrong@1", "wrong", "rank 1: WrongAnswer: out errs by 3e-01; S=3001", False),
        ("killed@1", "crash", "rank 1: the worker was killed by SIGKILL", True),
    ],
)
def test_a_failure_of_one_rank_is_one_trial_and_names_it(
    evaluator: RanksEvaluator, coordinator: Coordinator, kernel: str, kind: str, told: str, restarts: bool
) -> None:
    before = coordinator.new_generation()
    fault = check(evaluator, kernel, timeout_s=HANG_S if "hang" in kernel else 3600.0)  # which nobody waits for
    assert isinstance(fault, Fault)
    assert fault.kind == kind
    assert fault.message.startswith(told)
    assert isinstance(check(evaluator, "swift"), Checked)
    assert (coordinator.new_generation() > before + 2) is restarts


def test_a_block_goes_on_after_each_failure(evaluator: RanksEvaluator) -> None:
    kernels = ["quick", "error@1", "swift", "wrong@0", "slow@0"]
    block = evaluator.block(CELL, [plan(CELL, kernel) for kernel in kernels], timeout_s=LIMIT_S)
    kinds = [r.kind if isinstance(r, Fault) else r.ms for r in block.results]
    assert kinds == [2.0, "error", 1.0, "wrong", SLOW_MS]


def test_a_worker_killed_between_two_calls_is_nobodys_fault(evaluator: RanksEvaluator) -> None:
    first = check(evaluator, "quick")
    assert isinstance(first, Checked)
    os.kill(int(first.host_us), signal.SIGKILL)  # the larger of the two process ids
    time.sleep(0.2)
    assert isinstance(check(evaluator, "quick"), Checked)


def test_an_oom_that_earlier_calls_caused_is_tried_again_with_new_workers(evaluator: RanksEvaluator) -> None:
    assert isinstance(check(evaluator, "quick"), Checked)
    fault = check(evaluator, "oom")
    assert isinstance(fault, Fault)
    assert fault.kind == "oom"
    assert fault.message.startswith("ranks 0, 1: RuntimeError: CUDA out of memory")


def test_a_bug_of_ours_is_raised_with_its_rank(evaluator: RanksEvaluator) -> None:
    with pytest.raises(WorkerBug, match=r"(?s)rank 1:.*a bug of ours"):
        check(evaluator, "bug@1")


# --- first calls -------------------------------------------------------------------------------------------------


def test_first_calls_of_ranks_are_made_by_processes_of_one(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))  # the pool's processes find the bench there
    settings = BenchSettings("cpu", FACTS, seed=0, sample_target_ms=1.0, ragged_lengths=2)
    made = RanksEvaluator(coordinator, settings, workers=1, bench=BENCH, pool_bench="faulty_bench:FaultyBench")
    over_ranks = replace(CELL, world=2)
    good, bad = ((over_ranks, plan(over_ranks, kernel, schedule="ring")) for kernel in ("quick", "segfault"))
    try:
        assert isinstance(made, CallsAhead)
        made.begin_first_calls([good, bad])
        until = time.monotonic() + LIMIT_S
        while made.unfinished_calls() and time.monotonic() < until:
            made.wait_for_first_call(LIMIT_S)
        (call, fault), *others = made.failed_calls().items()
        assert (call, fault.kind, others) == (bad, "crash", [])
        assert made.end_first_calls(LIMIT_S).startswith("1 first call made ahead failed, one so: crash")
    finally:
        made.close()


def test_one_rank_compiles_what_a_call_of_ranks_does() -> None:
    over_ranks = Workload("train", True, 512, 8, 64, "bf16", 2, world=2, total_length=1000)
    alone = replace(over_ranks, world=1, total_length=0)
    options: dict[str, object] = {"params": (("quick.block", 64),), "layout": "contiguous", "checkpoint": "none"}
    own = plan(alone, "quick", params=options["params"])
    heads = plan(over_ranks, "quick", schedule="ulysses", exchange="symmetric", head_groups=2, **options)
    assert calls_on_one_rank((over_ranks, heads)) == ((alone, own),)
    rows = plan(over_ranks, "quick", schedule="ring", **options)
    assert calls_on_one_rank((over_ranks, rows)) == ((alone, own), (replace(alone, causal=False), own))


# --- the real bench ----------------------------------------------------------------------------------------------


def ring_plan(cell: Workload, schedule: str, layout: str, **changes: object) -> Tunables:
    branches = tuple(BranchTunables("flash-cpu", "flash-cpu") for _ in cell.pattern.resolved(cell.seq_len))
    return Tunables("fp32", branches, schedule=schedule, layout=layout, **changes)  # type: ignore[arg-type]


def test_real_ranks_check_prove_and_time_every_schedule_in_step(coordinator: Coordinator) -> None:
    evaluator = evaluator_of(coordinator, REAL_BENCH)
    evaluator._settings = BenchSettings("cpu", coordinator.facts, seed=0, sample_target_ms=1.0, ragged_lengths=2)
    assert evaluator.links().ring_gb_s > 0
    dense = Workload("train", True, 96, 2, 16, "fp32", world=2)
    dilated = Workload("train", True, 96, 2, 16, "fp32", world=2, pattern=Pattern.of([64, 128], [1, 2]))
    try:
        for cell, layout in ((dense, "zigzag"), (dilated, "contiguous")):
            plans = [ring_plan(cell, schedule, layout) for schedule in ("ring", "all-gather", "ulysses")]
            for each in plans:
                checked = evaluator.check(cell, each, timeout_s=LIMIT_S)
                assert isinstance(checked, Checked), checked
                assert 0 < checked.error < 1e-5
                proven = evaluator.validate(cell, each, timeout_s=LIMIT_S)  # all kinds of inputs, unequal shares
                assert isinstance(proven, Proven), proven
            block = evaluator.block(cell, [*plans, plans[0]], timeout_s=LIMIT_S)
            assert all(isinstance(sample, Sample) for sample in block.results), block
        refused = evaluator.check(dense, ring_plan(dense, "ulysses", "zigzag", grad_wire="compute"), timeout_s=LIMIT_S)
        assert isinstance(refused, Fault)
        assert refused.message.startswith("ranks 0, 1: PlanError")
    finally:
        evaluator.close()


def test_a_wrong_row_on_one_rank_is_a_wrong_answer_of_all_and_they_stay_in_step(coordinator: Coordinator) -> None:
    evaluator = evaluator_of(coordinator, "still_bench:OneRankErrs")
    evaluator._settings = BenchSettings("cpu", coordinator.facts, seed=0, sample_target_ms=1.0, ragged_lengths=2)
    cell = Workload("infer", True, 96, 2, 16, "fp32", world=2)
    try:
        for schedule in ("ring", "ulysses"):
            tunables = replace(ring_plan(cell, schedule, "zigzag"), branches=(BranchTunables("flash-cpu"),))
            fault = evaluator.check(cell, tunables, timeout_s=LIMIT_S)
            assert isinstance(fault, Fault)
            assert fault.kind == "wrong"
            assert fault.message.startswith("rank 1: WrongAnswer: out ")
            assert "S=192, ordinary inputs" in fault.message
            assert evaluator._in_step
    finally:
        evaluator.close()


# --- processes that go -------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def ended(pids: list[int], within_s: float = LIMIT_S) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_a_rank_that_is_lost_ends_the_probe_with_its_name() -> None:
    environ = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    with Coordinator(2, "cpu", None, environ) as coordinator:
        evaluator = evaluator_of(coordinator)
        worker = check(evaluator, "quick")
        assert isinstance(worker, Checked)
        relays = [child.pid for child in coordinator._children]
        os.kill(relays[1], signal.SIGKILL)
        with pytest.raises(ProbeFailure, match="rank 1 is lost"):
            check(evaluator, "quick")
    assert ended([*relays, int(worker.host_us)])


COORDINATOR = """
    import os, sys
    sys.path[:0] = {path!r}
    os.environ["PYTHONPATH"] = {tests!r}
    from test_ranks import CELL, evaluator_of
    from machines import plan
    from autotune.distributed.coordinator import Coordinator
    coordinator = Coordinator(2, "cpu", None, os.environ)
    evaluator = evaluator_of(coordinator)
    checked = evaluator.check(CELL, plan(CELL, "quick"), timeout_s={limit})
    print(int(checked.host_us), *(child.pid for child in coordinator._children), flush=True)
    evaluator.check(CELL, plan(CELL, "hang"), timeout_s={limit})
"""


def test_nobody_outlives_a_coordinator_that_is_killed() -> None:
    code = textwrap.dedent(COORDINATOR).format(path=sys.path, tests=str(SUPPORT), limit=LIMIT_S)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        pids = [int(word) for word in coordinator.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(alive, pids))
        coordinator.kill()
    assert ended(pids)


# --- gathering ---------------------------------------------------------------------------------------------------


def test_ranks_that_differ_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a host with other versions would say it."""
    real = coordinating._received

    def other_torch(link, who):  # type: ignore[no-untyped-def]
        message = real(link, who)
        if isinstance(message, Hello) and message.rank == 1:
            software = tuple(sorted({**dict(message.facts.software), "torch": "1.0"}.items()))
            message = replace(message, facts=replace(message.facts, software=software))
        return message

    monkeypatch.setattr(coordinating, "_received", other_torch)
    with pytest.raises(UsageFailure, match=r"torch is .* on rank 0 and 1\.0 on rank 1; .*same versions"):
        Coordinator(2, "cpu", None, os.environ)


def test_a_rank_without_its_device_is_named() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("every rank has a GPU here")
    with pytest.raises(NoDevice, match=r"rank [01]: device is 'cuda"):
        Coordinator(2, "cuda", None, os.environ)


def test_a_stranger_is_not_let_in() -> None:
    with listen("127.0.0.1") as server:
        let_in = []
        thread = threading.Thread(target=lambda: let_in.append(accept(server, b"right", 10)))
        thread.start()
        with pytest.raises(OSError):
            connect("127.0.0.1", server.getsockname()[1], b"wrong", 10)
        thread.join()
        assert let_in == [None]
        assert accept(server, b"right", 0.05) is None
