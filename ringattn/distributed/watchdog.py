"""Who failed, and why: what the ranks of a group tell each other beside their messages.

Everything goes through the store that the group was made with, so it works while a collective hangs:

- a *ledger* of failures: a rank that raises writes its reason there, and the others raise it as theirs;
- a *beat* of every rank, written each second by a thread, with the call it is in: who is gone stops beating;
- *lockstep*: before a call that differs from the last one, ranks wait for each other and compare, because messages
  of unequal sizes would hang or worse;
- *absence*: a rank that cannot begin a call asks the others whether they are in its messages already. If one is, all
  that are not exchange the messages of the last call with it, whose result nobody uses: else they would be taken for
  those of the next.

A thread of every rank also listens to the next one's beat, so that a lost rank is named even where the main thread
is stuck in a GPU call.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringattn.errors import InputError
from ringattn.hardware.facts import host_identity

from .comm import Comm, first_line
from .peer_errors import BY_THE_PLAN, Call, Failure, PeerError, SatOutError, is_known, mark_known, ticket_text

logger = logging.getLogger("ringattn")

_INSIDE, _OUTSIDE = "inside", "outside"
_LEFT = "left"

Store = Any  # torch.distributed.Store has no type stubs


class Guarded(Protocol):
    """What waits for peers on the device, where no timeout of torch ends it."""

    def waits_s(self) -> float:
        """For how long it has been waiting."""

    def release(self) -> None:
        """Ends the wait."""


@dataclass(frozen=True)
class WatchTimes:
    """How often ranks look at each other, and how long one waits for what others say; the same on all ranks."""

    beat_s: float = 1.0
    silent_after_error_s: float = 3.5  # after an error of the network: a rank that beats no more for so long is gone
    answered_within_s: float = 10.0  # in which the threads of ranks that live have said whether these are in a call


DEFAULT_TIMES = WatchTimes()


class Watch:
    """The view of one rank on the others of a group. ``timeout_s`` is the group's own."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, times: WatchTimes = DEFAULT_TIMES) -> None:
        self.times = times
        self.rank, self.size = group.rank(), group.size()
        self._global = [dist.get_global_rank(group, rank) for rank in range(self.size)]
        self._store: Store = dist.PrefixStore(  # type: ignore[attr-defined]
            "ringattn", group.get_group_store()
        )
        self.timeout_s = _timeout_s(group, device, self._store)
        self._synchronous = device.type == "cpu"
        self._seen = self._count()
        self._broken: Failure | None = None
        self._heard: Failure | None = None
        self._calls: dict[int, tuple[int, str]] = {}  # by module: calls begun, and what the last one looked like
        self._modules = 0
        self._moment = 0  # forwards and backwards that were ended, the same on all ranks
        self._failed_at = -1  # the last of them in which this rank failed
        self._beginning = threading.Lock()  # a call is begun before a thread says where this rank is, or after it
        self._comparing: Call | None = None
        self._missed: dict[Call, Failure] = {}  # that others did not begin, and this rank will not either
        self._sits_out = False
        self._apart: str | None = None
        self._guarded: list[weakref.ref[Guarded]] = []
        self._store.set(f"host/{self.rank}", host_identity())
        self._stop = threading.Event()
        # The thread must not keep the watch alive: a group that is dropped ends it.
        arguments = (weakref.ref(self), self._stop, self._store, times.beat_s)
        self._thread = threading.Thread(target=_beat, args=arguments, name="ringattn-watch", daemon=True)
        self._thread.start()

    # -- failures --

    def report(self, error: BaseException, missed: Call | None = None) -> None:
        """Tells the others that this rank failed, or that it does not begin a call; once for each error."""
        if is_known(error) or isinstance(error, PeerError):
            return
        mark_known(error)
        text = str(error).strip().splitlines()
        reason = f"failed: {type(error).__name__}: {text[0] if text else 'no message'}"
        self._write(self._store, Failure(self._global[self.rank], self.rank, reason, self._moment, missed))

    def meet_in(self, comm: Comm, ticket: int) -> None:
        """Compares the call that ranks are in before its rows travel: InputError on all where ``ticket`` differs.

        On CPUs alone, where that takes 0.1 ms (2 ranks) to 0.3 ms (4 ranks). Rows of another call would be taken for
        those of this one, or end the process where their sizes differ.
        """
        if self._synchronous:
            _, tickets = comm.vote(True, ticket)
            if any(other != ticket for other in tickets):
                self._end_moment(well=False)
                raise self._out_of_order(tickets)

    def settle(self, comm: Comm, *, well: bool) -> None:
        """Ends a call in which every message was exchanged; raises PeerError if another rank failed in it.

        On CPUs ranks vote, so that all leave the same call. On GPUs, where a call returns before it has run, what
        counts is what the thread has heard so far.
        """
        self._end_moment(well=well and not self._sits_out)
        if self._broken is not None:  # by the thread, while this call was under way
            raise PeerError(f"{self._broken}; the process group is aborted, start it anew")
        if self._sits_out:
            if self._synchronous:
                comm.vote(False, 0)
            raise SatOutError
        if self._synchronous:
            all_well, _ = comm.vote(well, 0)
            if all_well or not well:
                return
        elif self._heard is None or not well:
            return
        failure = self._new_failure(self._store)
        if failure is not None:
            raise PeerError(str(failure))
        if self._synchronous:
            raise PeerError("another rank failed in this call, and did not say why")

    def _out_of_order(self, tickets: Sequence[int]) -> InputError:
        other = next(rank for rank, ticket in enumerate(tickets) if ticket != tickets[self.rank])
        here, there = (f"rank {self._global[rank]} was in {ticket_text(tickets[rank])}" for rank in (self.rank, other))
        error = InputError(
            f"{here} and {there} at once; call modules, and go back through their calls, in the same order on every "
            "rank"
        )
        mark_known(error)  # every rank sees it for itself
        return error

    def _end_moment(self, well: bool) -> None:
        if not well:
            self._failed_at = self._moment
        self._moment += 1

    def lost(self, error: BaseException) -> PeerError:
        """The error to raise instead of one of the network: who is gone, or who failed, as far as anybody knows."""
        failure = self._diagnose()
        return self._break(failure or self._straggler(error))

    def _straggler(self, error: BaseException) -> Failure:
        """Who made the fewest calls, where nobody failed; this rank's own ``error`` if none made fewer than it."""
        calls = self._calls_made()
        told = ", ".join(f"rank {self._global[rank]} is in call {count}" for rank, count in calls.items())
        last = min(calls, key=lambda rank: calls[rank], default=self.rank)
        if calls and calls[last] < calls[self.rank]:
            return Failure(self._global[last], self.rank, f"did not make this call: {told}")
        return Failure(self._global[self.rank], self.rank, f"met: {error}; no rank failed ({told})")

    def _break(self, failure: Failure) -> PeerError:
        """The group is of no use any more: messages were lost."""
        self._broken = failure
        return PeerError(f"{failure}; the process group is aborted, start it anew")

    def _diagnose(self) -> Failure | None:
        try:
            first = self._beats()
            begin = time.monotonic()
            while time.monotonic() - begin < self.times.silent_after_error_s:
                failure = self._new_failure(self._store)
                if failure is not None:
                    return failure
                time.sleep(0.05)
            beats = self._beats()
        except RuntimeError as error:  # torch raises DistError and its kin, all RuntimeErrors, for a store that is gone
            return Failure(
                0, self.rank, f"or the launcher that holds the rendezvous store is gone ({first_line(error)})"
            )
        silent = [rank for rank in beats if rank != self.rank and beats[rank] in (first[rank], _LEFT)]
        if not silent:
            return None
        failure = Failure(self._global[silent[0]], self.rank, _gone(beats[silent[0]]))
        self._write(self._store, failure)
        return failure

    def _new_failure(self, store: Store) -> Failure | None:
        """The first failure of another rank in the ledger that was not raised here yet, later than this rank's own."""
        count = store.add("failures", 0)
        found = None
        while self._seen < count:
            failure = Failure.read(store.get(f"failure/{self._seen}"))
            self._seen += 1
            others = failure.told_by != self.rank and failure.rank != self._global[self.rank]
            if found is None and others and failure.moment > self._failed_at and not self._is_over(failure):
                found = failure
                if failure.missed is not None:
                    self._missed[failure.missed] = failure
        if count == self._seen:
            self._heard = None
        return found

    def _is_over(self, failure: Failure) -> bool:
        """Whether this rank went through the call without noticing who was missing, as it sends nothing."""
        module, call = failure.missed or (0, 0)
        return self._synchronous and self._calls.get(module, (0, ""))[0] > call > 0

    def _count(self) -> int:
        return int(self._store.add("failures", 0))

    def _write(self, store: Store, failure: Failure) -> None:
        try:
            number = store.add("failures", 1) - 1
            store.set(f"failure/{number}", json.dumps(failure))
        except RuntimeError as error:
            logger.error("could not tell the other ranks that %s: %s", failure, first_line(error))

    # -- lockstep --

    def new_module(self) -> int:
        """A number for a module; modules are built in the same order on every rank."""
        self._modules += 1
        return self._modules

    def begin(self, module: int, call: int, looks: str, *, comparing: bool = False) -> None:
        """This rank begins call number ``call`` of a module, its messages at once or ``comparing`` it first."""
        if self._broken is not None:
            raise PeerError(f"{self._broken}; the process group is aborted, start it anew")
        with self._beginning:
            failure = self._missed.get((module, call))
            if failure is None:
                self._calls[module] = (call, looks)
                self._comparing = (module, call) if comparing else None
        if failure is not None:
            raise PeerError(str(failure))

    def lockstep(self, module: int, call: int, looks: str) -> None:
        """Waits until every rank begins this call, and compares what it looks like to each.

        Raises InputError on every rank where they differ, PeerError where a rank fails or does not come.
        """
        self._store.set(self._call_key(module, call, self.rank), looks)
        self.meet(
            [self._call_key(module, call, rank) for rank in range(self.size)],
            "did not make this call",
            lambda rank: self._other_call(module, call, looks, rank),
        )
        told = [value.decode() for value in self._store.multi_get(self._call_keys(module, call))]
        different = [rank for rank in range(self.size) if told[rank] != told[0]]
        if different:
            rank = different[0]
            error = InputError(_different((self._global[0], told[0]), (self._global[rank], told[rank])))
            mark_known(error)  # every rank sees it for itself
            raise error
        self._comparing = None  # nobody is missing any more

    def meet(self, keys: Sequence[str], absence: str, probe: Callable[[int], str] = lambda rank: "") -> None:
        """Waits for the keys of all ranks in the store.

        ``probe`` may say, of a rank that did not come, why it never will.
        """
        deadline = time.monotonic() + self.timeout_s
        pause_s, look_s = 0.0005, time.monotonic() + self.times.beat_s
        while not self._store.check(list(keys)):
            now = time.monotonic()
            if now > look_s:
                look_s = now + self.times.beat_s
                failure = self._new_failure(self._store)
                if failure is not None:
                    raise PeerError(str(failure))
                missing = [rank for rank in range(self.size) if not self._store.check([keys[rank]])]
                for rank in missing:
                    reason = probe(rank)
                    if reason:
                        raise InputError(reason)
                if missing and now > deadline:
                    raise self._absent(missing, absence)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)

    def _absent(self, missing: list[int], absence: str) -> PeerError:
        names = ", ".join(f"rank {self._global[rank]}" for rank in missing)
        error = PeerError(f"{names} {absence} within the group's timeout of {self.timeout_s:g} s")
        self._write(self._store, Failure(self._global[missing[0]], self.rank, f"{absence} in time"))
        return error

    def _other_call(self, module: int, call: int, looks: str, rank: int) -> str:
        """Where ``rank`` is in this very call with the inputs of its last one, so that it waits for no one."""
        began, there = self._status(rank).get(module, (0, ""))
        if began < call or there == looks:
            return ""
        return _different((self._global[self.rank], looks), (self._global[rank], there))

    def forget(self, module: int, call: int) -> None:
        """Removes what ``lockstep`` left in the store, once every rank is past it."""
        self._store.delete_key(self._call_key(module, call, self.rank))

    def _call_key(self, module: int, call: int, rank: int) -> str:
        return f"call/{module}/{call}/{rank}"

    def _call_keys(self, module: int, call: int) -> list[str]:
        return [self._call_key(module, call, rank) for rank in range(self.size)]

    # -- absence --

    def miss(self, error: Exception, call: Call, sit_out: Callable[[], object]) -> None:
        """This rank does not begin a call, for ``error``: the others are told, and ``sit_out`` is called if it must be.

        That exchanges the messages of the last call, which others are in.
        """
        if is_known(error) or (isinstance(error, PeerError) and call not in self._missed):
            return  # every rank knows of it, or the group is of no use any more
        self._store.set(self._place_key(call, self.rank), _OUTSIDE)
        self.report(error, call)
        if self._is_awaited(call):
            self.sit_out(error, sit_out)
        else:
            self._end_moment(well=False)
        self._missed.pop(call, None)

    def sit_out(self, error: Exception, messages: Callable[[], object]) -> None:
        """Reports ``error``, and exchanges the messages of a call, of which the others are told that it failed."""
        self.report(error)
        self._sits_out = True
        try:
            messages()
        except SatOutError:
            pass
        except Exception as other:  # noqa: BLE001  what is raised is ``error``, which the others know
            error.add_note(f"and while the others were in this call: {type(other).__name__}: {other}")
        finally:
            self._sits_out = False

    # -- memory that ranks share --

    def apart(self) -> str:
        """Why the ranks cannot reach each other's memory; empty where they are on one host. Waits for all of them."""
        if self._apart is None:
            keys = [f"host/{rank}" for rank in range(self.size)]
            self.meet(keys, "did not build the same RingAttention")
            hosts = [value.decode() for value in self._store.multi_get(keys)]
            other = next((rank for rank in range(self.size) if hosts[rank] != hosts[0]), 0)
            self._apart = f"ranks {self._global[0]} and {self._global[other]} are on different hosts" if other else ""
        return self._apart

    def guard(self, guarded: Guarded) -> None:
        """Ends its waits where they outlast the group's timeout."""
        self._guarded.append(weakref.ref(guarded))

    def end_waits(self) -> None:
        """Called by the thread each second."""
        for each in list(self._guarded):
            guarded = each()
            if guarded is None:
                self._guarded.remove(each)
            elif guarded.waits_s() > self.timeout_s:
                reason = f"has waited on the GPU for a peer for the group's timeout of {self.timeout_s:g} s"
                self._broken = self._broken or Failure(self._global[self.rank], self.rank, reason)
                logger.error("%s; what it waits for is taken as NaN, and the process group is aborted", self._broken)
                guarded.release()

    def not_built(self, error: Exception) -> None:
        """A module is built on no rank: the others are told, where they do not know."""
        self.report(error)
        self._end_moment(well=False)

    def _is_awaited(self, call: Call) -> bool:
        """Whether a rank is in the messages of the call; the group is broken where one does not say."""
        keys = [self._place_key(call, rank) for rank in range(self.size)]
        deadline = time.monotonic() + min(self.times.answered_within_s, self.timeout_s)
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                silent = [rank for rank in range(self.size) if not self._store.check([keys[rank]])]
                self._break(Failure(self._global[silent[0]], self.rank, "does not say whether it is in a call"))
                return False
            time.sleep(0.01)
        return _INSIDE.encode() in self._store.multi_get(keys)

    def place(self, store: Store, failure: Failure) -> None:
        """Says whether this rank is in the messages of the call that another has missed; if not, it begins it no more.

        Called by the thread: the main one may wait for these messages.
        """
        assert failure.missed is not None
        module, call = failure.missed
        with self._beginning:
            begun, _ = self._calls.get(module, (0, ""))
            inside = begun > call or (begun == call and self._comparing != failure.missed)
            if not inside:
                self._missed.setdefault(failure.missed, failure)
        store.set(self._place_key(failure.missed, self.rank), _INSIDE if inside else _OUTSIDE)

    def _place_key(self, call: Call, rank: int) -> str:
        return f"missed/{call[0]}/{call[1]}/{rank}"

    # -- beats --

    def close(self) -> None:
        """This rank leaves on purpose."""
        self._stop.set()
        self._thread.join(2 * self.times.beat_s)

    def _beats(self) -> dict[int, str]:
        keys = [f"beat/{rank}" for rank in range(self.size)]
        present = [rank for rank in range(self.size) if self._store.check([keys[rank]])]
        values = self._store.multi_get([keys[rank] for rank in present]) if present else []
        return {rank: value.decode() for rank, value in zip(present, values, strict=True)}

    def _status(self, rank: int) -> dict[int, tuple[int, str]]:
        if not self._store.check([f"beat/{rank}"]):
            return {}
        beat = self._store.get(f"beat/{rank}").decode()
        if beat == _LEFT:
            return {}
        return {int(module): (call, looks) for module, (call, looks) in json.loads(beat)["calls"].items()}

    def _calls_made(self) -> dict[int, int]:
        try:
            return {rank: sum(call for call, _ in self._status(rank).values()) for rank in range(self.size)}
        except RuntimeError:  # the store is gone; the error that led here says enough
            return {}


