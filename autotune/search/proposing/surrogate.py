"""Surrogate of one cell's times: a Gaussian process over log(t / t_default) that sees how knobs act together.

A search times many plans a few times each. Taken alone, the best of many noisy readings is mostly luck; taken with what
similar plans did, luck averages out. The kernel is exp(-sum over differing knobs of a weight each): expanded, it holds
every knob alone, every pair, and higher orders, the weaker the higher. The weights come from the readings (maximum a
posteriori), so that a knob that does nothing is seen through after a few plans, and nothing is believed to add up that
does not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.space.space import Value, decode, encode
from ringattn.workload import Tunables, Workload

Codes = NDArray[np.int64]
Floats = NDArray[np.float64]

SLOW = math.log(4.0)  # what is slower than that counts as that: 4 or 40 times as slow teaches nothing about 5 %
LEAST_NOISE = 1e-3  # log-ratio: no clock is better than that
MEAN_VARIANCE = 1.0  # of what all plans have in common
OWN_VARIANCE = 0.015**2  # of what a plan has of its own, which no other tells
# Of the log of a knob's weight, before anything is known: that all knobs together are worth one unit, and how far off
# that may be. Of the log of the variance the mean is that of the readings.
WEIGHT_SPREAD, VARIANCE_SPREAD = 1.2, 1.0
FIRST_STEPS, MORE_STEPS = 30, 6  # of the ascent to the weights: from nothing, and from those of fewer readings
STEP = 0.25  # of the log of a weight, in one step
SURE = 2.0  # standard errors by which a plan is faster than predicted, for others like it to be asked for
OUTLIER = 3.0  # standard errors from what the others predict, from which a single reading is doubted
MOST_PLANS = 150  # the fastest are enough: time goes with the cube of their number


class Coder:
    """Plans as rows of small numbers, one column a knob; equal numbers are equal values."""

    def __init__(self, workload: Workload, knobs: Mapping[str, tuple[Value, ...]]) -> None:
        self._workload = workload
        self.names = tuple(name for name, several in knobs.items() if len(several) > 1)
        self._fixed = {name: several[0] for name, several in knobs.items() if len(several) == 1}
        self.values = tuple(knobs[name] for name in self.names)
        self._numbers = [{value: number for number, value in enumerate(values)} for values in self.values]
        self.sizes = np.array([len(values) + 1 for values in self.values], dtype=np.int64)  # one for what is foreign
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)])[:-1]
        self._rows: dict[Tunables, Codes] = {}
        self._plans: dict[bytes, Tunables] = {}

    def row(self, plan: Tunables) -> Codes:
        if plan not in self._rows:
            chosen = encode(self._workload, plan)
            found = [
                numbers.get(chosen.get(name), len(numbers))
                for name, numbers in zip(self.names, self._numbers, strict=True)
            ]
            self._rows[plan] = np.array(found, dtype=np.int64)
        return self._rows[plan]

    def rows(self, plans: Iterable[Tunables]) -> Codes:
        found = [self.row(plan) for plan in plans]
        return np.array(found) if found else np.empty((0, len(self.names)), dtype=np.int64)

    def plan(self, row: Codes) -> Tunables:
        """Return the plan of a row, plainly spelled; a search asks for most of them again and again."""
        key = row.tobytes()
        if key not in self._plans:
            chosen = {
                name: values[number]
                for name, values, number in zip(self.names, self.values, row.tolist(), strict=True)
                if number < len(values)
            }
            self._plans[key] = decode(self._workload, self._fixed | chosen)
        return self._plans[key]

    def hot(self, rows: Codes) -> Floats:
        """Return one column for every value of every knob."""
        found = np.zeros((len(rows), int(self.sizes.sum())))
        found[np.arange(len(rows))[:, None], rows + self.offsets] = 1.0
        return found


@dataclass(slots=True)
class Weights:
    """Logarithms of each knob's weight, and of the variance."""

    knobs: Floats
    variance: float


