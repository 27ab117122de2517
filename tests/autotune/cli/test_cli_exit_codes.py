"""A fault is one line and its exit code; a bug keeps its traceback."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import engine, one_line_error, ringtune
from report_samples import gpu_profile, plan

from autotune.cli.probing.probe_result import command_again
from autotune.exit_codes import DeviceBusy, ExitCode, NoDevice, NothingMeasured, ProbeFailure, UsageFailure
from autotune.probe.request import CellReport, ProbeObserver, ProbeResult
from ringattn.errors import DeviceError, PlanError, ProfileError
from ringattn.profile.schema import Choice, PlanEntry
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
    unsure = CellReport(cell.at(9), "inconclusive", chosen=plan("math", "math", dtype="fp32"), noise=0.12)
    row = PlanEntry(unsure.workload, choice=Choice(plan("math", "math", dtype="fp32")))
    quiet = CellReport(cell, "default", chosen=plan("math", "math", dtype="fp32"), noise=0.02)
    profile = replace(profile, plans=(*profile.plans, row))
    result = ProbeResult(Path("p.yaml"), profile, (unsure, quiet), 9.0, ("train dense S1024: noise 12 %",))
    engine(monkeypatch, lambda observer: result)
    shown = ringtune("probe")
    assert shown.exit_code == 6
    assert "NVIDIA H100" in shown.stdout
    assert "inconclusive: train dense S1024: noise 12 %" in shown.stderr
    assert "this probe, 2 cells: 1 measured now, 1 at the default;" in shown.stderr
    assert f"7.0% in the median cell, at most 12.0% ({unsure.workload})" in shown.stderr
    assert "without a row" not in shown.stderr


def test_what_went_wrong_stands_before_where_the_profile_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """After "uses it from now on" nobody reads on."""
    profile = gpu_profile()
    unsure = CellReport(
        profile.plans[0].workload, "inconclusive", chosen=plan("math", "math", dtype="fp32"), noise=0.12
    )
    result = ProbeResult(Path("p.yaml"), profile, (unsure,), 9.0, ("train dense S1024: noise 12 %",))
    engine(monkeypatch, lambda observer: result)
    told = ringtune("probe").output  # both streams in the order in which they were written
    order = [told.index(text) for text in ("noise of one timing", "inconclusive: ", "this probe, ", "Profile written")]
    assert order == sorted(order)


def test_the_cells_of_a_probe_are_counted_once_each_by_what_the_profile_has_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that an earlier probe measured and this one could not counted as measured and as left at the default."""
    profile = gpu_profile()
    (measured, *_) = (entry for entry in profile.plans if entry.evidence is not None)
    cells = [measured.workload.at(n) for n in (11, 12, 13, 14)]
    rows = [
        replace(measured, workload=cells[0]),
        replace(measured, workload=cells[1]),
        PlanEntry(cells[2], choice=Choice(plan("math", "math", dtype="fp32"))),
    ]
    reports = (
        CellReport(cells[0], "tuned", chosen=plan("math", "math", dtype="fp32")),
        *(CellReport(cell, "inconclusive", chosen=plan("math", "math", dtype="fp32")) for cell in cells[1:3]),
        CellReport(cells[3], "inconclusive"),
    )
    result = ProbeResult(Path("p.yaml"), replace(profile, plans=tuple(rows)), reports, 9.0, ("3 cells: noise",))
    engine(monkeypatch, lambda observer: result)
    shown = ringtune("probe", "--fresh", "--output", "p q.yaml")
    assert "3 workloads, 2 of them measured" in shown.stdout
    assert shown.stderr.splitlines()[-4:] == [
        f"at the default: {cells[2]}",
        f"kept from an earlier probe: {cells[1]}",
        f"without a row, the default being over a limit or not checked: {cells[3]}",
        "this probe, 4 cells: 1 measured now, 1 at the default, 1 kept from an earlier probe, "
        "1 without a row, the default being over a limit or not checked; when the machine is quieter, "
        "`ringtune probe --output 'p q.yaml'` measures those that are left, and what was measured stays",
    ]


def test_a_verification_that_judged_not_all_says_that_nothing_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended as a probe that has written a profile, with every cell measured."""
    profile = gpu_profile()
    judged = CellReport(profile.plans[0].workload, "resumed", note="still the winner")
    result = ProbeResult(Path("p.yaml"), profile, (judged,), 9.0, ("infer dense: too noisy",), verified=True)
    engine(monkeypatch, lambda observer: result)
    shown = ringtune("probe")
    assert shown.exit_code == 6
    assert shown.stderr.splitlines()[-1] == (
        "this verification, 2 cells: 1 verified, 1 not judged; nothing was written, their rows stay; when the machine "
        "is quieter, `ringtune probe` verifies them"
    )


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ("-v probe --dense --fresh", "-v probe --dense"),
        ("probe --if-missing --wait --store s", "probe --store s"),
        ("probe --wait 9 --if-stale --store s --wait=9", "probe --store s"),
    ],
)
def test_the_command_for_what_is_left_measures_that(words: str, again: str) -> None:
    assert command_again(words.split()) == f"`ringtune {again}`"


def test_a_cell_without_a_plan_is_not_said_to_keep_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default is over the limit, so the profile has no row for it at all."""
    cell = CellReport(Workload("train", True, 1024, 4, 64, "fp32"), "inconclusive")
    result = ProbeResult(Path("p.yaml"), gpu_profile(), (cell,), 9.0, inconclusive=("train dense S1024: over",))
    engine(monkeypatch, lambda observer: result)
    shown = ringtune("probe")
    assert shown.exit_code == 6
    assert "this probe, 1 cell: 0 measured now, 1 without a row, " in shown.stderr
    assert "at the default" not in shown.stderr
