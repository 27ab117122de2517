"""What a cell that is finished says of the same question at another length: what to try first, and what not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ringattn.workload import Tunables, Workload

from .lessons import Part, parts_of
from .space import Space
from .statistics import Interval

HOPELESS = 3.0  # times the best: what was so slow at a neighbouring length is not tried again


class Nearby:
    """Times of a finished cell, for a cell that differs from it in length only."""

    def __init__(self, cell: Workload, estimates: Mapping[Tunables, Interval]) -> None:
        self.seq_len = cell.seq_len
        self._by_kernels: dict[object, float] = {}
        self._by_part: dict[Part, float] = {}
        for plan, gain in estimates.items():
            self._by_kernels[_key(plan)] = min(gain.median, self._by_kernels.get(_key(plan), math.inf))
            for part in parts_of(plan):
                self._by_part[part] = min(gain.median, self._by_part.get(part, math.inf))
        self._best = min((gain.median for gain in estimates.values()), default=0.0)

    def behind(self, plan: Tunables) -> float | None:
        """log(t / t_best) there of the best plan with the same kernels; None where there was none."""
        known = self._by_kernels.get(_key(plan))
        return None if known is None else known - self._best

    def hopeless_parts(self, default: Tunables) -> set[Part]:
        """Kernels, by direction, with which nothing came near the best; those of the default stay."""
        slow = {part for part, median in self._by_part.items() if median - self._best > math.log(HOPELESS)}
        return slow - parts_of(default)

    def left_out(self, space: Space) -> dict[Tunables, str]:
        """Kernel plans not worth their time, and why."""
        return {
            plan: f"{math.exp(behind):.1f} times the best at S={self.seq_len}"
            for plan in space.kernel_plans
            if plan != space.default and (behind := self.behind(plan)) is not None and behind > math.log(HOPELESS)
        }


def _key(plan: Tunables) -> object:
    return (plan.dtype, *dict.fromkeys((branch.forward, branch.backward) for branch in plan.branches))
