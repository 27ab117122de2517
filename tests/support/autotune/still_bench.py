"""The real bench but for one thing: times are invented, so that what a search finds is known, or one rank errs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autotune.accuracy.inputs import Inputs
from autotune.measure.bench import Phase
from autotune.measure.benchmark import DeviceBench
from autotune.measure.evaluator import Checked, Interference, Sample
from ringattn.workload import Tunables, Workload

TIMES_MS = {"ring": 6.0, "all-gather": 6.0, "ulysses": 3.0}
MATH_FACTOR = 2.0


class StillBench(DeviceBench):
    """Every plan runs as it would, and Ulysses wins; rank 1 is the slower one by a tenth.

    math in the backward alone of a ring raises, on one rank alone; all workers have to start anew then.
    """

    def check(self, workload: Workload, tunables: Tunables, phase: Phase, pace_ms: float | None) -> Checked:
        branch = tunables.branches[0]
        if (branch.forward, branch.backward, tunables.schedule, self._peers.rank) == ("flash-cpu", "math", "ring", 1):
            raise RuntimeError("not on this rank")
        return replace(super().check(workload, tunables, phase, None), call_ms=self._ms(tunables), host_us=10.0)

    def sample(self, workload: Workload, tunables: Tunables) -> Sample:
        self._peers.barrier()
        return Sample(self._ms(tunables), 10.0)

    def end_block(self) -> tuple[Interference, ...]:
        super().end_block()
        return ()

    def _ms(self, tunables: Tunables) -> float:
        kernels = {name for branch in tunables.branches for name in (branch.forward, branch.backward)}
        frills = sum([tunables.head_groups > 0, tunables.checkpoint not in ("selective", "none")])
        ms = TIMES_MS[tunables.schedule] * (MATH_FACTOR if "math" in kernels else 1.0) * 1.05**frills
        return ms * (1.1 if self._peers.rank == 1 else 1.0)


class OneRankErrs(DeviceBench):
    """The last row that rank 1 holds is wrong."""

    def _answer(self, module: Any, workload: Workload, length: int, inputs: Inputs, *rest: Any) -> tuple[float, float]:
        if self._peers.rank != 1:
            return super()._answer(module, workload, length, inputs, *rest)

        def erring(*tensors: Any, **more: Any) -> Any:
            out, lse = module(*tensors, **more)
            wrong = torch.zeros_like(out)
            wrong[:, -1] = 1.0
            return out + wrong, lse

        return super()._answer(erring, workload, length, inputs, *rest)  # type: ignore[arg-type]
