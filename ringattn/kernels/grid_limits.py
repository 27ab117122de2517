"""Splits calls too large for a kernel along the block axis, and marks rows without a finite logit in its LSE.

Parts are slices: inputs are not copied, results are joined once. Everything within the limits goes straight through.

Legend: N blocks, M rows, H query heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .contract import BoundKernel, Forward, Grads

MAX_GRID = 65535  # CUDA's limit of the second and third grid dimension, where kernels put heads and blocks
FLASH_2_MAX_ELEMENTS = 2**31  # its backward's offsets into the dq accumulator are 32 bits (flash-attention#2260)


def flash_2_elements(blocks: int, rows: int, heads: int, head_dim: int) -> int:
    """Return the elements of the padded float32 dq accumulator of FlashAttention 2's backward."""
    padded_head_dim = -(-head_dim // 32) * 32 if head_dim <= 128 else -(-head_dim // 64) * 64
    return blocks * heads * (-(-rows // 128) * 128) * padded_head_dim


def without_empty_rows(lse_NHM: Tensor) -> Tensor:
    """Return the final LSE with +inf for -inf, so that no row of a backward that computes exp(s - lse) is NaN."""
    return torch.nan_to_num(lse_NHM, nan=math.nan, posinf=math.inf, neginf=math.inf)


def flash_2_empty_rows(lse_NHM: Tensor) -> Tensor:
    """Return FlashAttention 2's LSE with -inf for the +inf, beside out 0, of a row of which every logit is -inf.

    It says +inf of a row with NaN, too, and of empty rows of full blocks beside an out of NaN: that stays in whatever
    it is merged with.
    """
    return torch.nan_to_num(lse_NHM, nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def cutlass_empty_rows(lse_NHM: Tensor, q_NMHD: Tensor, k_NMHD: Tensor, scale: float) -> Tensor:
    """Return CUTLASS's LSE with -inf for the 0, beside out 0, of a row of which every logit is -inf.

    A true LSE can be 0, too; what tells is the first key, which every row sees: nothing waits for the device.
    """
    first_NHM = torch.matmul(q_NMHD.transpose(1, 2), k_NMHD[:, :1].permute(0, 2, 3, 1)).squeeze(-1)
    return lse_NHM.masked_fill((lse_NHM == 0) & (first_NHM * scale == -math.inf), -math.inf)


def in_parts(kernel: BoundKernel, *, flash_2_backward: bool = False) -> BoundKernel:
    """Wrap ``kernel`` so that no call has more than 65,535 blocks, nor passes FlashAttention 2's limit."""
    whole_backward, whole_differentiable = kernel.backward, kernel.differentiable

    def most_blocks(rows: int, heads: int, head_dim: int) -> int:
        """Return the most blocks of one call of the backward."""
        if not flash_2_backward:
            return MAX_GRID
        return min(MAX_GRID, FLASH_2_MAX_ELEMENTS // flash_2_elements(1, rows, heads, head_dim))

    def backward(*tensors: Tensor, **into: Grads) -> Grads:
        blocks, *row_shape = tensors[1].shape
        most = most_blocks(*row_shape)
        if blocks <= most:
            return whole_backward(*tensors, **into)
        made: list[Grads] = []
        for part in _parts(blocks, most):
            inputs = [x[part] for x in tensors]
            made.append(whole_backward(*inputs, **{name: _part_of(grads, part) for name, grads in into.items()}))
        dq, dk, dv = into.get("grads") or map(torch.cat, zip(*made, strict=True))
        return dq, dk, dv

    def differentiable(shape: Sequence[int], /) -> Forward | None:
        return whole_differentiable(shape) if shape[0] <= most_blocks(*shape[1:]) else None

    return kernel._replace(
        forward=_forward_in_parts(kernel.forward),
        backward=backward,
        differentiable=differentiable,
        one_query=kernel.one_query and _forward_in_parts(kernel.one_query),
    )


def _forward_in_parts(whole: Forward) -> Forward:
    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        if q.shape[0] <= MAX_GRID:
            return whole(q, k, v)
        parts = [whole(q[part], k[part], v[part]) for part in _parts(q.shape[0], MAX_GRID)]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    return forward


def _part_of(grads: Grads, part: slice) -> Grads:
    dq, dk, dv = grads
    return dq[part], dk[part], dv[part]


def _parts(blocks: int, most: int) -> list[slice]:
    return [slice(begin, min(begin + most, blocks)) for begin in range(0, blocks, most)]
