"""Runs the attempts of ``numerics_map`` in worker processes, several at a time: a crash costs one attempt."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from autotune.measure.bench import BenchSettings
from autotune.measure.evaluator import Fault
from autotune.measure.messages import Request
from autotune.measure.worker_evaluator import WorkerEvaluator
from ringattn.errors import DeviceError
from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Verdict

from .numerics_map import Attempt

KERNEL_BENCH = "autotune.report.numerics.numerics_bench:KernelBench"
ATTEMPT_TIMEOUT_S = 180.0  # a first call may compile

Progress = Callable[[int], None]  # told how many attempts are settled


class _Worker(WorkerEvaluator):
    """Worker process that checks single kernels."""

    def verdict(self, attempt: Attempt) -> Verdict:
        """Return the verdict on an attempt, or how it ended the process."""
        request = Request("kernel", combination=attempt.combination, rows=attempt.shape.rows)
        try:
            result = self._ask(request, ATTEMPT_TIMEOUT_S)
        except DeviceError as error:
            return Verdict(message=str(error))
        if isinstance(result, Fault):
            return Verdict(message=result.message)
        assert isinstance(result, Verdict)
        return result


def sweep(
    attempts: Sequence[Attempt],
    facts: HardwareFacts,
    device: str | None = None,
    *,
    processes: int = 1,
    budget_s: float = math.inf,
    progress: Progress = lambda done: None,
    bench: str = KERNEL_BENCH,
) -> Mapping[Attempt, Verdict]:
    """Return the verdict on every attempt that runs, as far as ``budget_s`` goes: nothing is begun after it.

    Attempts of one head dimension, dtype, mask and grouping stay in one process, which compiles for them once.
    """
    waiting: queue.SimpleQueue[list[Attempt]] = queue.SimpleQueue()
    by_program: dict[tuple[object, ...], list[Attempt]] = {}
    for attempt in attempts:
        if attempt.runs:
            by_program.setdefault(attempt.shape[:-1], []).append(attempt)
    for group in by_program.values():
        waiting.put(sorted(group, key=lambda attempt: attempt.shape.rows))  # those of one shape share its reference
    end = time.monotonic() + budget_s
    found: dict[Attempt, Verdict] = {}
    lock = threading.Lock()

    settings = BenchSettings(
        device or ("cpu" if facts.vendor == "cpu" else "cuda"), facts, seed=0, sample_target_ms=0.0, ragged_lengths=0
    )
    workers = [_Worker(settings, bench=bench) for _ in range(min(processes, max(1, waiting.qsize())))]

    def work(worker: _Worker) -> None:
        try:
            while True:
                try:
                    group = waiting.get_nowait()
                except queue.Empty:
                    return
                for attempt in group:
                    if time.monotonic() >= end:
                        return
                    verdict = worker.verdict(attempt)
                    with lock:
                        found[attempt] = verdict
                        progress(len(found))
        finally:
            worker.close()

    with ThreadPoolExecutor(len(workers), thread_name_prefix="ringtune-numerics") as pool:
        futures = [pool.submit(work, worker) for worker in workers]
        try:
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C, or a bug of ours in one of the threads
            end = 0.0
            for worker in workers:
                worker.interrupt()
            raise
    return found
