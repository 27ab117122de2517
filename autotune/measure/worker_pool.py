"""A pool of worker processes beside the one that measures: they compile ahead and share validations.

They compile on cores that the probe does not need, also while something is timed. A standard probe of an H200 spent 35
of its 170 s on validations, one length after the other, nearly all of it in cuDNN's making of plans on one core: 6 to
9 s for a LongNet plan.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import Empty, SimpleQueue
from threading import Condition
from typing import TypeVar

from autotune.space.first_calls import Call
from ringattn.errors import DeviceError
from ringattn.hardware.cgroups import available_bytes
from ringattn.hardware.facts import MIB, HardwareFacts
from ringattn.wording import plural
from ringattn.workload import Tunables, Workload

from .bench import BenchSettings
from .evaluator import Block, Checked, Ended, Fault, Proven
from .messages import POOL_BENCH, REAL_BENCH
from .worker_evaluator import WorkerEvaluator

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


class _PoolWorker:
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


class PooledEvaluator(WorkerEvaluator):
    """Measures in one worker process, with a pool of others for what need not run alone."""

    def __init__(
        self,
        settings: BenchSettings,
        *,
        workers: int,
        bench: str = REAL_BENCH,
        pool_bench: str = POOL_BENCH,
        reference_timeout_s: float = 300.0,
        last_call_s: float = LAST_CALL_S,
    ) -> None:
        """``last_call_s``: a first call that was begun may take so long when the time for them is over."""
        super().__init__(settings, bench=bench, reference_timeout_s=reference_timeout_s)
        self._make: Callable[[], _PoolWorker] = lambda: _PoolWorker(settings, pool_bench)
        self._workers = [self._make() for _ in range(workers)]
        self._last_call_s = last_call_s
        self._lengths = settings.ragged_lengths
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._calling: dict[Future[None], _PoolWorker] = {}
        self._ended = Condition()  # of a first call
        self._unfinished: dict[Call, None] = {}  # in the order in which they were asked for
        self._failed: dict[Call, Fault] = {}

    @property
    def validation_workers(self) -> int:
        """Return how many processes share a validation: those that are started and idle, as starting takes longer."""
        return 1 + len(self._idle())

    def _idle(self) -> list[_PoolWorker]:
        busy = [worker for future, worker in self._calling.items() if not future.done()]
        return [worker for worker in self._workers if worker.evaluator.starts and worker not in busy]

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        return self._with_memory(partial(super().check, cell, candidate, timeout_s=timeout_s, pace_ms=pace_ms))

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        return self._with_memory(partial(super().block, cell, order, timeout_s=timeout_s))

    def _with_memory(self, ask: Callable[[], Result]) -> Result:
        """Return the answer; where memory lacks for it and for first calls at once, give the first calls up.

        Or a default would be refused for them: q, k, v, out and their gradients of one training step over 524288
        positions are 32 GiB (32 heads of 128 in bf16), in every worker of the pool.
        """
        were_calling = any(not future.done() for future in self._calling)
        result = ask()
        if not (were_calling and _lacks_memory(result)):
            return result
        self._give_up_first_calls()
        return ask()

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
                self._dismiss(worker)
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

    def _give_up_first_calls(self) -> None:
        self._begin_no_more()
        self._end_calling(0.0)

    def _replace(self, workers: Sequence[_PoolWorker]) -> None:
        for worker in workers:
            worker.interrupt()  # all of them, before one is waited for
        for worker in workers:
            self._workers[self._workers.index(worker)] = self._make()
            worker.end()

    def _dismiss(self, worker: _PoolWorker) -> None:
        if worker in self._workers:  # and not replaced already
            self._workers.remove(worker)
            worker.end()

    def _pool_processes(self) -> tuple[int, ...]:
        return tuple(pid for worker in self._workers if (pid := worker.evaluator.running_pid) is not None)

    def validate(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, part: tuple[int, int] = (0, 1)
    ) -> Proven | Fault:
        """Share the lengths with the pool; what it cannot answer is asked again here, with all the memory."""
        workers = self._idle()[: self._lengths]  # and the cell's own length
        if not workers or part != (0, 1):
            return super().validate(cell, candidate, timeout_s=timeout_s, part=part)
        parts = len(workers) + 1

        def validate_part(number: int) -> Callable[[WorkerEvaluator], Proven | Fault]:
            return lambda worker: worker.validate(cell, candidate, timeout_s=timeout_s, part=(number, parts))

        asked = [(worker, worker.do(validate_part(number))) for number, worker in enumerate(workers, 1)]
        own = partial(super().validate, cell, candidate, timeout_s=timeout_s)
        first = own(part=(0, parts))
        others = [self._answer_of(*pair) for pair in asked]
        if _lacks_memory(first):  # beside the pool, which is done now
            first = self._with_memory(partial(own, part=(0, parts)))
        found = [first]
        for number, result in enumerate(others, 1):
            if isinstance(result, Fault) and result.kind != "wrong" and not isinstance(first, Fault):
                result = own(part=(number, parts))
            found.append(result)
        faults = [result for result in found if isinstance(result, Fault)]
        if faults:  # a wrong answer is a verdict, whatever kept others from one
            return next((fault for fault in faults if fault.kind == "wrong"), faults[0])
        return super().first_call(cell, candidate, timeout_s=timeout_s)

    def _answer_of(self, worker: _PoolWorker, future: Future[Proven | Fault]) -> Proven | Fault:
        try:
            return future.result()
        except (
            DeviceError
        ) as error:  # it was lost, and the device takes no new one: nor would it for the next validation
            self._dismiss(worker)
            return Fault("error", str(error))

    def close(self) -> None:
        for worker in self._workers:
            worker.interrupt()  # all of them, before one is waited for
        while self._workers:
            self._workers.pop().end()
        super().close()


def _lacks_memory(result: object) -> bool:
    results = result.results if isinstance(result, Block) else (result,)
    return any(isinstance(each, Fault) and each.kind == "oom" for each in results)
