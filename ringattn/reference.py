"""Computes exact attention straight from the definition: the oracle of every optimised path.

Slow on purpose: it builds the boolean selection of every branch. Nothing that is optimised may import it.

Legend: B batch, S length, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .workload import Pattern


def _head_offsets(kv_heads: int, rate: int, rule: str) -> list[int]:
    if rule == "interleaved":
        return [h % rate for h in range(kv_heads)]
    per_offset = math.ceil(kv_heads / rate)
    return [h // per_offset for h in range(kv_heads)]


def dilated_attention_reference(
    q_BSHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    pattern: Pattern,
    causal: bool,
    scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over the multiset union of the keys that the branches of ``pattern`` select for each query.

    A position p is selected for key/value head h by a branch (w, r) when ``(p mod w) mod r`` is the head's
    offset; a selected query sees the selected keys of its segment, the causal one only those at or before it.
    A key seen through two branches counts twice, which is what merging the branches by their log-sum-exp does
    (LongNet, arXiv:2307.02486, equations 9-11 with the exact weights).

    Args:
        q_BSHD: (B, S, H, D), any floating dtype; computed in that dtype. k: (B, S, Hkv, D), v: (B, S, Hkv, Dv).
        scale: factor on the logits; None is 1 / sqrt(D).
        window: a position sees no more than so many, those that end with itself.
        softcap: logits s become softcap * tanh(s / softcap).
        sinks_H: (H,), one more logit of every position that sees any, of a key whose value is 0.

    Returns:
        out (B, S, H, Dv) and lse (B, H, S), natural log, both differentiable. A logit of -inf has weight 0 and no
        gradient; a position without any other, as one that no branch selects, gives 0 and -inf, and no gradient. A
        logit of +inf or NaN makes its position NaN.
    """
    batch, length, heads, head_dim = q_BSHD.shape
    kv_heads = k_BSHD.shape[2]
    group = heads // kv_heads
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    k_BSHD = k_BSHD.repeat_interleave(group, dim=2)
    v_BSHD = v_BSHD.repeat_interleave(group, dim=2)
    logits_BHSS = _logits(q_BSHD, k_BSHD, scale)
    if softcap is not None:
        logits_BHSS = softcap * torch.tanh(logits_BHSS / softcap)

    position = torch.arange(length, device=q_BSHD.device)
    count_HSS = torch.zeros(heads, length, length, dtype=torch.int64, device=q_BSHD.device)
    for branch in pattern.resolved(length):
        same_segment_SS = (position[:, None] // branch.segment) == (position[None, :] // branch.segment)
        for kv_head, offset in enumerate(_head_offsets(kv_heads, branch.rate, pattern.head_offset)):
            selected_S = (position % branch.segment) % branch.rate == offset
            seen_SS = same_segment_SS & selected_S[:, None] & selected_S[None, :]
            if causal:
                seen_SS = seen_SS & (position[None, :] <= position[:, None])
            if window is not None:
                seen_SS = seen_SS & (position[None, :] > position[:, None] - window)
            count_HSS[kv_head * group : (kv_head + 1) * group] += seen_SS

    seen_HSS = count_HSS > 0
    # log(count) adds a key once per branch that shows it; an empty row is kept free of NaN in both directions
    # by giving it dummy logits and zeroing what comes of them.
    weighted = logits_BHSS + torch.where(seen_HSS, count_HSS, 1).to(logits_BHSS.dtype).log()
    weighted = weighted.masked_fill(~seen_HSS, -math.inf)
    empty_BHS1 = (weighted == -math.inf).all(-1, keepdim=True)
    weighted = torch.where(empty_BHS1, torch.zeros_like(weighted), weighted)
    if sinks_H is not None:
        sinks_BHS1 = sinks_H[:, None, None].expand(batch, heads, length, 1)
        weighted = torch.cat((weighted, sinks_BHS1), -1)
        v_BSHD = torch.cat((v_BSHD, torch.zeros_like(v_BSHD[:, :1])), 1)
    weights = torch.softmax(weighted, dim=-1).masked_fill(empty_BHS1, 0.0)
    out_BSHD = torch.einsum("bhqk,bkhd->bqhd", weights, v_BSHD)
    return out_BSHD, torch.logsumexp(weighted, dim=-1).masked_fill(empty_BHS1[..., 0], -math.inf)


def _logits(q_BSHD: Tensor, k_BSHD: Tensor, scale: float) -> Tensor:
    """Return logits (B, H, S, S); only finite ones have a gradient, so that none is 0 times an infinite key."""
    finite_q, finite_k = (x.masked_fill(x.isinf(), 0.0) for x in (q_BSHD, k_BSHD))
    finite = torch.einsum("bqhd,bkhd->bhqk", finite_q, finite_k) * scale
    with torch.no_grad():
        logits = torch.einsum("bqhd,bkhd->bhqk", q_BSHD, k_BSHD) * scale
    return torch.where(logits.isfinite(), finite, logits)
