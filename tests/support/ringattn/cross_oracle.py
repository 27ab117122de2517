"""The float64 result of queries at other positions than the keys, straight from the definition.

Legend: B batch, Sq queries, Sk keys, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringattn import Pattern


def counts(
    pattern: Pattern,
    causal: bool,
    query_positions: Tensor,
    key_positions: Tensor,
    heads: int,
    kv_heads: int,
    window: int | None = None,
) -> Tensor:
    """(H, Sq, Sk): in how many branches each query sees each key."""
    q, k = query_positions[:, None], key_positions[None, :]
    found = torch.zeros(heads, len(query_positions), len(key_positions), dtype=torch.float64)
    group = heads // kv_heads
    longest = int(max(query_positions.max(), key_positions.max())) + 1
    if pattern.dense and not causal:
        return torch.ones_like(found)
    for branch in pattern.resolved(longest):
        for head in range(heads):
            h = head // group
            rule = pattern.head_offset
            offset = h % branch.rate if rule == "interleaved" else h // math.ceil(kv_heads / branch.rate)
            seen = (q // branch.segment == k // branch.segment) & (q >= 0)
            seen = (
                seen & ((q % branch.segment) % branch.rate == offset) & ((k % branch.segment) % branch.rate == offset)
            )
            if causal:
                seen = seen & (k <= q)
            if window is not None:
                seen = seen & (k > q - window)
            found[head] += seen
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, counts_HSS: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, D) and lse (B, H, Sq) in float64, differentiable; counts may be (B, H, Sq, Sk)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    logits = logits + torch.where(counts_HSS > 0, counts_HSS, 1.0).log()
    logits = logits.masked_fill(counts_HSS == 0, -math.inf)
    empty = (counts_HSS == 0).all(-1, keepdim=True).expand(*logits.shape[:-1], 1)
    safe = torch.where(empty, 0.0, logits)
    weights = torch.softmax(safe, -1).masked_fill(empty, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), torch.logsumexp(safe, -1).masked_fill(empty[..., 0], -math.inf)
