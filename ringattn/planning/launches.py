"""The arithmetic in the kernel launches of a workload, which says whether the device or its launches are waited for."""

from __future__ import annotations

import functools

from ringattn.geometry.pattern import branch_calls
from ringattn.workload import Workload


def forward_gflop(workload: Workload, branch: int) -> float:
    """Return the GFLOP of a branch: two products of 2 D operations for each query and key that meet, half if causal."""
    one = workload.pattern.resolved(workload.seq_len)[branch]
    segment = min(one.segment, workload.seq_len)
    rows = segment / one.rate
    pairs = workload.batch * workload.heads * workload.seq_len / segment * rows**2
    return 4e-9 * workload.head_dim * pairs * (0.5 if workload.causal else 1.0)


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
