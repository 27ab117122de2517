"""Ctrl-C while a probe runs: it is never lost, it breaks no database, and it always ends the process.

A KeyboardInterrupt may come out of any line of Python. Out of a callback of the garbage collector it is printed and
dropped. Out of SQLAlchemy it leaves a transaction open, for which every other connection of SQLite waits 5 s, and then
fails: the progress stood still, and the lease on the database stayed, in 9 of 50 interrupts of trials in SQLite. Only
the standard library is imported here, as this answers Ctrl-C before anything else is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130  # of exit_codes, which may not be imported yet
PROBE_INTERRUPTED = (
    "interrupted; finished trials are kept and the old profile is untouched: run the same command to go on"
)
REPEATED_EVERY_S = 0.005  # between two operations there may be no more than that
# An operation on a database is let come to its end, unless the database does not answer.
LONGEST_OPERATION_S = 5.0
# A second Ctrl-C later than this ends the process at once; terminals and launchers send two of one key press.
SECOND_AFTER_S = 1.0
LONGEST_END_S = 30.0  # several times the 5 s in which a worker is asked to end, or SQLite waits for a lock
_WHOLE_OPERATIONS = ("optuna.storages", "sqlalchemy")
_SHOW_CURSOR = "\x1b[?25h"  # which a live progress display hides


def leave_interrupted(message: str) -> NoReturn:
    """Report an interrupt as the command does, and end past everything that may be half done or half imported.

    Written without Python's streams: one of them may be what was interrupted.
    """
    shown = _SHOW_CURSOR if os.isatty(2) else ""
    with contextlib.suppress(OSError):  # the reader of a pipe may be gone
        os.write(2, f"{shown}Error: {message}\n".encode())
        if "--json" in sys.argv:
            os.write(1, (json.dumps({"error": message, "exit_code": INTERRUPTED}) + "\n").encode())
    os._exit(INTERRUPTED)


class Interrupt:
    """Handler of SIGINT that raises KeyboardInterrupt once, where nothing is half done.

    In an operation on Optuna's storage it waits for its end. One that Python had to drop is raised again. A second
    Ctrl-C, or an end that takes longer than ``LONGEST_END_S``, ends the process at once: journals and databases
    survive that, and workers die with it.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first_s = 0.0
        self._waiting = False  # for an operation to end, or to be raised again
        self._repeated = False  # the next signal is the repeated one, and nobody's second Ctrl-C
        self._events: SimpleQueue[bool] = SimpleQueue()  # whose put() may interrupt itself; True ends the thread

    def __call__(self, _signal: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        repeated, self._repeated = self._repeated, False
        if not self.requested:
            self.requested, self._waiting, self._first_s = True, True, now_s
            self._events.put(False)
        elapsed_s = now_s - self._first_s
        if self._waiting and (elapsed_s > LONGEST_OPERATION_S or not _is_in_operation(frame)):
            self._waiting = False
            raise KeyboardInterrupt
        if not (self._waiting or repeated) and elapsed_s > SECOND_AFTER_S:
            leave_interrupted(PROBE_INTERRUPTED)

    def check(self) -> None:
        """Raise KeyboardInterrupt after a Ctrl-C, which numpy.random and others lose while they are imported."""
        if self.requested:
            self._waiting = False
            raise KeyboardInterrupt

    def dropped(self, unraisable: Any) -> None:
        """Raise again what Python could not raise in a callback or destructor; a hook of ``sys``."""
        if unraisable.exc_type is KeyboardInterrupt and self.requested:
            self._waiting = True
        else:
            sys.__unraisablehook__(unraisable)

    def _watch(self, main: int) -> None:
        """Repeat the signal while it waits, and end a process that does not end by itself."""
        if self._events.get():
            return
        while time.monotonic() - self._first_s < LONGEST_END_S:
            with contextlib.suppress(Empty):
                if self._events.get(timeout=REPEATED_EVERY_S):
                    return
            if self._waiting:
                self._repeated = True
                signal.pthread_kill(main, signal.SIGINT)
        leave_interrupted(PROBE_INTERRUPTED)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Answer SIGINT until the block ends; in a thread, where Python allows no handlers, change nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Started before any signal: starting a thread takes locks, which the handler may have interrupted.
        watch = threading.Thread(target=self._watch, args=(threading.get_ident(),), name="interrupts", daemon=True)
        watch.start()
        hook, sys.unraisablehook = sys.unraisablehook, self.dropped
        before = signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            sys.unraisablehook = hook
            self._events.put(True)
            watch.join()


def _is_in_operation(frame: FrameType | None) -> bool:
    """Return whether the code at work is part of an operation on a storage."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_WHOLE_OPERATIONS):
            return True
        frame = frame.f_back
    return False
