"""Compilers of a simulated machine: first calls that compile, in worker processes beside the probe and in its own."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.measure.evaluator import Checked, Fault
from autotune.space.first_calls import Call, CompiledKernel, kernels_compiled
from ringattn.workload import Tunables, Workload

from .clock import SimulatedClock
from .evaluator import ReplayEvaluator

CALL_TIMEOUT_S = 60.0
LAST_CALL_S = 10.0  # for calls that were begun when time was over
ROUNDING_S = 1e-6  # a moment that is waited for has come afterwards


@dataclass(slots=True)
class SimulatedCompilers:
    """``workers`` processes that make first calls, each from ``start_s`` on, and the cache of what they compile.

    ``compile_s`` says how long a kernel of a shape class takes, infinitely long where it hangs. One that two compile
    at once is compiled twice.
    """

    clock: SimulatedClock
    just_in_time: frozenset[str]
    compile_s: Callable[[CompiledKernel], float]
    workers: int = 0
    start_s: float = 8.0
    cached_at: dict[Hashable, float] = field(default_factory=dict)  # by the clock; given to the next probe, it is disk
    ends: dict[Call, float] = field(default_factory=dict)
    failed: dict[Call, Fault] = field(default_factory=dict)

    def begin(self, calls: Sequence[Call]) -> None:
        free = [self.clock.now() + self.start_s] * self.workers
        for call in calls if free else ():
            began = heapq.heappop(free)
            at = self._compile(call, began, CALL_TIMEOUT_S)
            if math.isinf(at):
                self.failed[call] = Fault("timeout", f"no answer within {CALL_TIMEOUT_S:.1f} s")
            self.ends[call] = min(at, began + CALL_TIMEOUT_S)
            heapq.heappush(free, self.ends[call])

    def missing(self, call: Call, now_s: float) -> list[CompiledKernel]:
        """Return what the call would compile now, in the order in which it runs."""
        kernels = sorted(kernels_compiled(*call, self.just_in_time), key=lambda kernel: kernel.direction == "backward")
        return [kernel for kernel in kernels if self.cached_at.get(kernel, math.inf) > now_s]

    def _compile(self, call: Call, began_s: float, timeout_s: float) -> float:
        """Put what a call compiles into the cache; return when it is done, infinity where that is too late."""
        at = began_s
        for kernel in self.missing(call, began_s):
            at += self.compile_s(kernel)
            if at > began_s + timeout_s:
                return math.inf
            self.cached_at[kernel] = min(at, self.cached_at.get(kernel, math.inf))
        return at

    def in_probe(self, call: Call, timeout_s: float) -> bool:
        """Compile in the process that measures, while the clock moves; return whether it came to an end in time."""
        at = self._compile(call, self.clock.now(), timeout_s)
        self.clock.advance(min(at - self.clock.now(), timeout_s))
        return math.isfinite(at)


class CompilingEvaluator(ReplayEvaluator):
    """A simulated machine whose kernels compile at their first call; set ``compilers`` after it is made."""

    compilers: SimulatedCompilers

    def begin_first_calls(self, calls: Sequence[Call]) -> None:
        self.compilers.begin(calls)

    def unfinished_calls(self) -> tuple[Call, ...]:
        now_s = self.clock.now()
        return tuple(call for call, at in self.compilers.ends.items() if at > now_s)

    def failed_calls(self) -> Mapping[Call, Fault]:
        unfinished = self.unfinished_calls()
        return {call: fault for call, fault in self.compilers.failed.items() if call not in unfinished}

    def wait_for_first_call(self, timeout_s: float) -> None:
        next_s = min((self.compilers.ends[call] for call in self.unfinished_calls()), default=self.clock.now())
        self.clock.advance(min(timeout_s, next_s - self.clock.now()) + ROUNDING_S)

    def end_first_calls(self, timeout_s: float) -> str:
        """Forget what is compiled later than that; the kernels of a call that is ended may be there already."""
        last_s = max((self.compilers.ends[call] for call in self.unfinished_calls()), default=self.clock.now())
        self.clock.advance(min(timeout_s + LAST_CALL_S, last_s - self.clock.now()) + ROUNDING_S)
        ended = self.clock.now()
        self.compilers.cached_at = {what: at for what, at in self.compilers.cached_at.items() if at <= ended}
        self.compilers.ends.clear()
        return ""

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        began = self.clock.now()
        if not self.compilers.in_probe((cell, candidate), timeout_s):
            self.clock.advance(self.restart_s)
            return Fault("timeout", f"no answer within {timeout_s:.1f} s")
        left_s = timeout_s - (self.clock.now() - began)
        return super().check(cell, candidate, timeout_s=left_s, pace_ms=pace_ms)
