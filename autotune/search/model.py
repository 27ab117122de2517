"""A model of one cell's times: what each knob's value costs, alone and beside every other, and how sure that is.

A search times many plans a few times each. Taken alone, the best of many noisy readings is mostly luck; taken with
what the same values did elsewhere, luck averages out. The model is a Gaussian process: log(t / t_default) is a sum
over the knobs, plus one over the pairs of knobs, plus something of each plan's own. How large each of the three is
comes from the readings (their marginal likelihood), so that a regular machine is seen through after a few plans, and
one where nothing adds up is not believed to be regular.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from autotune.space.space import Value, encode
from ringattn.workload import Tunables, Workload

Codes = NDArray[np.int64]
Floats = NDArray[np.float64]

SLOW = math.log(4.0)  # what is slower than that counts as that: 4 or 40 times as slow teaches nothing about 5 %
# What is like a plan that failed is tried later, not never: a kernel that hangs in one pair may win in another.
FAILED, FAILURE_NOISE = math.log(1.3), 0.5
LEAST_NOISE = 1e-4  # log-ratio: no clock is better than that
MEAN_VARIANCE = 1.0  # of what all plans have in common
# Standard deviations (log-ratio), over all knobs, of what their values add, of what their pairs add, and of what a plan
# has of its own.
MAIN = (0.03, 0.1, 0.3, 0.8)
PAIR = (0.02, 0.07, 0.2, 0.5)
OWN = (0.01, 0.04)
MOST_PLANS = 100  # the fastest are enough: time goes with the cube of their number


class Coder:
    """Plans as rows of small numbers, one column a knob; equal numbers are equal values."""

    def __init__(self, workload: Workload, knobs: Mapping[str, tuple[Value, ...]], plans: Iterable[Tunables]) -> None:
        self._workload = workload
        values: dict[str, set[Value]] = {name: set(values) for name, values in knobs.items()}
        for plan in plans:
            for name, value in encode(workload, plan).items():
                values.setdefault(name, {None}).add(value)
        self.names = tuple(name for name, several in values.items() if len(several) > 1)
        self._numbers: list[dict[Value, int]] = [{} for _ in self.names]
        for column, name in enumerate(self.names):
            for value in knobs.get(name, ()):
                self.number(column, value)

    def number(self, column: int, value: Value) -> int:
        numbers = self._numbers[column]
        return numbers.setdefault(value, len(numbers))

    def row(self, plan: Tunables) -> Codes:
        values = encode(self._workload, plan)
        return np.array([self.number(column, values.get(name)) for column, name in enumerate(self.names)])


Scales = tuple[float, float, float]  # of MAIN, PAIR and OWN


class PairModel:
    """The process, given readings of coded plans; ``variances`` is the noise of each reading."""

    def __init__(self, codes: Codes, readings: Floats, variances: Floats, scales: Scales | None = None) -> None:
        """``scales`` are found in the readings unless given."""
        self._codes, self._readings, self._variances = codes, np.minimum(readings, SLOW), variances
        agree = self._agreeing(codes)
        self.scales = scales or max(itertools.product(MAIN, PAIR, OWN), key=lambda some: self._evidence(agree, some))
        self._inverse = np.linalg.inv(self._covariance(agree, self.scales))
        self._weights = self._inverse @ self._readings

    def assume(self, code: Codes) -> None:
        """Take the prediction for a reading: whatever is asked next should tell something else."""
        mean, _ = self.predict(code[None])
        shared = self._shared_with(code[None])[0]
        alike = self._alike(code) + self.scales[2] ** 2
        # The inverse of a matrix with one more row, out of the one without.
        weights = self._inverse @ shared
        left = alike - shared @ weights
        corner = np.append(weights, -1.0)
        inverse = np.pad(self._inverse, (0, 1))
        self._inverse = inverse + np.outer(corner, corner) / left
        self._codes = np.vstack([self._codes, code])
        self._readings = np.append(self._readings, mean)
        self._weights = np.append(self._weights, 0.0)  # it is where it was predicted, and moves nothing

    def _shared_with(self, codes: Codes) -> Floats:
        return _shared(self._agreeing(codes), self.scales, codes.shape[1])

    def _alike(self, code: Codes) -> float:
        return float(_shared(np.array([float(len(code))]), self.scales, len(code))[0])

    def _agreeing(self, codes: Codes) -> Floats:
        """How many knobs agree, of each of ``codes`` with each plan that was read."""
        agreeing: Floats = (codes[:, None, :] == self._codes[None, :, :]).sum(axis=2, dtype=np.float64)
        return agreeing

    def _covariance(self, agree: Floats, scales: Scales) -> Floats:
        covariance = _shared(agree, scales, self._codes.shape[1])
        covariance[np.diag_indices(len(covariance))] += scales[2] ** 2 + self._variances
        return covariance

    def _evidence(self, agree: Floats, scales: Scales) -> float:
        """The logarithm of the marginal likelihood, up to a constant."""
        lower = np.linalg.cholesky(self._covariance(agree, scales))
        scaled = np.linalg.solve(lower, self._readings)
        return float(-0.5 * scaled @ scaled - np.log(np.diag(lower)).sum())

    def predict(self, codes: Codes) -> tuple[Floats, Floats]:
        """Mean and standard deviation of what the knobs of each coded plan add up to."""
        shared = self._shared_with(codes)
        variance = self._alike(codes[0]) - np.einsum("ij,ij->i", shared @ self._inverse, shared)
        return shared @ self._weights, np.sqrt(np.maximum(variance, 1e-12))

    def believed(self) -> Floats:
        """Each reading drawn towards the sum of its parts, the more the noisier it is."""
        believed: Floats = self._readings - self._variances * self._weights
        return believed


def _shared(agree: Floats, scales: Scales, knobs: int) -> Floats:
    """The covariance of two plans that agree in so many of the knobs: those, and their pairs, add the same to both."""
    main, pair, _ = scales
    pairs = max(1, knobs * (knobs - 1) // 2)
    covariance: Floats = MEAN_VARIANCE + main**2 / max(1, knobs) * agree + pair**2 / pairs * agree * (agree - 1) / 2
    return covariance


class CellModel:
    """The process over the plans of one cell."""

    def __init__(
        self,
        workload: Workload,
        knobs: Mapping[str, tuple[Value, ...]],
        timed: Mapping[Tunables, tuple[float, int]],
        *,
        sigma: float,
        failed: Iterable[Tunables] = (),
        scales: Scales | None = None,
    ) -> None:
        """``timed`` maps plans to (median log-ratio, repetitions); ``sigma`` is the noise of one repetition."""
        slower = sorted(timed, key=lambda plan: timed[plan][0])[MOST_PLANS:]
        beyond = {plan: timed[plan][0] for plan in slower}
        timed = {plan: reading for plan, reading in timed.items() if plan not in beyond}
        failed = [plan for plan in failed if plan not in timed][:MOST_PLANS]
        plans = [*timed, *failed]
        self.coder = Coder(workload, knobs, plans)
        noise = max(sigma if math.isfinite(sigma) else 0.0, LEAST_NOISE)
        variances = [noise**2 * (math.pi / 2 if count > 2 else 1.0) / count for _, count in timed.values()]
        self.process = PairModel(
            np.array([self.coder.row(plan) for plan in plans]),
            np.array([median for median, _ in timed.values()] + [FAILED] * len(failed)),
            np.array(variances + [FAILURE_NOISE**2] * len(failed)),
            scales,
        )
        self._believed = beyond | dict(zip(plans, map(float, self.process.believed()), strict=True))

    def believed(self, plan: Tunables) -> float:
        """What a timed plan's reading is worth, as a log-ratio; at most SLOW."""
        return self._believed[plan]

    def predict(self, plan: Tunables) -> tuple[float, float]:
        """Mean and standard deviation of log(t / t_default) of any plan."""
        mean, deviation = self.process.predict(self.coder.row(plan)[None])
        return float(mean[0]), float(deviation[0])
