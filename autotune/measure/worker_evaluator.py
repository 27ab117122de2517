"""Evaluates candidates in a worker process, so that every failure costs one candidate.

The worker is a fresh interpreter (CUDA does not survive a fork), talks over a socket pair, is killed when it stops
answering and started again when it is needed. It dies with this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from autotune.accuracy.reference_timeout import reference_limit_s
from autotune.children import child_command, child_environ
from autotune.folders import memory_file
from ringattn.errors import DeviceError
from ringattn.workload import Tunables, Workload

from .evaluator import Block, Checked, Direction, Ended, Fault, Interference, Killed, Proven, Sample, Stopped
from .messages import REAL_BENCH, Message, Request

if TYPE_CHECKING:
    from .bench import BenchSettings

ATTEMPTS = 2  # a worker that another process killed or stopped says nothing of its candidate, at first
_TAIL_BYTES = 2000
_PASSES: Mapping[str, Direction] = {"forward": "forward", "backward": "backward"}  # by phase
_ENDED_EARLY = Fault("crash", "the worker was ended before its work began", Ended())
# Torch's profiler would log every use, and so have the last word of a worker that was killed. What flash-attn-4
# compiled stays on disk for other workers of this probe only where it is told to keep it.
_QUIET_AND_CACHED = {"KINETO_LOG_LEVEL": "99", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """Timeouts of a worker beside those of its requests."""

    start_s: float = 120.0  # importing torch from a cold disk, making a CUDA context
    stop_s: float = 5.0
    stopped_s: float = 3.0  # one that a signal has stopped for so long is given up, however long its work may take
    look_s: float = 0.5  # how often it is looked whether one has


DEFAULT_TIMES = WorkerTimeouts()

# What a process loads for a kernel's first call takes, of what starting it took: flash-attn-4's compiler 5.1 s and
# cudnn's libraries 3.0, where the start took 4.3 (H200). Without it the first plan of a new worker counted as hung, so
# that one hang cost three workers.
LOADING_OF_START = 2.0


class WorkerBug(AssertionError):
    """The worker's own code failed; the text is its traceback."""


