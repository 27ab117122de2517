"""Softmax P of a case, built whole in float64."""

from __future__ import annotations

import math

import torch
from oracle import Case, times_seen
from torch import Tensor


def softmax_of(case: Case, q: Tensor, k: Tensor) -> Tensor:
    """P (B, H, S, S): a key counts as often as it is seen; rows that see nothing but -inf are 0."""
    group = case.heads // case.kv_heads
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    q, k = q.detach().double(), k.detach().double().repeat_interleave(group, 2)
    counts = times_seen(case)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    logits = torch.where(counts > 0, logits + counts.log(), -math.inf)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    return torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)


def mask_of(case: Case, kind: str) -> Tensor | None:
    """Queries that count: "all" is no mask, "each" one for each sequence of the batch."""
    generator = torch.Generator().manual_seed(case.seed + 7)
    if kind == "all":
        return None
    if kind == "none":
        return torch.zeros(case.length, dtype=torch.bool)
    shape = (case.batch, case.length) if kind == "each" else (case.length,)
    return torch.rand(shape, generator=generator) < 0.4


def received_of(p_BHSS: Tensor, queries: Tensor | None, reduce: str) -> Tensor:
    """Column sums (B, H, S) of P over ``queries``, or their mean; of no query 0."""
    batch, _, length, _ = p_BHSS.shape
    counted = torch.ones(length, dtype=torch.bool) if queries is None else queries
    counted = counted.expand(batch, length)
    sums = (p_BHSS * counted[:, None, :, None]).sum(2)
    return sums if reduce == "sum" else sums / counted.sum(-1).clamp(min=1)[:, None, None]
