"""Runs what ``numerics_map`` asks for in child processes, several at a time: a crash costs one attempt."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from ringattn.hardware.kernel_faults import Figure, Verdict

from .numerics_map import Attempt, Shape

WORKER_COMMAND = (sys.executable, "-m", "autotune.report.numerics_worker")
ATTEMPT_TIMEOUT_S = 180.0  # a first call may compile
START_TIMEOUT_S = 180.0  # importing torch, making a context

Progress = Callable[[int], None]  # told how many attempts are settled


class _Child:
    """Worker process with its messages; started when it is needed."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._late = ""
        self._stopped = False

    def run(self, shape: Shape, asked: Sequence[Attempt]) -> Iterator[tuple[Attempt, Verdict]]:
        """Yield the verdicts on ``asked``, all of one shape, as they come; the attempt that ends the process fails."""
        rest = list(asked)
        while rest and not self._stopped:
            running: Attempt | None = None
            settled = 0
            self._send(shape, rest)
            while (message := self._receive(ATTEMPT_TIMEOUT_S if running else START_TIMEOUT_S)) is not None:
                if "done" in message:
                    return
                if "begin" in message:
                    running = rest[message["begin"]]
                    continue
                settled, running = message["end"] + 1, None
                figures = tuple(Figure(name, float(error), float(bound)) for name, error, bound in message["figures"])
                yield rest[settled - 1], Verdict(figures, message["message"])
            fate = self._end()
            if (running is not None or not settled) and not self._stopped:
                settled += 1  # else it ended itself, after an error that cost it the device
                yield rest[settled - 1], Verdict(message=fate)
            rest = rest[settled:]

    def stop(self) -> None:
        """End it now, from another thread than the one that waits for its answer."""
        self._stopped = True
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    def close(self) -> None:
        if self._process is not None:
            self._end()

    def _send(self, shape: Shape, asked: Sequence[Attempt]) -> None:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        job = {"shape": shape, "asked": [(attempt.kernel, attempt.backward) for attempt in asked]}
        with contextlib.suppress(BrokenPipeError):  # it ended, and what it had to say is read next
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message; None at the end of the process, or when nothing came in time."""
        while True:
            try:
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                self._late = f"did not end in {timeout_s:.0f} s"
                return None
            if line is None:
                return None
            if line.startswith("{"):  # libraries print to stdout, too
                message: dict[str, Any] = json.loads(line)
                return message

    def _start(self) -> None:
        self._late = ""
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - as the child
        self._lines = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [*WORKER_COMMAND, self._device, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches the parent only, which ends its children in its own time
        )
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()

    def _end(self) -> str:
        """End the process, and return how it ended, with the last line of its stderr."""
        assert self._process is not None
        assert self._errors is not None
        if self._late:
            self._process.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        fate = self._late or _exit_text(self._process.returncode)
        self._errors.close()
        self._process = None
        return ": ".join(filter(None, (fate, said[-1].strip() if said else "")))


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def sweep(
    attempts: Sequence[Attempt], device: str, *, processes: int, budget_s: float, progress: Progress = lambda done: None
) -> Mapping[Attempt, Verdict]:
    """Return the verdict on every attempt that runs, as far as ``budget_s`` goes: nothing is begun after it.

    Shapes of one head dimension, dtype, mask and grouping stay in one process, which compiles for them once.
    """
    by_shape: dict[Shape, list[Attempt]] = {}
    for attempt in attempts:
        if attempt.runs:
            by_shape.setdefault(attempt.shape, []).append(attempt)
    items: dict[tuple[object, ...], list[Shape]] = {}
    for shape in by_shape:
        items.setdefault(shape[:-1], []).append(shape)
    waiting: queue.SimpleQueue[list[Shape]] = queue.SimpleQueue()
    for shapes in items.values():
        waiting.put(shapes)
    end = time.monotonic() + budget_s
    found: dict[Attempt, Verdict] = {}
    lock = threading.Lock()

    children = [_Child(device) for _ in range(min(processes, max(1, len(items))))]

    def work(child: _Child) -> None:
        try:
            while True:
                try:
                    shapes = waiting.get_nowait()
                except queue.Empty:
                    return
                for shape in shapes:
                    if time.monotonic() >= end:
                        return
                    for attempt, verdict in child.run(shape, by_shape[shape]):
                        with lock:
                            found[attempt] = verdict
                            progress(len(found))
        finally:
            child.close()

    with ThreadPoolExecutor(len(children), thread_name_prefix="ringtune-numerics") as pool:
        futures = [pool.submit(work, child) for child in children]
        try:
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C, or a bug of ours in one of the threads
            end = 0.0
            for child in children:
                child.stop()
            raise
    return found


def torch_device(vendor: str, device: str | None) -> str:
    """Return the device string for a child process: what was asked for, or what detection settled on."""
    return device or ("cpu" if vendor == "cpu" else "cuda")


def _environment() -> dict[str, str]:
    """Return this process's environment, with the package where the child finds it."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def _exit_text(returncode: int) -> str:
    if returncode < 0:
        return f"its process died of {signal.Signals(-returncode).name}"
    return f"its process ended with exit code {returncode}"
