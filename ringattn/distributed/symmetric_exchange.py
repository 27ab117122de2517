"""The exchange of heads as copies into the peers' memory: what ``HeadExchange`` does, nothing packed or unpacked.

A rank's heads go from where they lie straight to where the receiver's kernel reads them. Results go home into a buffer
as well, since what the caller gets must be memory of its own; from there they are copied once.

Buffers are kept for the calls that follow, of any module on the group. Before a buffer is written to again the ranks
that write to it meet its owner, unless they have met since it was read.

Legend: as in ``head_exchange``: B batch, S rows of this rank, T rows of all M members, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ringattn.geometry.layout import Shard, length_of

from .comm import Comm, Pending
from .head_exchange import HeadExchange
from .strided_copy import is_copyable

_MOST_EXCESS = 4  # a buffer serves what needs at least this part of it


class PeerBuffer(Protocol):
    """Buffer of ``nbytes`` on every rank: ``of`` are their bytes as this rank reaches them, ``own`` its own."""

    nbytes: int
    own: Tensor
    of: Sequence[Tensor]


class Memory(Protocol):
    """See ``peer_memory.PeerMemory``."""

    def allocate(self, nbytes: int) -> Any: ...

    def begin(self) -> None: ...

    def copy(self, source: Tensor, target: Tensor, *, far: bool) -> None: ...

    def barrier(self, members: Sequence[int]) -> Any: ...


class BufferPool:
    """The buffers of a group: every rank takes and gives the same ones in the same order, so that they stay equal."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._free: list[PeerBuffer] = []
        self._in_use: list[PeerBuffer] = []
        self._read: set[int] = set()  # ids of free buffers that some rank may still read

    def acquire(self, nbytes: int) -> tuple[PeerBuffer, bool]:
        """Return a buffer of at least so many bytes, and whether it may still be read."""
        fitting = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= _MOST_EXCESS * nbytes]
        if fitting:
            buffer = min(fitting, key=lambda buffer: (buffer.nbytes, id(buffer) in self._read))
            self._free.remove(buffer)
        else:
            buffer = self.memory.allocate(nbytes)
        self._in_use.append(buffer)
        return buffer, id(buffer) in self._read

    def release(self, buffer: PeerBuffer) -> None:
        """Take a buffer back: everything that reads it has been given to the current stream."""
        self._in_use.remove(buffer)
        self._free.append(buffer)
        self._read.add(id(buffer))

    def release_all(self) -> None:
        for buffer in list(self._in_use):
            self.release(buffer)

    def after_barrier(self) -> None:
        """Note that all ranks have begun what follows the last ``release``."""
        self._read.clear()


