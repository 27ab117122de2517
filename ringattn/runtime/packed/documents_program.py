"""Runs a plan document by document: exact for every kernel and pattern, both ways, without a mask.

Legend: B batch, S length, H query heads, Hkv key/value heads, D head dim; of a group of documents: N documents, M
positions of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor

from ringattn.geometry.documents import DocumentGroup, grouped_documents, positions_in
from ringattn.planning.plan import Plan
from ringattn.runtime.dropout_program import DropoutProgram
from ringattn.runtime.executor import ALL, Kept, Triple, Wanted
from ringattn.runtime.graphed import GraphedProgram
from ringattn.runtime.merge import accumulator_dtype, as_view
from ringattn.runtime.program import Program, TravelBackward, TravelForward

from .documents import Documents
from .over_documents import OverDocuments
from .varlen_program import VarlenProgram


class DocumentsProgram(OverDocuments):
    """Program for the documents of a batch. Each is a sequence of its own; padding gives 0, -inf and no gradient."""

    _groups: tuple[DocumentGroup, ...] = ()
    _padding = 0  # positions of the batch outside of all documents

    def over(self, documents: Documents, batch: int, length: int) -> Self:
        made = super().over(documents, batch, length)
        placed = documents.placed(batch, length)
        made._groups = grouped_documents(placed)
        made._padding = batch * length - positions_in(placed)
        return made

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None, travel: TravelForward | None = None
    ) -> tuple[Tensor, Tensor]:
        assert travel is None
        batch, length, heads, _ = q.shape
        out = self._filled(q, q.dtype)
        lse_shape = (batch, heads, length)
        lse = torch.full(lse_shape, -torch.inf, dtype=accumulator_dtype(q.dtype), device=q.device)
        for group in self._groups:
            found, found_lse = super().forward(*_each(group, (q, k, v)), kept)
            _view(group, out).copy_(found)
            _lse_view(group, lse).copy_(found_lse)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Iterable[Tensor] = (),
        wanted: Wanted = ALL,
        travel: TravelBackward | None = None,
    ) -> Triple:
        assert travel is None
        inputs = q, k, v
        dq, dk, dv = (self._filled(x, x.dtype) if want else x for x, want in zip(inputs, wanted, strict=True))
        grads = dq, dk, dv
        rows_kept = iter(kept)  # of all groups, one after the other
        for group in self._groups:
            results = (
                _view(group, dout).contiguous(),
                _view(group, out).contiguous(),
                _lse_view(group, lse).contiguous(),
            )
            of_group = _each(group, inputs)
            found = super().backward(results[0], *of_group, *results[1:], rows_kept if kept else (), wanted)
            for grad, part, want in zip(grads, found, wanted, strict=True):
                if want:
                    _view(group, grad).copy_(part)
        return grads

    def _filled(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor like x, of zeros if there is padding."""
        return (torch.zeros if self._padding else torch.empty)(x.shape, dtype=dtype, device=x.device)


def _each(group: DocumentGroup, tensors: Triple) -> Triple:
    q, k, v = tensors
    return _view(group, q), _view(group, k), _view(group, v)


def _view(group: DocumentGroup, x: Tensor) -> Tensor:
    """View the documents of a group in x (B, S, heads, D) as (N, M, heads, D)."""
    return as_view(x, group.view(x.stride(), x.shape[2], x.shape[3]))


def _lse_view(group: DocumentGroup, lse: Tensor) -> Tensor:
    """View the documents of a group in lse (B, H, S) as (N, H, M)."""
    return as_view(lse, group.lse_view(lse.stride(), lse.shape[1]))


def load_program(plan: Plan, scale: float, *, ranges: bool = False) -> Program:
    """Return the program of a plan on one device: for documents, or launched as the plan says.

    With named ranges it is launched step by step.
    """
    if plan.workload.packed:
        return (VarlenProgram if plan.tunables.packing == "varlen" else DocumentsProgram)(plan, scale, ranges=ranges)
    if plan.tunables.launch == "graph" and not ranges:
        return GraphedProgram(plan, scale)
    return (DropoutProgram if plan.workload.dropout else Program)(plan, scale, ranges=ranges)
