"""A fault is one line and its exit code; a bug keeps its traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import engine, one_line_error, ringtune
from report_samples import gpu_profile, plan

from autotune.exit_codes import DeviceBusy, ExitCode, NoDevice, NothingMeasured, ProbeFailure, UsageFailure
from autotune.probe.request import CellReport, ProbeObserver, ProbeResult
from ringattn.errors import DeviceError, PlanError, ProfileError
from ringattn.workload import Workload

FAULTS = [
    (ProbeFailure("it went wrong"), 1),
    (UsageFailure("nothing to measure"), 2),
    (NoDevice("no such card"), 3),
    (DeviceError("device is 'mps'"), 3),
    (ProbeFailure("no profile", ExitCode.NO_PROFILE), 4),
    (ProbeFailure("stale", ExitCode.STALE), 5),
    (NothingMeasured("too noisy"), 7),
    (DeviceBusy("another probe"), 75),
    (ProfileError("f.yaml", "broken", "plans[0]"), 1),
    (PlanError("nothing fits", {"math": ("no",)}), 1),
    (OSError(28, "No space left on device"), 1),
    (PermissionError(13, "Permission denied", "/some/file"), 1),
]


@pytest.mark.parametrize(
    ("fault", "code"), FAULTS, ids=lambda v: type(v).__name__ if isinstance(v, Exception) else str(v)
)
def test_faults_are_one_line_and_their_code(monkeypatch: pytest.MonkeyPatch, fault: Exception, code: int) -> None:
    def fail(observer: ProbeObserver) -> ProbeResult:
        raise fault

    engine(monkeypatch, fail)
    line = one_line_error(ringtune("probe"), code)
    assert line == f"Error: {fault}"
    told = json.loads(ringtune("probe", "--json").stdout)
    assert told == {"error": str(fault), "exit_code": code}


@pytest.mark.parametrize(
    "arguments",
    [
        ("probe", "--json", "--seq-len", "0"),
        ("probe", "--json", "--bogus"),
        ("prob", "--json"),
        ("--bogus", "probe", "--json"),  # before the command
        ("--json",),
        ("show", "--json", "a.yaml", "b.yaml"),
    ],
    ids=" ".join,
)
def test_a_usage_error_is_json_too_when_json_was_asked_for(arguments: tuple[str, ...]) -> None:
    result = ringtune(*arguments)
    assert result.exit_code == 2
    assert json.loads(result.stdout)["exit_code"] == 2
    assert "Error: " in result.stderr


@pytest.mark.parametrize("bug", [ValueError("a bug"), AssertionError(), KeyError("x"), OSError("no errno")])
def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, bug: Exception) -> None:
    def fail(observer: ProbeObserver) -> ProbeResult:
        raise bug

    engine(monkeypatch, fail)
    assert ringtune("probe").exception is bug


def test_ctrl_c_says_that_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(observer: ProbeObserver) -> ProbeResult:
        raise KeyboardInterrupt

    engine(monkeypatch, interrupt)
    line = one_line_error(ringtune("probe"), 130)
    assert "finished trials are kept" in line
    assert "run the same command" in line


def test_inconclusive_cells_still_show_the_profile_and_exit_6(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = gpu_profile()
    cell = profile.plans[0].workload
    kept = CellReport(cell, "inconclusive", chosen=plan("math", "math", dtype="fp32"), noise=0.12)
    quiet = CellReport(cell.at(7), "default", chosen=plan("math", "math", dtype="fp32"), noise=0.02)
    result = ProbeResult(Path("p.yaml"), profile, (kept, quiet), 9.0, ("train dense S1024: noise 12 %",))
    engine(monkeypatch, lambda observer: result)
    shown = ringtune("probe")
    assert shown.exit_code == 6
    assert "NVIDIA H100" in shown.stdout
    assert "inconclusive: train dense S1024: noise 12 %" in shown.stderr
    assert "the profile leaves 1 cell at the default, for the reasons above" in shown.stderr
    assert f"7.0% in the median cell, at most 12.0% ({cell})" in shown.stderr
    assert "no row" not in shown.stderr


def test_a_cell_without_a_plan_is_not_said_to_keep_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default is over the limit, so the profile has no row for it at all."""
    cell = CellReport(Workload("train", True, 1024, 4, 64, "fp32"), "inconclusive")
    result = ProbeResult(Path("p.yaml"), gpu_profile(), (cell,), 9.0, inconclusive=("train dense S1024: over",))
    engine(monkeypatch, lambda observer: result)
    shown = ringtune("probe")
    assert shown.exit_code == 6
    assert "the profile has no row for 1 cell, " in shown.stderr
    assert "at the default" not in shown.stderr
