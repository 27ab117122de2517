"""Starts of child interpreters, which import what this process would and nothing from the working folder."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

_PACKAGES = str(Path(__file__).resolve().parents[1])


def child_command(module: str, *words: str) -> list[str]:
    """Return the command line that runs ``module`` as a script."""
    return [sys.executable, "-P", "-m", module, *words]


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a child that finds this very package.

    A ``random.py`` or ``queue.py`` in the working folder would come before Python's own; the variable keeps it from the
    child's own children, too. An empty entry of PYTHONPATH means the working folder, and seldom does anybody mean it.
    """
    named = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if _PACKAGES not in (*site.getsitepackages(), site.getusersitepackages()):  # there Python looks by itself, last
        named.insert(0, _PACKAGES)
    return {**environ, "PYTHONPATH": os.pathsep.join(named), "PYTHONSAFEPATH": "1"}
