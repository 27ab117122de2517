"""Whatever happens to a rank, the others name it within the group's timeout and 5 s."""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from faults import CASE, TIMEOUT_S, Told, leaves_of, told_of
from pool import LIMIT_S, TIMES, Pool
from ring_cases import RingCase

from ringattn.distributed import watchdog
from ringattn.distributed.comm import Comm, Message
from ringattn.distributed.heartbeat import absence_of
from ringattn.distributed.watchdog import _leave


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


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
def test_a_killed_rank_is_named(schedule: str, backward: bool, fragile: Pool) -> None:
    fragile.start(_die_or_call, schedule, backward)
    for error, message in fragile.results_of([0, 2]):
        assert error == "PeerError"
        assert "rank 1 stopped responding" in message


def _die_or_unshard() -> Told:
    """After ranks have compared what they unshard."""
    module = RingCase(CASE, "ring", "zigzag").module()
    assert module._ring is not None
    rows = leaves_of(module)[0].detach()
    if dist.get_rank() == 1:
        module._ring.comm.gather_rows = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    return told_of(lambda: module.unshard(rows))


def test_a_rank_killed_while_rows_are_unsharded_is_named(fragile: Pool) -> None:
    fragile.start(_die_or_unshard)
    for error, message in fragile.results_of([0, 2]):
        assert error == "PeerError"
        assert "rank 1 stopped responding" in message


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


def test_a_killed_rank_is_named_where_nobody_waits_for_it(fragile: Pool) -> None:
    """By the thread, that is, and before the abort: that lets go of a main thread that waits for its GPU."""
    fragile.start(_die_or_listen)
    assert fragile.results_of([0, 2]) == [[f"rank 1 {absence_of('')}; the process group is aborted"]] * 2


def _leave_or_call() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = leaves_of(module)
    module(*leaves)
    dist.barrier()
    if dist.get_rank() == 1:
        _leave()
        os._exit(0)
    return told_of(lambda: module(*leaves))


def test_a_rank_that_ended_by_itself_is_not_called_killed(fragile: Pool) -> None:
    fragile.start(_leave_or_call)
    for error, message in fragile.results_of([0, 2]):
        assert error == "PeerError"
        assert "rank 1 has left: its process ended" in message


def _build_or_die() -> Told:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return told_of(lambda: RingCase(CASE, "ring", "zigzag").module())


def test_a_rank_that_is_not_there_at_init_is_named() -> None:
    """It has never said that it lives, and the others do not know it by more than its number."""
    pool = Pool(3, TIMEOUT_S, times=None)
    try:
        pool.start(_build_or_die)
        told = pool.results_of([0, 1])
    finally:
        pool.kill()
    for error, message in told:
        assert error == "PeerError"
        assert "rank 2 did not build the same RingAttention" in message


def _sleep_or_call(calls_before: int) -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    for _ in range(calls_before):
        module(*leaves_of(module))
    if dist.get_rank() == 1:
        time.sleep(LIMIT_S)
        return "", "", 0.0
    return told_of(lambda: module(*leaves_of(module)))


@pytest.mark.parametrize("calls_before", [0, 1], ids=["comparing", "in messages"])
def test_a_rank_that_does_not_call_is_named(calls_before: int, fragile: Pool) -> None:
    fragile.start(_sleep_or_call, calls_before)
    for error, message in fragile.results_of([0, 2]):
        assert error == "PeerError"
        assert "rank 1 did not make this call" in message


def _impatient_or_asleep() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    assert module._ring is not None
    if dist.get_rank() == 1:
        time.sleep(LIMIT_S)
        return "", "", 0.0
    if dist.get_rank() == 0:
        module._ring.watchdog.timeout_s = 1.0
    return told_of(lambda: module(*leaves_of(module)))


def test_what_one_rank_has_waited_for_in_vain_no_other_waits_for(fragile: Pool) -> None:
    fragile.start(_impatient_or_asleep)
    (first, said), (error, message) = fragile.results_of([0, 2])
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
