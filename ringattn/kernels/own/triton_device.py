"""Runs FlashAttention-2 forward and backward over one kind of block: the device side of the "triton" kernel.

Imported only when that kernel is loaded, since it needs triton. Written from FlashAttention (arXiv:2205.14135) and
FlashAttention-2 (arXiv:2307.08691).

What is different from the usual kernel:

- Scores are shifted before they are scaled, ``exp2((s - max) * scale * log2(e))``: scaling first rounds a logit of
  1e9 by 64, and the exponential of that is infinite. For the same reason nothing is contracted to fused multiply-adds
  (the host passes ``enable_fp_fusion=False``), and the backward, whose p is at most 1 by definition, clamps it there.
- The clamp also makes padding harmless without a mask: a key of zeros has a finite p and adds 0 to dq; a row beyond
  the end has an LSE of +inf, hence a p of 0.
- Query heads of a group read one k and v, and dk and dv sum over the group in registers. dq has a kernel of its own,
  which also makes delta, so nothing is added atomically and results are the same bits every time.
- A softcap makes the scores t = tanh(raw * scale / cap), which are then scaled by cap as others are by ``scale``: all
  that follows is the same, but for the slope 1 - t^2 in the backward.
- Lengths and strides are plain arguments: one compilation serves all. Offsets are 64-bit. Strides come in units of
  ALIGN elements, which tells the compiler that rows are aligned without compiling again for other strides.

Legend: a *pair* is one (block, head) pair, a *tile* BLOCK_M query rows or BLOCK_N keys of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device_tiles import _INF, _LOG2_E, _load, _offsets, _place, _seen, _store, _tanh, _tf32, _window_keys

# Arguments that differ from call to call and must not start a compilation.
_STRIDES = tuple(f"{x}_{axis}" for x in ("q", "k", "v", "out", "dout", "dq", "dk", "dv") for axis in "nmh")
_SIZES = ("rows", "keys", "heads", "group", "tiles", "pairs", "section", "window")
_VARYING = (*_STRIDES, *_SIZES, "scale", "scale_log2", "cap_scale")


# --- forward -----------------------------------------------------------------------------------------------------


@triton.jit
def _forward_keys(
    sums, total, peak, q, k, v, k_m, v_m, k_offsets, v_offsets, row, begin, end, keys, scale_log2, window, cap_scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Attend over keys [begin, end); MASK where some of them may not exist or, if CAUSAL, not be seen."""
    for first in tl.range(begin, end, BLOCK_N):
        k_tile = _load(k, k_m, k_offsets, first, keys, ROUND, MASK, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        if CAP:
            scores = _tanh(scores * cap_scale)
        if MASK:
            key = first + tl.arange(0, BLOCK_N)
            if CAUSAL:
                seen = _seen(key[None, :], row[:, None], window, WINDOW)
            else:
                seen = key[None, :] < keys
            scores = tl.where(seen, scores, -_INF)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        pivot = tl.where(new_peak == -_INF, 0.0, new_peak)  # -inf - -inf is no number
        p = tl.exp2((scores - pivot[:, None]) * scale_log2)
        shrink = tl.exp2((peak - pivot) * scale_log2)
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None]
        v_tile = _load(v, v_m, v_offsets, first, keys, ROUND, MASK, HEAD_DIM)
        sums = tl.dot(_tf32(p.to(v_tile.dtype), ROUND), v_tile, sums, input_precision=PRECISION)
        peak = new_peak
    return sums, total, peak


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(
    q, k, v, out, lse, q_n: tl.int64, q_m: tl.int64, q_h: tl.int64, k_n: tl.int64, k_m: tl.int64, k_h: tl.int64,
    v_n: tl.int64, v_m: tl.int64, v_h: tl.int64, rows, keys, heads, group, tiles, pairs, section, window, scale,
    scale_log2, cap_scale, CAUSAL: tl.constexpr, NEGATE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Write out (N, M, H, D) and lse (N, H, M), both contiguous, of one tile of query rows.

    ``scale`` is positive: the largest score must stay the largest when scaled. NEGATE takes its sign.
    """
    tile, pair = _place(tiles, pairs, section, CAUSAL)
    n = (pair // heads).to(tl.int64)
    head = pair % heads
    kv_head = head // group
    first_row = tile * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    q_m, k_m, v_m = q_m * ALIGN, k_m * ALIGN, v_m * ALIGN
    q += (n * q_n + head * q_h) * ALIGN
    k += (n * k_n + kv_head * k_h) * ALIGN
    v += (n * v_n + kv_head * v_h) * ALIGN
    q_offsets = _offsets(q_m, WIDE, BLOCK_M, BLOCK_D)
    k_offsets = _offsets(k_m, WIDE, BLOCK_N, BLOCK_D)
    v_offsets = _offsets(v_m, WIDE, BLOCK_N, BLOCK_D)

    q_tile = _load(q, q_m, q_offsets, first_row, rows, ROUND, True, HEAD_DIM)
    if NEGATE:
        q_tile = -q_tile
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), -_INF, tl.float32)
    if CAUSAL:
        end = tl.minimum(first_row + BLOCK_M, keys)
        whole = (first_row + 1) // BLOCK_N * BLOCK_N  # every row of the tile sees these keys
    else:
        end = keys
        whole = keys // BLOCK_N * BLOCK_N
    by_all = 0
    if WINDOW:
        begin, by_all = _window_keys(first_row, whole, window, BLOCK_M, BLOCK_N)
        sums, total, peak = _forward_keys(
            *(sums, total, peak, q_tile, k, v, k_m, v_m, k_offsets, v_offsets, row, begin, by_all, keys, scale_log2),
            *(window, cap_scale, True, CAUSAL, HEAD_DIM, BLOCK_N, PRECISION, ROUND, WINDOW, CAP),
        )
    sums, total, peak = _forward_keys(
        *(sums, total, peak, q_tile, k, v, k_m, v_m, k_offsets, v_offsets, row, by_all, whole, keys, scale_log2),
        *(window, cap_scale, False, CAUSAL, HEAD_DIM, BLOCK_N, PRECISION, ROUND, WINDOW, CAP),
    )
    sums, total, peak = _forward_keys(
        *(sums, total, peak, q_tile, k, v, k_m, v_m, k_offsets, v_offsets, row, whole, end, keys, scale_log2),
        *(window, cap_scale, True, CAUSAL, HEAD_DIM, BLOCK_N, PRECISION, ROUND, WINDOW, CAP),
    )

    total = tl.where(total == 0.0, 1.0, total)  # every score -inf: out 0 and lse -inf
    tl.store(lse + pair.to(tl.int64) * rows + row, peak * scale + tl.log(total), mask=row < rows)
    out_m = (heads * HEAD_DIM).to(tl.int64)
    out += (n * rows * heads + head) * HEAD_DIM
    out_offsets = _offsets(out_m, WIDE, BLOCK_M, BLOCK_D)
    _store(out, out_m, out_offsets, sums / total[:, None], first_row, rows, HEAD_DIM)


# --- backward ----------------------------------------------------------------------------------------------------


@triton.jit
def _weights(scores, lse, scale):
    """Return p of raw scores against the LSE of the whole row."""
    shifted = tl.minimum(scores * scale - lse, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(shifted * _LOG2_E)


@triton.jit
def _dq_keys(
    dq, q, dout, lse, delta, k, v, k_m, v_m, k_offsets, v_offsets, row, begin, end, keys, scale, window, cap_scale,
    MASK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Add what keys [begin, end) give; MASK where a row may not see all of them."""
    for first in tl.range(begin, end, BLOCK_N):
        k_tile = _load(k, k_m, k_offsets, first, keys, ROUND, True, HEAD_DIM)
        v_tile = _load(v, v_m, v_offsets, first, keys, ROUND, True, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        if CAP:
            scores = _tanh(scores * cap_scale)
        p = _weights(scores, lse[:, None], scale)
        if MASK:
            key = first + tl.arange(0, BLOCK_N)
            p = tl.where(_seen(key[None, :], row[:, None], window, WINDOW), p, 0.0)
        dp = tl.dot(dout, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if CAP:
            ds = ds * (1.0 - scores * scores)
        dq = tl.dot(_tf32(ds.to(k_tile.dtype), ROUND), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=_VARYING)
def dq_kernel(
    dout, q, k, v, out, lse, dq, delta, dout_n: tl.int64, dout_m: tl.int64, dout_h: tl.int64, q_n: tl.int64,
    q_m: tl.int64, q_h: tl.int64, k_n: tl.int64, k_m: tl.int64, k_h: tl.int64, v_n: tl.int64, v_m: tl.int64,
    v_h: tl.int64, out_n: tl.int64, out_m: tl.int64, out_h: tl.int64, dq_n: tl.int64, dq_m: tl.int64, dq_h: tl.int64,
    rows, keys, heads, group, tiles, pairs, section, window, scale, cap_scale, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Write dq (N, M, H, D) and delta (N, H, M), the fp32 row sums of dout * out, of one tile of query rows."""
    tile, pair = _place(tiles, pairs, section, CAUSAL)
    n = (pair // heads).to(tl.int64)
    head = pair % heads
    kv_head = head // group
    first_row = tile * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    dout_m, out_m, dq_m = dout_m * ALIGN, out_m * ALIGN, dq_m * ALIGN
    q_m, k_m, v_m = q_m * ALIGN, k_m * ALIGN, v_m * ALIGN
    dout += (n * dout_n + head * dout_h) * ALIGN
    out += (n * out_n + head * out_h) * ALIGN
    q += (n * q_n + head * q_h) * ALIGN
    k += (n * k_n + kv_head * k_h) * ALIGN
    v += (n * v_n + kv_head * v_h) * ALIGN
    k_offsets = _offsets(k_m, WIDE, BLOCK_N, BLOCK_D)
    v_offsets = _offsets(v_m, WIDE, BLOCK_N, BLOCK_D)

    out_offsets = _offsets(out_m, WIDE, BLOCK_M, BLOCK_D)
    out_tile = _load(out, out_m, out_offsets, first_row, rows, False, True, HEAD_DIM).to(tl.float32)
    dout_offsets = _offsets(dout_m, WIDE, BLOCK_M, BLOCK_D)
    dout_tile = _load(dout, dout_m, dout_offsets, first_row, rows, False, True, HEAD_DIM)
    delta_row = tl.sum(out_tile * dout_tile.to(tl.float32), 1)
    pair_rows = pair.to(tl.int64) * rows + row
    tl.store(delta + pair_rows, delta_row, mask=row < rows)
    lse_row = tl.load(lse + pair_rows, mask=row < rows, other=_INF)
    lse_row = tl.where(lse_row == -_INF, _INF, lse_row)  # a row that saw nothing has no gradient
    dout_tile = _tf32(dout_tile, ROUND)
    q_offsets = _offsets(q_m, WIDE, BLOCK_M, BLOCK_D)
    q_tile = _load(q, q_m, q_offsets, first_row, rows, ROUND, True, HEAD_DIM)

    grad = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if CAUSAL:
        whole = (first_row + 1) // BLOCK_N * BLOCK_N
    else:
        whole = keys
    by_all = 0
    if WINDOW:
        begin, by_all = _window_keys(first_row, whole, window, BLOCK_M, BLOCK_N)
        grad = _dq_keys(
            *(grad, q_tile, dout_tile, lse_row, delta_row, k, v, k_m, v_m, k_offsets, v_offsets, row, begin, by_all),
            *(keys, scale, window, cap_scale, True, HEAD_DIM, BLOCK_N, PRECISION, ROUND, WINDOW, CAP),
        )
    grad = _dq_keys(
        *(grad, q_tile, dout_tile, lse_row, delta_row, k, v, k_m, v_m, k_offsets, v_offsets, row, by_all, whole),
        *(keys, scale, window, cap_scale, False, HEAD_DIM, BLOCK_N, PRECISION, ROUND, WINDOW, CAP),
    )
    if CAUSAL:
        end = tl.minimum(first_row + BLOCK_M, keys)
        grad = _dq_keys(
            *(grad, q_tile, dout_tile, lse_row, delta_row, k, v, k_m, v_m, k_offsets, v_offsets, row, whole, end),
            *(keys, scale, window, cap_scale, True, HEAD_DIM, BLOCK_N, PRECISION, ROUND, WINDOW, CAP),
        )
    if CAP:
        scale *= cap_scale
    dq += (n * dq_n + head * dq_h) * ALIGN
    _store(dq, dq_m, _offsets(dq_m, WIDE, BLOCK_M, BLOCK_D), grad * scale, first_row, rows, HEAD_DIM)


@triton.jit
def _dkdv_rows(
    dk, dv, k, v, q, dout, lse, delta, q_m, dout_m, q_offsets, dout_offsets, key, begin, end, rows, scale, window,
    cap_scale, MASK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Add what query rows [begin, end) give; MASK where a row may not see all keys. Scores are transposed."""
    for first in tl.range(begin, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        q_tile = _load(q, q_m, q_offsets, first, rows, ROUND, True, HEAD_DIM)
        dout_tile = _load(dout, dout_m, dout_offsets, first, rows, ROUND, True, HEAD_DIM)
        lse_row = tl.load(lse + row, mask=row < rows, other=_INF)
        delta_row = tl.load(delta + row, mask=row < rows, other=0.0)
        lse_row = tl.where(lse_row == -_INF, _INF, lse_row)
        scores = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        if CAP:
            scores = _tanh(scores * cap_scale)
        p = _weights(scores, lse_row[None, :], scale)
        if MASK:
            p = tl.where(_seen(key[:, None], row[None, :], window, WINDOW), p, 0.0)
        dv = tl.dot(_tf32(p.to(dout_tile.dtype), ROUND), dout_tile, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(dout_tile), input_precision=PRECISION)
        ds = p * (dp - delta_row[None, :])
        if CAP:
            ds = ds * (1.0 - scores * scores)
        dk = tl.dot(_tf32(ds.to(q_tile.dtype), ROUND), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=_VARYING)
def dkdv_kernel(
    dout, q, k, v, lse, delta, dk, dv, dout_n: tl.int64, dout_m: tl.int64, dout_h: tl.int64, q_n: tl.int64,
    q_m: tl.int64, q_h: tl.int64, k_n: tl.int64, k_m: tl.int64, k_h: tl.int64, v_n: tl.int64, v_m: tl.int64,
    v_h: tl.int64, dk_n: tl.int64, dk_m: tl.int64, dk_h: tl.int64, dv_n: tl.int64, dv_m: tl.int64, dv_h: tl.int64,
    rows, keys, heads, group, tiles, pairs, section, window, scale, cap_scale, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Write dk and dv (N, M, K, D) of one tile of keys: the sum over the query heads of its group."""
    tile, pair = _place(tiles, pairs, section, False)
    kv_heads = heads // group
    n = (pair // kv_heads).to(tl.int64)
    kv_head = pair % kv_heads
    first_key = tile * BLOCK_N
    key = first_key + tl.arange(0, BLOCK_N)
    dout_m, q_m = dout_m * ALIGN, q_m * ALIGN
    k_m, v_m, dk_m, dv_m = k_m * ALIGN, v_m * ALIGN, dk_m * ALIGN, dv_m * ALIGN
    k += (n * k_n + kv_head * k_h) * ALIGN
    v += (n * v_n + kv_head * v_h) * ALIGN
    k_tile = _load(k, k_m, _offsets(k_m, WIDE, BLOCK_N, BLOCK_D), first_key, keys, ROUND, True, HEAD_DIM)
    v_tile = _load(v, v_m, _offsets(v_m, WIDE, BLOCK_N, BLOCK_D), first_key, keys, ROUND, True, HEAD_DIM)
    q_offsets = _offsets(q_m, WIDE, BLOCK_M, BLOCK_D)
    dout_offsets = _offsets(dout_m, WIDE, BLOCK_M, BLOCK_D)

    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    whole = 0  # from this row on, rows see every key of the tile
    last = rows  # to this one; under a window others, to the end of it, see the last keys of the tile
    end = rows
    if CAUSAL:
        whole = tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M
    if WINDOW:
        end = tl.minimum(rows, first_key + BLOCK_N - 1 + window)
        whole = tl.minimum(whole, end)
        last = tl.maximum(whole, tl.minimum((first_key + window) // BLOCK_M * BLOCK_M, end))
    for member in tl.range(0, group, num_stages=1):
        head = kv_head * group + member
        q_head = q + (n * q_n + head * q_h) * ALIGN
        dout_head = dout + (n * dout_n + head * dout_h) * ALIGN
        lse_head = lse + (n * heads + head) * rows
        delta_head = delta + (n * heads + head) * rows
        if CAUSAL:
            begin = first_key // BLOCK_M * BLOCK_M
            dk_tile, dv_tile = _dkdv_rows(
                *(dk_tile, dv_tile, k_tile, v_tile, q_head, dout_head, lse_head, delta_head, q_m, dout_m),
                *(q_offsets, dout_offsets, key, begin, tl.minimum(whole, rows), rows, scale, window, cap_scale),
                *(True, HEAD_DIM, BLOCK_M, PRECISION, ROUND, WINDOW, CAP),
            )
        dk_tile, dv_tile = _dkdv_rows(
            *(dk_tile, dv_tile, k_tile, v_tile, q_head, dout_head, lse_head, delta_head, q_m, dout_m),
            *(q_offsets, dout_offsets, key, whole, last, rows, scale, window, cap_scale),
            *(False, HEAD_DIM, BLOCK_M, PRECISION, ROUND, WINDOW, CAP),
        )
        if WINDOW:
            dk_tile, dv_tile = _dkdv_rows(
                *(dk_tile, dv_tile, k_tile, v_tile, q_head, dout_head, lse_head, delta_head, q_m, dout_m),
                *(q_offsets, dout_offsets, key, last, end, rows, scale, window, cap_scale),
                *(True, HEAD_DIM, BLOCK_M, PRECISION, ROUND, WINDOW, CAP),
            )
    if CAP:
        scale *= cap_scale
    dk += (n * dk_n + kv_head * dk_h) * ALIGN
    dv += (n * dv_n + kv_head * dv_h) * ALIGN
    _store(dk, dk_m, _offsets(dk_m, WIDE, BLOCK_N, BLOCK_D), dk_tile * scale, first_key, keys, HEAD_DIM)
    _store(dv, dv_m, _offsets(dv_m, WIDE, BLOCK_N, BLOCK_D), dv_tile, first_key, keys, HEAD_DIM)
