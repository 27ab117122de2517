"""Dilated attention on one GPU: the module against the sum of its bare kernels and against torchscale.

    [PEERS=FOLDER] python benchmarks/dilated.py [--output FOLDER] [--profile auto|none|FILE] [--prefer balanced]
                                                [--pattern longnet|gigapath] [--lengths ...]

``longnet``: segments 2048..32768, rates 1..16, H16 D128, bf16, causal. ``gigapath``: segments 1024..1048576 of
Prov-GigaPath's slide encoder, H16 D48, bf16, full, lengths that no segment divides. The bare kernels run on compact
rows of their own: what the branches would cost if gathering and merging were free. PEERS is a folder that holds
microsoft/torchscale's package, whose attention is then run on torch's FlashAttention 2. First, for ``longnet``, a
small shape in fp16, eager and as a graph. ``wall`` is a loop of steps that are not waited for one by one.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from common import Clock, Record, looped_ms, median, need_gpus, peak_mib, ratio
from common_kernels import BareKernel, flash_for_torchscale, runnable

from ringattn import RingAttention


@dataclass(frozen=True)
class Pattern:
    heads: int
    head_dim: int
    segments: tuple[int, ...]
    rates: tuple[int, ...]
    causal: bool
    lengths: tuple[int, ...]

    def module(self, profile: str | None, prefer: str | None = None) -> RingAttention:
        branches = list(self.segments), list(self.rates)
        return RingAttention(
            self.heads, self.head_dim, None, *branches, causal=self.causal, profile=profile, prefer=prefer
        )

    def blocks(self, length: int) -> Iterator[tuple[int, int]]:
        """Yield (segments, rows of each) of every branch; the last segment is shorter where none divides the length."""
        for segment, rate in zip(self.segments, self.rates, strict=True):
            whole, rest = divmod(length, min(segment, length))
            yield whole, min(segment, length) // rate
            if rest >= rate:
                yield 1, rest // rate


PATTERNS = {
    "longnet": Pattern(16, 128, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16), True, (65536, 262144, 1048576)),
    "gigapath": Pattern(16, 48, (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), False, (10001, 100003)),
}
KERNELS_ALONE = ("cudnn", "flash-attn-4", "flash")


def bare_sums(tensors: Sequence[torch.Tensor], pattern: Pattern) -> dict[str, list[BareKernel]]:
    """Return the kernels of every branch on compact rows; beyond 2^19 positions, for memory, only cudnn's."""
    length = tensors[0].shape[1]
    rows = max(rows for _, rows in pattern.blocks(length))
    able = runnable("bf16", pattern.head_dim, pattern.heads, rows, 1, pattern.causal)
    names = [name for name in KERNELS_ALONE if name in able]
    names = names if length < 500_000 else names[:1]
    return {
        name: [BareKernel(name, tensors, blocks, rows, pattern.causal) for blocks, rows in pattern.blocks(length)]
        for name in names
    }


def torchscale(folder: str, pattern: Pattern) -> Callable[..., torch.Tensor]:
    """Return torchscale's DilatedAttention on torch's FlashAttention 2, projections left out."""
    sys.path.insert(0, folder)
    import torchscale.component.multihead_attention as heads
    from torchscale.component.dilated_attention import DilatedAttention

    heads.flash_attn_func = flash_for_torchscale
    arguments = types.SimpleNamespace(
        flash_attention=True,
        segment_length=list(pattern.segments),
        dilated_ratio=list(pattern.rates),
        seq_parallel=False,
        multiway=False,
        xpos_rel_pos=False,
        xpos_scale_base=512,
        layernorm_eps=1e-5,
    )
    module = DilatedAttention(
        arguments, pattern.heads * pattern.head_dim, pattern.heads, self_attention=True, subln=False
    )
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(module, name, torch.nn.Identity())

    def attend(q, k, v):
        batch, length = q.shape[:2]
        flat = (x.reshape(batch, length, -1) for x in (q, k, v))
        return module(*flat, is_causal=pattern.causal)[0].view(q.shape)

    return attend


