"""What a bench measures on a real device (the CPU), and what it notices of the machine around it."""

from __future__ import annotations

import math
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import LIMIT_S
from torch import Tensor

from autotune.accuracy import references
from autotune.accuracy.inputs import validation_inputs
from autotune.measure import benchmark, module_calls
from autotune.measure import interference as health
from autotune.measure.benchmark import BenchSettings, DeviceBench, Runner, WrongAnswer
from autotune.measure.evaluator import Interference, InterferenceKind
from autotune.measure.interference import (
    HostReading,
    cpu_seconds,
    host_disturbances,
    throttle_reasons,
)
from autotune.measure.launch_overhead import flushes_for, sample_ms
from autotune.measure.module_calls import settled
from autotune.measure.rank_agreement import SingleRank
from autotune.measure.stopwatch import Stopwatch
from autotune.measure.timers import FEWEST, CudaTimer, HostTimer, Reading, cpu_peak_bytes
from autotune.measure.worker_evaluator import WorkerEvaluator
from ringattn import detect
from ringattn.planning import self_check
from ringattn.runtime.graphed import CALLS_BEFORE_REPLAY
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload

DILATED = Pattern.of([64, 128], [1, 2])
CELL = Workload("train", True, 200, 2, 32, "fp32", pattern=DILATED)
MIB = 2**20


