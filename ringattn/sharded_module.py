"""Defines a module whose sequences may lie over the ranks of a group: which rows are where, there and back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ringattn.geometry.layout import Shard, Span, check_dim, positions, shard
from ringattn.runtime.inputs import check_length
from ringattn.runtime.packed.documents import Documents, Extent, extent_of
from ringattn.runtime.packed.over_documents import OverDocuments
from ringattn.runtime.program import Program

from .arguments import integer
from .errors import InputError
from .workload import LONGEST

if TYPE_CHECKING:
    from ringattn.distributed.context import RingContext
    from ringattn.distributed.program import RingProgram
    from ringattn.planning.table import ModuleShape

SomeDocuments = Tensor | Sequence[int] | Documents | None


class ShardedModule(nn.Module):
    """Module of which every rank of a group holds some rows of a sequence; of none, this rank holds them all.

    Packed documents in zigzag layout are balanced one by one, so there ``cu_seqlens`` decides which rows a rank holds;
    it is that of the whole sequence, on every rank. Elsewhere it changes nothing.
    """

    _ring: RingContext | None
    device: torch.device
    shape: ModuleShape
    _programs: dict[Any, Program | RingProgram]

    def positions(self, total_length: int, cu_seqlens: SomeDocuments = None) -> Tensor:
        """Return the positions (S,), int64, of this rank's rows in a whole sequence, for rotary offsets and labels."""
        extent = extent_of(integer("total_length", total_length, most=LONGEST), cu_seqlens, None)
        return positions(self._shard_of(extent), self.device)

    def shard(self, x: Tensor, dim: int = 1, cu_seqlens: SomeDocuments = None) -> Tensor:
        """Return this rank's rows of ``x``, which is the whole sequence along ``dim``."""
        check_dim(x, dim)
        return shard(x, self._shard_of(extent_of(x.shape[dim], cu_seqlens, None)), dim)

    def unshard(
        self, x: Tensor, total_length: int | None = None, dim: int = 1, cu_seqlens: SomeDocuments = None
    ) -> Tensor:
        """Return the whole sequence from every rank's rows; all ranks call it. Not differentiable."""
        if self._ring is None:
            check_dim(x, dim)
            return x
        return self._ring.unshard(x, extent_of(total_length, cu_seqlens, None), dim)

    def reporting(self) -> AbstractContextManager[None]:
        """Return a context in which an error of this rank aborts the group: other ranks would wait for its call."""
        return nullcontext() if self._ring is None else self._ring.watchdog.reporting()

    def peer_workspace_bytes(self) -> int:
        """Return the peak bytes of memory that peers write into, which torch's allocator does not count."""
        return max((program.workspace_bytes for program in self._programs.values()), default=0)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse torch.jit.script, which calls this first."""
        raise InputError("torch.jit.script cannot compile a RingAttention; use torch.export, or torch.compile")

    def _shard_of(self, extent: Extent) -> Shard:
        assert extent.total_length is not None
        if self._ring is None:
            return (Span(0, extent.total_length),)
        return self._ring.shards_over(extent.total_length, extent.documents)[self._ring.comm.rank]

    def _of_documents(
        self, program: Program | RingProgram, batch: int, length: int, extent: Extent
    ) -> Program | RingProgram:
        """Return a program for documents as one for those of a call, after the check of their lengths."""
        assert extent.documents is not None
        total = length if self._ring is None else self._ring.total_of(length, extent)
        check_length(extent.documents.sizes(batch, total)[1], self.shape.max_seq_len)
        if isinstance(program, OverDocuments):
            return program.over(extent.documents, batch, length)
        assert self._ring is not None
        assert not isinstance(program, Program), "over ranks no plan for documents is local"
        return self._ring.over(program, batch, length, extent)