class Surrogate:
    """The process given readings: ``log_ratios`` of plans and the ``variances`` of their noise."""

    def __init__(
        self,
        coder: Coder,
        plans: Sequence[Tunables],
        log_ratios: Sequence[float],
        variances: Sequence[float],
        weights: Weights | None = None,
    ) -> None:
        """``weights`` are those of fewer readings, from which to go on."""
        self.coder = coder
        order = np.argsort(log_ratios, kind="stable")[:MOST_PLANS]
        self.plans = [plans[index] for index in order]
        self._hot = coder.hot(coder.rows(self.plans))
        self._y = np.minimum(np.array(log_ratios, dtype=np.float64)[order], SLOW)
        self._noise = np.maximum(np.array(variances, dtype=np.float64)[order], LEAST_NOISE**2)
        knobs = max(1, len(coder.names))
        self._prior = Weights(
            np.full(len(coder.names), -math.log(knobs)), math.log(max(float(np.var(self._y)), 0.05**2))
        )
        self.weights = weights or self._prior
        self._column_of = np.repeat(np.arange(len(coder.names)), coder.sizes)
        self._ascend(FIRST_STEPS if weights is None else MORE_STEPS)
        self._doubt_outliers()

    # --- the weights ------------------------------------------------------------------------------------------------

    def _ascend(self, steps: int) -> None:
        """Take resilient steps up the posterior: each weight by its own step, which halves where the slope turns."""
        place = np.append(self.weights.knobs, self.weights.variance)
        prior = np.append(self._prior.knobs, self._prior.variance)
        spread = np.append(np.full(len(place) - 1, WEIGHT_SPREAD), VARIANCE_SPREAD)
        step, before = np.full(len(place), STEP), np.zeros(len(place))
        best, kept = -math.inf, place
        for _ in range(steps):
            value, slope = self._posterior(place)
            value -= float((((place - prior) / spread) ** 2).sum()) / 2
            slope = slope - (place - prior) / spread**2
            if value > best:
                best, kept = value, place
            turned = np.sign(slope) * np.sign(before)
            step = np.clip(np.where(turned < 0, step / 2, np.where(turned > 0, step * 1.2, step)), 1e-3, 1.0)
            place, before = place + np.sign(slope) * step, slope
        self.weights = Weights(kept[:-1], float(kept[-1]))
        self._solve()

    def _posterior(self, place: Floats) -> tuple[float, Floats]:
        """Return the log marginal likelihood and its gradient."""
        self.weights = Weights(place[:-1], float(place[-1]))
        alike = self._solve()
        outer = np.outer(self._alpha, self._alpha) - self._inverse
        pulled = outer * alike  # d K / d log variance is the shared part itself
        value = -0.5 * float(self._y @ self._alpha) - self._half_log_det
        # d K / d log weight of a knob is -weight * alike where the two differ in it.
        agreeing = (self._hot * (pulled @ self._hot)).sum(axis=0)
        differing = pulled.sum() - np.bincount(self._column_of, agreeing, minlength=len(place) - 1)
        slope = np.append(-0.5 * np.exp(place[:-1]) * differing, 0.5 * pulled.sum())
        return value, slope

    def _solve(self) -> Floats:
        """Solve the process for the readings; return the part of the covariance that plans share."""
        alike = self._shared(self._hot, self._hot)
        covariance = alike + MEAN_VARIANCE
        covariance[np.diag_indices(len(covariance))] += OWN_VARIANCE + self._noise
        lower = np.linalg.cholesky(covariance)
        half = np.linalg.inv(lower)
        self._inverse: Floats = half.T @ half
        self._half_log_det = float(np.log(np.diag(lower)).sum())
        self._alpha: Floats = self._inverse @ self._y
        return alike

    def _shared(self, one: Floats, other: Floats) -> Floats:
        scale = np.exp(self.weights.knobs)
        weighted = one * scale[self._column_of]
        return np.asarray(np.exp(self.weights.variance - (scale.sum() - weighted @ other.T)))

    def _doubt_outliers(self) -> None:
        """Count readings far slower than all others predict for less: a disturbance hit them, more likely.

        What is far faster than predicted is what the search is for.
        """
        precision = np.diag(self._inverse)
        residual = self._alpha / precision
        surprising = residual * np.sqrt(precision) > OUTLIER
        if surprising.any():
            self._noise = np.where(surprising, np.maximum(self._noise, residual**2), self._noise)
            self._solve()

    # --- what it says -----------------------------------------------------------------------------------------------

    def predict(self, rows: Codes) -> tuple[Floats, Floats]:
        """Mean and standard deviation of each coded plan's log-ratio."""
        shared = self._shared(self.coder.hot(rows), self._hot) + MEAN_VARIANCE
        variance = math.exp(self.weights.variance) + MEAN_VARIANCE
        variance = variance - np.einsum("ij,ij->i", shared @ self._inverse, shared)
        return shared @ self._alpha, np.sqrt(np.maximum(variance, 1e-10))

    def believed(self) -> dict[Tunables, tuple[float, float]]:
        """Mean and standard deviation of each timed plan: its readings drawn towards what its parts did elsewhere."""
        mean = self._y - self._noise * self._alpha
        variance = self._noise - self._noise**2 * np.diag(self._inverse)
        deviation = np.sqrt(np.maximum(variance, 1e-10))
        return dict(zip(self.plans, zip(mean.tolist(), deviation.tolist(), strict=True), strict=True))

    def surprises(self) -> list[Tunables]:
        """Return plans surely faster than all others predict, the most so first: what they have, they have together."""
        precision = np.diag(self._inverse)[: len(self.plans)]
        errors = (self._alpha[: len(self.plans)] / np.sqrt(precision)).tolist()
        return [
            plan
            for error, plan in sorted(zip(errors, self.plans, strict=True), key=lambda each: each[0])
            if error < -SURE
        ]

    def carried(self, plan: Tunables, rows: Codes) -> Floats:
        """Mean of each coded plan if it has all by which ``plan`` is faster than the others predict."""
        number = self.plans.index(plan)
        precision = self._inverse[number, number]
        others = self._alpha - self._inverse[:, number] * (self._alpha[number] / precision)  # without its reading
        predicted = (self._shared(self.coder.hot(rows), self._hot) + MEAN_VARIANCE) @ others
        return np.asarray(predicted + self._alpha[number] / precision)

    def copy(self) -> Surrogate:
        """Return the same process, to assume readings of."""
        return copy.copy(self)

    def assume(self, row: Codes) -> None:
        """Take the prediction for a reading: whatever is asked next should tell something else."""
        mean, _ = self.predict(row[None])
        shared = self._shared(self.coder.hot(row[None]), self._hot)[0] + MEAN_VARIANCE
        alike = math.exp(self.weights.variance) + MEAN_VARIANCE + OWN_VARIANCE + LEAST_NOISE**2
        # The inverse of a matrix with one more row, out of the one without.
        solved = self._inverse @ shared
        corner = np.append(solved, -1.0)
        self._inverse = np.pad(self._inverse, (0, 1)) + np.outer(corner, corner) / (alike - shared @ solved)
        self._hot = np.vstack([self._hot, self.coder.hot(row[None])])
        self._y, self._noise = np.append(self._y, mean), np.append(self._noise, LEAST_NOISE**2)
        self._alpha = np.append(self._alpha, 0.0)  # it is where it was predicted, and moves nothing
