"""The memory that GPUs write into on each other, as files that processes share, with a checked order.

A write into a buffer that its owner may still read fails, at the writer.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ring_cases import RingCase, check_exact
from torch import Tensor

from ringattn.distributed.comm import CommError
from ringattn.distributed.context import RingContext
from ringattn.distributed.strided_copy import copies_2d, is_copyable
from ringattn.distributed.symmetric_exchange import BufferPool
from ringattn.planning import plan

_FLAG_BYTES = 64  # before the content: 1 while the owner reads


class SharedBuffer:
    def __init__(self, of: Sequence[Tensor], rank: int) -> None:
        self._flags = [memory[:_FLAG_BYTES] for memory in of]
        self.of = [memory[_FLAG_BYTES:] for memory in of]
        self.own, self._own_flag = self.of[rank], self._flags[rank]
        self.nbytes = self.own.nbytes

    def reading(self, yes: bool) -> None:
        self._own_flag.fill_(yes)

    def owner_reads(self, address: int) -> bool:
        return any(
            bool(flag[0]) and memory.data_ptr() <= address < memory.data_ptr() + memory.nbytes
            for memory, flag in zip(self.of, self._flags, strict=True)
        )


class SharedMemory:
    """What ``ringattn.distributed.symmetric_exchange.Memory`` asks, on gloo; copies are done when they are started."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self.pool: BufferPool | None = None
        self.buffers: list[SharedBuffer] = []
        self.barriers = 0

    def allocate(self, nbytes: int) -> SharedBuffer:
        try:
            return self._allocate(nbytes)
        except RuntimeError as error:
            raise CommError(f"no common buffer: {error}") from error

    def _allocate(self, nbytes: int) -> SharedBuffer:
        folder = [""]
        if self._rank == 0:
            folder = [tempfile.mkdtemp(prefix="ringattn")]
        dist.broadcast_object_list(folder, 0, group=self._group)

        def opened(rank: int) -> Tensor:
            path, size = str(Path(folder[0]) / str(rank)), nbytes + _FLAG_BYTES
            storage = torch.UntypedStorage.from_file(path, True, size)
            return torch.empty(0, dtype=torch.uint8).set_(storage)

        opened(self._rank).fill_(255)[:_FLAG_BYTES].zero_()
        dist.barrier(self._group)
        buffer = SharedBuffer([opened(rank) for rank in range(self._size)], self._rank)
        dist.barrier(self._group)
        if self._rank == 0:
            for path in Path(folder[0]).iterdir():
                path.unlink()
            Path(folder[0]).rmdir()
        self.buffers.append(buffer)
        return buffer

    def begin(self) -> None:
        pass

    def copy(self, source: Tensor, target: Tensor, *, far: bool) -> None:
        assert source.shape == target.shape
        assert source.dtype is target.dtype
        assert is_copyable(source)
        if far:
            assert not any(buffer.owner_reads(target.data_ptr()) for buffer in self.buffers), "written while it is read"
        copy_as_engine(source, target)

    def barrier(self, members: Sequence[int]) -> _BarrierWork:
        self.barriers += 1
        try:
            dist.barrier(self._group)  # all ranks of the group meet as often
        except RuntimeError as error:
            raise CommError(f"a barrier failed: {error}") from error
        assert self.pool is not None
        return _BarrierWork(self.pool, list(self.pool._in_use))


class _BarrierWork:
    def __init__(self, pool: BufferPool, arrived: list[Any]) -> None:
        self._pool, self._arrived = pool, arrived

    def wait(self) -> None:
        for buffer in self._arrived:
            buffer.reading(buffer in self._pool._in_use)


class CheckedPool(BufferPool):
    def release(self, buffer: Any) -> None:
        buffer.reading(False)
        super().release(buffer)


def copy_as_engine(source: Tensor, target: Tensor) -> None:
    """As the copy engine does it."""
    for rows in copies_2d(source.shape, source.stride(), target.stride(), source.itemsize):
        for row in range(rows.height):
            ctypes.memmove(
                target.data_ptr() + rows.target_offset + row * rows.target_pitch,
                source.data_ptr() + rows.source_offset + row * rows.source_pitch,
                rows.width,
            )


_pools: dict[Any, CheckedPool] = {}


def pool_of(group: Any) -> CheckedPool:
    if group not in _pools:
        memory = SharedMemory(group)
        memory.pool = _pools[group] = CheckedPool(memory)
    return _pools[group]


def held_bytes(pool: BufferPool) -> int:
    return sum(buffer.nbytes for buffer in (*pool._free, *pool._in_use))


def use_shared_memory() -> None:
    """From here on plans of this process may exchange heads so."""
    plan.exchange_reasons = lambda *given: []  # type: ignore[attr-defined, assignment]
    RingContext._buffer_pool = lambda self: pool_of(self.comm.group)  # type: ignore[method-assign, attr-defined]


def check_symmetric(rings: list[RingCase]) -> tuple[int, int, int]:
    """(cases that were right, bytes of buffers, barriers)."""
    use_shared_memory()
    checked = check_exact(rings)
    pool = pool_of(dist.group.WORLD)
    memory: Any = pool.memory
    return checked, held_bytes(pool), memory.barriers
