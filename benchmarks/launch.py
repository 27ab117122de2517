"""Measures what a call costs the host, and what many different lengths in a row cost.

    python benchmarks/launch.py [--output FOLDER] [--profile auto|none|FILE] [--varied-profile FILE]

1,000 unsynchronised calls of B1 H8 S128 D64 bf16, median of 5 rounds in turn, against aten's FlashAttention 2 op (its
forward, and its forward plus its backward). With gradients the calls go through autograd; what torch's own op costs
there, which no module can go below, is shown beside it. Then 64 different lengths.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping

import torch
from common import Record, Step, median, need_gpus, ratio

from ringattn import RingAttention

A = torch.ops.aten


def round_us(step: Step, calls: int = 1000) -> float:
    """Return the host's time for a call, the mean of a thousand that are not waited for."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    taken_us = (time.perf_counter() - begin) / calls * 1e6
    torch.cuda.synchronize()
    return taken_us


def rounds_us(steps: Mapping[str, Step], rounds: int = 5) -> dict[str, list[float]]:
    """Time rounds of all steps in turn, in random order: a host that is slower for a while is so for all of them."""
    order = random.Random(0)
    for step in steps.values():
        round_us(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            times[name].append(round_us(steps[name]))
    return times


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

    def add(work: str, times: dict[str, list[float]], train: bool) -> None:
        record.add(
            work=f"host time, {work}",
            **{f"{name}_us": median(us) for name, us in times.items()},
            **{f"module_over_{name}": ratio(times, "module", name) for name in times if name != "module"},
            plan=str(attn.plan_for(128, torch.bfloat16, train)),
        )

    with torch.no_grad():
        add("forward", rounds_us({"aten": aten_forward, "module": lambda: attn(q, k, v)}), False)
    both = {"aten": aten_both, "module": module_both, "aten_under_autograd": op_both}
    for threads in (True, False):
        with torch.autograd.set_multithreading_enabled(threads):
            add(f"forward+backward, autograd {'with' if threads else 'without'} its own threads", rounds_us(both), True)


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
    need_gpus()
    profile = None if arguments.profile == "none" else arguments.profile
    record = Record("launch", arguments.output)
    host_time(record, profile)
    varied_lengths(record, arguments.varied_profile or profile)


if __name__ == "__main__":
    main()
