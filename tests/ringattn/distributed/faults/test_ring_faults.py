"""A rank that raises in the middle of a call: the others raise its reason, and the group works as before."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from faults import CASE, Breaking, Told, assert_told, assert_works, leaves_of, told_of
from pool import LIMIT_S, TIMES, Pool
from ring_cases import RingCase

from ringattn.kernels.registry import KERNELS


def _told_of_a_broken_call(schedule: str, at: int, error: Exception, *, here: bool) -> Told:
    """A forward and a backward, in which the kernel raises ``error`` at one of its calls on the ranks of ``here``."""
    module = RingCase(CASE, schedule, "zigzag").module()
    kernel, breaking = KERNELS["math"], Breaking(at, error)
    if here:
        object.__setattr__(kernel, "load", breaking.load)
    try:
        leaves = leaves_of(module)
        told = told_of(lambda: module(*leaves).sum().backward())
    finally:
        object.__setattr__(kernel, "load", breaking.original)
    assert told[0], "the call went through"
    dist.barrier()
    return told


def _one_rank_breaks(schedule: str, at: int, error: Exception) -> Told:
    told = _told_of_a_broken_call(schedule, at, error, here=dist.get_rank() == 1)
    assert_works(schedule)  # the group is as good as before
    return told


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
    told = _told_of_a_broken_call(schedule, at, ValueError("kernel broke"), here=True)
    if dist.get_rank() == 0:
        time.sleep(2 * TIMES.beat_s)  # while the others wait for it they look for failures, and must not find that one
    assert_works(schedule)
    return told


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_failure_of_all_ranks_in_one_call_is_none_of_the_next(
    schedule: str, at: int, ranks: Callable[[int], Pool]
) -> None:
    """Each raised its own error, and one of them later the other's, in a call that the other went on with for good."""
    told = ranks(3).run(_all_ranks_break, schedule, at)
    assert [error for error, _ in told] == ["ValueError"] * 3


def _one_of_a_sub_group_breaks() -> Told:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[dist.get_rank() % 2]
    ring, kernel, breaking = RingCase(CASE, "ring", "zigzag"), KERNELS["math"], Breaking(2, ValueError("kernel broke"))
    module = ring.module(group=own)
    if dist.get_rank() == 3:
        object.__setattr__(kernel, "load", breaking.load)
    try:
        leaves = leaves_of(module)
        told = told_of(lambda: module(*leaves))
    finally:
        object.__setattr__(kernel, "load", breaking.original)
    dist.destroy_process_group(own)
    return told


def test_a_rank_of_a_sub_group_is_named_as_all_ranks_know_it(ranks: Callable[[int], Pool]) -> None:
    told = ranks(4).run(_one_of_a_sub_group_breaks)
    assert [error for error, _ in told] == ["", "PeerError", "", "ValueError"]
    assert told[1][1] == "rank 3 failed: ValueError: kernel broke"


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


def _one_rank_breaks_unnoticed() -> tuple[Told, Told]:
    """As on GPUs, where a call returns before it has run, and nobody votes."""
    module = RingCase(CASE, "ring", "zigzag").module()
    assert module._ring is not None
    watch, kernel = module._ring.watch, KERNELS["math"]
    breaking, leaves = Breaking(1, ValueError("kernel broke")), leaves_of(module)
    watch._synchronous = False
    if dist.get_rank() == 1:
        object.__setattr__(kernel, "load", breaking.load)
    try:
        first = told_of(lambda: module(*leaves))
        deadline = time.monotonic() + LIMIT_S
        while not first[0] and watch._heard is None and time.monotonic() < deadline:
            time.sleep(0.05)
        dist.barrier()
        second = told_of(lambda: module(*leaves))
        assert told_of(lambda: module(*leaves))[0] == ""
    finally:
        watch._synchronous = True
        object.__setattr__(kernel, "load", breaking.original)
    dist.barrier()
    assert_works()
    return first, second


def test_without_a_vote_a_failure_is_told_once_it_is_heard(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_one_rank_breaks_unnoticed)
    assert list(told[1]) == [("ValueError", "kernel broke"), ("", "")]
    for both in (told[0], told[2]):  # in the next call, or in this one by a thread that is quick
        assert sorted(both) == [("", ""), ("PeerError", "rank 1 failed: ValueError: kernel broke")]


def test_out_of_memory(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_one_rank_breaks, "ring", 2, torch.OutOfMemoryError("CUDA out of memory"))
    assert_told(told, "OutOfMemoryError", "CUDA out of memory")
