"""Runs kernels once on a tiny input, in a process of its own: a kernel that kills it costs one line of a diagnosis.

``python -m autotune.report.kernel_check DEVICE NAME:DTYPE:DIRECTIONS ...`` prints one JSON object a line:
``{"begin": NAME}`` before each kernel and ``{"end": NAME, "error": ..., "out": ..., "grads": ...}`` after it.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ROWS, HEADS, HEAD_DIM = 64, 2, 64
SCALE = HEAD_DIM**-0.5
TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def check(name: str, dtype: str, backward: bool, device: str) -> dict[str, float]:
    """Relative 2-norm errors of one kernel against float64: ``out``, and ``grads`` when ``backward``."""
    import torch

    from ringattn.kernels.registry import KERNELS, KernelConfig
    from ringattn.reference import dilated_attention_reference
    from ringattn.workload import Pattern

    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(1, ROWS, HEADS, HEAD_DIM, generator=generator) for _ in range(4)]
    q, k, v, dout = (x.to(device, getattr(torch, TORCH_NAMES[dtype])) for x in wide)
    q_64, k_64, v_64 = (x.double().cpu().requires_grad_() for x in (q, k, v))
    out_64, _ = dilated_attention_reference(q_64, k_64, v_64, Pattern(), True)
    kernel = KERNELS[name].load(KernelConfig(causal=True, scale=SCALE))
    out, lse = kernel.forward(q, k, v)
    errors = {"out": _relative(out, out_64)}
    if backward:
        grads_64 = torch.autograd.grad(out_64, (q_64, k_64, v_64), dout.double().cpu())
        grads = kernel.backward(dout, q, k, v, out, lse)
        errors["grads"] = max(_relative(g, g_64) for g, g_64 in zip(grads, grads_64, strict=True))
    return errors


def _relative(found: Tensor, exact: Tensor) -> float:
    exact = exact.detach()
    return float((found.detach().double().cpu() - exact).norm() / exact.norm())


def main(arguments: list[str]) -> None:
    device, *checks = arguments
    for text in checks:
        name, dtype, directions = text.split(":")
        print(json.dumps({"begin": name}), flush=True)
        try:
            result: dict[str, object] = {"error": "", **check(name, dtype, directions == "both", device)}
        except Exception as error:  # noqa: BLE001 - a broken package may raise anything; all of it is the answer
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"end": name, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
