"""First calls that compile: which plans wait for a compiler beside the probe, and how long a first call may take.

A compiler is not a hang. With 40 s for one shape of an H200 a plan counted as hung after 4.1 s, and flash-attn-4, whose
compiler takes 3 to 20 s a direction, was lost to the probe.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from autotune.measure.evaluator import CallsAhead, Fault, StillCompiling
from autotune.space.first_calls import Call, CompiledKernel, kernels_compiled, shape_class, steps_compiled
from ringattn.workload import Tunables, Workload

COMPILE_S = 60.0  # a first call that compiles may take so long, whatever the budget: three times the slowest one seen
# Of what is left of the probe, where nothing compiles beside it: a kernel that hangs must not take all of the rest.
COMPILE_SHARE = 0.6


class Compilers:
    """Compilers of a probe, in worker processes beside it and in the one that measures."""

    def __init__(self, just_in_time: frozenset[str] = frozenset(), ahead: CallsAhead | None = None) -> None:
        """``just_in_time`` are the kernels and steps that compile; ``ahead`` makes first calls beside the probe."""
        self._just_in_time = just_in_time
        self._ahead = ahead
        self._begun = False
        self._calls: list[Call] = []  # that were begun, and whose end was not met yet
        self._compiled: set[Hashable] = set()  # by first calls beside the probe
        self._ran: set[Hashable] = set()  # in the process that measures

    def begin(self, calls: Sequence[Call]) -> None:
        """Make first calls beside the probe, where something does."""
        if self._ahead is not None and calls:
            self._begun = True
            self._ahead.begin_first_calls(calls)
            self._calls = list(self._ahead.unfinished_calls())

    def news(self) -> Iterator[tuple[Tunables, Fault | None]]:
        """Yield the plans whose first calls have ended since the last time, with what went wrong."""
        if self._ahead is None or not self._calls:
            return
        unfinished, failed = frozenset(self._ahead.unfinished_calls()), self._ahead.failed_calls()
        ended = [call for call in self._calls if call not in unfinished]
        self._calls = [call for call in self._calls if call in unfinished]
        for call in ended:
            if call not in failed:
                self._compiled |= self._keys(*call)
            yield call[1], failed.get(call)

    @property
    def at_work(self) -> bool:
        return bool(self._calls)

    def wait(self, timeout_s: float) -> None:
        """Wait until one more first call has ended, but no longer."""
        if self._ahead is not None:
            self._ahead.wait_for_first_call(timeout_s)

    def waits(self, workload: Workload, plan: Tunables) -> bool:
        """Return whether a kernel of the plan is being compiled, so that its first call would compile it again."""
        if not self._calls:
            return False
        missing = self._keys(workload, plan) - self._compiled - self._ran
        return bool(missing) and any(missing & self._keys(*call) for call in self._calls)

    def waited_for(self) -> tuple[str, ...]:
        """Return the kernels that are still being compiled, with their directions and patterns."""
        missing = self._missing()
        return tuple(sorted({f"{key.kernel} ({key.direction}, {key.workload.pattern})" for key in missing}))

    def compile_for(self, workload: Workload) -> bool:
        """Return whether a kernel that plans of this workload may run is being compiled."""
        shape = shape_class(workload)
        return any(key.workload == shape and (workload.train or key.direction == "forward") for key in self._missing())

    def _missing(self) -> frozenset[CompiledKernel]:
        keys = {key for call in self._calls for key in self._keys(*call)}
        return frozenset(keys - self._compiled - self._ran)

    def limit_s(self, workload: Workload, plan: Tunables, left_s: float) -> float:
        """Return the seconds for a plan's first call with ``left_s`` of the probe left; 0 where nothing compiles."""
        kernels, steps = self._keys(workload, plan), steps_compiled(workload, plan, self._just_in_time)
        return min(COMPILE_S, COMPILE_SHARE * left_s) if (kernels | steps) - self._ran else 0.0

    def compiles_here(self, workload: Workload, plan: Tunables) -> bool:
        """Return whether the process that measures has to compile for the plan's first call."""
        steps = steps_compiled(workload, plan, self._just_in_time) - self._ran
        return bool(steps or self._keys(workload, plan) - self._ran - self._compiled)

    def ran(self, workload: Workload, plan: Tunables) -> None:
        """Learn that the plan ran in the process that measures, which has nothing left to compile for it."""
        self._ran |= self._keys(workload, plan) | steps_compiled(workload, plan, self._just_in_time)

    def end(self, timeout_s: float) -> str:
        """Let first calls come to their end, as far as there is time, for the next probe; return what failed."""
        return self._ahead.end_first_calls(timeout_s) if self._ahead is not None and self._begun else ""

    def _keys(self, workload: Workload, plan: Tunables) -> frozenset[CompiledKernel]:
        return kernels_compiled(workload, plan, self._just_in_time)


def judged(fault: Fault, limit_s: float, *, may_compile: bool) -> Fault:
    """Return the fault of a first call, told apart from a hang where its compiler had less time than one may need."""
    if not may_compile or limit_s >= COMPILE_S or fault.kind != "timeout" or fault.cause is not None:
        return fault
    return replace(fault, message=f"{fault.message}: it may still be compiling", cause=StillCompiling())
