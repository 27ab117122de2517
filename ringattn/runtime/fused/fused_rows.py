"""Finds the rows that the fused kernels read and write: their words, tiles and slots, on the device side.

Addresses and words (``fused_layout``) come in tuples; what is the same for every length of a pattern is a
``constexpr``, so that lengths share compiled kernels. ``BRANCHES`` is a ``BranchSlots`` per branch. Which slot holds a
(batch, head, segment) is worked out with scalars, because a block of positions touches one segment of a branch.
``NARROW`` says that offsets within a block of rows fit in 32 bits. All other offsets are 64-bit.
"""

# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005 - Triton has no starred expressions

from __future__ import annotations

import triton
import triton.language as tl

# The fields of the words that fused_layout packs: 12 bits for heads, 20 for batch or step, 30 for segments or
# offsets, 60 for the far stride, 26 for the stride between rows and 34 for that between heads.


@triton.jit
def _first_head(heads):
    return ((heads >> 1) & 0xFFF).to(tl.int32)


@triton.jit
def _head_count(heads):
    return ((heads >> 13) & 0xFFF).to(tl.int32)


@triton.jit
def _own_head(heads):
    return ((heads >> 25) & 0xFFF).to(tl.int32)


@triton.jit
def _batch_or_step(heads):
    return ((heads >> 37) & 0xFFFFF).to(tl.int32)


@triton.jit
def _segment_begin(segments):
    return ((segments >> 1) & 0x3FFFFFFF).to(tl.int32)


@triton.jit
def _segment_count(segments):
    return ((segments >> 31) & 0x3FFFFFFF).to(tl.int32)


@triton.jit
def _far(far):
    return (far >> 1) & 0xFFFFFFFFFFFFFFF


@triton.jit
def _row_stride(near):
    return (near >> 1) & 0x3FFFFFF


@triton.jit
def _head_stride(near):
    return (near >> 27) & 0x3FFFFFFFF


