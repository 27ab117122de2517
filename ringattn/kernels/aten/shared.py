"""Serves all wrappers of torch's kernels, which are called at the aten level: only there do they give and take the LSE.

The CUDA three (FlashAttention 2, cuDNN, CUTLASS "efficient") return a natural-log float32 LSE and their backwards
accept a merged out and LSE: relative gradient error about 3e-3 against float64 in bf16 on an H100.

The forward ops of flash and flash-cpu have a derivative in torch: the same backward op on what was saved, which makes
dout contiguous. So autograd may take them as they are. Not the others: cudnn's backward keys its plan on the strides of
q, k and v and is silently wrong for another layout of dout; efficient's has no grouped queries.

Legend: N blocks, M rows, H query heads, K key/value heads, D head dimension; kernels that want heads first get a
transposed view, never a copy.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.contract import KernelNeed
from ringattn.kernels.grid_limits import MAX_GRID

ATEN: Any = torch.ops.aten


def heads_first(*tensors_NMHD: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors_NMHD]


@functools.cache
def random_state(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the philox state of dropout: never read without it, but it must be a tensor."""
    return torch.zeros(numbers, dtype=dtype, device=device)


def cuda_reasons(
    need: KernelNeed, dtypes: tuple[str, ...], lowest_sm: int, head_dim_multiple: int, head_dim_max: int
) -> list[str]:
    """Return what a CUDA kernel with these limits lacks for ``need``."""
    reasons = []
    if need.vendor != "nvidia":
        return ["runs on NVIDIA GPUs only"]
    if need.sm < lowest_sm:
        reasons.append(f"needs sm_{lowest_sm} or newer, this is {need.arch}")
    if need.dtype not in dtypes:
        reasons.append(f"no {need.dtype}; it has {', '.join(dtypes)}")
    for name, size in (("head_dim", need.head_dim), ("head_dim_v", need.head_dim_v)):
        if size % head_dim_multiple or size > head_dim_max:
            reasons.append(f"{name} {size}; it needs a multiple of {head_dim_multiple} up to {head_dim_max}")
    if need.dropout and need.blocks > MAX_GRID:
        reasons.append(f"{need.blocks} blocks run in parts, and dropout is of one call")
    if need.heads > MAX_GRID:
        reasons.append(f"{need.heads} heads; its launch grid ends at {MAX_GRID} (pytorch/pytorch#142228)")
    return reasons


def far_rows_faults(need: KernelNeed) -> list[str]:
    """Return why rows lie too far apart for FlashAttention 2 and CUTLASS, whose offsets within 128 rows are 32 bits.

    On an H100 rows 2^24 elements apart end in an illegal address. cuDNN, flash-attn-4 and our own kernel read them.
    """
    if 128 * need.row_elements < 2**31:
        return []
    return [f"rows lie {need.row_elements} elements apart and its 32-bit offsets end within a tile; use gather copy"]
