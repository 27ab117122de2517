"""A whole probe of a replayed machine in a process of its own, which says what it does and may be killed at any time.

Processes are forked from a server that has everything loaded, so that a kill and a resume cost no more than they do.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from machines import environment_of, row_of

from autotune.measure.evaluator import Block, Checked, Evaluator, Fault
from autotune.measure.simulated import QUIET, ReplayEvaluator, SimulatedClock
from autotune.probe import tuning
from autotune.probe.output import writer as emit
from autotune.probe.request import ProbeObserver, ProbeRequest
from autotune.space.space import candidate_key
from autotune.trial_outcome import TrialOutcome
from ringattn.profile.schema import Profile
from ringattn.profile.yaml_io import save_profile
from ringattn.workload import Tunables, Workload

CALL_S = 2e-3  # what a measurement takes, so that some are killed in the middle of one
Event = tuple[str, ...]  # its kind first
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["autotune.probe.machine.device_lock", "autotune.probe.dry_run", "autotune.probe.run", "ringattn.attention"]
)


def truth(cell: Workload, tunables: Tunables) -> float:
    """math forward and backward are faster on the first branch alone; every other change costs 5 %."""
    first, others = tunables.branches[0], tunables.branches[1:]
    gain = -0.2 * (first.forward == "math") - 0.2 * (first.backward == "math")
    cost = sum(0.1 * ((b.forward == "math") + (b.backward == "math")) for b in others)
    frills = [tunables.checkpoint != "selective", tunables.pool_threshold_mib is not None, not tunables.pattern_cache]
    return gain + cost + 0.05 * sum(frills) + 0.1 * (tunables.dtype != "fp32")


def _run(path: Path, parent: Connection) -> None:
    def say(*event: str) -> None:
        """Go on when the parent has heard it, so that a moment is the same one however busy the machine is."""
        parent.send(event)
        parent.recv()

    class SearchObserver(ReplayEvaluator):
        def check(
            self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
        ) -> Checked | Fault:
            say("check", str(cell), candidate_key(candidate))
            time.sleep(CALL_S)
            if candidate.pattern_cache is False:  # some candidates fail
                return Fault("crash", "the worker was killed by SIGSEGV")
            return super().check(cell, candidate, timeout_s=timeout_s, pace_ms=pace_ms)

        def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
            say("block", str(cell), str(len(order)))
            time.sleep(CALL_S)
            return super().block(cell, order, timeout_s=timeout_s)

    class Observer(ProbeObserver):
        def trial(self, cell: Workload, candidate: str, outcome: TrialOutcome) -> None:
            say("told", str(cell), outcome.stage, candidate)

    def saving(profile: Profile, target: Path) -> None:
        if Path(target) == path:
            say("saving")
        save_profile(profile, target)
        if Path(target) == path:
            say("saved")

    emit.save_profile = saving  # type: ignore[attr-defined]  # this process is nobody else's
    clock = SimulatedClock()

    def evaluator(*_: object) -> Evaluator:
        return SearchObserver(row_of(truth), clock, 0, QUIET)

    environment = environment_of(path.parent, lambda: evaluator(), clock)
    tuning.run_probe(
        ProbeRequest(output=path, effort="quick", seq_lens=(4096,), modes=("train",)), Observer(), environment
    )
    say("finished")


@dataclass(slots=True)
class Run:
    """One process: what it said until it ended or was killed."""

    events: list[Event] = field(default_factory=list)

    def of(self, kind: str) -> list[Event]:
        return [event[1:] for event in self.events if event[0] == kind]

    @property
    def finished(self) -> bool:
        return bool(self.of("finished"))


def run_probe(path: Path, kill_after: int | str | None = None, delay_s: float = 0.0) -> Run:
    """Run it to its end, or kill it so long after its ``kill_after``-th event, or after the first of that kind."""
    here, there = _context.Pipe()
    process = _context.Process(target=_run, args=(path, there))
    process.start()
    there.close()
    run = Run()
    try:
        while True:
            run.events.append(here.recv())
            here.send("heard")
            if kill_after in (len(run.events), run.events[-1][0]):
                time.sleep(delay_s)
                process.kill()
    except (EOFError, ConnectionResetError, BrokenPipeError):
        process.join()
    finally:
        process.kill()
    if kill_after is None:
        assert process.exitcode == 0
    return run
