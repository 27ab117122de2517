"""Measures in one worker process, with a pool of others for what need not run alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from autotune.measure.bench import BenchSettings
from autotune.measure.evaluator import Block, Checked, Fault, Proven
from autotune.measure.messages import POOL_BENCH, REAL_BENCH
from autotune.measure.worker_evaluator import WorkerEvaluator
from autotune.space.first_calls import Call
from ringattn.errors import DeviceError
from ringattn.workload import Tunables, Workload

from .worker_pool import LAST_CALL_S, PoolWorker, WorkerPool

Result = TypeVar("Result")


class PooledEvaluator(WorkerEvaluator):
    """Measures in one worker process; the pool makes first calls and shares validations."""

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
        """``last_call_s`` as for ``WorkerPool``."""
        super().__init__(settings, bench=bench, reference_timeout_s=reference_timeout_s)
        self._pool = WorkerPool(settings, workers, bench=pool_bench, last_call_s=last_call_s)
        self._lengths = settings.ragged_lengths

    @property
    def validation_workers(self) -> int:
        """Return how many processes share a validation: those that are started and idle, as starting takes longer."""
        return 1 + len(self._pool.idle())

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
        were_calling = self._pool.is_calling
        result = ask()
        if not (were_calling and lacks_memory(result)):
            return result
        self._pool.give_up_first_calls()
        return ask()

    def begin_first_calls(self, calls: Sequence[Call]) -> None:
        self._pool.begin_first_calls(calls)

    def unfinished_calls(self) -> tuple[Call, ...]:
        return self._pool.unfinished_calls()

    def failed_calls(self) -> Mapping[Call, Fault]:
        return self._pool.failed_calls()

    def wait_for_first_call(self, timeout_s: float) -> None:
        self._pool.wait_for_first_call(timeout_s)

    def end_first_calls(self, timeout_s: float) -> str:
        return self._pool.end_first_calls(timeout_s)

    def _pool_processes(self) -> tuple[int, ...]:
        return self._pool.processes()

    def validate(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, part: tuple[int, int] = (0, 1)
    ) -> Proven | Fault:
        """Share the lengths with the pool; what it cannot answer is asked again here, with all the memory."""
        workers = self._pool.idle()[: self._lengths]  # and the cell's own length
        if not workers or part != (0, 1):
            return super().validate(cell, candidate, timeout_s=timeout_s, part=part)
        parts = len(workers) + 1

        def validate_part(number: int) -> Callable[[WorkerEvaluator], Proven | Fault]:
            return lambda worker: worker.validate(cell, candidate, timeout_s=timeout_s, part=(number, parts))

        asked = [(worker, worker.do(validate_part(number))) for number, worker in enumerate(workers, 1)]
        own = partial(super().validate, cell, candidate, timeout_s=timeout_s)
        first = own(part=(0, parts))
        others = [self._answer_of(*pair) for pair in asked]
        if lacks_memory(first):  # beside the pool, which is done now
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

    def _answer_of(self, worker: PoolWorker, future: Future[Proven | Fault]) -> Proven | Fault:
        try:
            return future.result()
        except DeviceError as error:  # it was lost, and the device takes no new one, nor would it for the next
            self._pool.dismiss(worker)
            return Fault("error", str(error))

    def close(self) -> None:
        self._pool.close()
        super().close()


def lacks_memory(result: object) -> bool:
    """Return whether a result, or one of a block's, is an out-of-memory."""
    results = result.results if isinstance(result, Block) else (result,)
    return any(isinstance(each, Fault) and each.kind == "oom" for each in results)
