"""Noise laid over true times."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Trouble:
    """Disturbances laid over true times. Shares and sizes are relative.

    ``step_at_s`` moves the clock of the machine by ``step`` once, as a power limit does. ``mode`` is how much slower
    the second of two states of the machine is, each left after ``mode_dwell_s`` on average. ``burst`` is what is added
    during the first ``burst_share`` of every ``burst_period_s``.
    """

    sigma: float = 0.03  # lognormal, per reading
    outlier_share: float = 0.05
    outlier_low: float = 0.2
    outlier_high: float = 1.0
    drift: float = 0.05  # slow, peak to peak
    drift_period_s: float = 90.0
    step: float = 0.0
    step_at_s: float = math.inf
    crash_share: float = 0.0  # of single calls in a block
    disturbed_share: float = 0.0  # of blocks that foreign load touches
    mode: float = 0.0
    mode_dwell_s: float = 0.3
    burst: float = 0.0
    burst_period_s: float = 0.5
    burst_share: float = 0.2


QUIET = Trouble(sigma=0.0, outlier_share=0.0, drift=0.0)
PHASE = 0.6180339887  # of a burst, times the seed: fractions spread evenly


class Noise:
    """The factors by which readings of one machine differ from true times; the same for the same seed and moments."""

    def __init__(self, trouble: Trouble, seed: int, rng: np.random.Generator) -> None:
        self._trouble, self._seed, self._rng = trouble, seed, rng
        self._slower = False
        self._asked_at_s = 0.0

    def factor(self, now_s: float) -> float:
        """Return the factor of a reading that begins now; moments never go back."""
        trouble = self._trouble
        factor = math.exp(self._rng.normal(0.0, trouble.sigma)) if trouble.sigma else 1.0
        if self._rng.random() < trouble.outlier_share:
            factor *= 1 + self._rng.uniform(trouble.outlier_low, trouble.outlier_high)
        factor *= 1 + trouble.drift / 2 * math.sin(2 * math.pi * now_s / trouble.drift_period_s + self._seed)
        if trouble.mode and self._is_slower(now_s):
            factor *= 1 + trouble.mode
        if trouble.burst and (now_s / trouble.burst_period_s + PHASE * self._seed) % 1 < trouble.burst_share:
            factor *= 1 + trouble.burst
        return factor * (1 + trouble.step if now_s >= trouble.step_at_s else 1.0)

    def _is_slower(self, now_s: float) -> bool:
        """Return whether it is in the slow state of a symmetric two-state Markov process."""
        waited_s, self._asked_at_s = now_s - self._asked_at_s, now_s
        changed = (1 - math.exp(-2 * waited_s / self._trouble.mode_dwell_s)) / 2
        self._slower ^= bool(self._rng.random() < changed)
        return self._slower
