"""Heartbeat thread of a rank: shows that it lives, and aborts the group where another rank fails or beats no more.

It logs the reason, since the main thread may sit in a call of the device.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from .comm import first_line
from .peer_errors import Failure

if TYPE_CHECKING:
    from .watchdog import Watchdog

logger = logging.getLogger("ringattn")

LEFT = "left"

Store = Any  # torch.distributed.Store has no type stubs


class Heartbeat:
    """Thread that writes ``beat/RANK`` to the store: a number, and the calls that the rank is in."""

    def __init__(self, watchdog: Watchdog, store: Store) -> None:
        self._stop, self._interval_s = threading.Event(), watchdog.times.beat_s
        # The thread must not keep the watchdog alive: a group that is dropped ends it.
        arguments = (weakref.ref(watchdog), self._stop, store, self._interval_s)
        self._thread = threading.Thread(target=_run, args=arguments, name="ringattn-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * self._interval_s)


def _run(watchdog_ref: weakref.ref[Watchdog], stop: threading.Event, shared: Store, interval_s: float) -> None:
    try:
        store = shared.clone()  # a connection of its own: the main thread may sit in a call of the other
        follower: _Follower | None = None
        rank = number = 0
        while not stop.wait(interval_s if number else 0):
            watchdog = watchdog_ref()
            if watchdog is None:
                break
            rank, number = watchdog.rank, number + 1
            follower = follower or _Follower(watchdog)
            calls = {str(module): call for module, call in list(watchdog.calls.items())}
            store.set(f"beat/{rank}", json.dumps({"beat": number, "pid": os.getpid(), "calls": calls}))
            if number > 1 and watchdog.failure is None:
                watchdog.find_failure(store)
                follower(watchdog, store)
                watchdog.end_waits(store)
                if watchdog.failure is not None:
                    logger.error("%s; the process group is aborted", watchdog.failure)
            del watchdog
        if number:
            store.set(f"beat/{rank}", LEFT)
    except RuntimeError as error:
        logger.debug("the store of the process group is gone: %s", first_line(error))


class _Follower:
    """Aborts the group where the next rank beats no more."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._rank = (watchdog.rank + 1) % watchdog.size
        self._silence_s = min(watchdog.timeout_s / 2, 60.0)
        self._last: tuple[str, float] = ("", time.monotonic())

    def __call__(self, watchdog: Watchdog, store: Store) -> None:
        key, now = f"beat/{self._rank}", time.monotonic()
        beat = store.get(key).decode() if store.check([key]) else ""
        if beat != self._last[0]:
            self._last = (beat, now)
        elif beat not in ("", LEFT) and now - self._last[1] > self._silence_s:
            watchdog.fail(Failure(watchdog.global_ranks[self._rank], absence_of(beat)), store)


def absence_of(beat: str) -> str:
    """Return why a rank is absent whose last beat this was."""
    if beat == LEFT:
        return "has left: its process ended"
    return "stopped responding: it was killed, or its host is gone"
