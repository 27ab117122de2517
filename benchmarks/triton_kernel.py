"""Our Triton kernel against torch's own kernels on one GPU, in float32, TF32 and bfloat16.

    python benchmarks/triton_kernel.py [--output FOLDER]    # TFLOP/s and relative error of every kernel that can run
    python benchmarks/triton_kernel.py --tiles              # every tile of the triton kernel as well

FLOPs are those of the matrix products: 4 M M' D a head forward and 10 backward, half of it when causal. ``rivals`` is
the time of the fastest kernel of torch over that of this one (float32's for TF32, which torch's kernels lack). The
error is the relative 2-norm of out, or of the worst gradient, against float64 at 1024 rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from common import Clock, Record, median, need_gpus, ratio

from ringattn import detect
from ringattn.hardware.facts import HardwareFacts
from ringattn.kernels.contract import BoundKernel, KernelConfig, KernelNeed, Params
from ringattn.kernels.registry import KERNELS
from ringattn.runtime.program import TORCH_DTYPES
from ringattn.workload import ParamValue

RIVALS = ("cudnn", "flash", "efficient")
DTYPES = ("fp32", "tf32", "bf16", "fp16")
ERROR_ROWS = 1024


@dataclass(frozen=True)
class Shape:
    blocks: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    def tensors(self, dtype: str, rows: int) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(0)
        sizes = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [
            torch.randn(self.blocks, rows, heads, self.head_dim, generator=generator, device="cuda").to(
                TORCH_DTYPES[dtype]
            )
            for heads in sizes
        ]

    def flops(self, backward: bool) -> float:
        products = 10 if backward else 4
        return products * self.blocks * self.heads * self.rows**2 * self.head_dim / (2 if self.causal else 1)

    def need(self, dtype: str, backward: bool, facts: HardwareFacts) -> KernelNeed:
        return KernelNeed(
            vendor=facts.vendor,
            arch=facts.arch,
            dtype=dtype,
            head_dim=self.head_dim,
            heads=self.heads,
            kv_heads=self.kv_heads,
            rows=self.rows,
            blocks=self.blocks,
            causal=self.causal,
            backward=backward,
            span_elements=self.blocks * self.rows * self.heads * self.head_dim,
        )


def contenders(
    shape: Shape, dtype: str, backward: bool, facts: HardwareFacts, all_tiles: bool
) -> dict[str, BoundKernel]:
    """Return our kernel with its default tiles (or all), and torch's on the same tensors."""
    found = {}
    for name in ("triton", *RIVALS):
        compute = "fp32" if dtype == "tf32" and name != "triton" else dtype
        need = shape.need(compute, backward, facts)
        if KERNELS[name].unsupported_reasons(need, facts):
            continue
        for params in searched(KERNELS[name].params(need), compute, all_tiles):
            config = KernelConfig(shape.causal, shape.head_dim**-0.5, params=params, dtype=compute)
            label = " ".join((name, *(f"{tile}={value}" for tile, value in params.items())))
            found[label] = KERNELS[name].load(config)
    return found


def searched(listed: Params, dtype: str, all_tiles: bool) -> list[dict[str, ParamValue]]:
    """Return the parameters to time: every tile of one step beside the others' defaults, or the defaults alone."""
    if all_tiles and listed:
        return [{tile: value} for tile, values in listed.items() for value in values]
    if dtype == "fp32" and listed:  # one of each way to make the products of float32
        precisions = ("ieee", "tf32x3")
        return [{tile: _first(values, precision) for tile, values in listed.items()} for precision in precisions]
    return [{}]


def _first(values: Iterable[ParamValue], precision: str) -> ParamValue:
    return next(value for value in values if str(value).endswith(precision))


def step_of(kernel: BoundKernel, tensors: list[torch.Tensor], backward: bool) -> Callable[[], object]:
    q, k, v, dout = tensors
    if not backward:
        return lambda: kernel.forward(q, k, v)
    out, lse = kernel.forward(q, k, v)
    lse = lse.contiguous()
    return lambda: kernel.backward(dout, q, k, v, out, lse)


def errors(shape: Shape, dtype: str, kernels: dict[str, BoundKernel], backward: bool) -> dict[str, float]:
    q, k, v, dout = shape.tensors(dtype, min(shape.rows, ERROR_ROWS))
    q_64, k_64, v_64 = (x.double() for x in (q, k, v))
    exact = KERNELS["math"].load(KernelConfig(shape.causal, shape.head_dim**-0.5, dtype="fp64"))
    out_64, lse_64 = exact.forward(q_64, k_64, v_64)
    grads_64 = exact.backward(dout.double(), q_64, k_64, v_64, out_64, lse_64)
    found = {}
    for label, kernel in kernels.items():
        out, lse = kernel.forward(q, k, v)
        pairs = [(out, out_64)]
        if backward:
            pairs = list(zip(kernel.backward(dout, q, k, v, out, lse.contiguous()), grads_64, strict=True))
        found[label] = max(float((x.double() - x_64).norm() / x_64.norm()) for x, x_64 in pairs)
    return found


def measure(record: Record, clock: Clock, shape: Shape, dtype: str, backward: bool, all_tiles: bool) -> None:
    tensors = shape.tensors(dtype, shape.rows)
    kernels = contenders(shape, dtype, backward, detect(), all_tiles)
    common = {"direction": "backward" if backward else "forward", "dtype": dtype, "rows": shape.rows}
    steps = {}
    for label, kernel in kernels.items():
        try:
            step = step_of(kernel, tensors, backward)
            step()
            torch.cuda.synchronize()
        except Exception as fault:  # noqa: BLE001 - a contender that cannot run is a row of the result
            fault_line = f"{type(fault).__name__}: {' '.join(str(fault).split())[:100]}"
            record.add(**common, head_dim=shape.head_dim, kernel=label, fault=fault_line)
            continue
        steps[label] = step
    times = clock.blocks_ms(steps, blocks=7, warmup=1)
    found = errors(shape, dtype, {label: kernels[label] for label in steps}, backward)
    rivals = [label for label in steps if label in RIVALS]
    best = min(rivals, key=lambda label: median(times[label]), default=None)
    for label in steps:
        ms = median(times[label])
        row = {"ms": ms, "tflops": shape.flops(backward) / ms / 1e9, "error": f"{found[label]:.1e}"}
        if best and label not in RIVALS:
            row["rivals"] = ratio(times, best, label)
        record.add(**common, head_dim=shape.head_dim, kernel=label, **row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for triton_kernel.json")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "tf32", "bf16"], choices=DTYPES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--full", action="store_true", help="every key instead of causal")
    parser.add_argument("--tiles", action="store_true", help="every tile of the triton kernel")
    arguments = parser.parse_args()
    need_gpus()
    record, clock = Record("triton_kernel", arguments.output), Clock()
    heads, kv_heads = arguments.heads, arguments.kv_heads
    for head_dim in arguments.head_dims:
        for rows in arguments.lengths:
            shape = Shape(max(1, 16384 // rows), rows, heads, kv_heads, head_dim, not arguments.full)
            for dtype in arguments.dtypes:
                for backward in (False, True):
                    measure(record, clock, shape, dtype, backward, arguments.tiles)


if __name__ == "__main__":
    main()
