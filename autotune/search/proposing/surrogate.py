"""Surrogate of one cell's times: a Gaussian process over log(t / t_default) that sees how knobs act together.

A search times many plans a few times each. Taken alone, the best of many noisy readings is mostly luck; taken with what
similar plans did, luck averages out. The process is a sum of what every knob does alone, every pair and every three
together (an additive kernel, Duvenaud et al. 2011), and a knob of branches counts once more by the share of branches
that have a value, as what a kernel is worth in one it mostly is in the others. The weight of each knob and the variance
of each order come from the readings (maximum a posteriori), so that a knob that does nothing is seen through after a
few plans, and nothing is believed to add up that does not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.space.space import Value, encode
from ringattn.workload import Tunables, Workload

Codes = NDArray[np.int64]
Floats = NDArray[np.float64]

SLOW = math.log(4.0)  # what is slower than that counts as that: 4 or 40 times as slow teaches nothing about 5 %
LEAST_NOISE = 1e-3  # log-ratio: no clock is better than that
MEAN_VARIANCE = 1.0  # of what all plans have in common
OWN_VARIANCE = 0.015**2  # of what a plan has of its own, which no other tells
# Of the log of a knob's weight, before anything is known: that all knobs together are worth one unit, and how far off
# that may be. Of the log of an order's variance the mean is that of the readings, times its share.
WEIGHT_SPREAD, VARIANCE_SPREAD = 1.2, 1.0
ORDER_SHARES = (1.0, 0.5, 0.25)  # of single knobs, pairs, threes
FIRST_STEPS, MORE_STEPS = 30, 6  # of the ascent to the weights: from nothing, and from those of fewer readings
STEP = 0.25  # of the log of a weight, in one step
SURE = 2.0  # standard errors by which a plan is faster than predicted, for others like it to be asked for
OUTLIER = 3.0  # standard errors from what the others predict, from which a single reading is doubted
BRANCH_KNOBS = ("forward", "backward", "gather")
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
        self._share_of = [self._share_matrix(stem) for stem in BRANCH_KNOBS if self._columns(stem)]
        self.groups = len(self.names) + len(self._share_of)

    def _columns(self, stem: str) -> list[int]:
        found = [column for column, name in enumerate(self.names) if name.partition(".")[0] == stem]
        return found if len(found) > 1 else []

    def _share_matrix(self, stem: str) -> Floats:
        columns = self._columns(stem)
        values = list(dict.fromkeys(value for column in columns for value in self.values[column]))
        found = np.zeros((int(self.sizes.sum()), len(values)))
        for column in columns:
            for value, number in self._numbers[column].items():
                found[self.offsets[column] + number, values.index(value)] = 1 / len(columns)
        return found

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

    def assignment(self, row: Codes) -> dict[str, Value]:
        return self._fixed | {
            name: values[number]
            for name, values, number in zip(self.names, self.values, row.tolist(), strict=True)
            if number < len(values)
        }

    def hot(self, rows: Codes) -> Floats:
        """One column for every value of every knob."""
        found = np.zeros((len(rows), int(self.sizes.sum())))
        found[np.arange(len(rows))[:, None], rows + self.offsets] = 1.0
        return found

    def shares(self, hot: Floats) -> list[Floats]:
        """For each knob of branches a column for every value: the share of branches that have it."""
        return [hot @ of for of in self._share_of]


@dataclass(slots=True)
class Weights:
    """Logarithms of each knob's weight, those of shares last, and of the variance of each order."""

    knobs: Floats
    orders: Floats

    @classmethod
    def of(cls, place: Floats) -> Weights:
        return cls(place[: -len(ORDER_SHARES)], place[-len(ORDER_SHARES) :])