class WorkerDied(Exception):
    """The worker ended by itself, or had to be killed."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class WorkerEvaluator:
    """Implements Evaluator on one device, in one worker process."""

    def __init__(
        self,
        settings: BenchSettings,
        *,
        bench: str = REAL_BENCH,
        reference_timeout_s: float = 300.0,
        times: WorkerTimeouts = DEFAULT_TIMES,
    ) -> None:
        """``bench`` is the ``module:class`` that the worker runs; tests put faulty ones there.

        ``reference_timeout_s`` is the most that the float64 rows of a cell may take, during which no candidate runs.
        """
        self._reference_timeout_s = reference_timeout_s
        self._times = times
        self._settings = settings
        self._bench = bench
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._errors: IO[bytes] | None = None
        self._is_new = True  # the worker has answered nothing yet
        self._loaded: set[str] = set()  # the kernels that the worker has run
        self._interrupted = False
        self._at_work = False  # the worker owes an answer
        self._phase = ""  # of the request at work
        self.unmonitored: tuple[str, ...] = ()
        self.starts = 0
        self.reference_s: dict[Workload, float] = {}  # what the slowest reference of a workload took
        self.start_s = 0.0  # what starting the worker took
        self.lost_s = 0.0  # went into attempts that ended without an answer, and into new workers after them

    @property
    def running_pid(self) -> int | None:
        """Return the id of the worker process, which may be at work; None where there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        result = self._ask(Request("check", cell, (candidate,), pace_ms=pace_ms), timeout_s)
        assert isinstance(result, (Checked, Fault))
        return result

    def validate(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, part: tuple[int, int] = (0, 1)
    ) -> Proven | Fault:
        """Validate at every n-th length from the i-th on for ``part`` (i, n); a first call is timed with all only."""
        result = self._ask(Request("validate", cell, (candidate,), part=part), timeout_s)
        assert isinstance(result, (Proven, Fault))
        return result

    def first_call(self, cell: Workload, candidate: Tunables, *, timeout_s: float) -> Proven | Fault:
        """Call the candidate at the cell's length and at another, which fills the caches of compilers."""
        result = self._ask(Request("first-call", cell, (candidate,)), timeout_s)
        assert isinstance(result, (Proven, Fault))
        return result

    def interrupt(self) -> None:
        """End the worker for good, from another thread than the one that waits: that gets a Fault."""
        self._interrupted = True
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    def run_profile(self, cell: Workload, profile_path: str, *, timeout_s: float) -> Tunables | Fault:
        result = self._ask(Request("run-profile", cell, profile_path=profile_path), timeout_s)
        assert isinstance(result, (Tunables, Fault))
        return result

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        """Time a block; after a candidate that kills the worker the rest goes on in a new one.

        What was timed before and after such a restart is still one block: seconds lie between, not hours.
        """
        results: list[Sample | Fault] = []
        disturbances: tuple[Interference, ...] = ()
        struck_at: set[int] = set()
        while len(results) < len(order):
            rest = tuple(order[len(results) :])
            try:
                self._send(Request("block", cell, rest, pool_processes=self._pool_processes()))
                with self._counting_losses():
                    disturbances += self._collect(rest, results, timeout_s)
                assert len(results) == len(order)
            except WorkerDied as died:
                if died.fault.ended_from_outside and len(results) not in struck_at:
                    struck_at.add(len(results))
                else:
                    results.append(died.fault)
        return Block(tuple(results), disturbances)

    def _pool_processes(self) -> tuple[int, ...]:
        """Return the ids of the other processes of this probe on the device."""
        return ()

    def _collect(
        self, plans: Sequence[Tunables], results: list[Sample | Fault], timeout_s: float
    ) -> tuple[Interference, ...]:
        """Add the worker's results for ``plans`` to ``results``, and return its interference; raises WorkerDied."""
        began = len(results)
        while True:
            plan = plans[len(results) - began : len(results) - began + 1]  # none is left when the interference comes
            message = self._receive(timeout_s + self._loading_s(plan))
            if message.kind == "result":
                results.append(message.value)
                self._note_loaded(plan, message.value)
            elif message.kind == "done":
                if isinstance(message.value, Fault):  # it gave up after a sticky error
                    self._kill()
                    raise WorkerDied(message.value)
                disturbances: tuple[Interference, ...] = message.value
                return disturbances

    def close(self) -> None:
        """End the worker: ask one that is idle, and kill it where it is at work, as after a Ctrl-C, or does not end."""
        if self._connection is not None and self.running_pid is not None and not self._at_work:
            assert self._process is not None
            try:
                self._connection.send(Request("stop"))
                self._process.wait(self._times.stop_s)
            except (OSError, subprocess.TimeoutExpired):
                pass  # it is killed next
        self._kill()

    def _ask(self, request: Request, timeout_s: float) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._exchange(request, timeout_s)
            except WorkerDied as died:
                if not died.fault.ended_from_outside or attempt == ATTEMPTS:
                    return self._with_direction(died.fault)
        raise AssertionError("unreachable")

    def _with_direction(self, fault: Fault) -> Fault:
        """Return the fault with the pass in which it came, where the worker has told of one."""
        return replace(fault, direction=_PASSES.get(self._phase))

    def _exchange(self, request: Request, timeout_s: float) -> Any:
        self._phase = ""
        self._send(request)
        with self._counting_losses():
            return self._answer(request, timeout_s)

    @contextlib.contextmanager
    def _counting_losses(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except WorkerDied:
            self.lost_s += time.monotonic() - began
            raise

    def _answer(self, request: Request, timeout_s: float) -> Any:
        timeout_s += self._loading_s(request.plans)
        limit = timeout_s
        while True:
            began = time.monotonic()
            message = self._receive(limit, self._phase)
            if self._phase == "reference" and (cell := request.workload) is not None:
                self.reference_s[cell] = max(self.reference_s.get(cell, 0.0), time.monotonic() - began)
            if message.kind == "phase":
                self._phase = message.value
                limit = timeout_s + (self._reference_s(request) if self._phase == "reference" else 0.0)
            elif message.kind == "done":
                self._is_new = False
                self._note_loaded(request.plans, message.value)
                if isinstance(message.value, Fault) and message.value.kind == "crash":
                    self._kill()  # a sticky error: its process cannot be used again
                    return self._with_direction(message.value)
                return message.value

    def _loading_s(self, plans: Sequence[Tunables]) -> float:
        """Return the seconds that loading takes where a plan has a kernel that the worker has not run."""
        missing = any(name not in self._loaded for plan in plans for name in plan.kernels)
        return LOADING_OF_START * self.start_s if missing else 0.0

    def _note_loaded(self, plans: Sequence[Tunables], result: object) -> None:
        if not isinstance(result, Fault):
            self._loaded.update(name for plan in plans for name in plan.kernels)

    def _reference_s(self, request: Request) -> float:
        """Return the time that a reference may take beside the candidate's."""
        cell, settings = request.workload, self._settings
        assert cell is not None
        gradients = cell.train or settings.train_too
        limit = reference_limit_s(cell, settings.device, gradients=gradients, first=self._is_new)
        return min(limit, self._reference_timeout_s)

    def _send(self, request: Request) -> None:
        if self._interrupted:
            raise WorkerDied(_ENDED_EARLY)
        if self._process is None or self._process.poll() is not None:
            self._renew()
        assert self._connection is not None
        self._at_work = True
        try:
            self._connection.send(request)
        except (BrokenPipeError, ConnectionResetError):
            # It ended between two requests, which is nobody's fault: start over once.
            self._renew()
            self._at_work = True
            self._connection.send(request)

    def _renew(self) -> None:
        """Start a worker in the place of one that ended between two requests, or that never was."""
        self._kill()
        began, replaces = time.monotonic(), self.starts > 0
        self._start()
        self.start_s = time.monotonic() - began
        self.lost_s += self.start_s if replaces else 0.0

    def _receive(self, timeout_s: float, phase: str = "") -> Message:
        assert self._connection is not None
        began = time.monotonic()
        try:
            if not self._has_message(timeout_s):
                stopped = self._is_stopped()
                waited_s = min(timeout_s, time.monotonic() - began)
                self._kill()
                why = ", at work on the reference" if phase == "reference" else ""
                why += ": the worker was stopped by a signal" if stopped else ""
                raise WorkerDied(
                    Fault("timeout", f"no answer within {waited_s:.1f} s{why}", Stopped() if stopped else None)
                )
            message: Message = self._connection.recv()
            self._at_work = message.kind in ("phase", "result")
        except (EOFError, ConnectionResetError):
            raise self._exit_fault() from None
        if message.kind == "bug":
            self._kill()
            raise WorkerBug(message.value)
        if message.kind == "no-device":
            self._kill()
            raise DeviceError(message.value)
        return message

    def _has_message(self, timeout_s: float) -> bool:
        """Wait for the worker's next message, but not for a worker that a signal has stopped."""
        assert self._connection is not None
        now = time.monotonic()
        end, at_work = now + timeout_s, now
        while now < end and now - at_work < self._times.stopped_s:
            if self._connection.poll(min(self._times.look_s, end - now)):
                return True
            now = time.monotonic()
            if not self._is_stopped():
                at_work = now
        return self._connection.poll(0)

    def _is_stopped(self) -> bool:
        """Return whether SIGSTOP or its like stopped the worker, which no candidate does to itself."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] in "Tt"

    def _exit_fault(self) -> WorkerDied:
        """Return how the worker ended, with the last line it wrote to stderr."""
        assert self._process is not None
        try:
            code = self._process.wait(self._times.stop_s)
        except subprocess.TimeoutExpired:
            code = None
        last = self._last_error_line()
        self._kill()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return WorkerDied(Fault("crash", f"the worker was killed by {name}{last}", Killed(-code)))
        return WorkerDied(Fault("crash", f"the worker ended with exit code {code}{last}"))

    def _last_error_line(self) -> str:
        assert self._errors is not None
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _TAIL_BYTES))
        lines = [line.strip() for line in self._errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return f" ({lines[-1][:200]})" if lines else ""

    def _start(self) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            self._launch()
            assert self._connection is not None
            try:
                self._connection.send(self._settings)
                message = self._receive(self._times.start_s)
                break
            except (WorkerDied, BrokenPipeError) as error:
                if self._interrupted:  # it was not the machine that ended it, and no second one is started
                    raise WorkerDied(_ENDED_EARLY) from None
                if not isinstance(error, WorkerDied) or not error.fault.ended_from_outside or attempt == ATTEMPTS:
                    text = f"the measuring process for {self._settings.device} did not start: {error}"
                    raise DeviceError(text) from None
        assert message.kind == "ready"
        self.unmonitored = message.value

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        self._errors = memory_file()
        self._process = subprocess.Popen(
            child_command("autotune.measure.worker", str(theirs.fileno()), str(os.getpid()), self._bench),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            env=child_environ(_QUIET_AND_CACHED | os.environ),
            start_new_session=True,  # Ctrl-C reaches the parent only, which ends the worker in its own time
        )
        if self._interrupted:  # while it was made, when there was nothing yet to end
            self._process.kill()
        theirs.close()
        self._connection = Connection(ours.detach())
        self._is_new = self._at_work = True
        self._loaded = set()
        self.starts += 1

    def _kill(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None
