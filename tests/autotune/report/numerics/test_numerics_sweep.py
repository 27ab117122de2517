"""The sweep itself: children that die, hang or lose the device, the budget, and the command on this machine's CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from patience import LIMIT_S, patient

from autotune.cli.machine.numerics import head_dim_list
from autotune.cli.main import cli
from autotune.report.numerics import numerics_sweep
from autotune.report.numerics.numerics_map import attempts
from autotune.report.numerics.numerics_sweep import sweep
from ringattn import RingAttention, detect
from ringattn.errors import PlanError
from ringattn.hardware.kernel_faults import Figure, Verdict
from ringattn.planning import self_check
from ringattn.planning.validation.validation_memory import user_memory

CRASHING = "crashing_numerics:CrashingBench"
NAMES = ("flash-cpu", "math")
CPU = detect("cpu")
HANG_S = patient(2.0)  # the others have to answer within it


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "support" / "autotune"))
    monkeypatch.setattr(numerics_sweep, "ATTEMPT_TIMEOUT_S", HANG_S)


@pytest.mark.usefixtures("crashing")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_crash_costs_one_attempt(processes: int) -> None:
    told: list[int] = []
    one_group = (88, "bf16", True)  # per head dimension
    asked = [
        a
        for a in attempts(CPU, NAMES, (8, 16, 24, 32))
        if (a.shape.rows, a.shape.dtype, a.shape.causal) == one_group and not a.shape.grouped
    ]
    found = sweep(asked, CPU, processes=processes, budget_s=LIMIT_S, progress=told.append, bench=CRASHING)
    assert set(found) == set(asked)
    assert told == list(range(1, len(asked) + 1))
    messages = {
        (a.shape.head_dim, a.kernel, a.backward): verdict.message for a, verdict in found.items() if verdict.message
    }
    assert messages == {
        (16, "flash-cpu", True): "the worker was killed by SIGSEGV (so long)",
        (24, "flash-cpu", True): f"no answer within {HANG_S:.1f} s",
        (32, "flash-cpu", False): "RuntimeError: CUDA error: misaligned address",
        (32, "flash-cpu", True): "RuntimeError: CUDA error: misaligned address",
    }


@pytest.mark.usefixtures("crashing")
def test_nothing_begins_after_the_budget() -> None:
    asked = attempts(CPU, NAMES, (8,))
    assert sweep(asked, CPU, budget_s=0, bench=CRASHING) == {}


@pytest.mark.usefixtures("crashing")
def test_a_worker_that_cannot_start_is_an_answer() -> None:
    asked = [a for a in attempts(CPU, ("math",), (8,)) if a.shape.rows == 1 and a.shape.dtype == "bf16"][:2]
    found = sweep(asked, CPU, bench="crashing_numerics:NeverStarts")
    assert len(found) == 2
    assert all("did not start: the worker ended with exit code 1 (no torch)" in v.message for v in found.values())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", "--numerics", "--device", "cpu", *arguments])


def test_the_map_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("--head-dim", "8", "--kernel", "flash-cpu", "--kernel", "cudnn", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["runs"] == document["done"] == 3 * 2 * 2 * 2 * 4
    assert {f["state"] for f in document["findings"]} == {"ok"}
    assert document["note"] == ""
    assert f"numerics: {document['runs']} of" in result.stderr

    monkeypatch.setattr(self_check, "check_all", lambda *arguments: pytest.fail("it was checked already"))
    q = torch.randn(1, 40, 2, 8)
    RingAttention(2, 8, causal=True, profile=None, device="cpu", backend="flash-cpu")(q, q, q)


def test_a_wrong_kernel_is_named_and_not_run_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(asked: Any, *arguments: Any, **keywords: Any) -> Any:
        right, off = (Verdict((Figure("dq", error, 0.03),)) for error in (0.002, 0.4))
        return {a: off if a.backward and a.kernel == "flash-cpu" and a.shape.grouped else right for a in asked}

    monkeypatch.setattr(numerics_sweep, "sweep", wrong)
    monkeypatch.setenv("COLUMNS", "160")  # at 80 a cell of the table breaks inside the message
    result = run("--head-dim", "8-16")
    assert result.exit_code == 1
    assert "wrong" in result.stdout
    assert "dq errs by 4.0e-01" in result.stdout
    assert "Not on this machine: cudnn" in result.stdout
    module = RingAttention(4, 8, 2, causal=True, profile=None, device="cpu", backend="flash-cpu")
    with pytest.raises(PlanError, match=r"is wrong on this machine: dq errs by 4\.0e-01"):
        module.plan_for(64, torch.float32, train=True)
    assert all(combination.kernel == "flash-cpu" for _, combination in user_memory().verdicts())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kernel", "flash"], "--kernel goes with --numerics"),
        (["--head-dim", "8"], "--head-dim goes with --numerics"),
        (["--budget", "8"], "--budget goes with --numerics"),
        (["--try-refused"], "--try-refused goes with --numerics"),
        (["--numerics", "--kernel", "nonesuch"], "the kernels are cudnn, flash,"),
        (["--numerics", "--head-dim", "eight"], "'eight' is not a list of head dimensions"),
        (["--numerics", "--head-dim", "9-15"], "'9-15' holds no multiple of 8"),
        (["--numerics", "--budget", "0"], "is not a number above 0"),
    ],
)
def test_misuse(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert told in result.output


def test_head_dimensions() -> None:
    assert head_dim_list("8, 16,40-80,256") == (8, 16, 40, 48, 56, 64, 72, 80, 256)
    assert head_dim_list("64") == (64,)
