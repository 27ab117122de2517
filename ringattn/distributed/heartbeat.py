"""Heartbeats of the ranks of a group: a thread of each writes ``beat/RANK`` to the store, and others read it.

A heartbeat is a number, the process, and the calls that the rank has begun; or ``LEFT``, where it ended by itself.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from .comm import first_line
from .peer_errors import logger

LEFT = "left"

Store = Any  # torch.distributed.Store has no type stubs
Calls = Mapping[int, tuple[int, str]]  # by module: how many were begun, and the last one's description


class Heartbeat:
    """Thread that calls ``beat`` with a number and a store of its own, until the owner of that method is gone."""

    def __init__(self, beat: Callable[[int, Store], None], rank: int, store: Store, interval_s: float) -> None:
        self._stop, self._interval_s = threading.Event(), interval_s
        # The thread must not keep the owner alive: a group that is dropped ends it.
        arguments = (weakref.WeakMethod(beat), rank, self._stop, store, interval_s)
        self._thread = threading.Thread(target=_run, args=arguments, name="ringattn-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * self._interval_s)


def _run(
    method: weakref.WeakMethod[Callable[[int, Store], None]],
    rank: int,
    stop: threading.Event,
    shared: Store,
    interval_s: float,
) -> None:
    number = 0
    try:
        store = shared.clone()  # a connection of its own: the main thread may sit in a call of the other
        while not stop.wait(interval_s if number else 0):
            beat = method()
            if beat is None:
                break
            number += 1
            beat(number, store)
            del beat
        if number:
            store.set(f"beat/{rank}", LEFT)
    except RuntimeError as error:
        logger.debug("the store of the process group is gone: %s", first_line(error))


def write_beat(store: Store, rank: int, number: int, calls: Calls) -> None:
    begun = {str(module): call for module, call in list(calls.items())}
    store.set(f"beat/{rank}", json.dumps({"beat": number, "pid": os.getpid(), "calls": begun}))


def read_beats(store: Store, size: int) -> dict[int, str]:
    """Return the last heartbeat of every rank that has written one."""
    return {rank: store.get(f"beat/{rank}").decode() for rank in range(size) if store.check([f"beat/{rank}"])}


def calls_in(beat: str) -> dict[int, tuple[int, str]]:
    """Return the calls that a heartbeat tells of."""
    if beat == LEFT:
        return {}
    return {int(module): (call, description) for module, (call, description) in json.loads(beat)["calls"].items()}


def absence_of(beat: str) -> str:
    """Return why a rank is absent whose last heartbeat this was."""
    if beat == LEFT:
        return "has left: its process ended"
    return "stopped responding: it was killed, or its host is gone"


class Silence:
    """Measures for how long a rank has written no new heartbeat."""

    def __init__(self, rank: int) -> None:
        self._key = f"beat/{rank}"
        self._last: tuple[str, float] = ("", time.monotonic())

    def seconds(self, store: Store) -> float:
        """Return 0 for a rank that never wrote one, or has left."""
        beat = store.get(self._key).decode() if store.check([self._key]) else ""
        if beat != self._last[0]:
            self._last = (beat, time.monotonic())
        return 0.0 if beat in ("", LEFT) else time.monotonic() - self._last[1]
