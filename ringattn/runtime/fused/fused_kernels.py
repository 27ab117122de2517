"""Gathers, merges and sums in one kernel each: the device side of ``merge_triton``.

Arguments are those that ``fused_rows`` finds rows by. Where segments are multiples of the block (``ALIGNED``) a slot is
found once a program, otherwise for every block, which ends at an edge.

Legend: B batch, S length, D head dim, G query heads per key/value head; of a call: N segments times batch, M rows.
"""

# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005 - Triton has no starred expressions

from __future__ import annotations

import triton
import triton.language as tl

from .fused_rows import (
    _batch_or_step,
    _first_head,
    _first_row_of,
    _head_count,
    _job_of_head,
    _mask,
    _of_job,
    _origin,
    _own_head,
    _place,
    _segment_begin,
    _segment_count,
    _selection,
    _store_rows,
    _target,
    _tile,
    _until_an_edge,
)


@triton.jit
def _find_partials(
    outs, lses, out_strides, lse_strides, slots, out_address, lse_address, target_strides, head, batch, position,
    begin, BRANCHES: tl.constexpr, GROUP: tl.constexpr, NARROW: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Find every branch's lse and out of the positions from one on, in one segment each, and where theirs go."""
    at = (head // GROUP, batch, position)
    found = ()
    for n in tl.static_range(len(BRANCHES)):
        segment, origin, first_row = _origin(at, BRANCHES, n)
        holds, block, j = _place(slots, at, segment, BRANCHES, n)
        own = j * GROUP + head % GROUP
        lse = _first_row_of(lses, lse_strides, holds, 0, block, own, first_row, BRANCHES, n, 1, 4, NARROW)
        out = _first_row_of(outs, out_strides, holds, 0, block, own, first_row, BRANCHES, n, 1, BYTES, NARROW)
        found = found + ((origin, first_row, lse, out),)
    first = position + begin
    out = _target(out_address, target_strides[0], target_strides[1], batch, first, head, BYTES, NARROW)
    lse = _target(lse_address, target_strides[2], target_strides[3], batch, first, head, 4, NARROW)
    return found, out, lse


@triton.jit
def _load_lse(found, index, valid, BRANCHES: tl.constexpr, N: tl.constexpr):
    """Load the lse of a branch at each position, -inf where it selects nothing, and find its out."""
    origin, first_row, lse_rows, out_rows = found
    row, selected = _selection(origin, first_row, index, valid, BRANCHES, N)
    lse_pointers = lse_rows[0].to(tl.pointer_type(tl.float32)) + row * lse_rows[1]
    lse = tl.load(lse_pointers, mask=selected, other=float("-inf"))
    return lse, out_rows[0], row * out_rows[1], selected


@triton.jit
def _weighted_sum(
    partials, shift, scale, chunk, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    merged = tl.zeros((shift.shape[0], CHUNK), tl.float32)
    for n in tl.static_range(len(partials)):
        lse, address, offsets, selected = partials[n]
        pointers = _tile(address, offsets, chunk, CHUNK, DTYPE, ALIGN)
        rows = tl.load(pointers, mask=_mask(selected, HEAD_DIM, CHUNK), other=0.0)
        merged += (tl.exp(lse - shift) * scale)[:, None] * rows.to(tl.float32)
    return merged


@triton.jit
def _merge_block(
    found, out, lse, index, valid, BRANCHES: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    partials = ()
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for n in tl.static_range(len(BRANCHES)):
        partial = _load_lse(found[n], index, valid, BRANCHES, n)
        partials = partials + (partial,)
        highest = tl.maximum(highest, partial[0])
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf would be NaN
    total = tl.zeros((BLOCK,), tl.float32)
    for n in tl.static_range(len(BRANCHES)):
        total += tl.exp(partials[n][0] - shift)
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    # Everything is loaded before anything is stored: no load can be moved up across a store.
    merged = ()
    for chunk in tl.static_range((HEAD_DIM + CHUNK - 1) // CHUNK):
        merged = merged + (_weighted_sum(partials, shift, scale, chunk, HEAD_DIM, CHUNK, DTYPE, ALIGN),)
    _store_rows(out[0], index * out[1], merged, valid, HEAD_DIM, CHUNK, DTYPE, ALIGN)
    lse_pointers = lse[0].to(tl.pointer_type(tl.float32)) + index * lse[1]
    tl.store(lse_pointers, shift + tl.log(total), mask=valid)  # log(0) is -inf


@triton.jit(do_not_specialize=["begin", "end", "batch_begin", "blocks"])
def merge_partials(
    outs, lses, out_strides, lse_strides, slots, out_address, lse_address, target_strides, begin, end, batch_begin,
    blocks, BRANCHES: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, NARROW: tl.constexpr, ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Write out and lse of ``blocks * BLOCK`` positions of a head: programs (positions x heads, batch elements)."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    HEADS: tl.constexpr = KV_HEADS * GROUP
    head = tl.program_id(0) % HEADS
    position = tl.program_id(0) // HEADS * (blocks * BLOCK)
    batch = batch_begin + tl.program_id(1)
    covered = tl.minimum(end - begin - position, blocks * BLOCK)
    index = tl.arange(0, BLOCK)
    if ALIGNED:
        found, out, lse = _find_partials(
            outs, lses, out_strides, lse_strides, slots, out_address, lse_address, target_strides, head, batch,
            position, begin, BRANCHES, GROUP, NARROW, BYTES,
        )  # fmt: skip
        for start in range(0, covered, BLOCK):
            own = index + start
            _merge_block(found, out, lse, own, own < covered, BRANCHES, HEAD_DIM, CHUNK, BLOCK, ALIGN, DTYPE)
    else:
        start = 0
        while start < covered:
            first = position + start
            count = _until_an_edge(first, tl.minimum(covered - start, BLOCK), BRANCHES)
            found, out, lse = _find_partials(
                outs, lses, out_strides, lse_strides, slots, out_address, lse_address, target_strides, head, batch,
                first, begin, BRANCHES, GROUP, NARROW, BYTES,
            )  # fmt: skip
            _merge_block(found, out, lse, index, index < count, BRANCHES, HEAD_DIM, CHUNK, BLOCK, ALIGN, DTYPE)
            start += count


@triton.jit
def _find_grads(
    grads, strides, slots, targets, target_strides, job, group, kv_head, query, batch, position, begin,
    BRANCHES: tl.constexpr, JOBS: tl.constexpr, NARROW: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Find every branch's gradient of the positions from one on, in one segment each, and where their sum goes."""
    at = (kv_head, batch, position)
    found = ()
    for n in tl.static_range(len(BRANCHES)):
        segment, origin, first_row = _origin(at, BRANCHES, n)
        holds, block, j = _place(slots, at, segment, BRANCHES, n)
        own = j * group + query
        rows = _first_row_of(grads, strides, holds, job, block, own, first_row, BRANCHES, n, JOBS, BYTES, NARROW)
        found = found + ((origin, first_row, rows),)
    target = _target(
        _of_job(targets, job, 0, 1, JOBS), _of_job(target_strides, job, 0, 2, JOBS),
        _of_job(target_strides, job, 1, 2, JOBS), batch, position + begin, kv_head * group + query, BYTES, NARROW,
    )  # fmt: skip
    return found, target


@triton.jit
def _sum_chunk(
    found, index, valid, chunk, BRANCHES: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK, CHUNK), tl.float32)
    for n in tl.static_range(len(BRANCHES)):
        origin, first_row, rows = found[n]
        row, selected = _selection(origin, first_row, index, valid, BRANCHES, n)
        pointers = _tile(rows[0], row * rows[1], chunk, CHUNK, DTYPE, ALIGN)
        total += tl.load(pointers, mask=_mask(selected, HEAD_DIM, CHUNK), other=0.0).to(tl.float32)
    return total


@triton.jit
def _sum_block(
    found, target, index, valid, BRANCHES: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    sums = ()
    for chunk in tl.static_range((HEAD_DIM + CHUNK - 1) // CHUNK):
        sums = sums + (_sum_chunk(found, index, valid, chunk, BRANCHES, BLOCK, HEAD_DIM, CHUNK, DTYPE, ALIGN),)
    _store_rows(target[0], index * target[1], sums, valid, HEAD_DIM, CHUNK, DTYPE, ALIGN)


@triton.jit(do_not_specialize=["begin", "end", "batch_begin", "blocks"])
def sum_partials(
    grads, strides, slots, targets, target_strides, begin, end, batch_begin,
    blocks, BRANCHES: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    NARROW: tl.constexpr, ALIGN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Sum ``blocks * BLOCK`` positions of one head of one gradient, a *job*: programs as for ``merge_partials``.

    ``GROUPS`` has the G of each job, ``HEADS`` counts the heads of all. What is stored at an element depends on what
    was loaded from it, so a partial may lie in the target itself.
    """
    JOBS: tl.constexpr = len(GROUPS)
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    position = tl.program_id(0) // HEADS * (blocks * BLOCK)
    batch = batch_begin + tl.program_id(1)
    job, group, kv_head, query = _job_of_head(tl.program_id(0) % HEADS, KV_HEADS, GROUPS)
    covered = tl.minimum(end - begin - position, blocks * BLOCK)
    index = tl.arange(0, BLOCK)
    if ALIGNED:
        found, target = _find_grads(
            grads, strides, slots, targets, target_strides, job, group, kv_head, query, batch, position, begin,
            BRANCHES, JOBS, NARROW, BYTES,
        )  # fmt: skip
        for start in range(0, covered, BLOCK):
            own = index + start
            _sum_block(found, target, own, own < covered, BRANCHES, HEAD_DIM, CHUNK, BLOCK, ALIGN, DTYPE)
    else:
        start = 0
        while start < covered:
            first = position + start
            count = _until_an_edge(first, tl.minimum(covered - start, BLOCK), BRANCHES)
            found, target = _find_grads(
                grads, strides, slots, targets, target_strides, job, group, kv_head, query, batch, first, begin,
                BRANCHES, JOBS, NARROW, BYTES,
            )  # fmt: skip
            _sum_block(found, target, index, index < count, BRANCHES, HEAD_DIM, CHUNK, BLOCK, ALIGN, DTYPE)
            start += count


@triton.jit
def _run_of(runs, j):
    """Return the key/value head and the offset of the j-th head of a call."""
    kv_head = 0
    offset = 0
    for run in tl.static_range(len(runs) // 2):
        heads = runs[2 * run]
        offsets = runs[2 * run + 1]
        in_run = j - _own_head(heads)
        mine = (in_run >= 0) & (in_run < _head_count(heads))
        kv_head = tl.where(mine, _first_head(heads) + in_run * _batch_or_step(heads), kv_head)
        offset = tl.where(mine, _segment_begin(offsets) + in_run * _segment_count(offsets), offset)
    return kv_head, offset


@triton.jit(
    do_not_specialize=["start", "batch_begin", "segments", "length", "rate", "rows_per_block", "kv_heads", "row_blocks"]
)
def gather_rows(
    sources, strides, rows, runs, lse_address, lse_strides, lse_rows_address, start, batch_begin, segments, length,
    rate, rows_per_block, kv_heads, row_blocks, GROUPS: tl.constexpr, HEADS_PER_KV: tl.constexpr,
    WITH_ROWS: tl.constexpr, WITH_LSE: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, NARROW: tl.constexpr, ALIGN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Copy ``BLOCK`` rows of one head of one source: programs (blocks N x row blocks x heads of all sources).

    The lse travels with the first source, or alone (then GROUPS has its G). Runs are as slots are, with the step in
    the place of the batch and (offset, offset step) in that of the segments.
    """
    SOURCES: tl.constexpr = len(GROUPS)
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    heads_of_all = kv_heads * HEADS_PER_KV
    source, group, j, query = _job_of_head(tl.program_id(0) % heads_of_all, kv_heads, GROUPS)
    first_row = tl.program_id(0) // heads_of_all % row_blocks * BLOCK
    block = tl.program_id(0) // heads_of_all // row_blocks
    kv_head, offset = _run_of(runs, j)
    head = kv_head * group + query
    head_of_rows = (j * group + query).to(tl.int64)
    batch = batch_begin + block // segments
    position = start + block % segments * length + offset + first_row * rate
    index = tl.arange(0, BLOCK)
    valid = index < rows_per_block - first_row
    if WITH_ROWS:
        far = _of_job(strides, source, 0, 2, SOURCES)
        near = _of_job(strides, source, 1, 2, SOURCES)
        address, row_stride = _target(
            _of_job(sources, source, 0, 1, SOURCES), far, near, batch, position, head, BYTES, NARROW
        )
        offsets = index * rate * row_stride
        values = ()
        for chunk in tl.static_range((HEAD_DIM + CHUNK - 1) // CHUNK):
            pointers = _tile(address, offsets, chunk, CHUNK, DTYPE, ALIGN)
            values = values + (tl.load(pointers, mask=_mask(valid, HEAD_DIM, CHUNK)),)
        heads = kv_heads * group
        row = block.to(tl.int64) * rows_per_block + first_row
        address = _of_job(rows, source, 0, 1, SOURCES) + (row * heads + head_of_rows) * HEAD_DIM * BYTES
        _store_rows(address, index * (heads * HEAD_DIM), values, valid, HEAD_DIM, CHUNK, DTYPE, ALIGN)
    if WITH_LSE:
        mine = index < tl.where(source == 0, rows_per_block - first_row, 0)
        address, row_stride = _target(lse_address, lse_strides[0], lse_strides[1], batch, position, head, 4, NARROW)
        lse = tl.load(address.to(tl.pointer_type(tl.float32)) + index * rate * row_stride, mask=mine)
        lse_row = (block.to(tl.int64) * kv_heads * group + head_of_rows) * rows_per_block + first_row
        address = lse_rows_address + lse_row * 4
        tl.store(address.to(tl.pointer_type(tl.float32)) + index, lse, mask=mine)
