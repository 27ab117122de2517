"""Loads, stores, masks and rounds tiles of rows: what the kernels of this folder share on the device side.

Imported only when one of them is loaded, since it needs triton. Offsets are 64-bit, but for those within a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_INF: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def _tf32(x, ROUND: tl.constexpr):
    """Round x to TF32's 10 mantissa bits: tensor cores drop the rest, which shrinks every product."""
    if ROUND:
        bits = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], tl.int32, is_pure=True, pack=1)
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def _place(tiles, pairs, section, HEAVY_LAST: tl.constexpr):
    """Return the (tile, pair) of this program.

    Lanes go in sections whose k and v (or q and dout) fit the L2 cache; within a section all pairs work on their
    heaviest tiles first, so that the light ones fill the end.
    """
    program = tl.program_id(0)
    first = program // (section * tiles) * section
    width = tl.minimum(pairs - first, section)
    local = program - first * tiles
    tile = local // width
    pair = first + local - tile * width
    if HEAVY_LAST:
        tile = tiles - 1 - tile
    return tile, pair


@triton.jit
def _offsets(row_stride, WIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return element offsets within a tile; 32 bits take half the registers, so 64 only if WIDE."""
    if not WIDE:
        row_stride = row_stride.to(tl.int32)
    return tl.arange(0, BLOCK)[:, None] * row_stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _inside(first, end, CHECK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mask the elements of a tile that exist: rows below ``end`` (all, unless CHECK) and columns below HEAD_DIM."""
    rows = (first + tl.arange(0, BLOCK) < end)[:, None]
    columns = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    if BLOCK_D == HEAD_DIM:
        inside = rows
    elif CHECK:
        inside = rows & columns
    else:
        inside = columns
    return inside


@triton.jit
def _load(x, row_stride, offsets, first, end, ROUND: tl.constexpr, CHECK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load the tile whose first row is ``first``; zeros where it does not exist."""
    pointers = x + first * row_stride + offsets
    if CHECK or offsets.shape[1] != HEAD_DIM:
        inside = _inside(first, end, CHECK, HEAD_DIM, offsets.shape[0], offsets.shape[1])
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        tile = tl.load(pointers)
    return _tf32(tile, ROUND)


@triton.jit
def _store(x, row_stride, offsets, tile, first, end, HEAD_DIM: tl.constexpr):
    inside = _inside(first, end, True, HEAD_DIM, offsets.shape[0], offsets.shape[1])
    tl.store(x + first * row_stride + offsets, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x):
    """Return tanh with an error of 1e-7: Triton has none of its own. NaN stays."""
    square = x * x
    small = x * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315 - square * (62.0 / 2835)))))
    e = tl.exp2(tl.abs(x) * -2.0 * _LOG2_E)
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0, -large, large))


@triton.jit
def _seen(key, row, window, WINDOW: tl.constexpr):
    """Mask the keys that a causal row sees."""
    seen = key <= row
    if WINDOW:
        seen = seen & (key > row - window)
    return seen


@triton.jit
def _window_keys(first_row, whole, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return from where on some row of the tile sees keys, and from where to ``whole`` every one does."""
    begin = tl.maximum(first_row - window + 1, 0) // BLOCK_N * BLOCK_N
    by_all = tl.cdiv(tl.maximum(first_row + BLOCK_M - window, 0), BLOCK_N) * BLOCK_N
    return begin, tl.minimum(tl.maximum(by_all, begin), whole)
