"""Starts of child interpreters, which import what this process would and nothing from the working folder."""

from __future__ import annotations

import os
import site
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_PACKAGES = str(Path(__file__).resolve().parents[1])
_NO_CACHE = "/proc/self"  # a folder that is there, as torch wants it, and in which nothing can be made


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
    made = {**environ, "PYTHONPATH": os.pathsep.join(named), "PYTHONSAFEPATH": "1"}
    if not has_temporary_folder():  # torch's profiler imports its compiler, which makes its cache there at once
        made.setdefault("TORCHINDUCTOR_CACHE_DIR", _NO_CACHE)
    return made


def has_temporary_folder() -> bool:
    """Return whether there is a folder for temporary files, without which torch.compile can do nothing."""
    try:
        return bool(tempfile.gettempdir())
    except FileNotFoundError:
        return False
