"""Machine whose knobs all interact, drawn from a seed."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autotune.measure.evaluator import Checked
from autotune.measure.simulated import Row
from autotune.space.space import Value, encode
from ringattn.workload import Tunables, Workload


@functools.lru_cache(maxsize=100_000)
def _standard_normal(seed: int, where: tuple[int, ...]) -> float:
    """Return one draw per place, the same whenever and in whatever order it is asked for."""
    return float(np.random.default_rng((seed, *where)).standard_normal())


@dataclass(frozen=True, slots=True)
class SyntheticMachine:
    """Knobs with main effects and an interaction of every pair of their values, all drawn from a seed.

    log t = log base_ms + sum of main effects N(0, main) + sum over pairs N(0, interaction); a default plan of
    first values has neither.
    """

    workload: Workload
    knobs: Mapping[str, tuple[Value, ...]]
    seed: int
    main: float = 0.05
    interaction: float = 0.06
    base_ms: float = 5.0

    def log_ratio(self, plan: Tunables) -> float:
        """Return log(t / t_default), the truth."""
        chosen = encode(self.workload, plan)
        names = [name for name in self.knobs if len(self.knobs[name]) > 1]
        total = 0.0
        for i, name in enumerate(names):
            here = self.knobs[name].index(chosen[name])
            total += self._effect(self.main, i, here)
            for j in range(i):
                there = self.knobs[names[j]].index(chosen[names[j]])
                if here and there:
                    total += self._effect(self.interaction, i, here, j, there)
        return total

    def _effect(self, sigma: float, *where: int) -> float:
        return sigma * _standard_normal(self.seed, where) if where[1] else 0.0

    def row(self, workload: Workload, plan: Tunables) -> Row:
        ms = self.base_ms * math.exp(self.log_ratio(plan))
        return Row(plan, (ms,), Checked(ms, 1e-3, 2**20, ms, 30.0))