@triton.jit
def _tile(address, offsets, chunk, CHUNK: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Return pointers to ``CHUNK`` columns of rows at ``address`` (bytes) + ``offsets`` (elements)."""
    rows = address.to(tl.pointer_type(DTYPE)) + offsets
    pointers = rows[:, None] + (chunk * CHUNK + tl.arange(0, CHUNK))[None, :]
    return tl.max_contiguous(tl.multiple_of(pointers, (1, ALIGN)), (1, CHUNK))


@triton.jit
def _mask(rows, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr):
    mask = rows[:, None]
    if HEAD_DIM % CHUNK != 0:  # then there is one chunk, wider than a row
        mask = mask & (tl.arange(0, CHUNK) < HEAD_DIM)[None, :]
    return mask


@triton.jit
def _store_rows(
    address, offsets, chunks, valid, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    for chunk in tl.static_range(len(chunks)):
        pointers = _tile(address, offsets, chunk, CHUNK, DTYPE, ALIGN)
        tl.store(pointers, chunks[chunk].to(DTYPE), mask=_mask(valid, HEAD_DIM, CHUNK))


@triton.jit
def _origin(at, BRANCHES: tl.constexpr, N: tl.constexpr):
    """Return the segment of the position of ``at``, where it starts among its selected ones, and their first row."""
    kv_head, batch, position = at
    SEGMENT: tl.constexpr = BRANCHES[N][0]
    RATE: tl.constexpr = BRANCHES[N][1]
    if BRANCHES[N][2] == 0:
        offset = kv_head % RATE
    else:
        offset = kv_head // BRANCHES[N][2]
    segment = position // SEGMENT
    origin = position - segment * SEGMENT - offset
    return segment, origin, tl.maximum(origin, 0) // RATE


@triton.jit
def _until_an_edge(position, covered, BRANCHES: tl.constexpr):
    """Return how many of ``covered`` positions lie in the segments that the first of them is in."""
    for n in tl.static_range(len(BRANCHES)):
        covered = tl.minimum(covered, BRANCHES[n][0] - position % BRANCHES[n][0])
    return covered


@triton.jit
def _selection(origin, first_row, index, valid, BRANCHES: tl.constexpr, N: tl.constexpr):
    """Return rows counted from the first, and a mask of the selected positions."""
    RATE: tl.constexpr = BRANCHES[N][1]
    # A position before the offset becomes a huge unsigned number, which the comparison below drops.
    within = (origin + index).to(tl.uint32)
    row = within // RATE
    return row.to(tl.int32) - first_row, valid & (row * RATE == within) & (within < BRANCHES[N][0])


@triton.jit
def _pick(values, holds, job, FIRST: tl.constexpr, PER_SLOT: tl.constexpr, PER_JOB: tl.constexpr, JOBS: tl.constexpr):
    """Return ``values[FIRST + slot * PER_SLOT + job * PER_JOB]`` for the slot that holds and ``job``."""
    chosen = _of_job(values, job, FIRST, PER_JOB, JOBS)
    for slot in tl.static_range(1, len(holds)):
        chosen = tl.where(holds[slot], _of_job(values, job, FIRST + slot * PER_SLOT, PER_JOB, JOBS), chosen)
    return chosen


@triton.jit
def _of_job(values, job, FIRST: tl.constexpr, PER_JOB: tl.constexpr, JOBS: tl.constexpr):
    chosen = values[FIRST]
    for number in tl.static_range(1, JOBS):
        chosen = tl.where(job == number, values[FIRST + number * PER_JOB], chosen)
    return chosen


@triton.jit
def _place(slots, at, segment, BRANCHES: tl.constexpr, N: tl.constexpr):
    """Find the slot of the branch that holds (batch, head, segment), the block of the call and its key/value head."""
    kv_head, batch, position = at
    STEP: tl.constexpr = BRANCHES[N][3]
    FIRST_SLOT: tl.constexpr = BRANCHES[N][4]
    END_SLOT: tl.constexpr = BRANCHES[N][5]
    holds = ()
    for slot in tl.static_range(FIRST_SLOT, END_SLOT):
        heads = slots[2 * slot]
        segments = slots[2 * slot + 1]
        from_head = kv_head - _first_head(heads)
        from_segment = segment - _segment_begin(segments)
        in_heads = (from_head >= 0) & (from_head % STEP == 0) & (from_head < _head_count(heads) * STEP)
        holds = holds + (in_heads & (from_segment >= 0) & (from_segment < _segment_count(segments)),)
    heads = _pick(slots, holds, 0, 2 * FIRST_SLOT, 2, 1, 1)
    segments = _pick(slots, holds, 0, 2 * FIRST_SLOT + 1, 2, 1, 1)
    block = (batch - _batch_or_step(heads)) * _segment_count(segments) + segment - _segment_begin(segments)
    return holds, block.to(tl.int64), _own_head(heads) + (kv_head - _first_head(heads)) // STEP


@triton.jit
def _first_row_of(
    addresses, strides, holds, job, block, head, first_row, BRANCHES: tl.constexpr, N: tl.constexpr,
    JOBS: tl.constexpr, BYTES: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Return the address of ``first_row`` in the partial result that holds it, and the elements between rows there."""
    FIRST_SLOT: tl.constexpr = BRANCHES[N][4]
    far = _pick(strides, holds, job, 2 * JOBS * FIRST_SLOT, 2 * JOBS, 2, JOBS)
    near = _pick(strides, holds, job, 2 * JOBS * FIRST_SLOT + 1, 2 * JOBS, 2, JOBS)
    address = _pick(addresses, holds, job, JOBS * FIRST_SLOT, JOBS, 1, JOBS)
    row_stride = _row_stride(near)
    address += (block * _far(far) + head * _head_stride(near) + first_row * row_stride) * BYTES
    if NARROW:
        row_stride = row_stride.to(tl.int32)
    return address, row_stride


@triton.jit
def _target(address, far, near, batch, position, head, BYTES: tl.constexpr, NARROW: tl.constexpr):
    row_stride = _row_stride(near)
    address += (batch * _far(far) + position * row_stride + head * _head_stride(near)) * BYTES
    if NARROW:
        row_stride = row_stride.to(tl.int32)
    return address, row_stride


@triton.jit
def _job_of_head(head, kv_heads, GROUPS: tl.constexpr):
    """Return the job of a head counted through all jobs, G there, its key/value head and its place in the group."""
    job = 0
    group = 1
    own = head
    heads_before = 0
    for number in tl.static_range(len(GROUPS)):
        mine = head >= heads_before
        job = tl.where(mine, number, job)
        group = tl.where(mine, GROUPS[number], group)
        own = tl.where(mine, head - heads_before, own)
        heads_before += kv_heads * GROUPS[number]
    kv_head = own // group
    return job, group, kv_head, own - kv_head * group
