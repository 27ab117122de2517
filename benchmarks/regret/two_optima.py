"""Machine with two optima far from each other, one of them a step or two from the default."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.measure.evaluator import Checked
from autotune.measure.simulated import Row
from autotune.search.deciding.choose import distance
from autotune.space.space import Space
from ringattn.workload import Tunables, Workload

MATH_TIMES = 6.0


@dataclass(frozen=True, slots=True)
class TwoOptima:
    """Every knob away from the nearer of two plans costs ``slope``; the far plan is ``apart`` faster than the near."""

    space: Space
    base_ms: float  # of the near optimum
    near: Tunables
    far: Tunables
    slope: float = 0.06
    apart: float = 0.01

    def row(self, workload: Workload, plan: Tunables) -> Row:
        """Return the Row of a plan, as ReplayEvaluator wants it."""
        assert workload == self.space.workload
        to_near = self.slope * distance(workload, plan, self.near)
        to_far = self.slope * distance(workload, plan, self.far) - math.log1p(self.apart)
        ms = self.base_ms * math.exp(min(to_near, to_far)) * (MATH_TIMES if "math" in plan.kernels else 1.0)
        return Row(plan, (ms,), Checked(ms, 1e-3, 2**24, ms + 30.0, 30.0))

    def is_right(self, plan: Tunables) -> bool:
        return True

    def best_ms(self) -> float:
        """Return true ms of the far plan."""
        return self.base_ms / (1 + self.apart)
