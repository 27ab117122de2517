"""Commands that take the profile of this machine, or say that it has none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import measured_entry, one_line_error, profile_of_this_machine, ringtune
from report_samples import plan

from ringattn.hardware.facts import detect
from ringattn.profile.schema import Choice
from ringattn.profile.yaml_io import save_profile


def test_which_names_the_heuristic_and_exits_4() -> None:
    result = ringtune("which", "--device", "cpu")
    assert result.exit_code == 4
    assert "tier: heuristic" in result.stdout
    assert "ringtune probe" in result.stderr
    bare = ringtune("which", "--device", "cpu", "--path-only")
    assert (bare.exit_code, bare.stdout) == (4, "")
    assert json.loads(ringtune("which", "--device", "cpu", "--json").stdout)["tier"] == "heuristic"


def test_which_names_the_file_and_the_tier(at_home: Path) -> None:
    result = ringtune("which", "--device", "cpu")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == str(at_home)
    assert "tier: exact" in result.stdout
    assert ringtune("which", "--device", "cpu", "--path-only").stdout == f"{at_home}\n"


def test_which_lists_what_is_for_this_kind_of_device_and_counts_the_rest(at_home: Path) -> None:
    lines = ringtune("which", "--device", "cpu").stdout.splitlines()
    assert f"  {at_home} (user): taken; tier exact: the same device and software" in lines
    assert any("heuristic-cpu" in line and "taken for what no plan covers" in line for line in lines)
    assert not any("nvidia" in line for line in lines)
    counted = re.fullmatch(
        r"  (\d+) shipped profiles for other devices, (\d+) measured and (\d+) heuristics: not taken", lines[-1]
    )
    assert counted is not None
    every, measured, rules = map(int, counted.groups())
    assert every == measured + rules
    listed = ringtune("which", "--device", "cpu", "-v").stdout.splitlines()
    assert sum(line.startswith("none ") and "(shipped)" in line for line in listed) == measured


def test_which_warns_of_a_broken_file_and_goes_on(at_home: Path) -> None:
    (at_home.parent / "broken.yaml").write_text("schema: [")
    result = ringtune("which", "--device", "cpu")
    assert result.exit_code == 0
    assert "broken.yaml" in result.stderr


def test_commands_take_the_profile_of_this_machine(at_home: Path, tmp_path: Path) -> None:
    assert ringtune("show", "--device", "cpu").stdout.startswith(detect("cpu").device_name)
    assert ringtune("report", "--device", "cpu", "--output", tmp_path / "r.html").exit_code == 0


@pytest.mark.parametrize("command", ["show", "report", "verify"])
def test_commands_say_that_there_is_no_profile(command: str) -> None:
    assert "ringtune probe" in one_line_error(ringtune(command, "--device", "cpu"), 4)


def test_an_absent_device_is_exit_3() -> None:
    for command in ("which", "doctor", "explain"):
        assert "mps" in one_line_error(ringtune(command, "--device", "mps"), 3)


def test_validate_here(at_home: Path, gpu_file: Path) -> None:
    result = ringtune("validate", "--here", "--device", "cpu", at_home)
    assert result.exit_code == 0
    assert "runs here (tier exact)" in result.stdout
    line = one_line_error(ringtune("validate", "--here", "--device", "cpu", gpu_file), 1)
    assert "does not fit this machine" in line
    assert "profile=" not in line, "that is for Python"


def test_validate_here_names_the_plan_that_cannot_run(tmp_path: Path) -> None:
    impossible = replace(measured_entry(), choice=Choice(plan("cudnn", "flash-cpu", dtype="fp32")))
    path = tmp_path / "odd.yaml"
    save_profile(profile_of_this_machine(measured_entry(1024), impossible), path)
    line = one_line_error(ringtune("validate", "--here", "--device", "cpu", path), 1)
    assert "plans[1]" in line
    assert "forward cudnn: runs on NVIDIA GPUs only" in line
    assert ringtune("validate", path).exit_code == 0
