"""Worker processes beside those that measure, which make first calls while something else is timed.

They compile on cores that the probe does not need. A standard probe of an H200 spent 35 of its 170 s on validations,
one length after the other, nearly all of it in cuDNN's making of plans on one core: 6 to 9 s for a LongNet plan.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from threading import Condition
from typing import TypeVar

from autotune.measure.bench import BenchSettings
from autotune.measure.evaluator import Ended, Fault
from autotune.measure.messages import POOL_BENCH
from autotune.measure.worker_evaluator import WorkerEvaluator
from autotune.space.first_calls import Call
from ringattn.errors import DeviceError
from ringattn.hardware.cgroups import available_bytes
from ringattn.hardware.facts import MIB, HardwareFacts
from ringattn.wording import plural

CALL_TIMEOUT_S = 60.0  # three times what the slowest compiler seen takes
LAST_CALL_S = 10.0  # for calls that were begun when time was over: flash-attn-4's take 5 s
MAX_WORKERS = 8
MEMORY_PER_WORKER_MIB = 8192  # of the device: its context, and one workload
HOST_MEMORY_PER_WORKER_MIB = 4096  # torch with its libraries, and what is compiled

_NOT_MADE = Fault("error", "there was no time or memory for it", Ended())

Result = TypeVar("Result")


def pool_size(cores: int, memory_mib: int, host_memory_mib: int) -> int:
    """Return how many workers to start; half of the cores are left to the probe and to compilers' own threads."""
    by_memory = min(memory_mib // MEMORY_PER_WORKER_MIB, host_memory_mib // HOST_MEMORY_PER_WORKER_MIB)
    return max(0, min(MAX_WORKERS, cores // 2, by_memory))


def pool_size_here(facts: HardwareFacts) -> int:
    """Return how many workers to start beside a probe of this machine's GPU."""
    return pool_size(len(os.sched_getaffinity(0)), facts.memory_mib, (available_bytes() or 0) // MIB)


class PoolWorker:
    """A worker process, and the thread that starts it and asks it: the kernel ends a process with that thread."""

    def __init__(self, settings: BenchSettings, bench: str) -> None:
        self.evaluator = WorkerEvaluator(settings, bench=bench)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ringtune-pool")

    def do(self, job: Callable[[WorkerEvaluator], Result]) -> Future[Result]:
        return self._thread.submit(job, self.evaluator)

    def interrupt(self) -> None:
        """End whatever it does; its answer is a Fault then."""
        self.evaluator.interrupt()

    def end(self) -> None:
        self.interrupt()
        self._thread.submit(self.evaluator.close)
        self._thread.shutdown()


class WorkerPool:
    """A number of worker processes, each started when it is first needed."""

    def __init__(
        self, settings: BenchSettings, workers: int, *, bench: str = POOL_BENCH, last_call_s: float = LAST_CALL_S
    ) -> None:
        """``last_call_s``: a first call that was begun may take so long when the time for them is over."""
        self._make: Callable[[], PoolWorker] = lambda: PoolWorker(settings, bench)
        self._workers = [self._make() for _ in range(workers)]
        self._last_call_s = last_call_s
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._calling: dict[Future[None], PoolWorker] = {}
        self._ended = Condition()  # of a first call
        self._unfinished: dict[Call, None] = {}  # in the order in which they were asked for
        self._failed: dict[Call, Fault] = {}

    @property
    def is_calling(self) -> bool:
        return any(not future.done() for future in self._calling)

    def idle(self) -> list[PoolWorker]:
        """Return the workers that are started and do nothing."""
        busy = [worker for future, worker in self._calling.items() if not future.done()]
        return [worker for worker in self._workers if worker.evaluator.starts and worker not in busy]

    def processes(self) -> tuple[int, ...]:
        """Return the ids of the processes that run."""
        return tuple(pid for worker in self._workers if (pid := worker.evaluator.running_pid) is not None)

    def begin_first_calls(self, calls: Sequence[Call]) -> None:
        """Make each call in some worker of the pool, which fills the caches of compilers."""
        self._unfinished = dict.fromkeys(calls if self._workers else ())
        for call in self._unfinished:
            self._calls.put(call)
        for worker in self._workers[: len(self._unfinished)]:
            self._calling[worker.do(self._make_calls)] = worker

    def _make_calls(self, worker: WorkerEvaluator) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            try:
                result = worker.first_call(*call, timeout_s=CALL_TIMEOUT_S)
            except DeviceError as error:  # a device may refuse another process
                self._end_call(call, Fault("error", str(error)))
                raise
            except BaseException:
                self._end_call(call, _NOT_MADE)  # a bug of ours is raised where calls are waited for
                raise
            self._end_call(call, result if isinstance(result, Fault) else None)

    def _end_call(self, call: Call, fault: Fault | None) -> None:
        with self._ended:
            if call in self._unfinished:
                del self._unfinished[call]
                if fault is not None:
                    self._failed[call] = fault
            self._ended.notify_all()

    def unfinished_calls(self) -> tuple[Call, ...]:
        with self._ended:
            return tuple(self._unfinished)

    def failed_calls(self) -> Mapping[Call, Fault]:
        with self._ended:
            return dict(self._failed)

    def wait_for_first_call(self, timeout_s: float) -> None:
        """Wait until one more has ended, at most so long; raise a bug of ours."""
        with self._ended:
            before = len(self._unfinished)
            self._ended.wait_for(lambda: len(self._unfinished) < before or not before, timeout_s)
        self._drop_refused()

    def _drop_refused(self) -> None:
        """Dismiss workers that the device took no more, whose calls are left to the others; raise a bug of ours."""
        for future, worker in list(self._calling.items()):
            if not future.done():
                continue
            try:
                future.result()
            except DeviceError:
                del self._calling[future]
                self.dismiss(worker)
        if all(future.done() for future in self._calling):  # there is nobody left
            self._begin_no_more()

    def end_first_calls(self, timeout_s: float) -> str:
        """Wait until all are made, or ``timeout_s`` is over and those begun are made. Return what failed, if anything.

        A call that does not end soon is ended. A failure here is no verdict: the probe checks every plan that it
        considers.
        """
        wait(self._calling, timeout_s)
        self._begin_no_more()
        self._end_calling(self._last_call_s)
        faults = [fault for fault in self._failed.values() if fault != _NOT_MADE]
        if not faults:
            return ""
        return f"{plural(len(faults), 'first call')} made ahead failed, one so: {faults[0].kind}, {faults[0].message}"

    def _end_calling(self, timeout_s: float) -> None:
        """End the calls that take longer, with their workers; one that is ended validates nothing later."""
        _, late = wait(self._calling, timeout_s)
        for call in self.unfinished_calls():  # before their workers end, which is no failure of theirs
            self._end_call(call, _NOT_MADE)
        self._replace([self._calling[future] for future in late])
        self._drop_refused()
        self._calling.clear()

    def _begin_no_more(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._end_call(self._calls.get_nowait(), _NOT_MADE)

    def give_up_first_calls(self) -> None:
        """End all of them at once."""
        self._begin_no_more()
        self._end_calling(0.0)

    def _replace(self, workers: Sequence[PoolWorker]) -> None:
        for worker in workers:
            worker.interrupt()  # all of them, before one is waited for
        for worker in workers:
            self._workers[self._workers.index(worker)] = self._make()
            worker.end()

    def dismiss(self, worker: PoolWorker) -> None:
        """End a worker that the device takes no more."""
        if worker in self._workers:  # and not replaced already
            self._workers.remove(worker)
            worker.end()

    def close(self) -> None:
        """End all of them."""
        for worker in self._workers:
            worker.interrupt()  # all of them, before one is waited for
        while self._workers:
            self._workers.pop().end()
