"""``ringtune verify``: which winners still win, and its exit codes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import measured_entry, one_line_error, profile_of_this_machine, ringtune
from report_samples import plan

import autotune.probe.tuning
from autotune.exit_codes import ExitCode
from autotune.probe.request import ProbeObserver, ProbeRequest, VerifiedCell, VerifyResult
from ringattn.profile.yaml_io import save_profile
from ringattn.workload import Workload


def verified(stale: bool) -> VerifiedCell:
    cell = Workload("train", True, 64, 1, 8, "fp32")
    return VerifiedCell(cell, plan("math", "math"), plan("math", "math"), 1.0, 0.9, 1.1, stale)


@pytest.mark.parametrize(
    ("stale", "inconclusive", "code"),
    [((), (), 0), (("train dense",), (), 5), ((), ("noise",), 6), (("a",), ("b",), 5)],
)
def test_verify(
    monkeypatch: pytest.MonkeyPatch, gpu_file: Path, stale: tuple[str, ...], inconclusive: tuple[str, ...], code: int
) -> None:
    seen: list[tuple[Path, ProbeRequest]] = []

    def fake(path: Path, request: ProbeRequest, observer: ProbeObserver) -> VerifyResult:
        seen.append((path, request))
        return VerifyResult(stale, (verified(bool(stale)),), 4.0, inconclusive)

    monkeypatch.setattr(autotune.probe.tuning, "verify_profile", fake)
    options = ("--effort", "full", "--budget", "9", "--seed", "3", "--device", "cpu")
    result = ringtune("verify", gpu_file, *options)
    assert result.exit_code == code
    path, request = seen[0]
    assert path == gpu_file
    assert (request.effort, request.budget_s, request.seed, request.device) == ("full", 9.0, 3, "cpu")
    assert ("stale  train" if stale else "holds  train") in result.stdout
    document = json.loads(ringtune("verify", "--json", gpu_file).stdout)
    assert document["stale"] == list(stale)


def test_the_summary_says_how_many_of_how_many_cells(monkeypatch: pytest.MonkeyPatch, gpu_file: Path) -> None:
    result = VerifyResult((), (verified(stale=False),), 4.0, left_out=2)
    monkeypatch.setattr(autotune.probe.tuning, "verify_profile", lambda path, request, observer: result)
    assert "every winner still wins (1 of 3 cells, 4 s)" in ringtune("verify", gpu_file).stdout
    assert json.loads(ringtune("verify", "--json", gpu_file).stdout)["left_out"] == 2


def test_rows_for_other_numbers_of_ranks_are_counted_and_no_winners_here(
    monkeypatch: pytest.MonkeyPatch, gpu_file: Path
) -> None:
    result = VerifyResult((), (verified(stale=False),), 4.0, other_ranks=2)
    monkeypatch.setattr(autotune.probe.tuning, "verify_profile", lambda path, request, observer: result)
    shown = ringtune("verify", gpu_file)
    assert shown.exit_code == ExitCode.OK
    assert "every winner for these ranks still wins (1 of 3 cells, 4 s)" in shown.stdout
    assert json.loads(ringtune("verify", "--json", gpu_file).stdout)["other_ranks"] == 2


def test_rows_for_other_numbers_of_ranks_alone_are_no_matching_profile(tmp_path: Path) -> None:
    entry = measured_entry()
    path = tmp_path / "two.yaml"
    save_profile(profile_of_this_machine(replace(entry, workload=replace(entry.workload, world=2))), path)
    line = one_line_error(ringtune("verify", "--device", "cpu", path), ExitCode.NO_PROFILE)
    assert re.search(r"plans are for 2 ranks, not 1; run: ringtune verify --nproc 2 .*two.yaml$", line)


def test_a_verify_that_judged_nothing_does_not_say_that_winners_win(
    monkeypatch: pytest.MonkeyPatch, gpu_file: Path
) -> None:
    nothing = VerifyResult((), (), 4.0, ("train dense: no time was left",))
    monkeypatch.setattr(autotune.probe.tuning, "verify_profile", lambda path, request, observer: nothing)
    result = ringtune("verify", gpu_file)
    assert result.exit_code == ExitCode.INCONCLUSIVE
    assert "nothing could be judged" in result.stdout
    assert "wins" not in result.stdout
    assert result.stderr.splitlines()[-1] == (
        "this verification, 1 cell: 0 verified, 1 not judged; nothing was written, their rows stay; when the machine "
        f"is quieter, `ringtune verify {gpu_file}` verifies them"
    )
