"""Measures what the workspace pool and the checkpoint modes buy: allocations, peaks, fragmentation, time.

    python benchmarks/memory.py [--output FOLDER] [--length S]

LongNet pattern, H16 D128 bf16, causal, forward+backward. Each row is the machine's plan with one tunable changed.
Fragmentation is what the allocator reserved beyond its peak of live bytes after 16 different lengths in a row.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from common import Clock, Record, median, need_gpus, peak_mib, ratio

from ringattn import Profile, RingAttention, detect
from ringattn.runtime.workspace import POOL

HEADS, HEAD_DIM = 16, 128
SEGMENTS, RATES = [2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]


def module_with(base, facts, **changes) -> RingAttention:
    profile = Profile.single(facts, base.workload, replace(base.tunables, **changes))
    return RingAttention(HEADS, HEAD_DIM, None, SEGMENTS, RATES, causal=True, profile=profile)


def leaves(length: int):
    return [
        torch.randn(1, length, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]


def step_of(attn: RingAttention, q, k, v):
    dout = torch.randn_like(q)
    return lambda: torch.autograd.grad(attn(q, k, v), (q, k, v), dout)


def fragmentation_mib(attn: RingAttention, lengths: list[int]) -> float:
    POOL.clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for length in lengths:
        step_of(attn, *leaves(length))()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()) / 2**20


def allocations(step) -> int:
    step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for memory.json")
    parser.add_argument("--length", type=int, default=131072)
    arguments = parser.parse_args()
    need_gpus()
    length = arguments.length
    facts = detect()
    record, clock = Record("memory", arguments.output), Clock()
    base = RingAttention(HEADS, HEAD_DIM, None, SEGMENTS, RATES, causal=True).plan_for(length, torch.bfloat16, True)
    q, k, v = leaves(length)
    variants = {
        "pool off": {"pool_threshold_mib": None, "pool_strategy": "shape"},
        "pool >= 1 MiB by shape": {"pool_threshold_mib": 1, "pool_strategy": "shape"},
        "pool >= 1 MiB by bucket": {"pool_threshold_mib": 1, "pool_strategy": "bucket"},
        "checkpoint full": {"checkpoint": "full"},
        "checkpoint offload": {"checkpoint": "offload"},
    }
    modules = {name: module_with(base, facts, **changes) for name, changes in variants.items()}
    steps = {name: step_of(module, q, k, v) for name, module in modules.items()}
    times = clock.blocks_ms(steps, blocks=9, warmup=2)
    lengths = [length // 16 * n + 37 * n for n in range(1, 17)]
    for name, module in modules.items():
        POOL.clear()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = module(q, k, v)
        torch.cuda.synchronize()
        held = (torch.cuda.memory_allocated() - before) / 2**20
        del out
        torch.cuda.reset_peak_memory_stats()
        peak = peak_mib(steps[name])
        record.add(
            variant=name,
            ms=median(times[name]),
            over_pool_off=ratio(times, name, "pool off"),
            held_between_mib=held,
            peak_mib=peak,
            peak_reserved_mib=torch.cuda.max_memory_reserved() / 2**20,
            allocations=allocations(steps[name]),
            fragmentation_mib=fragmentation_mib(module, lengths),
            plan=str(module.plan_for(length, torch.bfloat16, True)),
        )


if __name__ == "__main__":
    main()
