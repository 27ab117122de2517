"""Watchdog of a process group: the failure of any rank aborts the group, and every rank raises its reason.

Everything goes through the store that the group was made with, so it works while a collective hangs:

- the first *failure*: a rank that raises in a call writes its reason and aborts the group, which ends what the others
  wait for; they find the reason and raise it;
- a *heartbeat* of every rank, written each second by a thread, with the call it is in: who is gone stops beating;
- a *comparison* before a call that differs from the last one: messages of unequal sizes would hang or worse.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringattn.errors import InputError
from ringattn.hardware.identity import host_identity

from .comm import Comm, CommError, abort, first_line
from .heartbeat import LEFT, Heartbeat, Silence, Store, absence_of, calls_in, read_beats, write_beat
from .peer_errors import BY_THE_PLAN, Failure, PeerError, describe_sequence_number, is_known, logger, mark_known


class DeviceWaits(Protocol):
    """Waits for peers on the device, which no timeout of torch ends."""

    def waits_s(self) -> float:
        """Return seconds for which the oldest has been under way; 0 where none is."""

    def release(self) -> None:
        """End them all."""


@dataclass(frozen=True)
class WatchdogTimes:
    """Seconds between heartbeats, and without one until a rank counts as gone; the same on all ranks."""

    beat_s: float = 1.0
    silent_after_error_s: float = 3.5  # after an error of the network


DEFAULT_TIMES = WatchdogTimes()
LEAVE_S = 5.0  # that a rank with an error of all waits for the others to see it; they need some milliseconds


class Watchdog:
    """One rank's view of the others of a group. ``timeout_s`` is the group's own; ``failure`` has aborted it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, times: WatchdogTimes = DEFAULT_TIMES) -> None:
        self.times = times
        self.rank, self.size = group.rank(), group.size()
        self.global_ranks = [dist.get_global_rank(group, rank) for rank in range(self.size)]
        self._backend: Any = group._get_backend(device)
        store: Store = dist.PrefixStore("ringattn", group.get_group_store())  # type: ignore[attr-defined]
        self._store = store
        # The group's timeout; that of its store where the backend does not say.
        options: Any = getattr(self._backend, "options", None)
        timeout: timedelta = getattr(options, "_timeout", None) or self._store.timeout
        self.timeout_s = timeout.total_seconds()
        self.failure: Failure | None = None
        self._aborting = threading.Lock()
        self.calls: dict[int, tuple[int, str]] = {}  # by module: calls begun, and the last one's description
        self._modules = 0
        self._hosts_reason: str | None = None
        self._device_waits: list[weakref.ref[DeviceWaits]] = []
        self._store.set(f"host/{self.rank}", host_identity())
        self._next = (self.rank + 1) % self.size
        self._silence, self._most_silence_s = Silence(self._next), min(self.timeout_s / 2, 60.0)
        self._heartbeat = Heartbeat(self._beat, self.rank, self._store, times.beat_s)

    # -- failures --

    def report(self, error: BaseException) -> None:
        """Abort the group for an error of this rank, unless every rank knows of it."""
        if is_known(error) or isinstance(error, PeerError):
            return
        mark_known(error)
        text = str(error).strip().splitlines()
        reason = f"failed: {type(error).__name__}: {text[0] if text else 'no message'}"
        self.fail(Failure(self.global_ranks[self.rank], reason), self._store)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Abort the group for an error raised inside; one of the network becomes PeerError with the rank at fault.

        Raises PeerError at once where the group is aborted already.
        """
        self.check()
        try:
            yield
        except CommError as error:
            raise self._lost(error) from error
        except Exception as error:
            self.report(error)
            raise

    def check(self) -> None:
        """Raise PeerError where the group is aborted."""
        if self.failure is not None:
            raise self._error()

    def _lost(self, error: CommError) -> PeerError:
        if self.failure is None:
            self.fail(self._diagnose(error), self._store)
        return self._error()

    def fail(self, failure: Failure, store: Store, *, log: bool = False) -> None:
        """Abort the group for the first failure that any rank has written, by default this one.

        ``log`` says it before: where the main thread waits for its GPU nothing raises, and a program may end as soon
        as the abort lets go of it.
        """
        with self._aborting:
            if self.failure is not None:
                return
            try:
                failure = Failure(*json.loads(store.compare_set("failure", "", json.dumps(failure))))
            except RuntimeError as error:
                logger.error("could not tell the other ranks that %s: %s", failure, first_line(error))
            self.failure = failure
            if log:
                logger.error("%s; the process group is aborted", failure)
            for waits in self._device_waits:
                if (found := waits()) is not None:
                    found.release()
            abort(self._backend, self.rank, self.size)

    def _find_failure(self, store: Store, *, log: bool = False) -> bool:
        """Abort the group where another rank has failed."""
        if self.failure is None and store.check(["failure"]):
            self.fail(Failure(*json.loads(store.get("failure"))), store, log=log)
        return self.failure is not None

    def _error(self) -> PeerError:
        return PeerError(f"{self.failure}; the process group is aborted, build a new one")

    def _diagnose(self, error: CommError) -> Failure:
        """Return who failed or is gone; else who made the fewest calls; else this rank's own ``error``."""
        try:
            first, begin = read_beats(self._store, self.size), time.monotonic()
            while time.monotonic() - begin < self.times.silent_after_error_s:
                if self._store.check(["failure"]):
                    return Failure(*json.loads(self._store.get("failure")))
                time.sleep(0.05)
            beats = read_beats(self._store, self.size)
        except RuntimeError as gone:  # torch raises DistError and its kin, all RuntimeErrors, for a store that is gone
            return Failure(0, f"or the launcher that holds the rendezvous store is gone ({first_line(gone)})")
        for rank, beat in beats.items():
            if rank != self.rank and beat in (first.get(rank), LEFT):
                return Failure(self.global_ranks[rank], absence_of(beat))
        calls = {rank: sum(call for call, _ in calls_in(beat).values()) for rank, beat in beats.items()}
        counts = ", ".join(f"rank {self.global_ranks[rank]} is in call {count}" for rank, count in calls.items())
        last = min(calls, key=lambda rank: calls[rank], default=self.rank)
        if calls and calls[last] < calls[self.rank]:
            return Failure(self.global_ranks[last], f"did not make this call: {counts}")
        return Failure(self.global_ranks[self.rank], f"met: {error}; no rank failed ({counts})")

    # -- calls in step --

    def new_module(self) -> int:
        """Return a number for a module; modules are built in the same order on every rank."""
        self.check()
        self._modules += 1
        return self._modules

    def begin(self, module: int, call: int, description: str) -> None:
        """Note that this rank begins call number ``call`` of a module; PeerError where the group is aborted."""
        self.check()
        self.calls[module] = (call, description)

    def compare_order(self, comm: Comm, number: int, of: Callable[[], str] = str) -> None:
        """Compare the sequence number of the call that ranks are in, and what it is ``of``, which text says.

        InputError on all ranks where either differs. On CPUs alone, where that takes 0.1 ms (2 ranks) to 0.3 ms
        (4 ranks). Rows of another call would be taken for those of this one, or end the process where their sizes
        differ.
        """
        if self._backend.name() != "gloo":
            return
        mine = torch.tensor([number, zlib.crc32(of().encode())], device="cpu")
        found = [part.tolist() for part in comm.gather_rows(mine, [(2,)] * self.size)]
        other = next((rank for rank, each in enumerate(found) if each != found[self.rank]), None)
        if other is None:
            return
        ranks = [self.global_ranks[rank] for rank in (self.rank, other)]
        if found[other][0] == number:
            error = InputError(f"rank {ranks[0]} has {of()}, and rank {ranks[1]} other ones; give every rank the same")
        else:
            here, there = (
                f"rank {rank} was in {describe_sequence_number(found[place][0])}"
                for rank, place in zip(ranks, (self.rank, other), strict=True)
            )
            error = InputError(
                f"{here} and {there} at once; call modules, and go back through their calls, in the same order on "
                "every rank"
            )
        mark_known(error)  # every rank sees it for itself, and no row has travelled
        raise error

    def compare(self, module: int, call: int, description: str) -> None:
        """Wait until every rank begins this call, and compare its descriptions.

        Raises InputError on every rank where they differ, PeerError where a rank fails or does not come.
        """
        keys = [self._call_key(module, call, rank) for rank in range(self.size)]
        self._store.set(keys[self.rank], description)
        self.wait_for(keys, "did not make this call", lambda rank: self._other_inputs(module, call, description, rank))
        found = [value.decode() for value in self._store.multi_get(keys)]
        for rank in range(self.size):
            if found[rank] != found[0]:
                text = _difference((self.global_ranks[0], found[0]), (self.global_ranks[rank], found[rank]))
                self._leave_together(keys)
                error = InputError(text)
                mark_known(error)  # every rank sees it for itself
                raise error

    def _leave_together(self, keys: Sequence[str]) -> None:
        """Wait until every rank has read these keys, LEAVE_S at most.

        The error that follows ends most programs, and the process of one rank holds the store: the others, which had
        not read it yet, ended with a DistNetworkError in 2 of 3 runs.
        """
        read = [f"read/{key}" for key in keys]
        self._store.set(read[self.rank], "")
        limit = time.monotonic() + LEAVE_S
        try:
            while not self._store.check(read) and time.monotonic() < limit:
                time.sleep(0.005)
        except RuntimeError:  # the holder of the store has seen all of the others and gone
            return

    def wait_for(self, keys: Sequence[str], absence: str, conflict: Callable[[int], str] = lambda rank: "") -> None:
        """Wait for the store keys of all ranks; PeerError where a rank fails, or ``absence`` outlasts the timeout.

        ``conflict`` may say of a rank that does not come why it never will, which raises InputError.
        """
        deadline = time.monotonic() + self.timeout_s
        pause_s, look_s = 0.0005, time.monotonic() + self.times.beat_s
        while not self._store.check(list(keys)):
            now = time.monotonic()
            if now > look_s:
                look_s = now + self.times.beat_s
                if self._find_failure(self._store):
                    raise self._error()
                missing = [rank for rank in range(self.size) if not self._store.check([keys[rank]])]
                for rank in missing:
                    if reason := conflict(rank):
                        raise InputError(reason)
                if missing and now > deadline:
                    reason = f"{absence} within the group's timeout of {self.timeout_s:g} s"
                    self.fail(Failure(self.global_ranks[missing[0]], reason), self._store)
                    raise self._error()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)

    def announce(self, key: str) -> None:
        """Write a key that ``wait_for`` of the other ranks waits for."""
        self._store.set(key, "here")

    def forget(self, module: int, call: int) -> None:
        """Remove what ``compare`` left in the store, once every rank is past it."""
        self._store.delete_key(self._call_key(module, call, self.rank))

    def _call_key(self, module: int, call: int, rank: int) -> str:
        return f"call/{module}/{call}/{rank}"

    def _other_inputs(self, module: int, call: int, description: str, rank: int) -> str:
        """Return the difference where ``rank`` is in this very call with inputs that it need not compare."""
        begun, there = calls_in(read_beats(self._store, self.size).get(rank, LEFT)).get(module, (0, ""))
        if begun < call or there == description:
            return ""
        return _difference((self.global_ranks[self.rank], description), (self.global_ranks[rank], there))

    # -- memory that ranks share --

    def hosts_reason(self) -> str:
        """Return why the ranks cannot reach each other's memory; empty on one host. Waits for all of them."""
        if self._hosts_reason is None:
            keys = [f"host/{rank}" for rank in range(self.size)]
            self.wait_for(keys, "did not build the same RingAttention")
            hosts = [value.decode() for value in self._store.multi_get(keys)]
            other = next((rank for rank in range(self.size) if hosts[rank] != hosts[0]), 0)
            names = f"ranks {self.global_ranks[0]} and {self.global_ranks[other]}"
            self._hosts_reason = f"{names} are on different hosts" if other else ""
        return self._hosts_reason

    def add_device_waits(self, waits: DeviceWaits) -> None:
        """End these waits where they outlast the group's timeout, or the group is aborted."""
        self._device_waits.append(weakref.ref(waits))

    # -- heartbeats --

    def _beat(self, number: int, store: Store) -> None:
        """Show that this rank lives, and abort the group where another failed or is gone, or a wait lasts too long.

        Runs in a thread, which logs the reason: the main one may sit in a call of the device.
        """
        write_beat(store, self.rank, number, self.calls)
        if number == 1 or self.failure is not None:
            return
        self._find_failure(store, log=True)
        if self._silence.seconds(store) > self._most_silence_s:
            self.fail(Failure(self.global_ranks[self._next], absence_of("")), store, log=True)
        waits = [found for each in self._device_waits if (found := each()) is not None]
        if any(each.waits_s() > self.timeout_s for each in waits):
            reason = f"has waited on the GPU for a peer for the group's timeout of {self.timeout_s:g} s"
            reason = f"{reason}, and takes what it waits for as NaN"
            self.fail(Failure(self.global_ranks[self.rank], reason), store, log=True)

    def close(self) -> None:
        """Leave the group on purpose."""
        self._heartbeat.stop()


_watchdogs: weakref.WeakKeyDictionary[dist.ProcessGroup, Watchdog] = weakref.WeakKeyDictionary()


@atexit.register
def _leave() -> None:
    for watchdog in list(_watchdogs.values()):
        watchdog.close()


def watchdog_of(group: dist.ProcessGroup, device: torch.device, times: WatchdogTimes = DEFAULT_TIMES) -> Watchdog:
    """Return the watchdog of a group: one for all modules on it, with the ``times`` of the first call."""
    watchdog = _watchdogs.get(group)
    if watchdog is None:
        watchdog = _watchdogs[group] = Watchdog(group, device, times)
    return watchdog


def _difference(one: tuple[int, str], other: tuple[int, str]) -> str:
    """Return the message for two ranks (number, description) that describe one call differently."""
    remedy = "give every rank its shard of one sequence, or total_length where they differ"
    if one[1].partition(BY_THE_PLAN)[0] == other[1].partition(BY_THE_PLAN)[0]:
        remedy = "a kernel failed its accuracy check on some ranks alone; name a backend that is right on all"
    return f"ranks call with different inputs: rank {one[0]} {one[1]}, rank {other[0]} {other[1]}; {remedy}"
