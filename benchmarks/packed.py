"""32 documents packed into 65536 tokens, Llama-8B's heads (32/8 of 128), causal bf16: the module against bare kernels.

    python benchmarks/packed.py [--output FOLDER] [--profile auto|none|FILE]
    python benchmarks/packed.py --device cpu --documents 5 --tokens 512 --heads 4 --kv-heads 2 --head-dim 16

Bare kernels are the entries for packed sequences that this machine has, called with what the module would give them.
The module is timed as its plan has it, and with each of these kernels named. "documents" is the plan that runs them one
after the other. Forward is timed without gradients; forward+backward goes through autograd, as users call it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from common import Clock, Record, Step, median, need_gpus, ratio

from ringattn import Documents, RingAttention, detect
from ringattn.dtypes import DTYPE_NAMES
from ringattn.kernels.contract import KernelConfig, KernelNeed, Sequences
from ringattn.kernels.registry import KERNELS


def uneven(documents: int, tokens: int, seed: int = 0) -> list[int]:
    """Return bounds of so many documents, between cuts that are anywhere."""
    cuts = random.Random(seed).sample(range(1, tokens), documents - 1)
    return [0, *sorted(cuts), tokens]


class HostClock:
    """Clock like ``Clock`` by the host's time: for a machine without a GPU."""

    def blocks_ms(self, steps: Mapping[str, Step], blocks: int = 5, warmup: int = 1) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(warmup + blocks):
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                if turn >= warmup:
                    times[name].append((time.perf_counter() - begin) * 1e3)
        return times


class Packed:
    """The inputs, and the steps on them by name and direction."""

    def __init__(self, arguments: argparse.Namespace):
        a, device = arguments, torch.device(arguments.device)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.bounds = uneven(a.documents, a.tokens)
        self.documents = Documents(self.bounds)
        self.longest = max(end - begin for begin, end in zip(self.bounds, self.bounds[1:], strict=False))
        shapes = [(1, a.tokens, heads, a.head_dim) for heads in (a.heads, a.kv_heads, a.kv_heads, a.heads)]
        self.q, self.k, self.v, self.dout = (torch.randn(shape, device=device, dtype=self.dtype) for shape in shapes)
        self.leaves = [x.requires_grad_() for x in (self.q, self.k, self.v)]
        self.sequences = Sequences(
            tuple(self.bounds), self.longest, torch.tensor(self.bounds, dtype=torch.int32, device=device)
        )

    def module(self, attn: RingAttention) -> tuple[Step, Step]:
        def forward():
            with torch.no_grad():
                return attn(*self.leaves, cu_seqlens=self.documents)

        return forward, lambda: torch.autograd.grad(
            attn(*self.leaves, cu_seqlens=self.documents), self.leaves, self.dout
        )

    def bare(self, name: str) -> tuple[Step, Step]:
        q, k, v, dout = (x.detach()[0] for x in (self.q, self.k, self.v, self.dout))
        load = KERNELS[name].load_varlen
        assert load is not None
        kernel = load(KernelConfig(causal=True, scale=q.shape[-1] ** -0.5, dtype=DTYPE_NAMES[self.dtype]))

        def both():
            out, lse = kernel.forward(q, k, v, self.sequences)
            return kernel.backward(dout, q, k, v, out, lse.contiguous(), self.sequences)

        return lambda: kernel.forward(q, k, v, self.sequences), both

    def entries(self) -> list[str]:
        """Return the kernels that can run it in one call here, both ways; math where there is nothing else."""
        facts = detect(self.q.device)
        _, tokens, heads, head_dim = self.q.shape
        need = KernelNeed(
            facts.vendor, facts.arch, DTYPE_NAMES[self.dtype], head_dim, heads, self.k.shape[2], self.longest,
            len(self.bounds) - 1, causal=True, backward=True, packed_rows=tokens,
        )  # fmt: skip
        able = [name for name, kernel in KERNELS.items() if not kernel.unsupported_reasons(need, facts)]
        return [name for name in able if name != "math"] or able


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for packed.json")
    parser.add_argument("--profile", default="auto", help="auto, none (heuristic) or a profile file")
    parser.add_argument("--device", default="cuda")
    for option, value in (("documents", 32), ("tokens", 65536), ("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{option}", type=int, default=value)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        need_gpus()
    packed = Packed(arguments)
    shape = {"num_heads": arguments.heads, "head_dim": arguments.head_dim, "num_kv_heads": arguments.kv_heads}
    shape |= {"causal": True, "device": arguments.device}
    profile = None if arguments.profile == "none" else arguments.profile
    attn = RingAttention(**shape, profile=profile)
    names = packed.entries()
    steps = {"module": packed.module(attn)}
    for name in names:
        steps[f"bare {name}"] = packed.bare(name)
        steps[f"module {name}"] = packed.module(RingAttention(**shape, profile=None, backend=name))
    clock = Clock() if arguments.device == "cuda" else HostClock()
    record = Record("packed", arguments.output) if arguments.device == "cuda" else None
    for number, direction in enumerate(("forward", "forward+backward")):
        times = clock.blocks_ms({name: pair[number] for name, pair in steps.items()})
        best = min((f"bare {name}" for name in names), key=lambda name: median(times[name]))
        row = {
            "work": f"{arguments.documents} documents in {arguments.tokens} tokens, {direction}",
            "best": best,
            "module_over_best": ratio(times, "module", best),
            "same_kernel_over_bare": {name: ratio(times, f"module {name}", f"bare {name}") for name in names},
            "ms": {name: round(median(values), 4) for name, values in times.items()},
            "plan": str(plan_of(attn, packed, direction != "forward")),
        }
        if record is None:
            print(row)
        else:
            record.add(**row)


def plan_of(attn: RingAttention, packed: Packed, train: bool) -> object:
    count, longest, positions = packed.documents.sizes(1, packed.q.shape[1])
    row = attn.plan.plan_at(longest, DTYPE_NAMES[packed.dtype], train, count, packed_tokens=positions)
    return replace(row.runnable(), origin=None)


if __name__ == "__main__":
    main()
