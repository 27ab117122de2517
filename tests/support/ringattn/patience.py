"""Limits of tests. They are for what hangs, so they grow with what it takes a process to start here and now.

``tests/conftest.py`` measures that once in every process of pytest, and what a test starts finds it in its environment.
"""

from __future__ import annotations

import os

VARIABLE = "TESTS_START_S"
IDLE_START_S = 1.5  # what importing torch takes on an idle two-core machine, its bytecode on disk
MOST = 8.0  # a hang is to end the run some day


def slowness() -> float:
    """Return how many times as long as on an idle machine a process takes to start; at least 1."""
    return min(MOST, max(1.0, float(os.environ.get(VARIABLE, "0")) / IDLE_START_S))


def patient(seconds: float) -> float:
    """Return a limit for what takes far less than ``seconds`` on an idle machine."""
    return seconds * slowness()


LIMIT_S = patient(200.0)  # for what answers at once, or after a few processes have started
