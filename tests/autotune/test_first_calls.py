"""First calls made ahead: which ones, by how many, and that nothing of them outlives the wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machines import FACTS, plan, row_of, workload
from machines import edge_of as replayed_edge

from autotune.bench import BenchSettings
from autotune.cell_space import space_or_refusal
from autotune.edge import Edge, edge_of
from autotune.evaluator import Fault, Proven
from autotune.first_calls import Call, FirstCalls, calls_worth_making, processes_for
from autotune.grid import cells_for
from autotune.probe import ProbeRequest
from autotune.replay import ReplayEvaluator, SimulatedClock
from autotune.space import Space, machine_of
from autotune.trial import WorkerBug, WorkerEvaluator
from autotune.tuning import run_probe
from ringattn.hardware import HardwareFacts
from ringattn.workload import Workload

CELL = workload(512, mode="infer")
BENCH = "faulty_bench:FaultyBench"
H100 = HardwareFacts(
    vendor="nvidia",
    device_name="NVIDIA H100 80GB HBM3",
    sku="h100-sxm",
    arch="sm_90",
    sm_count=132,
    memory_mib=81079,
    l2_mib=50,
    packages=("flash_attn.cute", "triton"),
)


def settings(device: str = "cpu") -> BenchSettings:
    return BenchSettings(device, FACTS, seed=0, sample_target_ms=1.0, ragged_lengths=2)


@pytest.fixture(autouse=True)
def _bench_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def spaces(facts: HardwareFacts, **asked: object) -> list[Space]:
    edge: Edge = edge_of(facts, lambda facts, request, preset: WorkerEvaluator(settings()))
    request = ProbeRequest(**asked)  # type: ignore[arg-type]
    found = [space_or_refusal(cell, edge, "auto") for cell in cells_for(request, facts)]
    return [space for space in found if isinstance(space, Space)]


# --- which ------------------------------------------------------------------------------------------------------------


def test_every_compiled_kernel_and_every_gather_is_called_once_for_all_lengths_and_modes() -> None:
    calls = calls_worth_making(spaces(H100))
    assert len(set(calls)) == len(calls)
    assert {cell.mode for cell, _ in calls} == {"train"}  # its forward is inference's
    dilated = [made for cell, made in calls if not cell.pattern.dense]
    assert {cell.seq_len for cell, _ in calls if not cell.pattern.dense} == {32768}  # the first that ends no segment
    gathers = {tuple(b.gather for b in made.branches) for made in dilated if made.branches[0].forward == "cudnn"}
    assert len(gathers) == 2**4
    for dtype, kernel in (("fp32", "efficient"), ("bf16", "flash-attn-4"), ("bf16", "triton")):
        ways = [
            {b.gather for b in made.branches[1:]}
            for made in dilated
            if made.dtype == dtype and {made.branches[0].forward, made.branches[0].backward} == {kernel}
        ]
        assert ways == [{"view"}, {"copy"}], (dtype, kernel)
    for of_pattern in (dilated, [made for cell, made in calls if cell.pattern.dense]):
        alone = [made.branches[0] for made in of_pattern if made.dtype == "bf16"]
        assert {"flash-attn-4", "triton"} <= {b.forward for b in alone if b.forward == b.backward}
    assert all(
        made.branches[0].forward in ("flash-attn-4", "triton") for cell, made in calls if cell.pattern.dense
    )  # nothing else compiles there


def test_a_probe_of_inference_calls_inference() -> None:
    calls = calls_worth_making(spaces(H100, modes=("infer",), dense=True))
    assert {(cell.mode, cell.seq_len) for cell, _ in calls} == {("infer", 1024)}


def test_where_nothing_is_compiled_nothing_is_called() -> None:
    assert calls_worth_making(spaces(FACTS)) == ()
    assert machine_of(FACTS).just_in_time == frozenset()
    assert calls_worth_making([]) == ()


@pytest.mark.parametrize(
    ("calls", "cores", "memory_mib", "processes"),
    [
        (20, 32, 81079, 8),
        (3, 32, 81079, 3),
        (20, 4, 81079, 2),
        (20, 32, 24000, 2),
        (20, 1, 81079, 0),
        (0, 32, 81079, 0),
    ],
)
def test_neither_cores_nor_memory_are_exhausted(calls: int, cores: int, memory_mib: int, processes: int) -> None:
    assert processes_for(calls, cores, memory_mib) == processes


# --- making them ------------------------------------------------------------------------------------------------------


def of(*kernels: str) -> list[Call]:
    return [(CELL, plan(CELL, kernel)) for kernel in kernels]


def test_all_are_made_whatever_becomes_of_some() -> None:
    ahead = FirstCalls(settings(), of("quick", "segfault", "error", "quick", "swift"), 2, bench=BENCH)
    note = ahead.wait(60.0)
    assert "2 first calls made ahead failed, one so: " in note
    assert "SIGSEGV" in note or "ValueError" in note
    assert ahead._left.empty()


def test_what_hangs_ends_with_the_wait() -> None:
    ahead = FirstCalls(settings(), of("hang", "hang", "quick"), 2, bench=BENCH)
    time.sleep(1.0)
    pids = [worker._process.pid for worker in ahead._workers if worker._process is not None]
    begin = time.monotonic()
    ahead.wait(1.0)
    assert time.monotonic() - begin < 20.0
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_ended_worker_begins_nothing_more() -> None:
    worker = WorkerEvaluator(settings(), bench=BENCH)
    worker.interrupt()
    result = worker.first_call(CELL, plan(CELL, "quick"), timeout_s=5.0)
    assert isinstance(result, Fault)
    assert worker.starts == 0


def test_a_bug_of_ours_is_raised_where_the_calls_are_waited_for() -> None:
    ahead = FirstCalls(settings("bug-at-start"), of("quick"), 1, bench=BENCH)
    with pytest.raises(WorkerBug, match="a bug of ours"):
        ahead.wait(60.0)


def test_a_first_call_is_two_calls_of_the_real_module() -> None:
    worker = WorkerEvaluator(settings())
    try:
        cell = Workload("train", True, 64, 2, 16, "fp32")
        result = worker.first_call(cell, plan(cell, "math", dtype="fp32"), timeout_s=60.0)
    finally:
        worker.close()
    assert isinstance(result, Proven)
    assert result.first_call_ms > 0


# --- in a probe -------------------------------------------------------------------------------------------------------


def compiling_edge(tmp_path: Path, first_calls: Callable[..., Any]) -> Edge:
    """A replayed machine that compiles math at its first call."""
    clock = SimulatedClock()
    edge = replayed_edge(tmp_path, lambda: ReplayEvaluator(row_of(lambda cell, plan: 0.0), clock, 0), clock)
    machine = replace(edge.machine, just_in_time=frozenset({"math"}))
    return replace(edge, machine=machine, first_calls=first_calls)


def request(tmp_path: Path) -> ProbeRequest:
    return ProbeRequest(output=tmp_path / "made.yaml", effort="quick", seq_lens=(256,), dense=True)


class Pending:
    """Stands in for FirstCalls; says how many blocks had been timed when it was waited for."""

    def __init__(self, calls: Sequence[Call], note: str = "") -> None:
        self.calls, self.note = calls, note
        self.log: list[str] = []

    def wait(self, timeout_s: float) -> str:
        assert timeout_s >= 0
        self.log.append("wait")
        return self.note

    def stop(self) -> None:
        self.log.append("stop")


def test_a_probe_waits_for_them_before_it_times_anything_and_passes_on_what_failed(tmp_path: Path) -> None:
    made: list[Pending] = []

    def first_calls(facts: object, asked: object, preset: object, calls: Sequence[Call]) -> Pending:
        made.append(Pending(calls, "1 first call made ahead failed"))
        return made[0]

    edge = compiling_edge(tmp_path, first_calls)
    notes: list[str] = []
    timed_before: list[bool] = []

    class Heard:
        def __getattr__(self, name: str) -> object:
            return lambda *arguments: None

        def note(self, text: str) -> None:
            notes.append(text)

        def stage(self, cell: object, name: str) -> None:
            if name != "default":
                timed_before.append(made[0].log == ["wait", "stop"])

    run_probe(request(tmp_path), Heard(), edge)  # type: ignore[arg-type]
    assert [called.branches[0].forward for _, called in made[0].calls] == ["math"]
    assert "1 first call made ahead failed" in notes
    assert timed_before
    assert all(timed_before)


def test_what_breaks_a_probe_ends_them(tmp_path: Path) -> None:
    pending = Pending(())

    class Broken(Exception):
        pass

    class Breaks:
        def __getattr__(self, name: str) -> object:
            return lambda *arguments: None

        def stage(self, cell: object, name: str) -> None:
            raise Broken

    edge = compiling_edge(tmp_path, lambda *arguments: pending)
    with pytest.raises(Broken):
        run_probe(request(tmp_path), Breaks(), edge)  # type: ignore[arg-type]
    assert pending.log == ["stop"]
