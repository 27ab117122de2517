"""``make probe``: it fails, with the command's code in its message, where no profile was written."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from autotune.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make_probe(tmp_path: Path, code: int, *options: str) -> subprocess.CompletedProcess[str]:
    """``make probe`` with a Python whose every command ends with ``code``."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {code}\n")
    python.chmod(0o755)
    command = ["make", "--file", str(ROOT / "Makefile"), "probe", "NO_INSTALL=1", f"PYTHON={python}", *options]
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("code", [code for code in ExitCode if code not in (ExitCode.OK, ExitCode.INCONCLUSIVE)])
def test_without_a_profile_it_fails_with_the_code(tmp_path: Path, code: ExitCode) -> None:
    done = make_probe(tmp_path, code)
    assert done.returncode != 0
    assert f"Error {int(code)}" in done.stderr
    assert "to look at it" not in done.stderr


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.INCONCLUSIVE])
def test_with_a_profile_it_succeeds_and_says_where_to_look(tmp_path: Path, code: ExitCode) -> None:
    done = make_probe(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert "-m autotune show" in done.stderr
    assert "report for a web page" in done.stderr
    assert done.stdout == "", "stdout is the command's, which may print JSON"


def test_it_says_that_cells_were_not_measured(tmp_path: Path) -> None:
    said = "exit code 6, which is none for make"
    assert said in make_probe(tmp_path, ExitCode.INCONCLUSIVE).stderr
    assert said not in make_probe(tmp_path, ExitCode.OK).stderr


def test_a_dry_run_has_nothing_to_look_at(tmp_path: Path) -> None:
    assert make_probe(tmp_path, 0, "PROBE_ARGS=--dry-run").stderr == ""
