"""Heads that are copied into the peers' memory: the same results, buffers that are reused, nothing read too early."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from combinations import covering
from faults import Breaking, Told, assert_told, call_until_told, group_to_break, leaves_of, told_of
from oracle import DENSE, Case, pattern_of
from patience import LIMIT_S
from pool import TIMES, Pool, kill_self
from ring_cases import RingCase
from shared_memory import check_symmetric, copy_as_engine, held_bytes, pool_of, use_shared_memory
from test_ring_bytes import _sent
from torch import Tensor

from ringattn import RingAttention
from ringattn.distributed import watchdog
from ringattn.distributed.strided_copy import copies_2d, is_copyable
from ringattn.distributed.symmetric_exchange import BufferPool
from ringattn.kernels.registry import KERNELS

CROSSING = pattern_of([6, 48], [1, 3])
FAULTY = Case(36, 9, 9, 4, causal=True)


RANKS = [(2, "ulysses"), (3, "ulysses"), (4, "ulysses"), (4, "ulysses-ring")]
SPREADS = ("contiguous", "zigzag")
CHOICES = ("none", "selective", "full"), (0, 2), (False, True)  # checkpoint, groups of heads, shards of unequal length


@functools.cache
def _tried() -> list[tuple[Any, ...]]:
    """Combinations in which any three parameters meet."""
    return covering(3, RANKS, SPREADS, *CHOICES)


def _cases(schedule: str, spread: str, world: int) -> list[RingCase]:
    """Every checkpoint, in groups of heads or whole, with grouped queries and without, of equal lengths or not."""
    found = []
    every = list(product(*CHOICES))
    for *given, checkpoint, groups, ragged in _tried():
        if given != [(world, schedule), spread]:
            continue
        number = every.index((checkpoint, groups, ragged))
        grouped = number % 2 == 0
        heads, kv_heads = (4 * world, 2 * world) if grouped else (2 * world, 2 * world)
        length = 12 * world + (5 if ragged else 0)
        pattern = CROSSING if number % 3 == 2 else DENSE
        case = Case(length, heads, kv_heads, 4, 1 + number % 2, pattern, True, seed=number)
        ulysses = 2 if schedule == "ulysses-ring" else 0
        found.append(RingCase(case, schedule, spread, ulysses, groups, checkpoint, "", ragged, "symmetric"))
    return found


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("world", "schedule"), RANKS)
def test_as_on_one_rank(world: int, schedule: str, spread: str, ranks: Callable[[int], Pool]) -> None:
    cases = _cases(schedule, spread, world)
    for checked, _, barriers in ranks(world).run(check_symmetric, cases):
        assert checked == len(cases)
        assert barriers > 0


def _calls(ring: RingCase, calls: int) -> list[tuple[int, int]]:
    """(bytes of buffers, barriers) after each of some trainings steps, and what the module says of them."""
    use_shared_memory()
    module = ring.module()
    q, k, v = ring.case.inputs()
    pool = pool_of(module._ring.comm.group)  # type: ignore[union-attr]
    pool._free.clear()  # of earlier tests
    memory: Any = pool.memory
    seen = []
    for _ in range(calls):
        leaves = [module.shard(x.detach()).clone().requires_grad_() for x in (q, k, v)]
        before = memory.barriers
        torch.autograd.grad(module(*leaves), leaves, module.shard(ring.case.dout()))
        seen.append((held_bytes(pool), memory.barriers - before))
    assert held_bytes(pool) == module.peer_workspace_bytes()
    return seen


def test_blocks_are_allocated_once(ranks: Callable[[int], Pool]) -> None:
    """A buffer of every one of q, k and v holds all that travels, but for the LSE, whatever the number of calls."""
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


# -- faults --


def _broken(at: int, backward_keeps: bool) -> Told:
    """The kernel's call number ``at`` raises on rank 1."""
    use_shared_memory()
    checkpoint = "none" if backward_keeps else "selective"
    ring = RingCase(FAULTY, "ulysses", "zigzag", head_groups=3, checkpoint=checkpoint, exchange="symmetric")
    kernel, breaking = KERNELS["math"], Breaking(at, ValueError("kernel broke"))
    if dist.get_rank() == 1:
        object.__setattr__(kernel, "load", breaking.load)
    try:
        with group_to_break() as group:
            module = ring.module(group=group)
            return call_until_told(lambda: module(*leaves_of(module, FAULTY)).sum().backward())
    finally:
        object.__setattr__(kernel, "load", breaking.original)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_exception_between_exchanges(at: int, keeps: bool, ranks: Callable[[int], Pool]) -> None:
    """In a forward of three groups of heads, or in their backward."""
    assert_told(ranks(3).run(_broken, at, keeps), "ValueError", "kernel broke")


