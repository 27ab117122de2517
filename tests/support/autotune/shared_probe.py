"""Workers of one search, each a whole probe of an invented machine in a process that may be killed at any time."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from machines import FACTS, MIB, environment_of, row_of
from patience import LIMIT_S
from probed_machine import truth

from autotune.measure.evaluator import Block, Checked, Evaluator, Fault
from autotune.measure.simulated import QUIET, ReplayEvaluator, SimulatedClock
from autotune.probe import run, tuning
from autotune.probe.request import ProbeObserver, ProbeRequest
from autotune.space.space import candidate_key
from ringattn.profile.schema import Profile
from ringattn.workload import Tunables, Workload

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["autotune.probe.machine.device_lock", "autotune.probe.run", "ringattn.attention", "sqlalchemy"]
)


@dataclass(frozen=True, slots=True)
class Job:
    """One worker: its folder and its request; ``call_s`` is what a measurement takes in real seconds.

    ``version`` is its own of this program; Ctrl-C comes after ``interrupt_after`` blocks.
    """

    folder: Path
    request: ProbeRequest
    call_s: float = 0.0
    sku: str = FACTS.sku
    version: str = run.__version__
    interrupt_after: int | None = None


@dataclass(slots=True)
class Told:
    """What one worker said: each plan it checked and each block it timed, of which cell, and how it ended."""

    pid: int
    events: list[tuple[str, ...]] = field(default_factory=list)

    def of(self, kind: str) -> list[tuple[str, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]

    @property
    def failure(self) -> str:
        return next((text for (text,) in self.of("failed")), "")


def peak_bytes(plan: Tunables) -> int:
    """Return the memory of a plan: the leanest is none of the fastest."""
    return MIB if plan.checkpoint == "full" else 2 * MIB


def _work(job: Job, there: Connection, killed_after: int | None) -> None:
    clock = SimulatedClock()
    said = 0

    def say(*event: str) -> None:
        nonlocal said
        there.send(event)
        said += 1
        if said == killed_after:
            time.sleep(2 * LIMIT_S)  # and does not end before it is killed

    class Speaking(ReplayEvaluator):
        blocks_timed = 0

        def check(
            self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
        ) -> Checked | Fault:
            say("check", str(cell), candidate_key(candidate))
            time.sleep(job.call_s)
            return super().check(cell, candidate, timeout_s=timeout_s, pace_ms=pace_ms)

        def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
            say("block", str(cell))
            time.sleep(job.call_s)
            self.blocks_timed += 1
            if self.blocks_timed == job.interrupt_after:
                raise KeyboardInterrupt
            return super().block(cell, order, timeout_s=timeout_s)

    class Observer(ProbeObserver):
        def note(self, text: str) -> None:
            say("note", text)

    def evaluator() -> Evaluator:
        return Speaking(row_of(truth, peak=peak_bytes), clock, 0, QUIET)

    there.send(("ready",))
    there.recv()
    run.__version__ = job.version  # type: ignore[misc]
    environment = environment_of(job.folder, evaluator, clock, facts=replace(FACTS, sku=job.sku))
    try:
        tuning.run_probe(job.request, Observer(), environment)
    except KeyboardInterrupt:
        say("interrupted")
    except Exception as error:  # noqa: BLE001  the test shows it
        say("failed", f"{type(error).__name__}: {error}")
    else:
        say("finished")


def work_together(
    jobs: Sequence[Job], kill: dict[int, int] | None = None, after: tuple[int, Callable[[], None]] | None = None
) -> list[Told]:
    """Run the jobs at once; kill the numbers in ``kill`` after so many of their events.

    The others begin when those are dead, or a busy machine could give them all that there is to do. ``after`` so many
    events of all, a function is called.
    """
    events, kill = 0, kill or {}
    started = []
    for number, job in enumerate(jobs):
        job.folder.mkdir(parents=True, exist_ok=True)
        here, there = _context.Pipe()
        process = _context.Process(target=_work, args=(job, there, kill.get(number)))
        process.start()
        there.close()
        assert process.pid is not None
        started.append((process, here, Told(process.pid)))
    open_ = {here: (process, told, kill.get(number)) for number, (process, here, told) in enumerate(started)}
    later = [here for here, (_, _, most) in open_.items() if most is None]
    try:
        for here in open_:  # none is to find that all is done already
            assert here.poll(LIMIT_S), "a worker does not start"
            assert here.recv() == ("ready",)
        for here in open_:
            if here not in later or not kill:
                here.send("begin")
        while open_:
            ready = wait(list(open_), timeout=LIMIT_S)
            assert ready, "nobody says anything"
            for here in ready:
                assert isinstance(here, Connection)
                process, told, most = open_[here]
                try:
                    told.events.append(here.recv())
                except EOFError:
                    del open_[here]
                    if most is not None and len(open_) == len(later):
                        for waiting in later:
                            waiting.send("begin")
                    continue
                if len(told.events) == most:
                    process.kill()
                events += 1
                if after is not None and events == after[0]:
                    after[1]()
    finally:
        for process, _, _ in started:
            process.kill()
            process.join()
    for number, (process, _, told) in enumerate(started):
        assert process.exitcode == (-signal.SIGKILL if number in kill else 0), told.events[-3:]
    return [told for _, _, told in started]


def checked_twice(told: Sequence[Told]) -> int:
    """Return how many checks were of a plan that had been checked in that cell."""
    checks = Counter(event for one in told for event in one.of("check"))
    return checks.total() - len(checks)


def rows_of(profile: Profile) -> dict[str, Tunables]:
    return {str(entry.workload): entry.choice.tunables for entry in profile.plans if entry.choice is not None}
