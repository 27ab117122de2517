"""What a call costs the host, and what many different lengths in a row cost.

    python benchmarks/launch.py [--output FOLDER] [--profile auto|none|FILE] [--varied-profile FILE]

1,000 unsynchronised calls of B1 H8 S128 D64 bf16, the median of 5 rounds, against aten's FlashAttention 2 op (its
forward, and its forward plus its backward). With gradients the calls go through autograd; what torch's own op costs
there, which no module can go below, is shown beside it. Then 64 different lengths.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from common import Record

from ringattn import RingAttention

A = torch.ops.aten


def host_us(step, calls: int = 1000) -> float:
    rounds = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        rounds.append((time.perf_counter() - begin) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(rounds[1:])


def host_time(record: Record, profile: str | None) -> None:
    q, k, v, dout = (torch.randn(1, 128, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    attn = RingAttention(8, 64, causal=True, profile=profile)

    def aten_forward():
        return A._scaled_dot_product_flash_attention(*heads_first, 0.0, True)

    def aten_both():
        o = aten_forward()
        A._scaled_dot_product_flash_attention_backward(
            dout.transpose(1, 2), *heads_first, o[0], o[1], o[2], o[3], o[4], o[5], 0.0, True, o[6], o[7]
        )

    def module_both():
        torch.autograd.grad(attn(*leaves), leaves, dout)

    leaves_heads_first = [x.transpose(1, 2).detach().requires_grad_() for x in leaves]
    dout_heads_first = dout.transpose(1, 2)

    def op_both():
        out = A._scaled_dot_product_flash_attention(*leaves_heads_first, 0.0, True)[0]
        torch.autograd.grad(out, leaves_heads_first, dout_heads_first)

    with torch.no_grad():
        aten, module = host_us(aten_forward), host_us(lambda: attn(q, k, v))
    plan = attn.plan_for(128, torch.bfloat16, False)
    record.add(
        work="host time, forward", aten_us=aten, module_us=module, module_over_aten=module / aten, plan=str(plan)
    )
    plan = attn.plan_for(128, torch.bfloat16, True)
    for threads in (True, False):
        with torch.autograd.set_multithreading_enabled(threads):
            aten, module, floor = host_us(aten_both), host_us(module_both), host_us(op_both)
        record.add(
            work=f"host time, forward+backward, autograd {'with' if threads else 'without'} its own threads",
            aten_us=aten,
            module_us=module,
            aten_under_autograd_us=floor,
            module_over_aten=module / aten,
            module_over_aten_under_autograd=module / floor,
            plan=str(plan),
        )


def varied_lengths(record: Record, profile: str | None) -> None:
    drawn = random.Random(0).sample(range(1024, 16384), 72)
    lengths, others = drawn[:64], drawn[64:]
    attn = RingAttention(16, 128, causal=True, profile=profile)
    fa2 = RingAttention(16, 128, causal=True, profile=None, backend="flash")
    for train in (False, True):
        took_s = {}
        for name, module in (("flash", fa2), ("module", attn)):
            # Libraries are loaded and kernels compiled, but nothing is known of these lengths.
            module.warmup(others, torch.bfloat16, train=train)
            begin = time.perf_counter()
            for length in lengths:
                q, k, v = (
                    torch.randn(1, length, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=train)
                    for _ in range(3)
                )
                out = module(q, k, v)
                if train:
                    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            torch.cuda.synchronize()
            took_s[name] = time.perf_counter() - begin
        record.add(
            work=f"64 lengths of 1024..16383, H16 D128 bf16 causal, {'forward+backward' if train else 'forward'}",
            module_s=took_s["module"],
            flash_s=took_s["flash"],
            module_over_flash=took_s["module"] / took_s["flash"],
            plan=str(attn.plan_for(4096, torch.bfloat16, train)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for launch.json")
    parser.add_argument("--profile", default="auto", help="auto, none (heuristic) or a profile file")
    parser.add_argument("--varied-profile", help="a profile probed with --varied-lengths, for the 64 lengths")
    arguments = parser.parse_args()
    profile = None if arguments.profile == "none" else arguments.profile
    record = Record("launch", arguments.output)
    host_time(record, profile)
    varied_lengths(record, arguments.varied_profile or profile)


if __name__ == "__main__":
    main()
