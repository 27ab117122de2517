"""Arithmetic and blocks in the kernel launches of a workload: whether the device or its launches are waited for."""

from __future__ import annotations

import functools
import math

from ringattn.geometry.pattern import branch_calls
from ringattn.workload import Workload

ROWS_PER_BLOCK = (
    128  # query rows of a block, in the forward kernels of FlashAttention and cuDNN for most head dimensions
)


def forward_gflop(workload: Workload, branch: int) -> float:
    """Return the GFLOP of a branch: two products of 2 D operations for each query and key that meet, half if causal.

    A decoding step has one query for each sequence and head, counted as if it were selected.
    """
    one = workload.pattern.resolved(workload.seq_len)[branch]
    length = workload.packed_tokens / workload.batch if workload.packed else workload.seq_len
    segment = min(one.segment, length)
    rows = segment / one.rate
    if workload.decode:
        return 4e-9 * workload.head_dim * workload.batch * workload.heads * rows
    pairs = workload.batch * workload.heads * length / segment * rows**2
    if 0 < workload.window < length:  # of a causal half, what is left without the triangle before the window
        pairs *= 1.0 - (1.0 - workload.window / length) ** 2
    products = workload.head_dim + (workload.head_dim_v or workload.head_dim)
    return 2e-9 * products * pairs * (0.5 if workload.causal else 1.0)


def total_forward_gflop(workload: Workload) -> float:
    """Return the GFLOP of a forward, all branches together."""
    return sum(forward_gflop(workload, branch) for branch in range(len(workload.pattern.resolved(workload.seq_len))))


def occupancy(workload: Workload, multiprocessors: int) -> float:
    """Return the share of a device's multiprocessors that have a block of a forward to run, of the emptiest branch.

    All of them in decoding, which splits keys until they have.
    """
    if workload.decode:
        return 1.0
    blocks = [_blocks(workload, branch) for branch in range(len(workload.pattern.resolved(workload.seq_len)))]
    return min(1.0, min(blocks) / max(1, multiprocessors))


def _blocks(workload: Workload, branch: int) -> int:
    """Return the blocks of query rows of a branch, of all heads and sequences."""
    one = workload.pattern.resolved(workload.seq_len)[branch]
    segment = min(one.segment, workload.seq_len)
    tiles = math.ceil(segment / one.rate / ROWS_PER_BLOCK) * math.ceil(workload.seq_len / segment)
    return workload.batch * workload.heads * tiles


def blocks_per_launch(workload: Workload, branch: int, gather: str) -> float:
    """Return the blocks of query rows that a launch of a branch has, on average."""
    return _blocks(workload, branch) / launches(workload, branch, gather)


@functools.lru_cache(maxsize=1024)  # asked four times for every row: 8 of the 14 ms in which a LongNet module is made
def launches(workload: Workload, branch: int, gather: str) -> int:
    """Return a branch's launches over whole segments: one for copied rows, else one per affine set of heads."""
    one = workload.pattern.resolved(workload.seq_len)[branch]
    calls = branch_calls(
        one,
        begin=0,
        end=min(one.segment, workload.seq_len),
        batch=1,
        batch_folds=True,
        kv_heads=workload.kv_heads,
        group=workload.heads // workload.kv_heads,
        rule=workload.pattern.head_offset,
        copy=gather == "copy",
    )
    return len(calls)