@dataclass(slots=True)
class _Alike:
    """Sums over knobs in which two plans agree, of the weight's first, second and third power."""

    first: Floats
    second: Floats
    third: Floats

    def orders(self) -> tuple[Floats, Floats, Floats]:
        """The elementary symmetric polynomials of the weights, times 1, 2 and 6 (Newton's identities)."""
        one, two, three = self.first, self.second, self.third
        return one, one**2 - two, one**3 - 3 * one * two + 2 * three


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
        self._shares = coder.shares(self._hot)
        variance = max(float(np.var(self._y)), 0.05**2)
        self._prior = Weights(
            np.full(coder.groups, -math.log(max(1, coder.groups))), np.log(variance * np.array(ORDER_SHARES))
        )
        self.weights = weights or self._prior
        self._column_of = np.repeat(np.arange(len(coder.names)), coder.sizes)
        self._agreed = [share @ share.T for share in self._shares]
        self._ascend(FIRST_STEPS if weights is None else MORE_STEPS)
        self._doubt_outliers()

    # --- the weights ------------------------------------------------------------------------------------------------

    def _ascend(self, steps: int) -> None:
        """Resilient steps up the posterior: each weight by its own step, which halves where the slope turns."""
        place = np.concatenate([self.weights.knobs, self.weights.orders])
        prior = np.concatenate([self._prior.knobs, self._prior.orders])
        spread = np.where(np.arange(len(place)) < len(self._prior.knobs), WEIGHT_SPREAD, VARIANCE_SPREAD)
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
        self.weights = Weights.of(kept)
        self._solve()

    def _posterior(self, place: Floats) -> tuple[float, Floats]:
        """The log marginal likelihood and its gradient."""
        self.weights = Weights.of(place)
        alike = self._solve()
        pulled = np.outer(self._alpha, self._alpha) - self._inverse
        value = -0.5 * float(self._y @ self._alpha) - self._half_log_det
        one, two, three = np.exp(self.weights.orders)
        of_orders = [
            float((pulled * order).sum()) * v for order, v in zip(alike.orders(), (one, two, three), strict=True)
        ]
        # By the weight w of a knob in which two plans agree by a (0 or 1, for shares between) the covariance grows by
        # a (v1 + 2 v2 s1 + 3 v3 (s1^2 - s2)) - 2 w a^2 (v2 + 3 v3 s1) + 6 w^2 a^3 v3.
        first = pulled * (one + 2 * two * alike.first + 3 * three * (alike.first**2 - alike.second))
        second = pulled * (two + 3 * three * alike.first)
        weights = np.exp(self.weights.knobs)
        by_knob = []
        for power, matrix in enumerate((first, second, pulled), 1):
            agreeing = (self._hot * (matrix @ self._hot)).sum(axis=0)
            shared = [float((matrix * agreed**power).sum()) for agreed in self._agreed]
            by_knob.append(np.append(np.bincount(self._column_of, agreeing, len(self.coder.names)), shared))
        grows = by_knob[0] - 2 * weights * by_knob[1] + 6 * three * weights**2 * by_knob[2]
        return value, 0.5 * np.concatenate([weights * grows, of_orders])

    def _solve(self) -> _Alike:
        """Condition on the readings; returns how plans agree."""
        alike = self._alike(self._hot, self._shares)
        covariance = self._covariance(alike)
        covariance[np.diag_indices(len(covariance))] += OWN_VARIANCE + self._noise
        lower = np.linalg.cholesky(covariance)
        half = np.linalg.inv(lower)
        self._inverse: Floats = half.T @ half
        self._half_log_det = float(np.log(np.diag(lower)).sum())
        self._alpha: Floats = self._inverse @ self._y
        return alike

    def _alike(self, hot: Floats, shares: list[Floats]) -> _Alike:
        """How plans agree with those that were read."""
        weights = np.exp(self.weights.knobs)
        count = len(self.coder.names)
        agreed = [one @ other.T for one, other in zip(shares, self._shares, strict=True)]
        return _Alike(
            *(
                (hot * (weights[:count] ** power)[self._column_of]) @ self._hot.T
                + sum((a * w) ** power for a, w in zip(agreed, weights[count:], strict=True))
                for power in (1, 2, 3)
            )
        )

    def _covariance(self, alike: _Alike) -> Floats:
        orders = zip(np.exp(self.weights.orders), alike.orders(), strict=True)
        return np.asarray(sum(variance * order for variance, order in orders) + MEAN_VARIANCE)

    def _own(self, shares: list[Floats]) -> Floats:
        """The variance of each plan."""
        weights = np.exp(self.weights.knobs)
        count = len(self.coder.names)
        alone = [(share**2).sum(axis=1) for share in shares]
        return self._covariance(
            _Alike(
                *(
                    np.full(len(shares[0]) if shares else 1, (weights[:count] ** power).sum())
                    + sum((a * w) ** power for a, w in zip(alone, weights[count:], strict=True))
                    for power in (1, 2, 3)
                )
            )
        )

    def _doubt_outliers(self) -> None:
        """Readings far slower than all others predict count for less: a disturbance hit them, more likely.

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
        hot = self.coder.hot(rows)
        shares = self.coder.shares(hot)
        shared = self._covariance(self._alike(hot, shares))
        variance = self._own(shares) - np.einsum("ij,ij->i", shared @ self._inverse, shared)
        return shared @ self._alpha, np.sqrt(np.maximum(variance, 1e-10))

    def believed(self) -> dict[Tunables, tuple[float, float]]:
        """Mean and standard deviation of each timed plan: its readings drawn towards what its parts did elsewhere."""
        mean = self._y - self._noise * self._alpha
        variance = self._noise - self._noise**2 * np.diag(self._inverse)
        deviation = np.sqrt(np.maximum(variance, 1e-10))
        return dict(zip(self.plans, zip(mean.tolist(), deviation.tolist(), strict=True), strict=True))

    def surprises(self) -> list[Tunables]:
        """Plans surely faster than all others predict, the most so first: what they have, they have together."""
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
        hot = self.coder.hot(rows)
        predicted = self._covariance(self._alike(hot, self.coder.shares(hot))) @ others
        return np.asarray(predicted + self._alpha[number] / precision)

    def copy(self) -> Surrogate:
        """The same process, to assume readings of."""
        return copy.copy(self)

    def assume(self, row: Codes) -> None:
        """Take the prediction for a reading: whatever is asked next should tell something else."""
        mean, _ = self.predict(row[None])
        hot = self.coder.hot(row[None])
        shares = self.coder.shares(hot)
        shared = self._covariance(self._alike(hot, shares))[0]
        alike = float(self._own(shares)[0]) + OWN_VARIANCE + LEAST_NOISE**2
        # The inverse of a matrix with one more row, out of the one without.
        solved = self._inverse @ shared
        corner = np.append(solved, -1.0)
        self._inverse = np.pad(self._inverse, (0, 1)) + np.outer(corner, corner) / (alike - shared @ solved)
        self._hot = np.vstack([self._hot, hot])
        self._shares = [np.vstack(pair) for pair in zip(self._shares, shares, strict=True)]
        self._y, self._noise = np.append(self._y, mean), np.append(self._noise, LEAST_NOISE**2)
        self._alpha = np.append(self._alpha, 0.0)  # it is where it was predicted, and moves nothing
