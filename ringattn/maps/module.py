"""Methods of ``RingAttention`` that return maps of the attention.

Legend: B batch, S sequence, H query heads, Hkv key/value heads, D head dimension, N rows asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringattn.autograd.function import unit_stride_rows
from ringattn.autograd.transforms import transforms_active
from ringattn.errors import InputError
from ringattn.planning.table import ModuleShape
from ringattn.runtime.executor import Executor
from ringattn.runtime.inputs import check_inputs, check_total_length
from ringattn.runtime.packed.documents import Extent
from ringattn.workload import describe

from .received import Reduce, check_arguments, received
from .rows import check_positions, rows

if TYPE_CHECKING:
    from ringattn.distributed.context import RingContext


class AttentionMaps:
    """Base of ``RingAttention``, which has what is declared here."""

    shape: ModuleShape
    scale: float
    device: torch.device
    _device_type: str
    _ring: RingContext | None

    if TYPE_CHECKING:

        def program_for(self, q: Tensor, k: Tensor, v: Tensor, train: bool, extent: Extent = ...) -> Executor: ...

        def positions(self, total_length: int) -> Tensor: ...

        def call_mode(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[bool, torch.dtype | None]: ...

        def casts(self, q: Tensor, autocast: torch.dtype | None) -> bool: ...

    def received(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        reduce: Reduce = "sum",
        queries: Tensor | None = None,
        lse: Tensor | None = None,
        total_length: int | None = None,
    ) -> Tensor:
        """Return the attention that every key received: the column sums (B, H, S) of the softmax P, per query head.

        q, k and v are as in ``forward``; of v nothing depends. It costs one backward, in the memory of a training step,
        and a forward unless ``lse`` (B, H, S) is that of ``forward(q, k, v, return_lse=True)``. A key seen through two
        branches counts twice, as in the merge; a query that sees nothing gives nothing.

        ``reduce="mean"`` divides by the number of queries. ``queries``, bool (S,) or (B, S), are those that count; of
        none the mean is 0. A query whose logits are NaN makes what its keys received NaN, counted or not. Over several
        ranks keys, mask and lse are this rank's, and the queries of all ranks count.

        Returns float32 (float64 for float64), as accurate as dv is, without a gradient. InputError for arguments that
        do not fit.
        """
        with self._map_call(q, k, v, total_length) as narrow:
            check_arguments(q, reduce, queries, lse)
            if narrow is not None:
                q, k, v = q.to(narrow), k.to(narrow), v.to(narrow)
            program = self.program_for(q, k, v, True, Extent(total_length))
            whole = q.shape[1]
            if self._ring is not None:
                rows_that_count = "all" if queries is None else "some"
                given = f"with lse {'computed' if lse is None else 'given'}, by {describe(program.plan.tunables)}"
                what = f"{reduce} of what keys received from {rows_that_count} queries, {given}"
                whole = self._ring.begin_map(what, q, Extent(total_length), narrow)
            return received(program, unit_stride_rows(q, k, v), whole, self._ring, reduce, queries, lse)

    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | Sequence[int], total_length: int | None = None
    ) -> Tensor:
        """Return whole rows (B, H, N, S) of the softmax P at N ``positions``, in memory linear in S.

        q, k and v are as in ``forward``; of v nothing depends, and no forward is run. A key seen through two branches
        has its weight twice, one not seen 0. A row sums to 1; that of a query that sees nothing is 0.

        Positions count from the start of the whole sequence. Over several ranks all of them ask for the same, and S are
        this rank's keys: ``unshard(rows, total_length, dim=3)`` has every key.

        Returns float32 (float64 for float64), without a gradient. InputError for positions outside of the sequence.
        """
        with self._map_call(q, k, v, total_length) as narrow:
            whole = q.shape[1] if self._ring is None else self._ring.total_of(q.shape[1], Extent(total_length))
            wanted = check_positions(positions, whole)
            if self._ring is not None:
                self._ring.begin_map(f"rows {wanted} of the softmax", q, Extent(total_length), narrow)
            if narrow is not None:
                q, k = q.to(narrow), k.to(narrow)
            return rows(q, k, self.positions(whole), wanted, self.shape, self.scale, whole, self._ring)

    @contextmanager
    def _map_call(self, q: Tensor, k: Tensor, v: Tensor, total_length: int | None) -> Iterator[torch.dtype | None]:
        """Check a call that asks for a map, which runs inside, and count it; an error inside is told to other ranks.

        Yields the dtype that autocast has the inputs converted to, or None.
        """
        with nullcontext() if self._ring is None else self._ring.call(), torch.no_grad():
            if torch.compiler.is_compiling() or transforms_active():
                raise InputError("torch.compile, torch.export and torch.func take no attention map; call it outside")
            _, autocast = self.call_mode(q, k, v)
            check_inputs(q, k, v, self.shape, self.device)
            if self._ring is None and total_length is not None:
                check_total_length(total_length, q.shape[1])
            with torch.autocast(self._device_type, enabled=False):
                yield autocast if self.casts(q, autocast) else None
