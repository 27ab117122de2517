"""Worker of one rank among several: it never restarts by itself, as the others would not wait for it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from autotune.measure.evaluator import Block, Fault, Sample
from autotune.measure.messages import Request
from autotune.measure.worker_evaluator import WorkerDied, WorkerEvaluator
from ringattn.workload import Tunables, Workload

if TYPE_CHECKING:
    from autotune.measure.bench import BenchSettings


class WorkerGone(Exception):
    """The worker ended between two calls; only workers of all ranks together can be started anew."""


class RankWorker(WorkerEvaluator):
    """One generation of a rank's worker. ``stop`` may be called from another thread, at any time."""

    def __init__(self, settings: BenchSettings, *, bench: str, reference_timeout_s: float) -> None:
        super().__init__(settings, bench=bench, reference_timeout_s=reference_timeout_s)
        self._lock = threading.Lock()
        self._stopped = False
        self.started_s = 0.0  # that starting it took in the last call

    def serve(self, request: Request, timeout_s: float) -> Any:
        """Return the worker's answer; for a block the samples up to a failure, which ends it."""
        self.started_s = 0.0
        if request.action == "block":
            assert request.workload is not None
            return self.block(request.workload, request.plans, timeout_s=timeout_s)
        try:
            return self._exchange(request, timeout_s)
        except WorkerDied as died:
            return died.fault

    def block(self, cell: Workload, order: Any, *, timeout_s: float) -> Block:
        """Time a block; a Fault is the last result, whatever should have followed."""
        plans: tuple[Tunables, ...] = tuple(order)
        results: list[Sample | Fault] = []
        try:
            self._send(Request("block", cell, plans, lockstep=True))
            disturbances = self._collect(plans, results, timeout_s)
            return Block(tuple(results), disturbances)
        except WorkerDied as died:
            return Block((*results, died.fault))

    def stop(self) -> None:
        """End the worker, and start none any more."""
        with self._lock:
            self._stopped = True
            process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> None:
        began = time.monotonic()
        super()._start()
        self.started_s = time.monotonic() - began

    def _launch(self) -> None:
        with self._lock:
            if self._stopped or self.starts:
                raise WorkerGone
            super()._launch()
