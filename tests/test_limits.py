"""Limits of tests are for hangs: they grow with what a process takes to start, and every test has one."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import patience
import pytest
from patience import IDLE_START_S, LIMIT_S, MOST, patient

ROOT = Path(__file__).parents[1]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize(("starts", "slowness"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (2.5, 2.5), (1000.0, MOST)])
def test_limits_grow_with_the_start_of_a_process(
    starts: float, slowness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``starts`` is how many times as long as on an idle machine it takes."""
    monkeypatch.setenv(patience.VARIABLE, str(starts * IDLE_START_S))
    assert patient(10.0) == pytest.approx(10.0 * slowness)


def test_every_test_has_a_limit_of_its_own(request: pytest.FixtureRequest) -> None:
    assert patience.VARIABLE in os.environ, "tests/conftest.py measures it"
    for item in request.session.items:
        limit = item.get_closest_marker("timeout")
        assert limit is not None
        assert limit.args[0] >= patient(60.0)


def test_what_ends_the_whole_run_waits_for_the_longest_of_them() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    assert "timeout" not in options
    written = [
        float(n) for path in TESTS for n in re.findall(r"^@pytest\.mark\.timeout\((\d+)\)", path.read_text(), re.M)
    ]
    assert written
    assert options["faulthandler_timeout"] > MOST * max(*written, 2 * LIMIT_S / patience.slowness())


@pytest.mark.parametrize(("value", "option"), [("", "--no-compile"), ("1", "--compile")])
def test_make_compiles_what_it_installs_where_python_may_not(value: str, option: str, tmp_path: Path) -> None:
    environ = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "NO_INSTALL")}
    done = subprocess.run(
        ["make", "--dry-run", "setup", f"VENV={tmp_path}/venv"],
        cwd=ROOT,
        env=environ | {"PYTHONDONTWRITEBYTECODE": value},
        capture_output=True,
        text=True,
        check=True,
    )
    installs = [line for line in done.stdout.splitlines() if "pip install" in line]
    assert installs
    assert all(f" {option} " in line for line in installs)