def plan(kernel: str = "flash-cpu", cell: Workload = CELL, **changes: object) -> Tunables:
    back = kernel if cell.train else ""
    branches = tuple(
        BranchTunables(kernel, back, "copy" if branch.rate > 1 else "view")
        for branch in cell.pattern.resolved(cell.seq_len)
    )
    return Tunables(cell.dtype, branches, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bench() -> DeviceBench:
    settings = BenchSettings("cpu", detect("cpu"), seed=0, sample_target_ms=1.0, ragged_lengths=3)
    return DeviceBench(settings)


def test_the_passes_of_the_first_call_are_told_apart(bench: DeviceBench) -> None:
    for cell in (CELL, replace(CELL, mode="infer")):
        phases: list[str] = []
        bench.check(cell, plan(cell=cell), phases.append, None)
        passes = ["forward", "backward"] if cell.train else ["forward"]
        assert phases[-len(passes) - 1 :] == [*passes, "candidate"]


def no_phase(name: str) -> None:
    pass


# --- the real bench --------------------------------------------------------------------------------------------------


def test_a_right_plan_is_checked_proven_and_timed(bench: DeviceBench) -> None:
    checked = bench.check(CELL, plan(), no_phase, None)
    assert 0 < checked.error < 1e-5
    assert checked.call_ms > 0
    assert checked.cold_ms > 0
    # out, dq, dk and dv at least, 200 x 2 x 32 floats each
    assert checked.peak_bytes >= 4 * 200 * 2 * 32 * 4
    assert bench.validate(CELL, plan(), no_phase).first_call_ms > 0
    bench.begin_block()
    sample = bench.sample(CELL, plan())
    assert sample.ms > 0
    assert isinstance(bench.end_block(), tuple)


def test_a_candidate_is_held_against_float64_by_the_bench_alone(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime's own check would run kernels within what is measured as a first call."""
    monkeypatch.setattr(self_check, "check_all", lambda *arguments: pytest.fail("checked twice"))
    cell = replace(CELL, seq_len=150)
    bench.check(cell, plan(cell=cell), no_phase, None)
    bench.validate(cell, plan(cell=cell), no_phase)
    bench.first_call(cell, plan(cell=cell))


def test_inference_holds_less_than_training(bench: DeviceBench) -> None:
    infer = replace(CELL, mode="infer")
    lean = bench.check(infer, plan(cell=infer), no_phase, None)
    full = bench.check(CELL, plan(), no_phase, None)
    assert lean.peak_bytes < full.peak_bytes


def test_peak_memory_is_exact_and_the_same_every_time(bench: DeviceBench) -> None:
    def two_buffers() -> None:
        one = torch.empty(MIB, dtype=torch.uint8)
        other = torch.empty(2 * MIB, dtype=torch.uint8)
        del one, other
        torch.empty(MIB, dtype=torch.uint8)

    peaks = {cpu_peak_bytes(two_buffers) for _ in range(3)}
    assert len(peaks) == 1
    assert peaks.pop() == pytest.approx(3 * MIB, abs=4096)


def test_a_pool_counts_as_memory_that_stays(bench: DeviceBench) -> None:
    cell = replace(CELL, seq_len=2000)
    bare = bench.check(cell, plan(cell=cell), no_phase, None)
    pooled = bench.check(cell, plan(cell=cell, pool_threshold_mib=0), no_phase, None)
    assert pooled.peak_bytes >= bare.peak_bytes


@pytest.mark.parametrize("length_is_ragged", [False, True])
def test_a_wrong_plan_is_caught_with_the_input_that_broke_it(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch, length_is_ragged: bool
) -> None:
    """Wrong at the cell's own length, or only at another: as public kernels are."""
    real = benchmark.results_of

    def wrong(module, inputs, train, *rest):  # type: ignore[no-untyped-def]
        out, lse, grads = real(module, inputs, train, *rest)
        if (inputs.q.shape[1] != CELL.seq_len) is length_is_ragged:
            out = out.clone()
            out[:, 0] += 1.0
            out[:, -1] += 1.0
            out[:, 5:] *= 1.1
        return out, lse, grads

    monkeypatch.setattr(benchmark, "results_of", wrong)
    if length_is_ragged:
        bench.check(CELL, plan(), no_phase, None)
        with pytest.raises(WrongAnswer, match=r"out (errs|has a row).*S=\d+, \w+ inputs, seed 0"):
            bench.validate(CELL, plan(), no_phase)
    else:
        with pytest.raises(WrongAnswer, match="S=200, ordinary inputs, seed 0"):
            bench.check(CELL, plan(), no_phase, None)


def test_a_slow_candidate_is_let_go_after_a_first_look(bench: DeviceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    real = DeviceBench._check_against_reference

    def counting(self, module, workload, tunables, length, kind, phase):  # type: ignore[no-untyped-def]
        kinds.append(kind)
        return real(self, module, workload, tunables, length, kind, phase)

    monkeypatch.setattr(DeviceBench, "_check_against_reference", counting)
    bench.release_all()
    bench.check(CELL, plan("math"), no_phase, pace_ms=1e-6)
    assert not bench._runners  # not warmed up
    bench.check(CELL, plan("math"), no_phase, pace_ms=1e6)
    assert (CELL, plan("math")) in bench._runners
    assert kinds == ["ordinary"] * 2


def test_a_proof_is_at_the_cell_s_own_length_too_with_adversarial_inputs(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[tuple[int, str]] = []

    def looking(self, module, workload, tunables, length, kind, phase):  # type: ignore[no-untyped-def]
        looked_at.append((length, kind))
        return 0.0, 0.0

    monkeypatch.setattr(DeviceBench, "_check_against_reference", looking)
    bench.validate(CELL, plan(), no_phase)
    lengths = bench.settings.ragged_lengths
    assert looked_at == [(CELL.seq_len, "negative"), *validation_inputs(CELL, lengths, bench.settings.seed)]
    for parts in (2, 3):
        looked_at.clear()
        for part in range(parts):
            bench.validate(CELL, plan(), no_phase, (part, parts))
        assert len(looked_at) == 1 + lengths
    for part in range(1 + lengths):  # one each, where there are so many processes
        looked_at.clear()
        bench.validate(CELL, plan(), no_phase, (part, 1 + lengths))
        assert len(looked_at) == 1


def test_the_reference_is_worked_out_once_for_all_candidates(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = replace(CELL, seq_len=190)
    bench.check(cell, plan(cell=cell), no_phase, None)

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("worked out again")

    monkeypatch.setattr(references, "compute_rows", never)
    monkeypatch.setattr(references, "expect", never)
    bench.check(cell, plan("math", cell), no_phase, None)
    infer = replace(cell, mode="infer")
    bench.check(infer, plan(cell=infer), no_phase, None)


def test_samples_repeat_short_calls_until_they_are_long_enough(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_is_busy", lambda: False)  # samples are longer beside others
    bench.check(CELL, plan(), no_phase, None)
    counted = 0
    runner = bench._runner(CELL, plan())

    def counting() -> None:
        nonlocal counted
        counted += 1

    runner.call = counting
    runner.call_ms = 0.25
    bench.sample(CELL, plan())
    assert counted == 4  # to reach the sample target of 1 ms
    counted, runner.call_ms = 0, 50.0
    bench.sample(CELL, plan())
    assert counted == 1
    bench.release_all()  # the others have a runner of their own


def test_candidates_used_longest_ago_make_room(bench: DeviceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "RUNNERS_KEPT", 2)
    bench.release_all()
    plans = [plan(), plan("math"), plan(pattern_cache=False)]
    for tunables in plans:
        bench.sample(CELL, tunables)
    assert list(bench._runners) == [(CELL, plans[1]), (CELL, plans[2])]


def test_with_varied_lengths_a_first_call_counts_in_every_sample() -> None:
    settings = BenchSettings("cpu", detect("cpu"), 0, 1.0, 2, varied_lengths=True)
    varied = DeviceBench(settings)
    varied.check(CELL, plan(), no_phase, None)
    assert varied._first_calls[CELL, plan()] > 0
    varied._first_calls[CELL, plan()] = 32_000.0
    assert varied.sample(CELL, plan()).ms > 1000


def test_a_narrower_compute_dtype_runs_as_itself(bench: DeviceBench) -> None:
    narrow = replace(plan(), dtype="bf16")
    checked = bench.check(CELL, narrow, no_phase, None)
    assert 1e-4 < checked.error < 3e-2


def test_the_worker_runs_the_real_bench() -> None:
    settings = BenchSettings("cpu", detect("cpu"), 0, 1.0, 1)
    evaluator = WorkerEvaluator(settings)
    try:
        checked = evaluator.check(CELL, plan(), timeout_s=LIMIT_S)
        assert not hasattr(checked, "kind"), checked
        block = evaluator.block(CELL, [plan(), plan("math"), plan()], timeout_s=LIMIT_S)
        assert all(getattr(result, "ms", 0) > 0 for result in block.results)
    finally:
        evaluator.close()


# --- the machine around it -------------------------------------------------------------------------------------------

STAT = """cpu  100 0 100 1000 0 0 0 50 0 0
cpu0 60 1 39 500 0 5 6 30 0 0
cpu1 40 0 61 500 0 0 0 20 0 0
cpu10 9999 0 0 0 0 0 0 0 0 0
intr 1 2 3
"""


def test_only_the_cpus_we_may_use_are_counted() -> None:
    assert cpu_seconds(STAT, frozenset({0}), 100) == (1.11, 0.30)
    assert cpu_seconds(STAT, frozenset({0, 1}), 100) == (2.12, 0.50)


def reading(
    at_s: float, busy: float = 0.0, steal: float = 0.0, own: float = 0.0, throttled: float = 0.0
) -> HostReading:
    return HostReading(at_s, busy, steal, own, throttled)


@pytest.mark.parametrize(
    ("after", "kind", "percent"),
    [
        (reading(1.0, busy=2.0, own=2.0), None, 0),  # both CPUs busy, with us
        (reading(1.0, busy=1.9, own=1.0), InterferenceKind.FOREIGN_LOAD, 45),
        (reading(1.0, busy=1.2, own=1.0), None, 0),  # a tenth is what any machine does
        (reading(1.0, busy=1.0, own=1.0, steal=0.5), InterferenceKind.STEAL, 25),
        (reading(1.0, busy=1.0, own=1.0, throttled=0.3), InterferenceKind.QUOTA, 30),
        (reading(0.05, busy=0.1, own=0.0), None, 0),  # too short to say
    ],
)
def test_foreign_load_is_told_from_our_own(after: HostReading, kind: InterferenceKind | None, percent: float) -> None:
    found = host_disturbances(reading(0.0), after, cpu_count=2)
    assert [each.kind for each in found] == ([] if kind is None else [kind])
    assert [each.percent for each in found] == [pytest.approx(percent)] * len(found)


def test_load_is_seen_in_blocks_that_are_each_too_short_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three plans, 50 ms: beside busy loops that no block was long enough for, a row was called stale."""
    monitor = health.InterferenceMonitor()
    monkeypatch.setattr(monitor, "_cpus", frozenset({0, 1}))
    at = iter([reading(t, busy=2 * t, own=t) for t in (0.0, 0.05, 1.0, 1.06, 5.0, 5.06, 9.0, 9.06)])
    monkeypatch.setattr(monitor, "_read", lambda: next(at))
    found = []
    for _ in range(4):
        monitor.begin()
        found.append(monitor.end())
    assert found == [(), (), (Interference(InterferenceKind.FOREIGN_LOAD, pytest.approx(50.0)),), ()]


def test_only_throttling_from_outside_the_workload_spoils_a_timing() -> None:
    assert throttle_reasons(0x0) == ()
    assert throttle_reasons(0x1 | 0x4) == ()  # idle, and the software power cap that heavy work always meets
    assert throttle_reasons(0x40) == (Interference(InterferenceKind.HARDWARE_THERMAL),)
    assert len(throttle_reasons(0x08 | 0x20 | 0x40 | 0x80)) == 4


def test_a_watch_sees_this_machine_and_names_what_it_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = health.InterferenceMonitor()
    monitor.begin()
    end = time.perf_counter() + 0.2
    while time.perf_counter() < end:
        math.sqrt(2.0)
    assert isinstance(monitor.end(), tuple)
    monkeypatch.setattr(health, "_PROC_STAT", Path("/nowhere/stat"))
    assert any("cannot be seen" in spot for spot in health.InterferenceMonitor().unmonitored)
    assert any("throttling" in spot for spot in health.InterferenceMonitor("GPU-no-such-card").unmonitored)


def test_a_sample_ends_when_its_calls_have_become_a_hundred_times_slower(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes a core: the calls that were counted on would take seconds."""
    bench.check(CELL, plan(), no_phase, None)
    runner = bench._runner(CELL, plan())
    runner.call_ms = 0.004  # 250 calls
    calls: list[float] = []

    def slow() -> None:
        calls.append(time.perf_counter())
        time.sleep(0.02)

    monkeypatch.setattr(runner, "call", slow)
    sample = bench.sample(CELL, plan())
    assert len(calls) == FEWEST
    assert sample.ms >= 20
    bench.release_all()  # the others have a runner of their own


@pytest.mark.parametrize(
    ("host_us", "flushes"),
    [(0.0, 1), (40.0, 1), (41.0, 2), (590.0, 15), (3e6, 167)],
    ids=["unknown", "short", "longer", "long", "a compiler's"],
)
def test_the_device_is_busy_until_the_host_has_launched_a_call(host_us: float, flushes: int) -> None:
    assert flushes_for(host_us, 0.06) == flushes


def test_the_head_starts_of_a_sample_are_part_of_its_length() -> None:
    timer = object.__new__(CudaTimer)
    timer._flush_ms = 0.06
    assert timer.calls_for(10.0, 5.0, 1000.0) == 2  # of 5 ms, and 25 flushes
    assert timer.calls_for(10.0, 0.05, 20.0) == 91
    assert timer.calls_for(10.0, 0.8, 2400.0) == 5  # of 4.4 ms each, but the host is the slower one


def test_where_the_host_is_slower_a_sample_waits_for_it_several_times() -> None:
    assert sample_ms(3.0, 2000.0) == 3.0
    assert sample_ms(0.8, 2400.0) == pytest.approx(5 * (0.8 + 3.6))


def test_one_slow_launch_changes_nothing() -> None:
    """30 of 40 calls at rest, the others interrupted."""
    timer = object.__new__(CudaTimer)
    quiet = [Reading(0.02, 100.0)] * 30
    assert timer.of(quiet + [Reading(0.5, 900.0)] * 10) == timer.of(quiet) == Reading(0.02, 100.0)


def test_ranks_warm_up_with_one_head_start(bench: DeviceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the slowest host, or the others would wait for its device and time that."""
    head_starts_us: list[float] = []

    class Peers(SingleRank):
        def max_over_ranks(self, *values: float) -> tuple[float, ...]:
            return tuple(max(value, 70.0) if value > 1 else value for value in values)  # but what is late

    class Timer(HostTimer):
        def time(
            self, call: Callable[[], None], repeats: int, limit_s: float = math.inf, host_us: float = 0.0
        ) -> list[Reading]:
            head_starts_us.append(host_us)
            return [Reading(1.0, 20.0)]

    monkeypatch.setattr(bench, "_peers", Peers())
    monkeypatch.setattr(bench, "_stopwatch", Stopwatch(Timer(), Peers()))
    bench._warm(Runner(lambda: None))
    assert head_starts_us[0] == 0.0
    assert set(head_starts_us[1:]) == {70.0}


def test_another_process_on_the_gpu_is_foreign_unless_it_is_of_the_pool_or_was_there_before() -> None:
    class Driver:
        count = 0

        def reasons(self) -> int:
            return 0

        def processes(self) -> int:
            return self.count

    def disturbed(before: int, beside: int, after: int, later_beside: int) -> bool:
        monitor, driver = health.InterferenceMonitor(), Driver()
        monitor._gpu = driver  # type: ignore[assignment]
        driver.count = before
        monitor.begin(range(beside))
        monitor.end()
        driver.count = after
        monitor.begin(range(later_beside))
        return Interference(InterferenceKind.FOREIGN_PROCESS) in monitor.end()

    assert disturbed(1, 0, 2, 0)
    assert not disturbed(3, 0, 3, 0)  # two others were there from the start
    assert disturbed(3, 0, 4, 0)
    assert not disturbed(9, 8, 9, 8)
    assert disturbed(9, 8, 10, 8)
    assert not disturbed(1, 0, 9, 8)  # workers of the pool came later
    assert disturbed(4, 1, 4, 0)  # one of the pool left and somebody else came
    assert not disturbed(0, 0, 0, 0)  # a driver that counts none


def test_the_load_of_the_other_ranks_and_of_the_pool_is_not_foreign() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            watches = [health.InterferenceMonitor(siblings=(other.pid,)), *(health.InterferenceMonitor() for _ in "..")]
            watches[1].begin([other.pid])  # a worker that compiles while a block is timed
            before, deadline = [monitor._read().own_s for monitor in watches], time.monotonic() + LIMIT_S
            while watches[0]._read().own_s < before[0] + 0.5 and time.monotonic() < deadline:
                time.sleep(0.05)
            ours, pool, alone = (monitor._read().own_s - begin for monitor, begin in zip(watches, before, strict=True))
        finally:
            other.kill()
    assert min(ours, pool) > alone + 0.1
    assert health.InterferenceMonitor(siblings=(other.pid,))._read().own_s < 1e6  # one that is gone counts nothing


def test_what_blocks_no_longer_look_at_is_collected_when_a_cell_ends(bench: DeviceBench) -> None:
    """A plan whose objects refer to each other must not hold its tensors for the rest of a probe."""

    class Node:
        itself: Node

    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    bench.begin_block()
    bench.end_block()
    del node
    bench._release()
    assert gone() is None


def test_the_gradients_that_are_checked_are_those_of_the_calls_that_are_timed() -> None:
    """A call with an lse is another to autograd: a dense plan of one kernel is torch's own operator only without."""
    differentiated = []

    def module(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False) -> Any:
        out = q + k + v
        out.register_hook(lambda grad: differentiated.append(return_lse))
        return (out, out.sum(-1)) if return_lse else out

    q, k, v = (torch.ones(1, 4, 2, 8) for _ in range(3))
    inputs = SimpleNamespace(q=q, k=k, v=v, dout=torch.ones_like(q), documents=None)
    out, lse, grads = module_calls.results_of(module, inputs, Workload("train", False, 4, 2, 8, "fp32"))  # type: ignore[arg-type]
    assert differentiated == [False]
    assert [x.requires_grad for x in (out, lse)] == [False, False]
    assert len(grads) == 3


# --- CPUs that others leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy_s", "own_s", "steal_s", "free"),
    [(2.0, 2.0, 0.0, 4), (2.0, 0.1, 0.0, 2), (4.0, 0.5, 0.0, 1), (1.0, 1.0, 3.0, 1), (0.0, 0.0, 0.0, 4)],
)
def test_the_cpus_that_others_leave(busy_s: float, own_s: float, steal_s: float, free: int) -> None:
    before = health.HostReading(10.0, 5.0, 1.0, 2.0, 0.0)
    after = health.HostReading(11.0, 5.0 + busy_s, 1.0 + steal_s, 2.0 + own_s, 0.0)
    assert health.free_cpus(before, after, 4) == free
    assert health.free_cpus(before, replace(after, at_s=10.05), 4) is None


def test_references_leave_the_candidate_its_threads(bench: DeviceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside busy loops they take one thread, and the candidate what the user has given torch."""
    monkeypatch.setattr(bench._monitor, "free_cpus", lambda: 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with bench._free_cpus_alone():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        assert bench._is_busy()
        monkeypatch.setattr(bench._monitor, "free_cpus", lambda: 2)
        assert not bench._is_busy()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("launch", "calls"), [("eager", 1), ("graph", 1 + CALLS_BEFORE_REPLAY)])
def test_what_is_replayed_is_checked_and_timed_once_it_is(launch: str, calls: int) -> None:
    made: list[int] = []

    def call() -> int:
        made.append(len(made) + 1)
        return made[-1]

    assert settled(call, replace(plan(), launch=launch)) == calls
    assert len(made) == calls


def test_a_check_says_what_torch_runs_and_whether_bits_vary(bench: DeviceBench) -> None:
    dense = replace(CELL, pattern=Pattern())
    checked = bench.check(dense, plan(cell=dense), no_phase, None)
    assert (checked.torch_kernel, checked.varies) == ("flash-cpu", False)
    assert bench.check(CELL, plan(), no_phase, None).torch_kernel == ""


def test_a_plan_whose_gradients_vary_is_found_out(bench: DeviceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = benchmark.results_of, iter(range(100))

    def results(*arguments: Any) -> Any:
        out, lse, grads = real(*arguments)
        return out, lse, tuple(grad * (1 + 1e-6 * (next(calls) % 2)) for grad in grads)

    monkeypatch.setattr(benchmark, "results_of", results)
    assert bench.check(CELL, plan(), no_phase, None).varies


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [Pattern(), DILATED])
def test_a_decoding_step_is_checked_validated_and_timed(bench: DeviceBench, pattern: Pattern) -> None:
    cell = Workload("decode", True, 200, 4, 32, "fp32", 2, 3, pattern)
    checked = bench.check(cell, plan(cell=cell), no_phase, None)
    assert 0 < checked.error < 1e-5
    # no whole sequence is attended over: out of one would be as large
    assert checked.peak_bytes < 4 * 200 * 3 * 4 * 32
    assert bench.validate(cell, plan(cell=cell), no_phase).first_call_ms > 0
    bench.begin_block()
    assert bench.sample(cell, plan(cell=cell)).ms > 0
    bench.end_block()


def test_a_wrong_decoding_step_is_caught(bench: DeviceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module_calls.decoding

    def wrong(module: Any, inputs: Any) -> Any:
        return real(module, replace(inputs, k=inputs.k.roll(1, 1), v=inputs.v))

    monkeypatch.setattr(module_calls, "decoding", wrong)
    cell = Workload("decode", True, 200, 4, 32, "fp32", 2)
    with pytest.raises(WrongAnswer, match="S=200"):
        bench.check(cell, plan(cell=cell), no_phase, None)
