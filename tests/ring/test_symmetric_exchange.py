"""Heads that are copied into the peers' memory: the same results, blocks that are reused, nothing read too early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from oracle import DENSE, Case, pattern_of
from pool import Pool
from ring_cases import RingCase
from shared_memory import check_symmetric, copy_planes, pool_of, use_shared_memory
from test_ring_bytes import _sent
from torch import Tensor

from ringattn.planes import planes, regular
from ringattn.symmetric_exchange import BlockPool

CROSSING = pattern_of([6, 48], [1, 3])


def _cases(schedule: str, spread: str, world: int) -> list[RingCase]:
    """Every checkpoint, in groups of heads or whole, with grouped queries and without, of equal lengths or not."""
    found = []
    for number, (checkpoint, groups, ragged) in enumerate(
        product(("none", "selective", "full"), (0, 2), (False, True))
    ):
        grouped = number % 2 == 0
        heads, kv_heads = (4 * world, 2 * world) if grouped else (2 * world, 2 * world)
        length = 12 * world + (5 if ragged else 0)
        pattern = CROSSING if number % 3 == 2 else DENSE
        case = Case(length, heads, kv_heads, 4, 1 + number % 2, pattern, True, seed=number)
        ulysses = 2 if schedule == "ulysses-ring" else 0
        found.append(RingCase(case, schedule, spread, ulysses, groups, checkpoint, "", ragged, "symmetric"))
    return found


@pytest.mark.parametrize("spread", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("world", "schedule"), [(2, "ulysses"), (3, "ulysses"), (4, "ulysses"), (4, "ulysses-ring")])
def test_as_on_one_rank(world: int, schedule: str, spread: str, ranks: Callable[[int], Pool]) -> None:
    cases = _cases(schedule, spread, world)
    for checked, _, meetings in ranks(world).run(check_symmetric, cases):
        assert checked == len(cases)
        assert meetings > 0


def _calls(ring: RingCase, calls: int) -> list[tuple[int, int]]:
    """(bytes of blocks, meetings) after each of some trainings steps, and what the module says of them."""
    use_shared_memory()
    module = ring.module()
    q, k, v = ring.case.inputs()
    pool = pool_of(module._ring.comm.group)  # type: ignore[union-attr]
    pool._free.clear()  # of earlier tests
    memory: Any = pool.memory
    seen = []
    for _ in range(calls):
        leaves = [module.shard(x.detach()).clone().requires_grad_() for x in (q, k, v)]
        before = memory.meetings
        torch.autograd.grad(module(*leaves), leaves, module.shard(ring.case.dout()))
        seen.append((pool.held_bytes(), memory.meetings - before))
    assert pool.held_bytes() == module.peer_workspace_bytes()
    return seen


def test_blocks_are_allocated_once(ranks: Callable[[int], Pool]) -> None:
    """A block of every one of q, k and v holds all that travels, but for the LSE, whatever the number of calls."""
    case = Case(48, 4, 4, 8, causal=True)
    for checkpoint in ("none", "selective"):
        ring = RingCase(case, "ulysses", "contiguous", checkpoint=checkpoint, exchange="symmetric")
        for seen in ranks(2).run(_calls, ring, 3):
            sizes = {size for size, _ in seen}
            tensor, lse = 24 * 4 * 8 * 8, 24 * 4 * 8
            assert sizes == {(3 if checkpoint == "none" else 5) * tensor + lse}
            assert seen[1] == seen[2]


def test_what_is_sent_is_what_others_compute(ranks: Callable[[int], Pool]) -> None:
    for exchange in ("", "symmetric"):
        ring = RingCase(Case(96, 4, 4, 4), "ulysses", "contiguous", exchange=exchange)
        ranks(2).run(use_shared_memory)
        (sent,) = set(ranks(2).run(_sent, ring))
        rows, lse = 48 * 4 * 4 * 8 // 2, 48 * 4 * 8 // 2
        assert sent == (4 * rows + lse, 12 * rows + 2 * lse)


def _narrow(ring: RingCase) -> list[Tensor]:
    use_shared_memory()
    module = ring.module(torch.bfloat16, "fp32")
    leaves = [module.shard(x.detach()).clone().requires_grad_() for x in ring.case.inputs(torch.bfloat16)]
    out = module(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, module.shard(ring.case.dout(torch.bfloat16)))]


def test_narrow_inputs_as_by_all_to_all(ranks: Callable[[int], Pool]) -> None:
    ring = RingCase(Case(40, 8, 4, 4, causal=True), "ulysses", "zigzag", head_groups=2, checkpoint="none")
    for plain, symmetric in zip(
        ranks(2).run(_narrow, ring), ranks(2).run(_narrow, replace(ring, exchange="symmetric")), strict=True
    ):
        for one, other in zip(plain, symmetric, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


# -- what a copy engine is given --


def _strided(shape: tuple[int, ...], order: tuple[int, ...], gaps: tuple[int, ...]) -> Tensor:
    """A tensor of ``shape`` whose dimensions lie in ``order`` from the outermost on, with room left between them."""
    wide = [shape[dim] + gaps[dim] for dim in order]
    flat = torch.arange(torch.Size(wide).numel(), dtype=torch.int32).view(wide)
    return flat.permute([order.index(dim) for dim in range(len(order))])[tuple(slice(n) for n in shape)]


@pytest.mark.parametrize("shape", [(1, 9, 4, 8), (2, 5, 3, 4), (1, 1, 1, 8), (3, 7, 2, 1), (1, 20000, 2, 2)])
def test_planes_are_the_copy(shape: tuple[int, ...]) -> None:
    inner = 3 if shape[3] > 1 else 1
    others = [dim for dim in range(4) if dim != inner]
    for gaps in product((0, 3), (0, 3), (0,) if shape[3] > 1 else (0, 3), (0,) if shape[3] > 1 else (0, 3)):
        for order in ((*others, inner), (others[1], others[0], others[2], inner)):
            source = _strided(shape, order, gaps)
            target = torch.full_like(_strided(shape, (*others, inner), (0, 2, 1, 4)), -1)
            assert regular(source)
            copy_planes(source, target)
            assert torch.equal(source, target)


def test_rows_are_joined_where_they_lie_side_by_side() -> None:
    x = torch.empty(1, 8192, 32, 128, dtype=torch.bfloat16)
    half = x.unflatten(2, (2, 16))[:, :, 1]
    (plane,) = planes(half.shape, half.stride(), torch.empty_like(half).stride(), 2)
    assert (plane.width, plane.height, plane.source_pitch, plane.target_pitch) == (4096, 8192, 8192, 4096)
    (whole,) = planes(x.shape, x.stride(), x.stride(), 2)
    assert whole.width * whole.height == x.nbytes


def test_what_a_copy_engine_cannot_read_is_not_regular() -> None:
    x = torch.empty(1, 64, 4, 8)
    assert regular(x)
    assert regular(x[:, ::2])
    assert not regular(x[:, :, :1].expand(1, 64, 4, 8))
    assert not regular(x.transpose(1, 3))
    assert not regular(torch.empty(1, 64, 4, 3, 8)[:, :, :, 1])  # rows of one head
    assert regular(torch.empty(1, 64, 3, 4, 8)[:, :, 1])
    assert not regular(torch.empty(80, 8, 4, 8))  # planes
    assert regular(torch.empty(1, 4, 64, 1).transpose(1, 2))
    assert not regular(torch.empty(1, 64, 4, 1))


# -- blocks --


class _Memory:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allocate(self, nbytes: int) -> Any:
        self.sizes.append(nbytes)
        own = torch.empty(nbytes, dtype=torch.uint8)
        return type("Block", (), {"nbytes": nbytes, "own": own, "of": (own,)})()


def test_a_block_that_was_read_is_not_written_before_ranks_met() -> None:
    memory: Any = _Memory()
    pool = BlockPool(memory)
    block, read = pool.take(100)
    assert not read
    pool.give(block)
    assert pool.take(90) == (block, True)
    pool.give(block)
    pool.met()
    assert pool.take(100) == (block, False)
    other, _ = pool.take(100)
    assert other is not block
    pool.give_all()
    pool.met()
    pool.take(10)  # too little to take a block of a hundred for
    assert memory.sizes == [100, 100, 10]
