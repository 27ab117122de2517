"""Dense causal attention, H16 D128 bf16: the module against every bare kernel, in one run.

    python benchmarks/dense.py [--output FOLDER] [--profile auto|none|FILE]

First at batch size 1 (ratio to the best bare kernel), then with 16384 tokens in the batch (ratio to plain FA2).
Forward is timed without gradients; forward+backward goes through autograd, as users call it.
"""

from __future__ import annotations

import argparse

import torch
from common import Clock, Record, median, need_gpus, ratio
from common_kernels import BareKernel, runnable

from ringattn import RingAttention

HEADS, HEAD_DIM = 16, 128


def module_steps(attn: RingAttention, batch: int, length: int):
    q, k, v, dout = (torch.randn(batch, length, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward():
        with torch.no_grad():
            return attn(*leaves)

    return forward, lambda: torch.autograd.grad(attn(*leaves), leaves, dout)


def measure(record: Record, clock: Clock, attn: RingAttention, batch: int, length: int) -> None:
    forward, both = module_steps(attn, batch, length)
    tensors = [torch.randn(1, batch * length, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    kernels = {
        name: BareKernel(name, tensors, batch, length, True)
        for name in runnable("bf16", HEAD_DIM, HEADS, length, batch, True)
    }
    forwards = {"module": forward} | {name: kernel.forward for name, kernel in kernels.items()}
    pairs = {"module": both}
    for name, kernel in kernels.items():
        pairs[name] = lambda kernel=kernel: (kernel.forward(), kernel.backward())
    if {"cudnn", "flash-attn-4"} <= set(kernels):
        pairs["cudnn+flash-attn-4"] = lambda: (kernels["cudnn"].forward(), kernels["flash-attn-4"].backward())
    for direction, steps in (("forward", forwards), ("forward+backward", pairs)):
        times = clock.blocks_ms(steps)
        best = min((name for name in steps if name != "module"), key=lambda name: median(times[name]))
        plan = attn.plan_for(length, torch.bfloat16, direction != "forward", batch)
        record.add(
            work=f"dense causal B{batch} S{length} H{HEADS} D{HEAD_DIM} bf16 {direction}",
            best=best,
            best_over_module=ratio(times, best, "module"),
            fa2_over_module=ratio(times, "flash", "module"),
            ms={name: round(median(values), 4) for name, values in times.items()},
            plan=str(plan),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for dense.json")
    parser.add_argument("--profile", default="auto", help="auto, none (heuristic) or a profile file")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    arguments = parser.parse_args()
    need_gpus()
    profile = None if arguments.profile == "none" else arguments.profile
    attn = RingAttention(HEADS, HEAD_DIM, causal=True, profile=profile)
    record, clock = Record("dense", arguments.output), Clock()
    for length in arguments.lengths:
        measure(record, clock, attn, 1, length)
        if length < 16384:
            measure(record, clock, attn, 16384 // length, length)


if __name__ == "__main__":
    main()
