"""Evaluates candidates on several ranks: every request goes to all, the slowest rank's answer counts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.exit_codes import ProbeFailure
from autotune.measure.evaluator import Block, Checked, Ended, Fault, Interference, Proven, Sample, largest_of_each
from autotune.measure.messages import MESSAGE_MIB, POOL_BENCH, REAL_BENCH, Rendezvous, Request
from autotune.measure.pool.worker_pool import LAST_CALL_S, WorkerPool
from autotune.space.first_calls import Call
from ringattn.profile.schema import LinkSpeed
from ringattn.workload import Tunables, Workload

from .first_calls import RanksFirstCalls
from .merging import agreed_plan, first_cause, largest, samples_of
from .protocol import RankAnswer, RankRequest

if TYPE_CHECKING:
    from autotune.measure.bench import BenchSettings

    from .coordinator import Coordinator

LINKS_TIMEOUT_S = 60.0


class RanksEvaluator:
    """Implements Evaluator on all ranks of a coordinator, which stays when this is closed.

    Workers of one generation share a process group. After a fault that may leave them out of step with each other all
    are ended, and the next call starts a new generation. First calls are made ahead by processes on rank 0's device.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        settings: BenchSettings,
        *,
        workers: int = 0,
        bench: str = REAL_BENCH,
        pool_bench: str = POOL_BENCH,
        reference_timeout_s: float = 300.0,
        last_call_s: float = LAST_CALL_S,
    ) -> None:
        """``workers`` make first calls; the others are those of ``PooledEvaluator``."""
        self._coordinator = coordinator
        self._settings = settings
        self._bench = bench
        self._reference_timeout_s = reference_timeout_s
        self._ahead = RanksFirstCalls(WorkerPool(settings, workers, bench=pool_bench, last_call_s=last_call_s))
        self._in_step = False
        self._generation = 0
        self._calls = 0  # in this generation
        self._used = False  # by a call before the last one
        self._broken = False  # the last call ended with workers out of step
        self.unmonitored: tuple[str, ...] = ()
        self.lost_s = 0.0  # went into calls after which all workers had to be started anew, and into starting them

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        request = Request("check", cell, (candidate,), pace_ms=pace_ms, lockstep=True)
        result: Checked | Fault = self._largest(request, timeout_s)
        return result

    def validate(self, cell: Workload, candidate: Tunables, *, timeout_s: float) -> Proven | Fault:
        result: Proven | Fault = self._largest(Request("validate", cell, (candidate,), lockstep=True), timeout_s)
        return result

    def run_profile(self, cell: Workload, profile_path: str, *, timeout_s: float) -> Tunables | Fault:
        """Run a copy of the profile on every rank, as the file may lie on rank 0's host alone."""
        path = Path(profile_path)
        request = Request("run-profile", cell, profile_path=path.name, lockstep=True)
        values = self._values(request, timeout_s, path.read_text(encoding="utf-8"))
        return values if isinstance(values, Fault) else agreed_plan(dict(enumerate(values)))

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        """Time a block; after a candidate that fails on any rank the rest goes on with new workers."""
        results: dict[int, Sample | Fault] = {}
        disturbances: list[Interference] = []
        pending = list(range(len(order)))
        while pending:
            plans = tuple(order[index] for index in pending)
            processes = self._ahead.pool.processes()
            answers = self._ask(Request("block", cell, plans, lockstep=True, pool_processes=processes), timeout_s)
            blocks = {rank: answer.value for rank, answer in answers if isinstance(answer.value, Block)}
            samples = samples_of([block.results for block in blocks.values()]) if len(blocks) == len(answers) else []
            results |= dict(zip(pending, samples, strict=False))
            disturbances += [each for block in blocks.values() for each in block.disturbances]
            left = pending[len(samples) :]
            fault = self._fault(answers)
            if fault is not None:
                failed = pending[min(self._failed_at(answers, len(plans)), len(pending) - 1)]
                results[failed] = fault
                left = [index for index in left if index != failed]
            pending = left
        return Block(tuple(results[index] for index in range(len(order))), largest_of_each(disturbances))

    def close(self) -> None:
        """End the workers."""
        self._in_step = False
        self._ahead.pool.close()
        self._coordinator.rest()

    def begin_first_calls(self, calls: Sequence[Call]) -> None:
        self._ahead.begin(calls)

    def unfinished_calls(self) -> tuple[Call, ...]:
        return self._ahead.unfinished()

    def failed_calls(self) -> Mapping[Call, Fault]:
        return self._ahead.failed()

    def wait_for_first_call(self, timeout_s: float) -> None:
        self._ahead.pool.wait_for_first_call(timeout_s)

    def end_first_calls(self, timeout_s: float) -> str:
        return self._ahead.pool.end_first_calls(timeout_s)

    def links(self) -> LinkSpeed:
        """Measure how fast messages go round the ranks; raises ProbeFailure where none arrive."""
        values = self._values(Request("links", lockstep=True), LINKS_TIMEOUT_S)
        if isinstance(values, Fault):
            raise ProbeFailure(f"the ranks cannot exchange messages: {values.message}")
        return LinkSpeed(
            world=self._coordinator.world,
            hosts=self._coordinator.hosts,
            ring_gb_s=float(f"{MESSAGE_MIB * 2**20 / max(reading.large_s for reading in values) / 1e9:.3g}"),
            latency_us=float(f"{max(reading.small_s for reading in values) * 1e6:.3g}"),
        )

    def _largest(self, request: Request, timeout_s: float) -> Any:
        values = self._values(request, timeout_s)
        return values if isinstance(values, Fault) else largest(values)

    def _values(self, request: Request, timeout_s: float, profile_text: str = "") -> list[Any] | Fault:
        """Return what every rank answered, by rank, or the fault of the first that failed."""
        answers = self._ask(request, timeout_s, profile_text)
        fault = self._fault(answers)
        return fault or [answer.value for _, answer in sorted(answers, key=lambda pair: pair[0])]

    def _ask(self, request: Request, timeout_s: float, profile_text: str = "") -> list[tuple[int, RankAnswer]]:
        """Ask all ranks, and again where only others were to blame.

        Those are first calls that take memory beside it, which are given up, and workers that another process ended or
        that ran out of memory among what earlier calls left behind, which are started anew.
        """
        were_calling = self._ahead.pool.is_calling
        answers = self._once(request, timeout_s, profile_text)
        fault = self._fault(answers)
        if fault is not None and fault.kind == "oom" and were_calling:
            self._ahead.pool.give_up_first_calls()
            answers = self._once(request, timeout_s, profile_text)
            fault = self._fault(answers)
        ended_from_outside = any(answer.ended_from_outside and not answer.aborted for _, answer in answers)
        if ended_from_outside or (fault and fault.kind == "oom" and self._used):
            self._in_step = False
            answers = self._once(request, timeout_s, profile_text)
        return answers

    def _once(self, request: Request, timeout_s: float, profile_text: str) -> list[tuple[int, RankAnswer]]:
        if not self._in_step:
            self._generation = self._coordinator.new_generation()
            self._calls, self._in_step = 0, True
        self._used = self._calls > 0
        self._calls += 1
        rendezvous = Rendezvous(
            0, self._coordinator.world, self._coordinator.host, self._coordinator.store_port, self._generation
        )
        rank_request = RankRequest(
            number=0,
            generation=rendezvous.generation,
            settings=replace(self._settings, rendezvous=rendezvous),
            bench=self._bench,
            reference_timeout_s=self._reference_timeout_s,
            request=request,
            timeout_s=timeout_s,
            profile_text=profile_text,
        )
        began = time.monotonic()
        try:
            answers = self._coordinator.ask(rank_request)
        except BaseException:
            self._in_step = False
            raise
        self._in_step = self._still_in_step(answers)
        if not self._in_step:
            self.lost_s += time.monotonic() - began
        elif self._broken:
            self.lost_s += max(answer.started_s for _, answer in answers)
        self._broken = not self._in_step
        self.unmonitored = tuple(
            dict.fromkeys((*self.unmonitored, *(line for _, answer in answers for line in answer.unmonitored)))
        )
        return answers

    def _still_in_step(self, answers: Sequence[tuple[int, RankAnswer]]) -> bool:
        """Return whether workers are in step: after good answers, and a wrong one, which all ranks agree on."""
        faults = [answer.fault for _, answer in answers]
        if any(answer.aborted or answer.ended_from_outside for _, answer in answers):
            return False
        return not any(faults) or all(fault is not None and fault.kind == "wrong" for fault in faults)

    def _fault(self, answers: Sequence[tuple[int, RankAnswer]]) -> Fault | None:
        faults = [(rank, fault) for rank, answer in answers if not answer.aborted and (fault := answer.fault)]
        if faults:
            return first_cause(faults)
        stopped = [rank for rank, answer in answers if answer.aborted]
        return Fault("crash", f"rank {stopped[0]}: its worker was ended", Ended()) if stopped else None

    def _failed_at(self, answers: Sequence[tuple[int, RankAnswer]], plans: int) -> int:
        """Return which plan of a block the fault belongs to: that of the rank whose own failure came first."""
        places = [
            len(answer.value.results) - 1
            for _, answer in answers
            if not answer.aborted and isinstance(answer.value, Block) and answer.fault
        ]
        return min(places, default=0) if plans else 0
