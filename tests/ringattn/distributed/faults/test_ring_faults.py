"""A rank that raises in the middle of a call: the others raise its reason, and the group is aborted."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from faults import (
    CASE,
    Breaking,
    Told,
    assert_aborted,
    assert_told,
    assert_works,
    call_until_told,
    group_to_break,
    leaves_of,
    told_of,
)
from pool import LIMIT_S, Pool
from ring_cases import RingCase

from ringattn.distributed.comm import Message
from ringattn.distributed.watchdog import Watchdog
from ringattn.kernels.registry import KERNELS


def _told_of_a_broken_call(schedule: str, at: int, error: Exception, *, here: bool) -> Told:
    """A forward and a backward, in which the kernel raises ``error`` at one of its calls on the ranks of ``here``."""
    with group_to_break() as group:
        module = RingCase(CASE, schedule, "zigzag").module(group=group)
        kernel, breaking = KERNELS["math"], Breaking(at, error)
        if here:
            object.__setattr__(kernel, "load", breaking.load)
        try:
            leaves = leaves_of(module)
            told = call_until_told(lambda: module(*leaves).sum().backward())
        finally:
            object.__setattr__(kernel, "load", breaking.original)
        assert_aborted(module)
    assert_works()
    return told


def _one_rank_breaks(schedule: str, at: int, error: Exception) -> Told:
    return _told_of_a_broken_call(schedule, at, error, here=dist.get_rank() == 1)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_an_exception_in_the_middle_of_a_ring(at: int, ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_one_rank_breaks, "ring", at, ValueError("kernel broke"))
    assert_told(told, "ValueError", "kernel broke")


@pytest.mark.parametrize("schedule", ["all-gather", "ulysses"])
@pytest.mark.parametrize("at", [1, 2])
def test_an_exception_in_other_schedules(schedule: str, at: int, ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_one_rank_breaks, schedule, at, ValueError("kernel broke"))
    assert_told(told, "ValueError", "kernel broke")


def _all_ranks_break(schedule: str, at: int) -> Told:
    return _told_of_a_broken_call(schedule, at, ValueError("kernel broke"), here=True)


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_failure_of_all_ranks_in_one_call(schedule: str, at: int, ranks: Callable[[int], Pool]) -> None:
    """Each raises its own error, or that of the rank which was first."""
    told = ranks(3).run(_all_ranks_break, schedule, at)
    assert "ValueError" in [error for error, _ in told]
    for error, message in told:
        assert error in ("ValueError", "PeerError")
        assert "kernel broke" in message


def _one_of_a_sub_group_breaks() -> Told:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[dist.get_rank() % 2]
    ring, kernel, breaking = RingCase(CASE, "ring", "zigzag"), KERNELS["math"], Breaking(2, ValueError("kernel broke"))
    module = ring.module(group=own)
    if dist.get_rank() == 3:
        object.__setattr__(kernel, "load", breaking.load)
    try:
        leaves = leaves_of(module)
        told = call_until_told(lambda: module(*leaves))
    finally:
        object.__setattr__(kernel, "load", breaking.original)
    dist.destroy_process_group(own)
    return told


def test_a_rank_of_a_sub_group_is_named_as_all_ranks_know_it(ranks: Callable[[int], Pool]) -> None:
    told = ranks(4).run(_one_of_a_sub_group_breaks)
    assert [error for error, _ in told] == ["", "PeerError", "", "ValueError"]
    assert told[1][1].startswith("rank 3 failed: ValueError: kernel broke; the process group is aborted")


def _messages_need_memory() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    assert module._ring is not None

    def exchange(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    if dist.get_rank() == 1:
        module._ring.comm.exchange = exchange  # type: ignore[assignment, method-assign]
    return told_of(lambda: module(*leaves_of(module)))


def test_memory_for_messages_that_runs_out_is_told_to_those_who_wait(fragile: Pool) -> None:
    """Nothing can be sent any more, so the group is lost; its reason is not."""
    told = fragile.run(_messages_need_memory)
    assert told[1] == ("OutOfMemoryError", "out of memory")
    for rank in (0, 2):
        assert told[rank][0] == "PeerError"
        assert told[rank][1].startswith("rank 1 failed: OutOfMemoryError: out of memory; the process group is aborted")


def await_failure(watchdog: Watchdog) -> None:
    deadline = time.monotonic() + LIMIT_S
    while watchdog.failure is None and time.monotonic() < deadline:
        time.sleep(0.05)


def _one_rank_breaks_unnoticed() -> Told:
    """As on GPUs, where a call returns before it has run: rank 1 fails between calls of the others."""
    with group_to_break() as group:
        module = RingCase(CASE, "ring", "zigzag").module(group=group)
        assert module._ring is not None
        watchdog, leaves = module._ring.watchdog, leaves_of(module)
        module(*leaves)
        if dist.get_rank() == 1:
            watchdog.report(ValueError("kernel broke"))
        await_failure(watchdog)
        return told_of(lambda: module(*leaves))


def test_a_failure_that_the_thread_finds_is_raised_by_the_next_call(ranks: Callable[[int], Pool]) -> None:
    for error, message in ranks(3).run(_one_rank_breaks_unnoticed):
        assert error == "PeerError"
        assert message.startswith("rank 1 failed: ValueError: kernel broke; the process group is aborted")


def _stuck_in_a_message() -> Told:
    """Rank 2 waits for rows of rank 0, which is busy, when rank 1 fails."""
    with group_to_break() as group:
        module = RingCase(CASE, "ring", "zigzag").module(group=group)
        assert module._ring is not None
        watchdog, comm = module._ring.watchdog, module._ring.comm
        module(*leaves_of(module))
        if dist.get_rank() == 1:
            watchdog.report(ValueError("kernel broke"))
        if dist.get_rank() != 2:
            dist.barrier()
            await_failure(watchdog)  # rank 2's thread may have found it first
            return told_of(watchdog.check)

        def receive() -> None:
            with watchdog.reporting():
                comm.exchange([], [Message(torch.empty(1), 0)]).wait()

        told = told_of(receive)
        dist.barrier()
        return told


def test_a_wait_for_a_rank_that_is_busy_ends_when_another_fails(ranks: Callable[[int], Pool]) -> None:
    """The thread ends it: rank 0 closes no connection before it finds the failure itself."""
    for error, message in ranks(3).run(_stuck_in_a_message):
        assert error == "PeerError"
        assert message.startswith("rank 1 failed: ValueError: kernel broke; the process group is aborted")


def test_out_of_memory(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_one_rank_breaks, "ring", 2, torch.OutOfMemoryError("CUDA out of memory"))
    assert_told(told, "OutOfMemoryError", "CUDA out of memory")