def measure(
    record: Record,
    clock: Clock,
    pattern: Pattern,
    modules: dict[str, RingAttention],
    length: int,
    peer: Callable | None,
) -> None:
    shape = 1, length, pattern.heads, pattern.head_dim
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward_of(attend):
        def step():
            with torch.no_grad():
                attend(*leaves)

        return step

    def both_of(attend):
        return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)

    forward = {name: forward_of(attn) for name, attn in modules.items()}
    both = {name: both_of(attn) for name, attn in modules.items()}
    if peer:
        forward["torchscale"], both["torchscale"] = forward_of(peer), both_of(peer)
    sums = bare_sums((q, k, v, dout), pattern)
    for name, kernels in sums.items():
        forward[f"{name} kernels"] = lambda kernels=kernels: [kernel.forward() for kernel in kernels]
        both[f"{name} kernels"] = lambda kernels=kernels: [(x.forward(), x.backward()) for x in kernels]
    if "cudnn" in sums and "flash-attn-4" in sums:
        mixed = list(zip(sums["cudnn"], sums["flash-attn-4"], strict=True))
        both["cudnn+flash-attn-4 kernels"] = lambda: [(a.forward(), b.backward()) for a, b in mixed]
    for direction, steps in (("forward", forward), ("forward+backward", both)):
        peaks = {name: round(peak_mib(step)) for name, step in steps.items() if "kernels" not in name}
        times = clock.blocks_ms(steps, blocks=7 if length > 100_000 else 11, warmup=1)
        row = {
            f"{mine}_over_{name.replace(' ', '_')}": ratio(times, mine, name)
            for mine in modules
            for name in steps
            if name not in modules
        }
        record.add(
            work=f"{pattern.segments} / {pattern.rates} {'causal' if pattern.causal else 'full'} "
            f"S{length} H{pattern.heads} D{pattern.head_dim} bf16 {direction}",
            **row,
            ms={name: round(median(values), 3) for name, values in times.items()},
            wall_ms={name: round(looped_ms(steps[name], 20), 3) for name in modules},
            peak_mib=peaks,
            plans={
                name: str(attn.plan_for(length, torch.bfloat16, direction != "forward"))
                for name, attn in modules.items()
            },
        )


def warm_up(step: Callable[[], object], seconds: float = 0.3) -> None:
    """Repeat the step until clocks and caches are those of a program that has been running for a while."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        step()
    torch.cuda.synchronize()


def eager_ms(step: Callable[[], object]) -> float:
    """Return what a caller waits for: host and device together."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure_small(record: Record, clock: Clock, profile: str | None) -> None:
    """Measure fp16 B1 H8 D64, [1024, 2048, 4096]/[1, 2, 4], forward: eager and replayed from a CUDA graph."""
    attn = RingAttention(8, 64, None, [1024, 2048, 4096], [1, 2, 4], causal=True, profile=profile)
    for length in (4096, 8192, 16384):
        inputs = [torch.randn(1, length, 8, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
        step = functools.partial(attn, *inputs)
        with torch.no_grad():
            warm_up(step)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            peak = peak_mib(step)
            eager = [eager_ms(step) for _ in range(30)]
            replayed = clock.blocks_ms({"graph": graph.replay}, blocks=30)["graph"]
        record.add(
            work=f"fp16 causal B1 H8 D64 [1024,2048,4096]/[1,2,4] S{length} forward",
            eager_ms=median(eager),
            graph_ms=median(replayed),
            peak_mib=peak,
            plan=str(attn.plan_for(length, torch.float16, False)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for dilated.json")
    parser.add_argument("--profile", default="auto", help="auto, none (heuristic) or a profile file")
    parser.add_argument("--prefer", choices=["time", "memory", "balanced"], help="also the module that prefers so")
    parser.add_argument("--pattern", choices=PATTERNS, default="longnet")
    parser.add_argument("--lengths", type=int, nargs="+", help="instead of the pattern's own")
    arguments = parser.parse_args()
    need_gpus()
    profile = None if arguments.profile == "none" else arguments.profile
    preferences = {"module": None}
    if arguments.prefer:
        preferences[f"module_{arguments.prefer}"] = arguments.prefer
    pattern = PATTERNS[arguments.pattern]
    modules = {name: pattern.module(profile, prefer) for name, prefer in preferences.items()}
    record, clock = Record("dilated", arguments.output), Clock()
    if arguments.pattern == "longnet":
        measure_small(record, clock, profile)
    peer = torchscale(os.environ["PEERS"], pattern) if os.environ.get("PEERS") else None
    for length in arguments.lengths or pattern.lengths:
        # torchscale runs out of memory above 500,000 positions
        measure(record, clock, pattern, modules, length, peer if length < 500_000 else None)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
