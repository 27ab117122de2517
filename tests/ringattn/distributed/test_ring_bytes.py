"""What travels, counted: only keys and values, only rows that somebody needs, only among ranks that share a segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import DENSE, Case, pattern_of
from pool import Pool
from ring_cases import RingCase
from shared_memory import SharedMemory

from ringattn import Pattern

ELEMENT = 8  # float64
LENGTH, HEADS, HEAD_DIM = 96, 4, 4


def _sent(ring: RingCase, dtype: torch.dtype = torch.float64, compute: str = "fp64") -> tuple[int, int]:
    """(bytes sent in a forward, in a forward and backward) by this rank."""
    q, k, v = ring.case.inputs(dtype)
    module = ring.module(dtype, compute)
    assert module._ring is not None
    leaves = [module.shard(x.detach()).clone().requires_grad_() for x in (q, k, v)]
    with _sent_bytes(module._ring.comm.rank) as sent:
        out = module(*leaves)
        forward = sum(sent)
        torch.autograd.grad(out, leaves, module.shard(ring.case.dout(dtype)))
    return forward, sum(sent)


@contextmanager
def _sent_bytes(own: int) -> Iterator[list[int]]:
    """Collects the bytes of rows that rank ``own`` sends to others; the numbers that ranks compare are none."""
    sent: list[int] = []
    start_messages, start_exchange = dist.batch_isend_irecv, dist.all_to_all_single
    start_copy = SharedMemory.copy

    def messages(operations: Any) -> Any:
        sent.extend(o.tensor.nbytes for o in operations if o.op is dist.isend and o.tensor.dtype is not torch.int64)
        return start_messages(operations)

    def exchange(theirs: Any, mine: Any, receive_bytes: Any, send_bytes: Any, **more: Any) -> Any:
        sent.append(sum(send_bytes) - send_bytes[own])
        return start_exchange(theirs, mine, receive_bytes, send_bytes, **more)

    def copy(memory: SharedMemory, source: Any, target: Any, *, far: bool) -> None:
        sent.append(source.nbytes * far)
        start_copy(memory, source, target, far=far)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMemory, "copy", copy)
        patch.setattr(dist, "batch_isend_irecv", messages)
        patch.setattr(dist, "all_to_all_single", exchange)
        yield sent


def _case(kv_heads: int = HEADS, causal: bool = False, pattern: Pattern = DENSE) -> Case:
    return Case(LENGTH, HEADS, kv_heads, HEAD_DIM, 1, pattern, causal)


def _shard(world: int, kv_heads: int = HEADS) -> int:
    """Bytes of K and V that one rank holds."""
    return 2 * (LENGTH // world) * kv_heads * HEAD_DIM * ELEMENT


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_full_ring_passes_every_shard_once_a_step(world: int, ranks: Callable[[int], Pool]) -> None:
    for kv_heads in (HEADS, 1):
        sent = ranks(world).run(_sent, RingCase(_case(kv_heads), "ring", "contiguous"))
        forward = (world - 1) * _shard(world, kv_heads)
        assert sent == [(forward, 3 * forward)] * world  # again in the backward, and as much of dk and dv


@pytest.mark.parametrize(("grad_wire", "gradients"), [("", 1), ("compute", 2)])
def test_rows_travel_as_narrow_as_they_came(grad_wire: str, gradients: int, ranks: Callable[[int], Pool]) -> None:
    """Inputs in bfloat16 that are computed in float32; gradients are as wide as that where the plan says so."""
    ring = RingCase(_case(), "ring", "contiguous", grad_wire=grad_wire)
    narrow = _shard(2) * 2 // ELEMENT
    assert ranks(2).run(_sent, ring, torch.bfloat16, "fp32") == [(narrow, (2 + gradients) * narrow)] * 2


@pytest.mark.parametrize("schedule", ["ring", "all-gather"])
def test_a_causal_contiguous_sequence_sends_half(schedule: str, ranks: Callable[[int], Pool]) -> None:
    sent = ranks(4).run(_sent, RingCase(_case(causal=True), schedule, "contiguous"))
    total = sum(forward for forward, _ in sent)
    assert total == 6 * _shard(4)  # of 12 pairs of ranks
    assert sent[3][0] == 0  # nobody comes after the last rank


def test_a_causal_zigzag_gathers_no_row_that_is_masked(ranks: Callable[[int], Pool]) -> None:
    sent = ranks(4).run(_sent, RingCase(_case(causal=True), "all-gather", "zigzag"))
    # A rank sends its first half to the ranks after it and all to those before: 6 halves and 6 wholes.
    assert sum(forward for forward, _ in sent) == 9 * _shard(4)
    assert sum(both for _, both in sent) == 3 * 9 * _shard(4)


def test_ulysses_sends_what_others_compute(ranks: Callable[[int], Pool]) -> None:
    for world in (2, 4):
        sent = ranks(world).run(_sent, RingCase(_case(), "ulysses", "contiguous"))
        rows = LENGTH // world * HEADS * HEAD_DIM * ELEMENT * (world - 1) // world
        lse = LENGTH // world * HEADS * ELEMENT * (world - 1) // world
        assert sent == [(4 * rows + lse, 4 * rows + lse + 5 * rows + lse + 3 * rows)] * world


def test_segments_within_a_rank_send_nothing(ranks: Callable[[int], Pool]) -> None:
    case = _case(causal=True, pattern=pattern_of([8, 24, 48], [1, 2, 4]))
    for spread, world in (("contiguous", 2),):
        sent = ranks(world).run(_sent, RingCase(case, "local", spread))
        assert sent == [(0, 0)] * world
    zigzag = _case(causal=True, pattern=pattern_of([4, 12], [1, 2]))
    assert ranks(4).run(_sent, RingCase(zigzag, "local", "zigzag")) == [(0, 0)] * 4


@pytest.mark.parametrize("schedule", ["ring", "all-gather"])
@pytest.mark.parametrize("rate", [1, 2, 4, 8])
def test_traffic_falls_by_the_rate(rate: int, schedule: str, ranks: Callable[[int], Pool]) -> None:
    pattern = pattern_of([8, LENGTH], [1, rate])
    sent = ranks(3).run(_sent, RingCase(_case(pattern=pattern), schedule, "contiguous"))
    dense = 2 * _shard(3)
    assert sent == [(dense // rate, 3 * dense // rate)] * 3


def test_only_ranks_that_share_a_segment_talk(ranks: Callable[[int], Pool]) -> None:
    # Segments of 48 positions, ranks of 24: ranks 0 and 1 share one, ranks 2 and 3 another.
    pattern = pattern_of([24, 48], [1, 2])
    sent = ranks(4).run(_sent, RingCase(_case(causal=True, pattern=pattern), "ring", "contiguous"))
    half = _shard(4) // 2
    # Forward: the earlier of a pair sends its keys. Backward: again, and the later one sends their gradients back.
    assert sent == [(half, 2 * half), (0, half)] * 2
