"""The merge of one ring step as one GPU kernel: reads the block's result once, updates the running one in place.

Legend: N blocks, M rows, H heads, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE_ELEMENTS = 4096


@triton.jit
def _merge_block(
    total, total_lse, part, part_lse, rows, head_dim,
    total_far, total_row, total_head, total_lse_far, total_lse_row, total_lse_head,
    part_far, part_row, part_head, part_lse_far, part_lse_row, part_lse_head,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    far = tl.program_id(2).to(tl.int64)
    there = row < rows
    total_lse += far * total_lse_far + head * total_lse_head + row * total_lse_row
    part_lse += far * part_lse_far + head * part_lse_head + row * part_lse_row
    old = tl.load(total_lse, there, other=0.0)
    new = tl.load(part_lse, there, other=0.0)
    peak = tl.maximum(old, new)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # -inf - -inf is no number
    keep = tl.exp(old - peak)
    add = tl.exp(new - peak)
    both = keep + add
    weights = tl.where(both == 0.0, 1.0, both)  # 0 where neither has the row

    d = tl.arange(0, BLOCK_D)
    tile = there[:, None] & (d < head_dim)[None, :]
    total += far * total_far + head * total_head + row[:, None] * total_row + d[None, :]
    part += far * part_far + head * part_head + row[:, None] * part_row + d[None, :]
    kept = tl.load(total, tile, other=0.0) * (keep / weights)[:, None]
    added = tl.load(part, tile, other=0.0).to(tl.float32) * (add / weights)[:, None]
    tl.store(total, kept + added, tile)
    tl.store(total_lse, peak + tl.log(both), there)


def merge_block(total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Do as ``chunk_rows.merge_block``, for (N, M, H, D) with contiguous D: ``total`` float32, ``part`` of any dtype.

    The LSEs are (N, M, H) in float32, of any strides.
    """
    n, rows, heads, head_dim = total.shape
    part = part if part.stride(3) == 1 else part.contiguous()
    block_d = triton.next_power_of_2(head_dim)
    block = max(1, _TILE_ELEMENTS // block_d)
    _merge_block[(triton.cdiv(rows, block), heads, n)](
        total, total_lse, part, part_lse, rows, head_dim,
        *total.stride()[:3], *total_lse.stride(), *part.stride()[:3], *part_lse.stride(),
        BLOCK=block, BLOCK_D=block_d,
    )  # fmt: skip
