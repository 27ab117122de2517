"""How much arithmetic the kernel launches of a workload do: whether the device or its launches are waited for."""

from __future__ import annotations

from .pattern import head_runs
from .workload import Workload


def forward_gflop(workload: Workload, branch: int) -> float:
    """Of one branch: two products of 2 D operations for every query and key that meet, half of them under a mask."""
    one = workload.pattern.resolved(workload.seq_len)[branch]
    segment = min(one.segment, workload.seq_len)
    rows = segment / one.rate
    pairs = workload.batch * workload.heads * workload.seq_len / segment * rows**2
    return 4e-9 * workload.head_dim * pairs * (0.5 if workload.causal else 1.0)


def launches(workload: Workload, branch: int, gather: str) -> int:
    """Of one branch: copied rows are one launch, rows in place one for every affine set of heads."""
    rate = workload.pattern.resolved(workload.seq_len)[branch].rate
    return 1 if gather == "copy" else len(head_runs(workload.kv_heads, rate, workload.pattern.head_offset))