def _beat(of: weakref.ref[Watch], stop: threading.Event, shared: Store, beat_s: float) -> None:
    """The thread of a watch: beats, and listens to the ledger and to the next rank."""
    try:
        store = shared.clone()  # a connection of its own: the main thread may sit in a call of the other
        listen: _Listener | None = None
        number = 0
        while not stop.wait(beat_s if number else 0):
            watch = of()
            if watch is None:
                break
            listen = listen or _Listener(watch)
            number += 1
            calls = {str(module): call for module, call in list(watch._calls.items())}
            store.set(f"beat/{listen.rank}", json.dumps({"beat": number, "pid": os.getpid(), "calls": calls}))
            if number > 1:
                listen(watch, store)
                watch.end_waits()
            del watch
        if listen is not None:
            store.set(f"beat/{listen.rank}", _LEFT)
    except RuntimeError as error:
        logger.debug("the store of the process group is gone: %s", first_line(error))


class _Listener:
    """Notes new failures for the main thread and says them, in case that one is stuck; watches the next rank."""

    def __init__(self, watch: Watch) -> None:
        self.rank = watch.rank
        self._next = (watch.rank + 1) % watch.size
        self._silence_s = min(watch.timeout_s / 2, 60.0)
        self._last: tuple[str, float] = ("", time.monotonic())
        self._told = watch._seen
        self._lost = False

    def __call__(self, watch: Watch, store: Store) -> None:
        count = int(store.add("failures", 0))
        while self._told < count:
            failure = Failure.read(store.get(f"failure/{self._told}"))
            self._told += 1
            if failure.told_by != watch.rank:
                if failure.missed is not None:
                    watch.place(store, failure)
                watch._heard = failure
                logger.error("%s", failure)
        self._follow_next(watch, store)

    def _follow_next(self, watch: Watch, store: Store) -> None:
        key, now = f"beat/{self._next}", time.monotonic()
        beat = store.get(key).decode() if store.check([key]) else ""
        if beat != self._last[0]:
            self._last = (beat, now)
        elif not self._lost and beat not in ("", _LEFT) and now - self._last[1] > self._silence_s:
            self._lost = True
            failure = Failure(watch._global[self._next], watch.rank, _gone(beat))
            watch._write(store, failure)
            watch._heard = failure
            logger.error("%s", failure)


