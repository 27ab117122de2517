"""Bench of a process of the pool, which compiles and validates beside what is timed on the same device."""

from __future__ import annotations

from autotune.measure.bench import Phase
from autotune.measure.benchmark import DeviceBench
from autotune.measure.evaluator import Proven
from ringattn.workload import Tunables, Workload


class PoolBench(DeviceBench):
    """Runs in a process of the pool: the device's memory is released after each request."""

    def validate(self, workload: Workload, tunables: Tunables, phase: Phase, part: tuple[int, int] = (0, 1)) -> Proven:
        try:
            return super().validate(workload, tunables, phase, part)
        finally:
            self._release_inputs()

    def first_call(self, workload: Workload, tunables: Tunables) -> Proven:
        try:
            return super().first_call(workload, tunables)
        finally:
            self._release_inputs()
