"""The outcome of one candidate of one cell, as it is reported to observers of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OutcomeKind = Literal[
    "ok", "oom", "crash", "timeout", "wrong", "compile", "error", "rejected", "over-memory", "over-error"
]


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """Outcome of one candidate of one cell; ``median_ms`` and ``default_ratio`` are None unless it was timed."""

    kind: OutcomeKind
    stage: str
    median_ms: float | None = None
    default_ratio: float | None = None  # time / default's time, below 1 is faster
    error: float | None = None  # relative 2-norm against float64
    peak_bytes: int | None = None
    message: str = ""  # one line; for a wrong answer also the input that broke it
