"""``ringtune trace``: what counts as what in a profiler's events, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from autotune.cli.main import cli
from autotune.measure.evaluator import Interference, InterferenceKind
from autotune.measure.interference import InterferenceMonitor
from autotune.report.trace import OTHER, STEP, Trace, TracedRange, ranges_of, trace_summary
from ringattn import Workload

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


@dataclass
class Event:
    """An event of torch's profiler; times in us."""

    name: str
    cpu_time_total: float = 0.0
    device_time_total: float = 0.0
    self_device_time_total: float = 0.0
    device_type: Any = CPU
    cpu_parent: Any = None
    is_user_annotation: bool = False


def test_ranges_are_summed_outermost_first_and_averaged_over_steps() -> None:
    step = Event(STEP, 10_000.0)
    gather = Event("ringattn::gather", 1000.0, 600.0, cpu_parent=step)
    inner = Event("ringattn::gather", 900.0, 400.0, cpu_parent=Event("aten::copy_", cpu_parent=gather))
    backward = Event("ringattn::branch 0 cudnn backward", 2000.0, 6000.0)  # in autograd's own thread
    kernels = [Event("flash", self_device_time_total=8000.0, device_type=CUDA)]
    marks = [Event("ringattn::gather", self_device_time_total=500.0, device_type=CUDA, is_user_annotation=True)]
    host_ms, device_ms, found = ranges_of([step, gather, inner, backward, gather, *kernels, *marks], steps=2)
    assert (host_ms, device_ms) == (5.0, 4.0)
    assert found == (
        TracedRange("branch 0 cudnn backward", 0.5, 1.0, 3.0),
        TracedRange("gather", 1.0, 1.0, 0.6),
        TracedRange(OTHER, 1.0, 3.0, pytest.approx(0.4)),  # type: ignore[arg-type]
    )


def test_of_a_gpu_the_share_is_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    from autotune.cli.console import print_answer

    workload = Workload("train", True, 64, 2, 8, "bf16")
    ranges = (TracedRange("merge", 1.0, 1.0, 3.0), TracedRange(OTHER, 1.0, 9.0, 1.0))
    print_answer(trace_summary(Trace(workload, "math/math bf16", "profile", 5, 10.0, 4.0, ranges, "a note")))
    printed = capsys.readouterr().out
    assert "75.0 %" in printed
    assert "Device" in printed
    assert "a note" in printed


SMALL = ["trace", "--device", "cpu", "--seq-len", "64", "--heads", "2", "--head-dim", "8", "--steps", "2"]
DILATED = ["--segment-lengths", "16,64", "--dilation-rates", "1,2"]


def test_the_command_prints_a_table(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, [*SMALL, *DILATED, "--output", str(tmp_path / "trace.json")])
    assert done.exit_code == 0, done.output
    for name in ("branch 0 flash-cpu forward", "branch 1 flash-cpu backward", "gather", "merge", "sum", OTHER):
        assert name in done.stdout
    assert "averaged over 2 steps" in done.stdout
    written = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert "ringattn::merge" in {event.get("name") for event in written["traceEvents"]}


def test_the_command_prints_json() -> None:
    done = CliRunner().invoke(cli, [*SMALL, "--mode", "infer", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["workload"]["mode"] == "infer"
    assert {each["name"] for each in found["ranges"]} == {"branch 0 flash-cpu forward", OTHER}
    assert sum(each["host_ms"] for each in found["ranges"]) == pytest.approx(found["host_ms"])


@pytest.mark.parametrize("busy", [True, False])
def test_the_command_says_what_disturbed_it(monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    found = (Interference(InterferenceKind.FOREIGN_LOAD, 62.0),) if busy else ()
    monkeypatch.setattr(InterferenceMonitor, "end", lambda self: found)
    done = CliRunner().invoke(cli, [*SMALL, "--json"])
    assert json.loads(done.stdout)["interference"] == ["other processes used 62 % of the CPUs"] * busy
    said = "disturbed while it was timed: other processes used 62 % of the CPUs; measure again on a quieter machine"
    assert (said in done.stderr.splitlines()) is busy


def test_what_cannot_be_traced_is_said_before_torch_is_loaded(tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, [*SMALL, "--output", str(tmp_path / "none" / "trace.json")]).exit_code == 1
    assert CliRunner().invoke(cli, [*SMALL, "--kv-heads", "3"]).exit_code == 2


@pytest.mark.usefixtures("fresh_interpreters")
def test_the_profiler_says_nothing_of_its_own() -> None:
    """kineto wrote "USDT: ... profiler_start" to stderr. A new process: it reads its level once."""
    shape = ["--heads", "2", "--head-dim", "16", "--seq-len", "64", "--steps", "1", "--device", "cpu"]
    command = [sys.executable, "-m", "autotune", "trace", *shape]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    assert "profiler_start" not in done.stdout + done.stderr
