"""Holds a kernel with dropout against float64, by the mask that it turns out to have drawn.

Values that are columns of the identity show the weights themselves, and with the same random numbers the same ones are
dropped of any values.

Legend: N blocks, M rows, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ringattn.hardware.kernel_faults import Figure
from ringattn.kernels import math as kernels_math
from ringattn.kernels.contract import BoundDropout, DropoutForward, KernelConfig
from ringattn.random_state import RandomState

DROPOUT = 0.25


def shown_weights(forward: DropoutForward, random: RandomState, q: Tensor, k: Tensor, value_dim: int) -> Tensor:
    """Return the weights (N, H, M, M), dropped ones 0, that ``forward`` gives its values for these random numbers."""
    rows = k.shape[1]
    parts = []
    for first in range(0, rows, value_dim):
        values = torch.zeros((*k.shape[:3], value_dim), dtype=k.dtype, device=k.device)
        shown = range(first, min(first + value_dim, rows))
        for column, row in enumerate(shown):
            values[:, row, :, column] = 1.0
        with random.again():
            out, _, _ = forward(q, k, values)
        parts.append(out[..., : len(shown)].transpose(1, 2))
    return torch.cat(parts, -1)


def exact_results(
    kernel: BoundDropout, config: KernelConfig, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, exact_on: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor], Figure]:
    """Return what the kernel gives and what float64 makes of the weights that it kept, and how many of them it kept.

    out, lse, dq, dk and dv each. The share that is kept, of weights that causality and a window leave, may be 7
    standard deviations from 1 - p, which chance exceeds once in 4e11 checks, and 1/256, to which FlashAttention 2
    rounds it.
    """
    random = RandomState.now(q.device)
    weights = shown_weights(kernel.forward, random, q, k, v.shape[3]).to(exact_on)
    with random.again():
        out, lse, state = kernel.forward(q, k, v)
    found = {"out": out, "lse": lse}
    found |= dict(zip(("dq", "dk", "dv"), kernel.backward(dout, q, k, v, out, lse, state), strict=True))

    n, heads, rows, _ = weights.shape
    kv_heads = k.shape[2]
    kept = (weights > 0).view(n, kv_heads, heads // kv_heads, rows, rows)

    def factors(block: Tensor, of_rows: slice, of_keys: slice) -> Tensor:
        return kept[..., of_rows, of_keys].to(block.dtype) / (1.0 - config.dropout)

    fixed: dict[str, Any] = {"causal": config.causal, "scale": config.scale, "factors": factors}
    fixed |= {"window": config.window, "softcap": config.softcap}
    exact_q, exact_k, exact_v, exact_dout = (x.to(exact_on).double() for x in (q, k, v, dout))
    exact_out, exact_lse = kernels_math.forward(exact_q, exact_k, exact_v, **fixed)
    grads = kernels_math.backward(exact_dout, exact_q, exact_k, exact_v, exact_out, exact_lse, **fixed)
    exact = {"out": exact_out, "lse": exact_lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    seen = torch.ones(rows, rows, dtype=torch.bool, device=exact_on)
    seen = seen.tril() if config.causal else seen
    seen = seen.triu(1 - config.window) if config.window else seen
    p, of_seen = config.dropout, kept[..., seen].double()
    bound = 7.0 * math.sqrt(p * (1.0 - p) / of_seen.numel()) + 1.0 / 256
    return found, exact, Figure("share of kept weights", abs(float(of_seen.mean()) - (1.0 - p)), bound)
