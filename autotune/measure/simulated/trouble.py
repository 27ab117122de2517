"""Noise laid over true times."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is laid over true times. Shares and sizes are relative.

    ``step_at_s`` moves the clock of the machine by ``step`` once, as a power limit does.
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


QUIET = Trouble(sigma=0.0, outlier_share=0.0, drift=0.0)