def _gone(beat: str) -> str:
    if beat == _LEFT:
        return "has left: its process ended"
    return "stopped responding: it was killed, or its host is gone"


def _timeout_s(group: dist.ProcessGroup, device: torch.device, store: Store) -> float:
    """The group's timeout; that of its store where the backend does not say."""
    options: Any = getattr(group._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", None) or store.timeout
    return timeout.total_seconds()


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()


@atexit.register
def _leave() -> None:
    for watch in list(_watches.values()):
        watch.close()


def watch_of(group: dist.ProcessGroup, device: torch.device, times: WatchTimes = DEFAULT_TIMES) -> Watch:
    """The watch of a group: one for all modules on it, with the ``times`` of the first call."""
    watch = _watches.get(group)
    if watch is None:
        watch = _watches[group] = Watch(group, device, times)
    return watch


def _different(one: tuple[int, str], other: tuple[int, str]) -> str:
    """That two ranks, by number, tell different things of one call."""
    remedy = "give every rank its share of one sequence, or total_length where they differ"
    if one[1].partition(BY_THE_PLAN)[0] == other[1].partition(BY_THE_PLAN)[0]:
        remedy = "a kernel failed its accuracy check on some ranks alone; name a backend that is right on all"
    return f"ranks call with different inputs: rank {one[0]} {one[1]}, rank {other[0]} {other[1]}; {remedy}"
