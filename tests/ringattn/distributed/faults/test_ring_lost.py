"""Whatever happens to a rank, the others name it within the group's timeout and 5 s."""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from faults import CASE, TIMEOUT_S, Told, leaves_of, told_of
from pool import GROUP_TIMEOUT_S, LIMIT_S, TIMES, Pool
from ring_cases import RingCase

from ringattn.distributed import watchdog
from ringattn.distributed.comm import Comm, Message
from ringattn.distributed.heartbeat import absence_of
from ringattn.distributed.watchdog import WatchdogTimes, _leave


def _die_or_call(schedule: str, backward: bool) -> Told:
    module = RingCase(CASE, schedule, "zigzag").module()
    leaves = leaves_of(module)
    out = module(*leaves)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = told_of((lambda: out.sum().backward()) if backward else (lambda: module(*leaves)))
    again = told_of(lambda: module(*leaves))
    assert again == told, "the group is of no use any more"
    return told


def _die_or_unshard() -> Told:
    """After ranks have compared what they unshard."""
    module = RingCase(CASE, "ring", "zigzag").module()
    assert module._ring is not None
    rows = leaves_of(module)[0].detach()
    if dist.get_rank() == 1:
        module._ring.comm.gather_rows = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    return told_of(lambda: module.unshard(rows))


def _die_or_listen() -> list[str]:
    """What the log says while this rank does something else, until the group is aborted."""
    RingCase(CASE, "ring", "zigzag").module()
    said: list[str] = []
    said_before: queue.Queue[list[str]] = queue.Queue()
    watchdog.abort = lambda *_: said_before.put(list(said))
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringattn").addHandler(handler)
    time.sleep(2 * TIMES.beat_s)  # it has beaten
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return said_before.get(timeout=LIMIT_S)


def _leave_or_call() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = leaves_of(module)
    module(*leaves)
    dist.barrier()
    if dist.get_rank() == 1:
        _leave()
        os._exit(0)
    return told_of(lambda: module(*leaves))


def _build_or_die() -> Told:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return told_of(lambda: RingCase(CASE, "ring", "zigzag").module())


def _sleep_or_call(calls_before: int) -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    for _ in range(calls_before):
        module(*leaves_of(module))
    if dist.get_rank() == 1:
        time.sleep(LIMIT_S)
        return "", "", 0.0
    return told_of(lambda: module(*leaves_of(module)))


def _impatient_or_asleep() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    assert module._ring is not None
    if dist.get_rank() == 1:
        time.sleep(LIMIT_S)
        return "", "", 0.0
    if dist.get_rank() == 0:
        module._ring.watchdog.timeout_s = 1.0
    return told_of(lambda: module(*leaves_of(module)))


class Loss(NamedTuple):
    """What three ranks run, of which one is lost; ``waits`` says that the others learn it by the group's timeout."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    lost: int = 1
    waits: bool = False
    times: WatchdogTimes | None = TIMES

    def pool(self) -> Pool:
        return Pool(3, TIMEOUT_S if self.waits else GROUP_TIMEOUT_S, self.times)


KILLED = {
    "ring, forward": Loss(_die_or_call, ("ring", False)),
    "ring, backward": Loss(_die_or_call, ("ring", True)),
    "ulysses, forward": Loss(_die_or_call, ("ulysses", False)),
    "ulysses, backward": Loss(_die_or_call, ("ulysses", True)),
    "while rows are unsharded": Loss(_die_or_unshard),
}
ASLEEP = {
    "comparing": Loss(_sleep_or_call, (0,), waits=True),
    "in messages": Loss(_sleep_or_call, (1,), waits=True),
}
LOSSES = {
    **KILLED,
    **ASLEEP,
    "nobody waits": Loss(_die_or_listen, waits=True),
    "left": Loss(_leave_or_call),
    # It has never said that it lives, and the others do not know it by more than its number.
    "not there at init": Loss(_build_or_die, lost=2, waits=True, times=None),
    "in vain": Loss(_impatient_or_asleep, waits=True),
}


@pytest.fixture(scope="module")
def told() -> Iterator[Callable[[str], list[Any]]]:
    """What the other ranks tell of a loss. All have begun before the first is asked for: most of each is a wait."""
    pools: dict[str, Pool] = {}
    try:
        for name, loss in LOSSES.items():
            pools[name] = loss.pool()
            pools[name].start(loss.function, *loss.arguments)

        def of(name: str) -> list[Any]:
            others = [rank for rank in range(3) if rank != LOSSES[name].lost]
            results = pools[name].results_of(others)
            pools[name].kill()
            return results

        yield of
    finally:
        for pool in pools.values():
            pool.kill()


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_rank_is_named(name: str, told: Callable[[str], list[Told]]) -> None:
    for error, message in told(name):
        assert error == "PeerError"
        assert "rank 1 stopped responding" in message


def test_a_killed_rank_is_named_where_nobody_waits_for_it(told: Callable[[str], list[list[str]]]) -> None:
    """By the thread, that is, and before the abort: that lets go of a main thread that waits for its GPU."""
    assert told("nobody waits") == [[f"rank 1 {absence_of('')}; the process group is aborted"]] * 2


def test_a_rank_that_ended_by_itself_is_not_called_killed(told: Callable[[str], list[Told]]) -> None:
    for error, message in told("left"):
        assert error == "PeerError"
        assert "rank 1 has left: its process ended" in message


def test_a_rank_that_is_not_there_at_init_is_named(told: Callable[[str], list[Told]]) -> None:
    for error, message in told("not there at init"):
        assert error == "PeerError"
        assert "rank 2 did not build the same RingAttention" in message


@pytest.mark.parametrize("name", ASLEEP)
def test_a_rank_that_does_not_call_is_named(name: str, told: Callable[[str], list[Told]]) -> None:
    for error, message in told(name):
        assert error == "PeerError"
        assert "rank 1 did not make this call" in message


def test_what_one_rank_has_waited_for_in_vain_no_other_waits_for(told: Callable[[str], list[Told]]) -> None:
    (first, said), (error, message) = told("in vain")
    assert (first, error) == ("PeerError", "PeerError")
    assert said == message
    assert said.startswith("rank 1 did not make this call within the group's timeout of 1 s; the process group is")


def _messages_that_do_not_start() -> list[Told]:
    comm = Comm(dist.group.WORLD)
    x = torch.zeros(4)

    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("connection closed\nby whom")

    batch, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single
    dist.batch_isend_irecv = dist.all_to_all_single = lost
    try:
        exchange = told_of(lambda: comm.exchange([Message(x, 1 - comm.rank)], []))
        return [exchange, told_of(lambda: comm.all_to_all(x, x.clone(), [8, 8], [8, 8]))]
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single = batch, all_to_all


def test_a_peer_that_is_lost_when_messages_start_is_lost_as_well(ranks: Callable[[int], Pool]) -> None:
    for told in ranks(2).run(_messages_that_do_not_start):
        assert told == [("CommError", "communication failed: connection closed")] * 2
