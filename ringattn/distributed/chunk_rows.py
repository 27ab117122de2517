"""Gathers, writes, adds and merges rows of a chunk in a rank's tensors. Plain torch, any device.

Legend: B batch, S local length, H heads; of a chunk: N segments times batch, M rows, J key/value heads, G = H / Hkv,
D head dim. A row tensor is (N, M, J * G, D), its lse (N, J * G, M); ``group`` is G, and 1 for keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ringattn.geometry.pattern import Call, run_view
from ringattn.geometry.ring_schedules import Chunk
from ringattn.kernels.compile_cache import prepare_triton
from ringattn.planning.plan import Plan
from ringattn.runtime.merge import as_view


def gather_rows(x_BSHD: Tensor, chunk: Chunk, group: int) -> Tensor:
    """Return the chunk's rows (N, M, J * group, D), in place where they lie evenly, else side by side."""
    in_place = _in_place(x_BSHD, chunk, group)
    if in_place is not None:
        return in_place
    blocks = chunk.calls[0].batch * chunk.segments
    rows = x_BSHD.new_empty(blocks, chunk.rows, chunk.kv_heads * group, x_BSHD.shape[3])
    for there, here in _pairs(x_BSHD, rows, chunk, group):
        here.copy_(there)
    return rows


def gather_lse(lse_BHS: Tensor, chunk: Chunk, group: int) -> Tensor:
    """Return the chunk's LSE, (N, J * group, M) contiguous."""
    if _covers(chunk, lse_BHS.shape, group):
        return lse_BHS.contiguous()
    rows = lse_BHS.new_empty(chunk.calls[0].batch * chunk.segments, chunk.kv_heads * group, chunk.rows)
    for there, here in _lse_pairs(lse_BHS, rows, chunk, group):
        here.copy_(there)
    return rows


def lse_of_all(chunk: Chunk, lse: Tensor) -> Tensor:
    """Return the LSE (B, H, S) of a chunk of all heads and positions, whose segments lie behind its batch.

    out needs no such turn: (N, M, H, D) is (B, S, H, D) in memory.
    """
    return torch.unflatten(lse, 0, (-1, chunk.segments)).transpose(1, 2).flatten(2)


def set_rows(chunk: Chunk, group: int, out_BSHD: Tensor, lse_BHS: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write a chunk's result where no other chunk writes."""
    for there, here in _pairs(out_BSHD, out, chunk, group):
        there.copy_(here)
    for there, here in _lse_pairs(lse_BHS, lse, chunk, group):
        there.copy_(here)


def add_rows(chunk: Chunk, group: int, total_BSHD: Tensor, rows: Tensor) -> None:
    for there, here in _pairs(total_BSHD, rows, chunk, group):
        there.add_(here)


def merge_rows(chunk: Chunk, group: int, out_BSHD: Tensor, lse_BHS: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge a chunk's result into (out, lse) of all positions, out in float32 or wider."""
    results = zip(_pairs(out_BSHD, out, chunk, group), _lse_pairs(lse_BHS, lse, chunk, group), strict=True)
    for (total, part), (total_lse, part_lse) in results:
        merge_block(total, total_lse, part, part_lse)


def merge_block(total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge (part, part_lse) exactly into (total, total_lse), in place; an LSE has the axes of out but the last.

    A row that either of them does not have holds 0 and -inf there. The two weights sum to 1, as in ``merge``.
    """
    peak = torch.maximum(total_lse, part_lse)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)  # -inf - -inf is no number
    kept, added = torch.exp(total_lse - peak), torch.exp(part_lse - peak)
    both = kept + added
    weights = both.clamp(min=1.0)  # less where neither has the row
    total.mul_((kept / weights).unsqueeze(-1))
    total.addcmul_(part.to(total.dtype), (added / weights).unsqueeze(-1))
    total_lse.copy_(peak + both.log())


def merge_of(plan: Plan) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Return the function that merges the blocks of a chunk, one after the other."""
    if plan.fused and plan.tunables.dtype != "fp64":
        prepare_triton()
        # triton: only where there is a GPU for it
        from ringattn.runtime.fused.merge_step_triton import merge_block as fused

        return fused
    return merge_block


def _covers(chunk: Chunk, shape: Sequence[int], group: int) -> bool:
    """Return whether the chunk is all heads of all rows, in order, of an LSE of this shape (B, H, S)."""
    call, (batch, heads, length) = chunk.calls[0], shape
    return (
        len(chunk.calls) == 1
        and call.batch == batch
        and (call.rate, call.segments, call.rows, len(call.runs)) == (1, 1, length, 1)
        and (call.runs[0].first, call.runs[0].count * group) == (0, heads)
    )


def _in_place(x: Tensor, chunk: Chunk, group: int) -> Tensor | None:
    call = chunk.calls[0]
    if len(chunk.calls) > 1 or call.rate > 1 or len(call.runs) > 1 or call.runs[0].step != 1:
        return None
    if call.segments > 1 and call.batch > 1:
        return None
    run = call.runs[0]
    heads = x.narrow(0, call.batch_start, call.batch).narrow(2, run.first * group, run.count * group)
    rows = heads.narrow(1, call.start, call.segments * call.length)
    return rows if call.segments == 1 else torch.unflatten(rows.squeeze(0), 0, (call.segments, call.length))


def _pairs(x_BSHD: Tensor, rows: Tensor, chunk: Chunk, group: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (in x, in the chunk's rows) of every affine set of heads, both (batch, segment, M, J, G, D)."""
    for call, number, here, heads in _parts(chunk, group):
        view = run_view(call, call.runs[number], group, x_BSHD.stride(), x_BSHD.shape[3], folded=False)
        shape = (call.batch, call.segments, call.rows, call.runs[number].count, group, rows.shape[3])
        yield as_view(x_BSHD, view), rows[:, here, heads].view(shape)


def _lse_pairs(lse_BHS: Tensor, rows: Tensor, chunk: Chunk, group: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same for the LSE, both (batch, segment, M, J, G)."""
    lse_BSH = lse_BHS.transpose(1, 2)
    for call, number, here, heads in _parts(chunk, group):
        view = run_view(call, call.runs[number], group, lse_BSH.stride(), folded=False)
        shape = (call.batch, call.segments, call.runs[number].count, group, call.rows)
        yield as_view(lse_BSH, view), rows[:, heads, here].view(shape).movedim(4, 2)


def _parts(chunk: Chunk, group: int) -> Iterator[tuple[Call, int, slice, slice]]:
    """Yield every run of every call, with its rows and its heads among those of the chunk."""
    row = 0
    for call in chunk.calls:
        head = 0
        for number, run in enumerate(call.runs):
            yield call, number, slice(row, row + call.rows), slice(head, head + run.count * group)
            head += run.count * group
        row += call.rows
