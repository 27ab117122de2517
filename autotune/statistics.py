"""Robust statistics of paired timings: medians, bootstrap intervals, noise. Pure functions of numbers and a seed.

Every timing enters as the logarithm of a ratio taken inside one block, so that drift of the clock and load that
lasts longer than a block cancel; medians ignore the outliers that are left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median as median  # of few numbers: numpy takes 40 microseconds for what takes this one 2

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float64]

RESAMPLES = 1000
TRUSTED = 3  # readings of which one may be disturbed
LEAST_APART = 0.02  # noise (log-ratio) below which two readings of one plan are never called too far apart
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Interval:
    """A median of log-ratios with its bootstrap interval; ``count`` paired repetitions stand behind it."""

    low: float
    median: float
    high: float
    count: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def ratio(self) -> float:
        return math.exp(self.median)

    @property
    def ratio_low(self) -> float:
        return math.exp(self.low)

    @property
    def ratio_high(self) -> float:
        return math.exp(self.high)


@functools.lru_cache(maxsize=256)
def _resampling(count: int, resamples: int, seed: int) -> NDArray[np.intp]:
    rng = np.random.default_rng((seed, count))
    return rng.integers(0, count, size=(resamples, count))


def bootstrap_medians(log_ratios: Sequence[float], *, seed: int, resamples: int = RESAMPLES) -> Samples:
    """Return the medians of ``resamples`` resamplings, sorted; the same for the same seed and samples."""
    values = np.asarray(log_ratios, dtype=np.float64)
    assert values.size > 0, "a median of nothing was asked for"
    # Sorted whole: np.median, which parts rows in the middle and looks for NaN, takes three times as long for 8 values.
    rows = np.sort(values[_resampling(values.size, resamples, seed)], axis=1)
    return np.sort((rows[:, (values.size - 1) // 2] + rows[:, values.size // 2]) / 2)


def settled(logs: Sequence[float], sigma: float, first_look: float | None = None) -> float:
    """Return the estimate from a plan's few readings: their median, from TRUSTED readings on.

    Before that one disturbed reading would decide, and what disturbs a reading makes it slower: of two that are too
    far apart for noise of ``sigma`` the lower one counts. Beside a single reading stands the ``first_look``, the ratio
    of two unpaired calls: too rough to be averaged, and enough to see that one of the two was disturbed.
    """
    few = [*logs, first_look] if len(logs) == 1 and first_look is not None else list(logs)
    if len(few) < TRUSTED and max(few) - min(few) > 3 * max(sigma, LEAST_APART):
        return min(few)
    return median(logs)


def interval_of(
    log_ratios: Sequence[float],
    *,
    seed: int,
    level: float = 0.95,
    sigma: float = math.inf,
    first_look: float | None = None,
) -> Interval:
    """Return the estimate of ``settled`` with a percentile-bootstrap interval.

    One sample has no width that can be known: it is infinite. ``sigma`` is the noise of one log-ratio, where known.
    """
    count = len(log_ratios)
    median = settled(log_ratios, sigma, first_look)
    if count < 2:
        return Interval(-math.inf, median, math.inf, count)
    medians = bootstrap_medians(log_ratios, seed=seed)
    tail = (1 - level) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(float(min(low, median)), median, float(max(high, median)), count)


def noise_floor(repeated_log_ratios: Sequence[float]) -> float:
    """Estimate the standard deviation of one paired log-ratio from a plan timed against itself.

    The true ratio is known to be 0 there, so the deviations are taken from 0. A quarter of the values may be
    outliers.
    """
    if len(repeated_log_ratios) < 2:
        return math.inf
    return _MAD_TO_SIGMA * median([abs(ratio) for ratio in repeated_log_ratios])


def blocks_needed(sigma: float, half_width: float) -> int:
    """Return how many blocks make a 95 % interval of the median as narrow as ``half_width`` either way."""
    if not math.isfinite(sigma):
        return 2
    median_efficiency = 2 / math.pi
    return max(2, math.ceil((1.96 * sigma / half_width) ** 2 / median_efficiency))