class SymmetricExchange(HeadExchange):
    """Exchange among ``members``, of ranks that hold ``shards`` all together, in ``groups`` of heads."""

    PREFETCHED = 1  # copy engines work beside any kernel
    IN_FLIGHT = 2  # one result leaves while the one before it is brought where it belongs

    def __init__(
        self,
        comm: Comm,
        members: tuple[int, ...],
        shards: tuple[Shard, ...],
        groups: int,
        pool: Callable[[], BufferPool],
    ) -> None:
        super().__init__(comm, members, shards[members[0] : members[-1] + 1], groups)
        self._me = members.index(comm.rank)
        lengths = [length_of(shard) for shard in shards]
        degree = len(members)
        # The same on all ranks, whatever they hold themselves.
        self._most_rows = max(lengths)
        self._most_joined = max(sum(lengths[first : first + degree]) for first in range(0, len(lengths), degree))
        self._pool_of = pool
        self._pool: BufferPool | None = None
        self._used: dict[int, int] = {}  # bytes of the buffers that calls took, by id

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the buffers that this exchange needs; others may use them, too."""
        return sum(self._used.values())

    def start_call(self) -> None:
        """Release what an earlier call brought."""
        self._buffers.release_all()

    @property
    def _buffers(self) -> BufferPool:
        if self._pool is None:
            self._pool = self._pool_of()
        return self._pool

    def scatter_heads(self, tensors: Sequence[Tensor], group: int, dtype: torch.dtype) -> tuple[Pending, list[Tensor]]:
        """Do as ``HeadExchange.scatter_heads``; what arrives is valid until the result's ``release``."""
        sources = [self._by_member(_readable(x.to(dtype)), group) for x in tensors]
        batch, length, members, _, head_dim = sources[0].shape
        memory, buffers = self._buffers.memory, []
        memory.begin()
        for x in sources:
            buffers.append(self._take(batch * self._most_joined * x.shape[3] * head_dim * dtype.itemsize))
        self._free_to_write(buffers)
        spans, rows = self._spans[self._me], sum(self._lengths)
        arrived = []
        for x, (buffer, _) in zip(sources, buffers, strict=True):
            shape = batch, rows, x.shape[3], head_dim
            for place in self._around():
                there = _rows_first(buffer.of[self._members[place]], dtype, shape)
                row = 0
                for begin, count in spans:
                    self._copy(x[:, row : row + count, place], there[:, begin : begin + count], place)
                    row += count
            arrived.append(_rows_first(buffer.own, dtype, shape))
        given = [buffer for buffer, _ in buffers]

        def release() -> None:
            for buffer in given:
                self._buffers.release(buffer)

        return Pending((self._barrier(),), sources, (), release), arrived

    def gather_heads(self, result: Tensor, target: Tensor, group: int) -> Pending:
        """Do as ``HeadExchange.gather_heads``."""
        result = _readable(result if result.shape[3] == 1 else result.contiguous())
        batch, length = target.shape[:2]
        heads, head_dim = result.shape[2:]
        memory, members = self._buffers.memory, len(self._members)
        memory.begin()
        buffer, read = self._take(batch * self._most_rows * members * heads * head_dim * result.itemsize)
        self._free_to_write([(buffer, read)])
        home = self._by_member(target, group)
        for place in self._around():
            if place == self._me:
                there = home[:, :, place]
            else:
                shape = batch, self._lengths[place], members * heads, head_dim
                whole = _rows_first(buffer.of[self._members[place]], result.dtype, shape)
                there = whole[:, :, self._me * heads : (self._me + 1) * heads]
            row = 0
            for begin, count in self._spans[place]:
                self._copy(result[:, begin : begin + count], there[:, row : row + count], place)
                row += count
        arrived = _rows_first(buffer.own, result.dtype, (batch, length, members * heads, head_dim))
        arrived = torch.unflatten(arrived, 2, (members, heads))

        def bring() -> None:
            for others in (slice(0, self._me), slice(self._me + 1, members)):
                home[:, :, others].copy_(arrived[:, :, others])
            self._buffers.release(buffer)

        return Pending((self._barrier(),), (result, target), (bring,))

    def keep(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy what ``scatter_heads`` brought, beside what the current stream does; complete after a later wait."""
        memory = self._buffers.memory
        copies = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
        memory.begin()
        for x, copy in zip(tensors, copies, strict=True):
            memory.copy(x, copy, far=False)
        return copies

    def _take(self, nbytes: int) -> tuple[PeerBuffer, bool]:
        buffer, read = self._buffers.acquire(nbytes)
        self._used[id(buffer)] = buffer.nbytes
        return buffer, read

    def _free_to_write(self, buffers: Sequence[tuple[PeerBuffer, bool]]) -> None:
        if any(read for _, read in buffers):
            self._barrier()

    def _barrier(self) -> Any:
        arrival = self._buffers.memory.barrier(self._members)
        self._buffers.after_barrier()
        return arrival

    def _around(self) -> list[int]:
        """Return the members' places from the one after this rank on: no two ranks send to one at the same time."""
        count = len(self._members)
        return [(self._me + step) % count for step in range(1, count + 1)]

    def _copy(self, source: Tensor, target: Tensor, place: int) -> None:
        self._buffers.memory.copy(source, target, far=place != self._me)


def _rows_first(memory: Tensor, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> Tensor:
    """View (B, rows, heads, D) at the beginning of ``memory``; where D is 1 (an LSE) a head's rows lie side by side."""
    batch, rows, heads, head_dim = shape
    flat = memory[: prod(shape) * dtype.itemsize].view(dtype)
    if head_dim == 1:
        return flat.view(batch, heads, 1, rows).permute(0, 3, 1, 2)
    return flat.view(shape)


def _readable(x: Tensor) -> Tensor:
    """Return the tensor where a copy engine can read it."""
    x = x.detach()
    if is_copyable(x):
        return x
    if x.shape[3] == 1:
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return x.contiguous()
