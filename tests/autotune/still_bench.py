"""The real bench in every respect but one: times are invented, so that what a search over ranks finds is known."""

from __future__ import annotations

from dataclasses import replace

from autotune.bench import Phase
from autotune.benchmark import DeviceBench
from autotune.evaluator import Checked, Sample
from ringattn.workload import Tunables, Workload

TIMES_MS = {"ring": 6.0, "all-gather": 6.0, "ulysses": 3.0}
MATH_FACTOR = 2.0


class StillBench(DeviceBench):
    """Every plan runs as it would, and Ulysses wins; rank 1 is the slower one by a tenth."""

    def check(self, workload: Workload, tunables: Tunables, phase: Phase, pace_ms: float | None) -> Checked:
        return replace(super().check(workload, tunables, phase, None), call_ms=self._ms(tunables), host_us=10.0)

    def sample(self, workload: Workload, tunables: Tunables) -> Sample:
        super().sample(workload, tunables)
        return Sample(self._ms(tunables), 10.0)

    def end_block(self) -> tuple[str, ...]:
        super().end_block()
        return ()

    def _ms(self, tunables: Tunables) -> float:
        kernels = {name for branch in tunables.branches for name in (branch.forward, branch.backward)}
        frills = sum([tunables.head_groups > 0, tunables.checkpoint not in ("selective", "none")])
        ms = TIMES_MS[tunables.schedule] * (MATH_FACTOR if "math" in kernels else 1.0) * 1.05**frills
        return ms * (1.1 if self._peers.rank == 1 else 1.0)
