"""What a cell that is finished says of the same question at another length: what to try first, and what not at all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autotune.statistics import Interval
from ringattn.workload import Tunables, Workload

from .lessons import Part, parts_of

HOPELESS = 2.0  # times the best: what was so slow at a neighbouring length is not tried again


@dataclass(frozen=True, slots=True)
class Timed:
    """What a finished cell timed. ``narrow`` have a narrower dtype; ``ruled_out`` failed or break a limit.

    ``launch_bound`` were judged by how long the host takes to launch them, which says nothing of another length.
    """

    cell: Workload
    estimates: Mapping[Tunables, Interval]
    narrow: frozenset[Tunables] = frozenset()
    ruled_out: frozenset[Tunables] = frozenset()
    launch_bound: frozenset[Tunables] = frozenset()

    def behind(self) -> dict[Tunables, float]:
        """log(t / t_best): what is ruled out is no measure for others, a narrower dtype none for the main ones.

        Of what was launch-bound nothing is said.
        """
        allowed = {plan: gain.median for plan, gain in self.estimates.items() if plan not in self.ruled_out}
        best = min(allowed.values(), default=math.inf)
        best_main = min((median for plan, median in allowed.items() if plan not in self.narrow), default=math.inf)
        return {
            plan: gain.median - (best if plan in self.narrow else best_main)
            for plan, gain in self.estimates.items()
            if plan not in self.launch_bound
        }


class Nearby:
    """Times of finished cells, for a cell that differs from them in length only."""

    def __init__(self, cells: Iterable[Timed]) -> None:
        """``cells`` nearest first: a farther one speaks where the nearer say nothing."""
        self._by_kernels: dict[object, tuple[float, int]] = {}  # log(t / t_best), and at which length
        self._by_part: dict[Part, tuple[float, int]] = {}
        for timed in cells:
            by_kernels: dict[object, tuple[float, int]] = {}
            by_part: dict[Part, tuple[float, int]] = {}
            for plan, log_ratio in timed.behind().items():
                behind = (log_ratio, timed.cell.seq_len)
                by_kernels[_key(plan)] = min(behind, by_kernels.get(_key(plan), behind))
                for part in parts_of(plan):
                    by_part[part] = min(behind, by_part.get(part, behind))
            self._by_kernels = by_kernels | self._by_kernels
            self._by_part = by_part | self._by_part

    def behind(self, plan: Tunables) -> float | None:
        """log(t / t_best) there of the best plan with the same kernels; None where there was none."""
        known = self._by_kernels.get(_key(plan))
        return None if known is None else known[0]

    def hopeless_parts(self, default: Tunables) -> set[Part]:
        """Kernels, by direction, with which nothing came near the best; those of the default stay."""
        slow = {part for part, (behind, _) in self._by_part.items() if behind > math.log(HOPELESS)}
        return slow - parts_of(default)

    def left_out(self, plans: Iterable[Tunables], default: Tunables) -> dict[Tunables, str]:
        """Those not worth their time, and why: nothing with their kernels, whatever else it had, came near the best."""
        known = {plan: self._by_kernels[_key(plan)] for plan in plans if _key(plan) in self._by_kernels}
        return {
            plan: f"{math.exp(behind):.1f} times the best at S={seq_len}"
            for plan, (behind, seq_len) in known.items()
            if plan != default and behind > math.log(HOPELESS)
        }


def _key(plan: Tunables) -> object:
    return (plan.dtype, *dict.fromkeys((branch.forward, branch.backward) for branch in plan.branches))
