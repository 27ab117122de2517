"""Rank 0 of several records what no measured plan served, with the number of ranks and the whole length."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from pool import Pool

from ringattn import RingAttention, Workload
from ringattn.planning.unmeasured_workloads import VARIABLE, read_record, record_at


def _record(folder: Path) -> None:
    """Call a module on shards of equal and of different lengths, each rank with a file of its own named."""
    path = folder / f"rank{dist.get_rank()}.jsonl"
    os.environ[VARIABLE] = str(path)
    try:
        module = RingAttention(2, 4, causal=True, device="cpu", process_group=dist.group.WORLD)
    finally:
        del os.environ[VARIABLE]
    for total, calls in ((32, 3), (29, 2)):
        x = module.shard(torch.randn(1, total, 2, 4))
        for _ in range(calls):
            module(x, x, x, total_length=None if total == 32 else total)
    record_at(str(path)).write()


def test_rank_0_records(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    ranks(2).run(_record, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.jsonl"]
    even = Workload("infer", True, 16, 2, 4, "fp32", world=2)
    uneven = Workload("infer", True, 15, 2, 4, "fp32", world=2, total_length=29)
    assert read_record(tmp_path / "rank0.jsonl") == ({even: 3, uneven: 2}, ())
