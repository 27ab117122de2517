"""Runs a plan over all documents of a batch at once, by the kernels' entries for packed sequences.

Legend: B batch, S length, T packed rows, H query heads, K key/value heads, G = H / K, R gathered rows, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ringattn.planning.plan import Plan
from ringattn.runtime.executor import ALL, Kept, Triple, Wanted
from ringattn.runtime.loading import bind_varlen
from ringattn.runtime.merge import accumulator_dtype
from ringattn.runtime.program import TravelBackward, TravelForward

from .over_documents import OverDocuments
from .packed_rows import PackedBranch, PackedRows, packed_rows

_Partial = tuple[PackedBranch, Tensor, Tensor]


class VarlenProgram(OverDocuments):
    """Program for the documents of a batch, all in one call per branch."""

    def __init__(self, plan: Plan, scale: float, *, ranges: bool = False) -> None:
        super().__init__(plan, scale, ranges=ranges)
        named = [(f"branch {n}" if ranges else "", branch) for n, branch in enumerate(plan.tunables.branches)]
        self._varlen_forward = [bind_varlen(plan, branch.forward, scale, name).forward for name, branch in named]
        self._varlen_backward = [
            bind_varlen(plan, branch.backward, scale, name).backward for name, branch in named if branch.backward
        ]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None, travel: TravelForward | None = None
    ) -> tuple[Tensor, Tensor]:
        assert travel is None
        assert kept is None, "rows are gathered again"
        batch, length, heads, _ = q.shape
        rows = self._packed_rows(q, k)
        packed = _packed(rows, q), _packed(rows, k), _packed(rows, v)
        partials: list[_Partial] = []
        for branch, forward in zip(rows.branches, self._varlen_forward, strict=bool(rows.branches)):
            q_rows, k_rows, v_rows = (_gathered(branch, x, k.shape[2]) for x in packed)
            partials.append((branch, *forward(q_rows, k_rows, v_rows, branch.sequences)))
        if not partials:
            wide = accumulator_dtype(q.dtype)
            return torch.zeros_like(q), torch.full((batch, heads, length), -torch.inf, dtype=wide, device=q.device)
        out, lse = _merged(partials, rows.rows, heads, k.shape[2])
        return _spread(rows, out, (batch, length)), _spread_lse(rows, lse, (batch, length))

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
        rows, shape, kv_heads = self._packed_rows(q, k), (q.shape[0], q.shape[1]), k.shape[2]
        packed = [_packed(rows, x) for x in (dout, q, k, v, out)]
        lse_HT = _packed(rows, lse.transpose(1, 2)).T
        found: list[tuple[PackedBranch, Triple]] = []
        for branch, backward in zip(rows.branches, self._varlen_backward, strict=bool(rows.branches)):
            dout_rows, q_rows, k_rows, v_rows, out_rows = (_gathered(branch, x, kv_heads) for x in packed)
            lse_rows = _gathered(branch, lse_HT.T, kv_heads).T.contiguous()
            made = backward(dout_rows, q_rows, k_rows, v_rows, out_rows, lse_rows, branch.sequences)
            found.append((branch, made))
        grads = []
        for number, (x, want) in enumerate(zip((q, k, v), wanted, strict=True)):
            parts = [(branch, of_branch[number]) for branch, of_branch in found]
            grads.append(_spread(rows, _sum(parts, rows.rows, x), shape) if want and parts else torch.zeros_like(x))
        return grads[0], grads[1], grads[2]

    def _packed_rows(self, q: Tensor, k: Tensor) -> PackedRows:
        rows = packed_rows(self._documents, q.shape[0], q.shape[1], self._pattern, k.shape[2], q.device)
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            _of_graphs.append(rows)
        return rows


_of_graphs: list[
    PackedRows
] = []  # those that a captured graph reads, at these addresses, for as long as it is replayed


def _packed(rows: PackedRows, x: Tensor) -> Tensor:
    """Return the rows of all documents in x (B, S, ...) as (T, ...), in place where they lie together."""
    if len(rows.stretches) == 1:
        row, begin, end = rows.stretches[0]
        return x[row, begin:end]
    parts = [x[row, begin:end] for row, begin, end in rows.stretches]
    return torch.cat(parts) if parts else x[0, :0]


def _spread(rows: PackedRows, packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return packed (T, ...) in their places in (B, S, ...), with zeros elsewhere."""
    batch, length = shape
    if batch * length == rows.rows:
        return packed.view(batch, length, *packed.shape[1:])
    spread = packed.new_zeros(batch, length, *packed.shape[1:])
    _put(rows, packed, spread)
    return spread


