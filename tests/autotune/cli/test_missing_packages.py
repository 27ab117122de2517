"""A Python without a package that the command needs is told of in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import autotune

BARE = "import sys; sys.modules[{!r}] = None; from autotune.__main__ import main; main()"


@pytest.mark.parametrize("package", ["rich", "torch", "optuna"])
def test_the_package_and_how_to_install_it_are_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(autotune.__file__).parents[1]))
    command = [sys.executable, "-c", BARE.format(package), "probe", "--dry-run"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr == f"Error: ringtune needs {package}, which is not installed; pip install . brings it\n"
