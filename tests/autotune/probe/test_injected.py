"""A real probe whose candidates and worker meet everything that can go wrong: the right winner, an honest record."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from injected_bench import write_script
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from patience import LIMIT_S, patient

from autotune.measure.benchmark import BenchSettings
from autotune.measure.evaluator import Checked, Evaluator, Fault
from autotune.measure.simulated import SimulatedClock
from autotune.measure.worker_evaluator import WorkerEvaluator
from autotune.probe.cells.runs import HANG_S
from autotune.probe.machine.environment import this_machine
from autotune.probe.request import ProbeObserver, ProbeRequest
from autotune.probe.tuning import run_probe
from autotune.probe.workloads.grid import cells_for
from autotune.search.budget import EFFORTS, EffortPreset
from ringattn.hardware.facts import HardwareFacts
from ringattn.profile.yaml_io import load_profile
from ringattn.workload import BranchTunables, Tunables, Workload, describe

BENCH = "injected_bench:InjectedBench"


def plan(forward: str, backward: str, dtype: str = "fp32", checkpoint: str = "selective") -> Tunables:
    return Tunables(dtype, (BranchTunables(forward, backward),), checkpoint=checkpoint)  # type: ignore[arg-type]


WINNER = plan("math", "flash-cpu")
WRONGS = {
    WINNER: "killed-once",  # and the worker is stopped once while it times
    plan("flash-cpu", "math"): "killed",
    plan("math", "math"): "segfault",
    plan("math", "math", checkpoint="full"): "hang",
    plan("flash-cpu", "flash-cpu", checkpoint="full"): "nan",
    plan("flash-cpu", "math", checkpoint="full"): "sticky",
    plan("flash-cpu", "flash-cpu", "bf16"): "oom",
    plan("math", "flash-cpu", "bf16"): "wrong",
}
SLOW = plan("math", "flash-cpu", checkpoint="full")
TIMES_MS = {WINNER: 7.5, SLOW: 750.0}
KINDS = {
    "killed": ("crash", "the worker was killed by SIGKILL"),
    "segfault": ("crash", "the worker was killed by SIGSEGV"),
    "sticky": ("crash", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    "hang": ("timeout", "no answer within "),
    "nan": ("wrong", "WrongAnswer: out holds 2048 values not finite, of 2048; S=64, ordinary inputs, seed 0"),
    "wrong": ("wrong", "WrongAnswer: out errs by 5.0e-01 "),
    "oom": ("oom", "RuntimeError: [enforce fail at alloc_cpu.cpp"),
}


def recorded(journal: Path) -> Iterator[FrozenTrial]:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
    for summary in optuna.get_all_study_summaries(storage):
        for trial in optuna.load_study(study_name=summary.study_name, storage=storage).trials:
            if "plan" in trial.user_attrs:
                yield trial


def test_a_real_probe_survives_everything_and_says_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in write_script(tmp_path / "script.json", WRONGS, TIMES_MS).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(HANG_S, "cpu", patient(4.0))
    request = ProbeRequest(
        output=tmp_path / "here.yaml", device="cpu", budget_s=3600.0, modes=("train",), seq_lens=(64,), heads=1,
        head_dim=32, memory_limit_mib=10_000,
    )  # fmt: skip
    # Within a memory limit plans that recompute are tried around all kernels, also around those that are wrong here.
    made: list[WorkerEvaluator] = []
    single = replace(EFFORTS["standard"], sample_target_ms=0.001)  # one call a sample
    monkeypatch.setattr("autotune.probe.probe_context.EFFORTS", {"standard": single})

    def evaluator(facts: HardwareFacts, request: ProbeRequest, preset: EffortPreset) -> Evaluator:
        settings = BenchSettings("cpu", facts, request.seed, preset.sample_target_ms, preset.ragged_lengths)
        made.append(WorkerEvaluator(settings, bench=BENCH, reference_timeout_s=preset.budget_s))
        return made[-1]

    # The clock stands still: how much is tried does not depend on how long restarts take on a busy machine.
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    environment = replace(this_machine(request), evaluator=evaluator, environ=environ, clock=SimulatedClock())
    dense = [cell for cell in cells_for(request, environment.facts) if cell.workload.pattern.dense]
    monkeypatch.setattr("autotune.probe.workloads.grid.cells_for", lambda request, facts: dense)
    result = run_probe(request, ProbeObserver(), environment)
    assert (tmp_path / "killed-once").exists()
    assert (tmp_path / "stopped-once").exists()
    (cell,) = result.cells
    assert (cell.status, cell.chosen) == ("tuned", WINNER), cell.note
    (entry,) = load_profile(tmp_path / "here.yaml").plans
    assert entry.choice is not None
    assert entry.choice.tunables == WINNER
    assert entry.choice.evidence is not None
    assert entry.choice.evidence.default_ratio == pytest.approx(0.75)
    told = {failure.candidate: (failure.kind, failure.message) for failure in entry.failures}
    trials = list(recorded(tmp_path / "here.yaml.journal"))
    asked = {trial.user_attrs["plan"] for trial in trials}
    # What shares a kernel with a plan that cost a worker is not asked for: each trap costs one trial.
    assert set(told) == {describe(plan) for plan, wrong in WRONGS.items() if plan != WINNER} & asked
    assert {"crash", "wrong"} <= {kind for kind, _ in told.values()}
    for bad, wrong in WRONGS.items():
        if bad == WINNER or describe(bad) not in asked:
            continue
        kind, message = KINDS[wrong]
        assert told[describe(bad)][0] == kind, wrong
        assert told[describe(bad)][1].startswith(message)
        (trial,) = [trial for trial in trials if trial.user_attrs["plan"] == describe(bad)]
        assert trial.state == TrialState.PRUNED
        assert trial.user_attrs["kind"] == kind
        assert trial.user_attrs["message"].startswith(message)
    (slow,) = [trial for trial in trials if trial.user_attrs["plan"] == describe(SLOW)]
    assert slow.state == TrialState.PRUNED  # it was never timed beside the default
    assert "kind" not in slow.user_attrs
    assert "far slower at its first look" in slow.user_attrs["reason"]
    assert made[0].starts <= 10  # segfault, sticky, hang, twice each killed, killed once, stopped once; and the first


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", ["device-side assert", "illegal memory access"])
def test_a_lost_cuda_context_is_one_crash_and_the_next_candidate_is_measured(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ProbeRequest(device="cuda")
    environment = this_machine(request)
    cell = Workload("infer", True, 1024, 4, 64, "fp16")
    good, bad = (Tunables("fp16", (BranchTunables(name),)) for name in ("efficient", "math"))
    for name, value in write_script(tmp_path / "script.json", {bad: wrong}, {}).items():
        monkeypatch.setenv(name, value)
    preset = EFFORTS["quick"]
    settings = BenchSettings(
        "cuda", environment.facts, 0, preset.sample_target_ms, preset.ragged_lengths, train_too=False
    )
    evaluator = WorkerEvaluator(settings, bench=BENCH)
    try:
        assert isinstance(evaluator.check(cell, good, timeout_s=LIMIT_S), Checked)
        fault = evaluator.check(cell, bad, timeout_s=LIMIT_S)
        assert isinstance(fault, Fault)
        assert fault.kind == "crash"
        assert wrong in fault.message
        assert evaluator.starts == 1
        assert isinstance(evaluator.check(cell, good, timeout_s=LIMIT_S), Checked)
        assert evaluator.starts == 2
        block = evaluator.block(cell, [good, bad, good], timeout_s=LIMIT_S)
        assert [isinstance(result, Fault) for result in block.results] == [False, True, False]
        assert evaluator.starts == 3
    finally:
        evaluator.close()