def _spread_lse(rows: PackedRows, lse_HT: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return packed (H, T) in their places in (B, H, S), with -inf elsewhere."""
    (batch, length), heads = shape, lse_HT.shape[0]
    if batch == 1 and length == rows.rows:
        return lse_HT[None]
    lse_BHS = lse_HT.new_full((batch, heads, length), -torch.inf)
    _put(rows, lse_HT.T, lse_BHS.transpose(1, 2))
    return lse_BHS


def _put(rows: PackedRows, packed: Tensor, into: Tensor) -> None:
    at = 0
    for row, begin, end in rows.stretches:
        into[row, begin:end] = packed[at : at + end - begin]
        at += end - begin


def _gathered(branch: PackedBranch, x: Tensor, kv_heads: int) -> Tensor:
    """Return the rows of a branch of x (T, heads[, D]): as they are, or (R, heads / K[, D])."""
    if branch.taken is None:
        return x
    return _by_kv_head(x, kv_heads).index_select(0, branch.taken)


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """View x (T, heads[, D]) as (T * K, heads / K[, D])."""
    return x.reshape(x.shape[0] * kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def _merged(partials: list[_Partial], rows: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return out (T, H, D) and lse (H, T) of all branches, exactly; see ``merge``."""
    first, out, lse = partials[0]
    if len(partials) == 1 and first.taken is None:
        return out, lse
    lses_TH = [_whole_lse(branch, lse, rows, kv_heads) for branch, _, lse in partials]
    peak = torch.stack(lses_TH).amax(0)
    peak.masked_fill_(peak == -torch.inf, 0.0)  # -inf - -inf is NaN
    weights = [torch.exp(lse_TH - peak) for lse_TH in lses_TH]
    both = torch.stack(weights).sum(0)
    total = torch.zeros(rows, heads, out.shape[-1], dtype=lse.dtype, device=out.device)
    for (branch, part, _), weight_TH in zip(partials, weights, strict=True):
        share = (weight_TH / both.clamp(min=1.0))[..., None]  # less is a row without a result
        _add(branch, total, part * _gathered(branch, share, kv_heads), kv_heads)
    return total.to(out.dtype), (peak + both.log()).T.contiguous()


def _whole_lse(branch: PackedBranch, lse: Tensor, rows: int, kv_heads: int) -> Tensor:
    """Return the LSE of a branch, (G, R) or (H, T), as (T, H) with -inf where it selects nothing."""
    if branch.taken is None:
        return lse.T
    whole = lse.new_full((rows * kv_heads, lse.shape[0]), -torch.inf)
    return whole.index_copy_(0, branch.taken, lse.T).view(rows, -1)


def _add(branch: PackedBranch, total: Tensor, part: Tensor, kv_heads: int) -> None:
    """Add the rows of a branch, (T, heads, D) or (R, heads / K, D), to total (T, heads, D)."""
    if branch.taken is None:
        total.add_(part)
    else:
        _by_kv_head(total, kv_heads).index_add_(0, branch.taken, part.to(total.dtype))


def _sum(parts: list[tuple[PackedBranch, Tensor]], rows: int, x: Tensor) -> Tensor:
    """Return the sum of a gradient over branches, (T, heads, D) in the dtype of x (B, S, heads, D)."""
    if len(parts) == 1 and parts[0][0].taken is None:
        return parts[0][1]
    total = torch.zeros(rows, *x.shape[2:], dtype=accumulator_dtype(x.dtype), device=x.device)
    for branch, part in parts:
        kv_heads = x.shape[2] // part.shape[1] if branch.taken is not None else 1
        _add(branch, total, part, kv_heads)
    return total.to(x.dtype)
