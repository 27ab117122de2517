"""Dense attention in float64 under any boolean mask, and what ``Keys`` describes as such a mask.

Legend: B batch, S queries or keys, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
from cross_oracle import attend
from torch import Tensor

from ringattn.modules.masks import Keys


def masked(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, allowed_BSS: Tensor, scale: float | None = None) -> Tensor:
    """out (B, S, H, D) in float64, differentiable; a query without a key gives 0."""
    batch, queries, keys = len(q_BSHD), q_BSHD.shape[1], k_BSHD.shape[1]
    counts = allowed_BSS.expand(batch, queries, keys).double()[:, None]
    return attend(q_BSHD, k_BSHD, v_BSHD, counts, scale)[0]


def allowed_by(keys: Keys, batch: int, queries: int) -> Tensor:
    """(B, Sq, L): which keys each query attends to, straight from the words of ``Keys``."""
    codes = keys.codes.expand(batch, -1)
    at = torch.arange(keys.length)
    if not keys.causal and keys.single:
        return (codes > 0)[:, None].expand(batch, queries, -1)
    own = at[keys.length - queries :]
    allowed = (codes[:, own, None] == codes[:, None]) & (codes[:, None] > 0)
    if keys.causal:
        allowed = allowed & (at <= own[:, None])
    return allowed if keys.window is None else allowed & (at > own[:, None] - keys.window)