def _no_memory_to_keep() -> Told:
    use_shared_memory()
    ring = RingCase(FAULTY, "ulysses", "zigzag", checkpoint="none", exchange="symmetric")
    with group_to_break() as group:
        module = ring.module(group=group)
        _keep_nothing_on_rank_1(module)
        return told_of(lambda: module(*leaves_of(module, FAULTY)))


def _keep_nothing_on_rank_1(module: RingAttention) -> None:
    program_of = module.program_for

    def program_for(*arguments: Any) -> Any:
        program: Any = program_of(*arguments)

        def keep(tensors: Any) -> Any:
            raise torch.OutOfMemoryError("out of memory")

        if dist.get_rank() == 1:
            program._exchange.keep = keep
        return program

    module.program_for = program_for  # type: ignore[method-assign]


def test_memory_to_keep_what_came_that_runs_out(ranks: Callable[[int], Pool]) -> None:
    assert_told(ranks(3).run(_no_memory_to_keep), "OutOfMemoryError", "out of memory")


def _one_is_killed() -> Told:
    use_shared_memory()
    module = RingCase(FAULTY, "ulysses", "zigzag", exchange="symmetric").module()
    out = module(*leaves_of(module, FAULTY))
    dist.barrier()
    if dist.get_rank() == 1:
        kill_self()
    return told_of(lambda: out.sum().backward())


def test_a_killed_rank_is_named(fragile: Pool) -> None:
    fragile.start(_one_is_killed)
    for error, message in fragile.results_of([0, 2]):
        assert error == "PeerError"
        assert "rank 1 stopped responding" in message


class _Waiting:
    def __init__(self, waits_s: float) -> None:
        self.waited_s, self.released = waits_s, 0

    def waits_s(self) -> float:
        return self.waited_s

    def release(self) -> None:
        self.released += 1
        self.waited_s = 0.0


def _waits_end() -> None:
    with group_to_break() as group:
        module = RingCase(FAULTY, "ulysses", "zigzag").module(group=group)
        leaves = leaves_of(module, FAULTY)
        assert module._ring is not None
        watchdog = module._ring.watchdog
        patient, stuck = _Waiting(watchdog.timeout_s / 2), _Waiting(watchdog.timeout_s + 1)
        module(*leaves)
        dist.barrier()
        if dist.get_rank() == 1:
            watchdog.add_device_waits(patient)
            time.sleep(3 * TIMES.beat_s)
            assert patient.released == 0
            watchdog.add_device_waits(stuck)
        deadline = time.monotonic() + LIMIT_S
        while watchdog.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        error, message = told_of(lambda: module(*leaves))
        assert error == "PeerError"
        assert "rank 1 has waited on the GPU for a peer" in message
        if dist.get_rank() == 1:
            assert (patient.released, stuck.released) == (1, 1)  # the group is of no use to either


def test_a_wait_on_the_gpu_ends_with_the_timeout_of_the_group(fragile: Pool) -> None:
    """The next call raises; what came of this one is NaN."""
    fragile.run(_waits_end)


def _hosts_differ() -> tuple[str, str]:
    ring = RingCase(FAULTY, "ulysses", "zigzag", exchange="symmetric")
    group = dist.new_group([0, 1, 2])
    host, watchdog.host_identity = watchdog.host_identity, lambda: f"host {dist.get_rank() // 2}"
    try:
        error, message = told_of(lambda: ring.module(group=group))
    finally:
        watchdog.host_identity = host
    dist.destroy_process_group(group)
    return error, message


