"""Identity of a process as a storage keeps it, by which another process of the same host sees that it has ended."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringattn.hardware.identity import pid_scope

PROCESS, PID = "process", "pid"  # what people are told, and its number
_STARTED, _SCOPE = "started", "scope"


def this_process() -> dict[str, Any]:
    """Return facts of this process (JSON)."""
    return {
        PROCESS: f"process {os.getpid()} on {platform.node()}",
        PID: os.getpid(),
        _STARTED: _started(os.getpid()),
        _SCOPE: list(pid_scope()),
    }


def has_ended(facts: Mapping[str, Any]) -> bool:
    """Return whether a process is known to have ended, by its facts; one of another host never is."""
    pid = facts.get(PID)
    if facts.get(_SCOPE) != list(pid_scope()) or not isinstance(pid, int):
        return False
    return _started(pid) != facts.get(_STARTED)


def _started(pid: int) -> str:
    """Return when a process began, in ticks since the host did; empty where there is none that runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a zombie has ended
