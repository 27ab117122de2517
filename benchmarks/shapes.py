"""Shapes that people train and serve: the module against what torch dispatches to and the best bare kernels.

    python benchmarks/shapes.py [--output FOLDER] [--profile none|auto|FILE] [--only TEXT ...] [--direction both|...]

Two clocks, each paired in blocks of random order. ``device``: events around a step, L2 flushed, the host ahead.
``wall``: many steps in a row, not waited for one by one, as a program's loop has them. ``torch`` is
``F.scaled_dot_product_attention`` under autograd; bare kernels have their two launches called without it. A row's
``over_torch`` is the module's time over torch's, ``over_best`` over the best of torch and the bare kernels. A profile's
plans for a loop of calls are ``profile``, to be judged by the wall, those for a CUDA graph ``captured``, by the device.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from common import Clock, Record, Step, looped_ms, median, need_gpus, ratio
from common_kernels import BareKernel, runnable

from ringattn import RingAttention
from ringattn.dtypes import TORCH_DTYPES


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return (
            f"B{self.batch} S{self.length} H{heads} D{self.head_dim} {self.dtype} {'causal' if self.causal else 'full'}"
        )


SHAPES = (
    Shape(1, 8192, 32, 8, 128, True),
    Shape(2, 4096, 32, 32, 96, True),
    Shape(1, 8192, 16, 8, 256, True),
    Shape(64, 197, 12, 12, 64, False),
    Shape(32, 512, 12, 12, 64, False),
    Shape(1, 1024, 16, 16, 128, True),
    Shape(1, 4096, 16, 16, 128, True),
    Shape(1, 16384, 16, 16, 128, True),
    Shape(1, 65536, 16, 16, 128, True),
    Shape(4, 2048, 32, 32, 80, True),
    Shape(2, 4096, 16, 16, 192, True),
    Shape(1, 4096, 8, 8, 256, False),
    Shape(4, 2048, 64, 8, 128, True),
    Shape(1, 16384, 64, 8, 128, True),
    Shape(2, 4096, 32, 1, 128, True),
    Shape(8, 2048, 16, 16, 64, True),
    Shape(1, 32768, 16, 16, 64, True),
    Shape(16, 577, 16, 16, 64, False),
    Shape(8, 1024, 16, 16, 64, False, "fp16"),
    Shape(1, 5000, 32, 8, 128, True),
    Shape(1, 8192, 32, 8, 128, True, "fp16"),
    Shape(1, 3001, 24, 24, 96, False),
)


def walls_ms(steps: Mapping[str, Step], blocks: int) -> dict[str, list[float]]:
    """Time rounds of about 15 ms of every step in turn."""
    order = random.Random(0)
    calls = {name: max(3, min(200, int(15 / looped_ms(step, 3)))) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(blocks):
        for name in order.sample(list(steps), len(steps)):
            times[name].append(looped_ms(steps[name], calls[name]))
    return times


def module_steps(attn: RingAttention, tensors: list[torch.Tensor]) -> dict[str, Step]:
    *leaves, dout = tensors

    def forward() -> object:
        with torch.no_grad():
            return attn(*leaves)

    return {"infer": forward, "train": lambda: torch.autograd.grad(attn(*leaves), leaves, dout)}


def torch_steps(shape: Shape, tensors: list[torch.Tensor]) -> dict[str, Step]:
    *leaves, dout = tensors
    grouped = shape.heads != shape.kv_heads

    def attend() -> torch.Tensor:
        heads_first = [x.transpose(1, 2) for x in leaves]
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=shape.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    def forward() -> object:
        with torch.no_grad():
            return attend()

    return {"infer": forward, "train": lambda: torch.autograd.grad(attend(), leaves, dout)}


def bare_steps(kernel: BareKernel) -> dict[str, Step]:
    return {"infer": kernel.forward, "train": lambda: (kernel.forward(), kernel.backward())}


def measure(
    record: Record, clock: Clock, shape: Shape, askers: Mapping[str, tuple[object, str]], modes: list[str]
) -> None:
    sizes = [shape.heads, shape.kv_heads, shape.kv_heads, shape.heads]
    dtype = TORCH_DTYPES[shape.dtype]
    tensors = [torch.randn(shape.batch, shape.length, n, shape.head_dim, device="cuda", dtype=dtype) for n in sizes]
    bare = {
        name: BareKernel(name, tensors, shape.batch, shape.length, shape.causal)
        for name in runnable(
            shape.dtype, shape.head_dim, shape.heads, shape.length, shape.batch, shape.causal, shape.kv_heads
        )
        if name in ("cudnn", "flash", "flash-attn-4")
    }
    leaves = [x.requires_grad_() for x in tensors[:3]]
    modules = {
        name: RingAttention(
            shape.heads, shape.head_dim, shape.kv_heads, causal=shape.causal, profile=profile, launch=launch
        )
        for name, (profile, launch) in askers.items()
    }
    steps = {name: module_steps(attn, [*leaves, tensors[3]]) for name, attn in modules.items()}
    steps["torch"] = torch_steps(shape, [*leaves, tensors[3]])
    steps |= {name: bare_steps(kernel) for name, kernel in bare.items()}
    for mode in modes:
        of_mode = {name: each[mode] for name, each in steps.items()}
        device = clock.blocks_ms(of_mode, blocks=9)
        wall = walls_ms(of_mode, blocks=7)
        row: dict[str, object] = {"work": f"{shape} {mode}"}
        for clock_name, times in (("device", device), ("wall", wall)):
            others = [name for name in of_mode if name not in modules]
            best = min(others, key=lambda name: median(times[name]))
            row[f"{clock_name}_ms"] = {name: round(median(values), 4) for name, values in times.items()}
            row[f"{clock_name}_best"] = best
            for name in modules:
                row[f"{clock_name}_{name}_over_torch"] = ratio(times, name, "torch")
                row[f"{clock_name}_{name}_over_best"] = ratio(times, name, best)
        for name, attn in modules.items():
            row[f"plan_{name}"] = str(attn.plan_for(shape.length, dtype, mode == "train", shape.batch))
        record.add(**row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for shapes.json")
    parser.add_argument("--profile", default="none", help="also the module with this profile: auto, or a file")
    parser.add_argument("--only", nargs="*", default=[], help="shapes whose text holds one of these")
    parser.add_argument("--modes", nargs="+", default=["train", "infer"], choices=["train", "infer"])
    arguments = parser.parse_args()
    need_gpus()
    askers: dict[str, tuple[object, str]] = {"heuristic": (None, "eager")}
    if arguments.profile != "none":
        askers |= {"profile": (arguments.profile, "eager"), "captured": (arguments.profile, "captured")}
    record, clock = Record("shapes", arguments.output), Clock()
    for shape in SHAPES:
        if not arguments.only or any(text in str(shape) for text in arguments.only):
            measure(record, clock, shape, askers, arguments.modes)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