def test_ranks_on_several_hosts_are_refused(fragile: Pool) -> None:
    for error, message in fragile.run(_hosts_differ):
        assert error in ("PlanError", "PeerError")
        assert "ranks 0 and 2 are on different hosts" in message


# -- what a copy engine is given --


def _strided(shape: tuple[int, ...], order: tuple[int, ...], gaps: tuple[int, ...]) -> Tensor:
    """A tensor of ``shape`` whose dimensions lie in ``order`` from the outermost on, with room left between them."""
    wide = [shape[dim] + gaps[dim] for dim in order]
    flat = torch.arange(torch.Size(wide).numel(), dtype=torch.int32).view(wide)
    return flat.permute([order.index(dim) for dim in range(len(order))])[tuple(slice(n) for n in shape)]


@pytest.mark.parametrize("shape", [(1, 9, 4, 8), (2, 5, 3, 4), (1, 1, 1, 8), (3, 7, 2, 1), (1, 20000, 2, 2)])
def test_2d_copies_are_the_copy(shape: tuple[int, ...]) -> None:
    inner = 3 if shape[3] > 1 else 1
    others = [dim for dim in range(4) if dim != inner]
    for gaps in product((0, 3), (0, 3), (0,) if shape[3] > 1 else (0, 3), (0,) if shape[3] > 1 else (0, 3)):
        for order in ((*others, inner), (others[1], others[0], others[2], inner)):
            source = _strided(shape, order, gaps)
            target = torch.full_like(_strided(shape, (*others, inner), (0, 2, 1, 4)), -1)
            assert is_copyable(source)
            copy_as_engine(source, target)
            assert torch.equal(source, target)


def test_rows_are_joined_where_they_lie_side_by_side() -> None:
    x = torch.empty(1, 8192, 32, 128, dtype=torch.bfloat16)
    half = x.unflatten(2, (2, 16))[:, :, 1]
    (rows,) = copies_2d(half.shape, half.stride(), torch.empty_like(half).stride(), 2)
    assert (rows.width, rows.height, rows.source_pitch, rows.target_pitch) == (4096, 8192, 8192, 4096)
    (whole,) = copies_2d(x.shape, x.stride(), x.stride(), 2)
    assert whole.width * whole.height == x.nbytes


def test_what_a_copy_engine_cannot_read() -> None:
    x = torch.empty(1, 64, 4, 8)
    assert is_copyable(x)
    assert is_copyable(x[:, ::2])
    assert not is_copyable(x[:, :, :1].expand(1, 64, 4, 8))
    assert not is_copyable(x.transpose(1, 3))
    assert not is_copyable(torch.empty(1, 64, 4, 3, 8)[:, :, :, 1])  # rows of one head
    assert is_copyable(torch.empty(1, 64, 3, 4, 8)[:, :, 1])
    assert not is_copyable(torch.empty(80, 8, 4, 8))  # too many copies
    assert is_copyable(torch.empty(1, 4, 64, 1).transpose(1, 2))
    assert not is_copyable(torch.empty(1, 64, 4, 1))


# -- buffers --


class _Memory:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allocate(self, nbytes: int) -> Any:
        self.sizes.append(nbytes)
        own = torch.empty(nbytes, dtype=torch.uint8)
        return type("Buffer", (), {"nbytes": nbytes, "own": own, "of": (own,)})()


def test_a_buffer_that_was_read_is_not_written_before_ranks_met() -> None:
    memory: Any = _Memory()
    pool = BufferPool(memory)
    buffer, read = pool.acquire(100)
    assert not read
    pool.release(buffer)
    assert pool.acquire(90) == (buffer, True)
    pool.release(buffer)
    pool.after_barrier()
    assert pool.acquire(100) == (buffer, False)
    other, _ = pool.acquire(100)
    assert other is not buffer
    pool.release_all()
    pool.after_barrier()
    pool.acquire(10)  # too little to take a buffer of a hundred for
    assert memory.sizes == [100, 100, 10]
