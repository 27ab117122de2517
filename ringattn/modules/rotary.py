"""Rotary position embeddings by the true positions of rows, which over several ranks are not 0, 1, 2 and so on.

Legend: B batch, S sequence, H heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.arguments import is_finite, shown
from ringattn.errors import InputError


def check_rotary(base: float | None, head_dim: int) -> float | None:
    """Return the base; InputError unless it is None, or > 1 with an even head dimension."""
    if base is None:
        return None
    if not is_finite(base) or base <= 1 or head_dim % 2:
        raise InputError(
            f"rotary_base is {shown(base)} and head_dim {head_dim}; it must be a number > 1, and head_dim even, or None"
        )
    return float(base)


def rotated(x_BSHD: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate pairs (i, i + D / 2) of x by angles ``positions * base ** (-2 i / D)``; positions are (S,) or (B, S)."""
    half = x_BSHD.shape[-1] // 2
    if positions.shape not in (x_BSHD.shape[1:2], x_BSHD.shape[:2]):
        raise InputError(f"positions has shape {tuple(positions.shape)}; it must be (S,) or (B, S) of the queries")
    # float32 and wider: angles of late positions are thousands of turns
    wide = torch.float64 if x_BSHD.dtype == torch.float64 else torch.float32
    frequencies = base ** (-torch.arange(half, device=x_BSHD.device, dtype=wide) / half)
    angles = (positions.to(x_BSHD.device, wide)[..., None] * frequencies).unsqueeze(-2)
    if positions.dim() == 1:
        angles = angles.unsqueeze(0)
    cos, sin = angles.cos(), angles.sin()
    first, second = torch.split(x_BSHD.to(wide), half, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x_BSHD.dtype)
