"""An additive model of one cell's times: what each changed knob costs, and how far a reading may be believed.

A search times many plans a few times each. Taken alone, the best of many noisy readings is mostly luck; taken with
what the same changes did elsewhere, luck averages out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ringattn.workload import Tunables, Workload

from .space import Value, encode

LOCALITY = 4.0  # knobs: how fast a measurement counts less with its distance from the plan at hand
RIDGE = 1.0
MOST_REPETITIONS = 4  # beyond so many, more repetitions of one plan say nothing more about the others
LEAST_NOISE = 1e-4  # log-ratio: no clock is better than that
LEAST_MISFIT = 0.01  # log-ratio: no machine is more additive than that

Changes = frozenset[tuple[str, Value]]


def changes_between(workload: Workload, plan: Tunables, default: Tunables) -> Changes:
    """The knobs of ``plan`` that differ from the default, with their values."""
    there = encode(workload, default)
    return frozenset((name, value) for name, value in encode(workload, plan).items() if there.get(name) != value)


class AdditiveModel:
    """log(t / t_default) as a sum over changed knobs, by ridge regression on everything timed.

    With ``around``, plans near to it count most: effects that depend on other knobs are then those that hold there.
    """

    def __init__(
        self,
        workload: Workload,
        default: Tunables,
        timed: Mapping[Tunables, tuple[float, int]],
        *,
        sigma: float,
        around: Tunables | None = None,
    ) -> None:
        """``timed`` maps plans to (median log-ratio, repetitions); ``sigma`` is the noise of one repetition."""
        self._workload, self._default = workload, default
        self._timed, self._sigma = timed, max(sigma, LEAST_NOISE)
        changes = {plan: changes_between(workload, plan, default) for plan in timed}
        self._columns = {change: n for n, change in enumerate(sorted(set().union(*changes.values()), key=repr))}
        rows = np.zeros((len(timed), len(self._columns)))
        weights = np.zeros(len(timed))
        for number, plan in enumerate(timed):
            rows[number, [self._columns[change] for change in changes[plan]]] = 1.0
            far = 0 if around is None else len(changes_between(workload, plan, around))
            weights[number] = min(timed[plan][1], MOST_REPETITIONS) * math.exp(-far / LOCALITY)
        targets = np.array([median for median, _ in timed.values()])
        self._effects = np.zeros(len(self._columns))
        if self._columns:
            gram = rows.T @ (weights[:, None] * rows) + RIDGE * weights.mean() * np.eye(len(self._columns))
            self._effects = np.linalg.solve(gram, rows.T @ (weights * targets))
        self.misfit = self._misfit()

    def predict(self, plan: Tunables) -> float:
        """The sum of what is known of its changes; what was never tried counts nothing."""
        changes = changes_between(self._workload, plan, self._default)
        return math.fsum(self._effects[self._columns[c]] for c in changes if c in self._columns)

    def _misfit(self) -> float:
        """Standard deviation of what the sum cannot explain, noise taken out."""
        if len(self._timed) < 3:
            return math.inf
        squares = [(median - self.predict(plan)) ** 2 for plan, (median, _) in self._timed.items()]
        noise = [self._variance(count) for _, count in self._timed.values()]
        return max(LEAST_MISFIT, math.sqrt(max(0.0, float(np.median(squares)) * 2.2 - float(np.mean(noise)))))

    def _variance(self, count: int) -> float:
        return (math.pi / 2 if count > 2 else 1.0) * self._sigma**2 / count

    def believed(self, plan: Tunables) -> float:
        """The reading of a timed plan drawn towards the sum of its parts, the more the fewer its repetitions."""
        median, count = self._timed[plan]
        if not math.isfinite(self.misfit):
            return median
        reading, prior = 1 / self._variance(count), 1 / self.misfit**2
        return (reading * median + prior * self.predict(plan)) / (reading + prior)
