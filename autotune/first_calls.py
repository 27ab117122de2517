"""First calls made ahead: what compiles at its first call is compiled on many cores, before anything is timed.

Of the 170 s of a standard probe on an H200, 76 went into first calls, one after the other: 24 plans took 0.3 to 12 s
each, nearly all of it Triton's and flash-attn-4's compilers on one core. A second probe, which found their kernels on
disk, spent 12.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

from ringattn.errors import DeviceError
from ringattn.fused_steps import FUSED_STEPS
from ringattn.wording import plural
from ringattn.workload import Tunables, Workload

from .bench import BenchSettings
from .evaluator import Fault
from .messages import REAL_BENCH
from .space import Space
from .trial import WorkerEvaluator

Call = tuple[Workload, Tunables]

MOST_CALLS = 40  # two rounds or so of a full house
MOST_PROCESSES = 8
MEMORY_PER_PROCESS_MIB = 8192  # of the device: its context, and one workload
CALL_TIMEOUT_S = 60.0


def calls_worth_making(spaces: Iterable[Space]) -> tuple[Call, ...]:
    """The plans that between them need most of what a probe of these spaces will compile, slowest to compile first.

    What is compiled depends on the kernels and on which branches copy, not on the length, but for whether segments
    end with it: one length is enough that all segments divide.
    """
    alike: dict[Workload, list[Space]] = {}
    for space in spaces:
        alike.setdefault(replace(space.workload, seq_len=1, mode="train", total_length=0), []).append(space)
    calls = [call for group in alike.values() for call in _calls_of(min(group, key=_as_example))]
    calls.sort(key=lambda call: (call[0].pattern.dense, not call[0].train))
    return tuple(calls[:MOST_CALLS])


def _as_example(space: Space) -> tuple[bool, bool, int]:
    workload = space.workload
    ragged = any(workload.seq_len % branch.segment for branch in workload.pattern.branches)
    return (not workload.train, ragged, workload.seq_len)


def _calls_of(space: Space) -> list[Call]:
    compiled = space.machine.just_in_time
    plans: list[Tunables] = []
    kernels = set[str]()
    for plan in space.kernel_plans:
        own = {name for branch in plan.branches for name in (branch.forward, branch.backward) if name}
        if plan.dtype == space.default.dtype and len(own) == 1 and own <= compiled - kernels:
            kernels |= own
            plans.append(plan)
    if not space.workload.pattern.dense and compiled.intersection(FUSED_STEPS):
        wider = {p.dtype: p for p in reversed(space.kernel_plans) if p.dtype != space.default.dtype}
        plans += wider.values()
        # A kernel that reads strides is compiled for the layout of copies as well.
        plans += [copied for plan in plans if (copied := _copied(space, plan)) is not None]
        plans += _gathers(space)
    return [(space.workload, plan) for plan in dict.fromkeys(plans)]


def _copied(space: Space, plan: Tunables) -> Tunables | None:
    """The plan with every branch copied that may be; None where that cannot run."""
    return space.combine(plan, {name: values[-1] for name, values in space.knobs.items() if name.startswith("gather.")})


def _gathers(space: Space) -> list[Tunables]:
    """The default with every choice of branches that copy their rows."""
    knobs = {name: values for name, values in space.knobs.items() if name.startswith("gather.")}
    every = (dict(zip(knobs, values, strict=True)) for values in itertools.product(*knobs.values()))
    plans = (space.combine(space.default, choice) for choice in itertools.islice(every, MOST_CALLS))
    return [plan for plan in plans if plan is not None]


def processes_for(calls: int, cores: int, memory_mib: int) -> int:
    """How many work at once; half of the cores are left to the probe and to compilers' own threads."""
    return max(0, min(calls, MOST_PROCESSES, cores // 2, memory_mib // MEMORY_PER_PROCESS_MIB))


class FirstCalls:
    """Worker processes that make calls in the background, until all are made or ``wait`` ends them."""

    def __init__(
        self, settings: BenchSettings, calls: Sequence[Call], processes: int, *, bench: str = REAL_BENCH
    ) -> None:
        """``bench`` is what the processes run, as ``WorkerEvaluator`` takes it."""
        self._left: SimpleQueue[Call] = SimpleQueue()
        for call in calls:
            self._left.put(call)
        self._faults: list[Fault] = []
        self._bugs: list[BaseException] = []
        self._stopped = threading.Event()
        self._workers = [WorkerEvaluator(settings, bench=bench) for _ in range(processes)]
        # A thread starts its process and outlives it: the kernel ends a process with the thread that started it.
        self._threads = [threading.Thread(target=self._work, args=(worker,), daemon=True) for worker in self._workers]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float) -> str:
        """Until all calls are made, at most ``timeout_s``; then what is left is ended. Says what failed, if anything.

        A failure here is no verdict: the probe checks every plan that it considers.
        """
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self.stop()
        if self._bugs:
            raise self._bugs[0]
        if not self._faults:
            return ""
        first = self._faults[0]
        return f"{plural(len(self._faults), 'first call')} made ahead failed, one so: {first.kind}, {first.message}"

    def stop(self) -> None:
        """Ends the processes; what they were compiling is lost."""
        self._stopped.set()
        for worker in self._workers:
            worker.interrupt()
        for thread in self._threads:
            thread.join()

    def _work(self, worker: WorkerEvaluator) -> None:
        try:
            while not self._stopped.is_set():
                workload, plan = self._left.get_nowait()
                result = worker.first_call(workload, plan, timeout_s=CALL_TIMEOUT_S)
                if isinstance(result, Fault) and not self._stopped.is_set():
                    self._faults.append(result)
        except Empty:
            pass  # every call is made
        except DeviceError as error:  # a device may refuse a second process
            if not self._stopped.is_set():
                self._faults.append(Fault("error", str(error)))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._bugs.append(error)
        finally:
            worker.close()
