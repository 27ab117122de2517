"""Attends with a few queries over a long cache of keys, split among programs: the device side of "split-kv".

Imported only when that kernel is loaded, since it needs triton. Written from FlashAttention (arXiv:2205.14135) and
Flash-Decoding (pytorch.org/blog/flash-decoding).

- The query heads of a key/value head, for all queries, are the rows of one tile of tensor cores: keys are read once.
- Programs are (batch element, key/value head, tile of rows, slot). A slot is one split of the keys of one *job*, which
  is a segment of a branch that queries lie in. Each gives out and LSE; ``merge_slots_kernel`` makes one of them.
- How long a sequence is, where its cache begins and how many of the queries are its own are read from device memory, so
  that a CUDA graph can be replayed. A split then is a share of however many keys there are.
- Scores are shifted before they are scaled and nothing is contracted to fused multiply-adds, as in ``triton_device``.

Legend: *row* m is query ``m // group`` of head ``m % group`` of the group. *j* counts the selected positions of a
segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device_tiles import _INF, _offsets, _tf32

_STRIDES = tuple(f"{x}_{axis}" for x in "qkv" for axis in "nmh")
_VARYING = (*_STRIDES, "queries", "keys", "heads", "group", "tiles", "splits", "window", "scale", "scale_log2", "slots")


@triton.jit
def _rows_of(selected, rate):
    """Return how many of the positions 0, rate, 2 rate... lie before ``selected``."""
    return tl.maximum(selected + rate - 1, 0) // rate


@triton.jit
def _branch_of(job, kv_head, BRANCHES: tl.constexpr):
    """Return the job among those of its branch, and the branch's segment, rate and offset for the head."""
    segment = job * 0 + BRANCHES[0][0]
    rate = job * 0 + BRANCHES[0][1]
    per_offset = job * 0 + BRANCHES[0][2]
    first = job * 0
    for n in tl.static_range(1, len(BRANCHES)):
        own = job >= BRANCHES[n][3]
        segment = tl.where(own, BRANCHES[n][0], segment)
        rate = tl.where(own, BRANCHES[n][1], rate)
        per_offset = tl.where(own, BRANCHES[n][2], per_offset)
        first = tl.where(own, BRANCHES[n][3], first)
    offset = tl.where(per_offset == 0, kv_head % rate, kv_head // tl.maximum(per_offset, 1))
    return job - first, segment, rate, offset


@triton.jit(do_not_specialize=_VARYING)
def split_kv_kernel(
    q, k, v, lengths, begins, counts, out, lse, q_n: tl.int64, q_m: tl.int64, q_h: tl.int64, k_n: tl.int64,
    k_m: tl.int64, k_h: tl.int64, v_n: tl.int64, v_m: tl.int64, v_h: tl.int64, queries, keys, heads, group, tiles,
    splits, window, scale, scale_log2, BRANCHES: tl.constexpr, JOBS: tl.constexpr, DENSE: tl.constexpr,
    CAUSAL: tl.constexpr, SEVERAL: tl.constexpr, LENGTHS: tl.constexpr, BEGINS: tl.constexpr, COUNTS: tl.constexpr,
    DIRECT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Write out and lse of one slot: (B, H, queries, slots, D) and (B, H, queries, slots), float32.

    DIRECT, where there is one slot: out (B, queries, H, D) in the dtype of q, and lse (B, H, queries).
    SEVERAL: more than one query. ``window`` is that of a sliding window, or larger than any length.
    """
    slots = splits * JOBS
    program = tl.program_id(0)
    slot = program % slots
    tile = program // slots % tiles
    kv_heads = heads // group
    kv_head = program // (slots * tiles) % kv_heads
    n = (program // (slots * tiles * kv_heads)).to(tl.int64)
    split = slot % splits
    job, segment, rate, offset = _branch_of(slot // splits, kv_head, BRANCHES)

    length = keys
    if LENGTHS:
        length = tl.load(lengths + n)
    cached_from = length * 0
    if BEGINS:
        cached_from = tl.load(begins + n)
    count = queries
    if COUNTS:
        count = tl.load(counts + n)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // group
    head = kv_head * group + m % group
    there = query < queries
    position = length - count + query
    first_position = tl.maximum(length - count, 0)
    # The segment of this job, and its selected keys [low, high) that any query may see.
    segment_begin = (first_position // segment + job) * segment
    segment_end = tl.minimum(segment_begin + segment, length)
    origin = segment_begin + offset
    low = tl.maximum(segment_begin, cached_from)
    if CAUSAL:
        low = tl.maximum(low, first_position - window + 1)
    low = _rows_of(low - origin, rate)
    high = _rows_of(segment_end - origin, rate)
    sees = query < count
    if not DENSE:  # rows of another segment, and those that are not selected, see nothing
        sees = sees & (position >= origin) & (position < segment_end) & ((position - origin) % rate == 0)
    last = tl.where(sees, high - 1, -1)
    if CAUSAL:
        last = tl.where(sees, tl.minimum((position - origin) // rate, last), -1)
        last = tl.where(position < 0, -1, last)
    high = tl.minimum(high, tl.max(last, 0) + 1)

    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), splits) * BLOCK_N
    begin = low + split * share
    end = tl.minimum(begin + share, high)

    d = tl.arange(0, BLOCK_D)
    columns = d < HEAD_DIM
    q += n * q_n * ALIGN
    q_rows = (query.to(tl.int64) * q_m + head.to(tl.int64) * q_h) * ALIGN
    q_tile = _tf32(tl.load(q + q_rows[:, None] + d[None, :], mask=there[:, None] & columns[None, :], other=0.0), ROUND)
    k_m, v_m = k_m * ALIGN, v_m * ALIGN
    k += (n * k_n + kv_head * k_h) * ALIGN + (origin - cached_from) * k_m
    v += (n * v_n + kv_head * v_h) * ALIGN + (origin - cached_from) * v_m
    k_m, v_m = k_m * rate, v_m * rate
    k_offsets = _offsets(k_m, WIDE, BLOCK_N, BLOCK_D)
    v_offsets = _offsets(v_m, WIDE, BLOCK_N, BLOCK_D)

    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), -_INF, tl.float32)
    for first in tl.range(begin, end, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        inside = (j < end)[:, None]
        if BLOCK_D != HEAD_DIM:
            inside = inside & columns[None, :]
        k_tile = _tf32(tl.load(k + first * k_m + k_offsets, mask=inside, other=0.0), ROUND)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        seen = (j < end)[None, :]
        if SEVERAL:
            seen = seen & (j[None, :] <= last[:, None])
            if CAUSAL:
                seen = seen & (j[None, :] > (position - window)[:, None])  # a window is for dense attention alone
        scores = tl.where(seen, scores, -_INF)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        pivot = tl.where(new_peak == -_INF, 0.0, new_peak)  # -inf - -inf is no number
        p = tl.exp2((scores - pivot[:, None]) * scale_log2)
        shrink = tl.exp2((peak - pivot) * scale_log2)
        total = total * shrink + tl.sum(p, 1)
        v_tile = _tf32(tl.load(v + first * v_m + v_offsets, mask=inside, other=0.0), ROUND)
        sums = sums * shrink[:, None]
        sums = tl.dot(_tf32(p.to(v_tile.dtype), ROUND), v_tile, sums, input_precision=PRECISION)
        peak = new_peak

    total = tl.where(total == 0.0, 1.0, total)  # nothing seen: out 0 and lse -inf
    rows = (n * heads + head) * queries + query
    tl.store(lse + rows * slots + slot, peak * scale + tl.log(total), mask=there)
    if DIRECT:
        rows = (n * queries + query) * heads + head
    else:
        rows = rows * slots + slot
    inside = there[:, None] & columns[None, :]
    tl.store(out + rows[:, None] * HEAD_DIM + d[None, :], (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def merge_slots_kernel(
    part_out, part_lse, out, lse, queries, heads, slots, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write out (B, queries, H, D) and lse (B, H, queries) of one query and head from those of all slots."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    columns = d < HEAD_DIM
    sums = tl.zeros((BLOCK_D,), tl.float32)
    total = 0.0
    peak = -_INF
    for first in tl.range(0, slots, BLOCK_S):
        slot = first + tl.arange(0, BLOCK_S)
        inside = slot < slots
        found = tl.load(part_lse + row * slots + slot, mask=inside, other=-_INF)
        tile = (row * slots + slot)[:, None] * HEAD_DIM + d[None, :]
        parts = tl.load(part_out + tile, mask=inside[:, None] & columns[None, :], other=0.0)
        new_peak = tl.maximum(peak, tl.max(found, 0))
        pivot = tl.where(new_peak == -_INF, 0.0, new_peak)
        weights = tl.exp(found - pivot)
        shrink = tl.exp(peak - pivot)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(parts * weights[:, None], 0)
        peak = new_peak
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + row, peak + tl.log(total))
    query = row % queries
    head = row // queries % heads
    n = row // (queries * heads)
    target = ((n * queries + query) * heads + head) * HEAD_DIM
    tl.store(out + target + d, (sums / total).to(out.dtype.element_ty), mask=columns)
