"""Computes single rows of the softmax P from q and k: no kernel, no forward, memory linear in the length.

A row is divided by its own sum, not by exp(lse): a rounded lse of 4e5 is off by 0.03.

Legend: B batch, S length (local, over ranks), N rows asked for, H query heads, Hkv or K key/value heads, G = H / Hkv,
D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringattn.arguments import is_integer, is_list
from ringattn.errors import InputError
from ringattn.geometry.pattern import head_offset_of
from ringattn.planning.table import ModuleShape
from ringattn.runtime.merge import accumulator_dtype

if TYPE_CHECKING:
    from ringattn.distributed.context import RingContext


def check_positions(positions: Tensor | Sequence[int], total_length: int) -> list[int]:
    """Return the positions as a list; InputError unless each is an integer of the whole sequence."""
    if isinstance(positions, Tensor):
        if positions.dim() != 1 or positions.is_floating_point() or positions.dtype is torch.bool:
            raise InputError(
                f"positions is {positions.dtype} of shape {tuple(positions.shape)}; give integers of shape (rows,)"
            )
        if positions.is_meta:
            raise InputError("positions is on meta, where tensors hold no data; give a list of integers")
        given = positions.tolist()
    elif not is_list(positions):
        raise InputError(f"positions is {positions!r}; give a list of integers, or a tensor of them")
    else:
        given = list(positions)
    for position in given:
        if not is_integer(position) or not 0 <= position < total_length:
            raise InputError(f"positions holds {position!r}; each must be an integer from 0 to {total_length - 1}")
    return [int(position) for position in given]


def rows(
    q: Tensor,
    k: Tensor,
    own_S: Tensor,
    positions: Sequence[int],
    shape: ModuleShape,
    scale: float,
    total_length: int,
    ring: RingContext | None,
) -> Tensor:
    """Return rows of P at ``positions`` for the keys k (B, S, Hkv, D): (B, H, N, S), float32 (float64 for float64).

    ``own_S`` are the positions of the rows of q and k in the whole sequence.
    """
    wide = accumulator_dtype(q.dtype)
    at_N = torch.tensor(positions, dtype=torch.int64, device=q.device)
    q_BNHD = _query_rows(q, own_S, at_N, ring).to(wide)
    q_BNKGD = torch.unflatten(q_BNHD, 2, (shape.kv_heads, -1))
    logits = torch.einsum("bnkgd,bskd->bkgns", q_BNKGD, k.to(wide)).mul_(scale)
    if shape.softcap:
        logits = logits.div_(shape.softcap).tanh_().mul_(shape.softcap)
    count_KNS = _times_seen(at_N, own_S, shape, total_length)[:, None]  # one axis for G
    logits = logits.masked_fill_(count_KNS == 0, -math.inf)
    peak = logits.amax(-1, keepdim=True)
    if ring is not None:
        peak = torch.stack(ring.gather_equal(peak)).amax(0)
    peak = peak.masked_fill(peak == -math.inf, 0.0)  # -inf - -inf is no number
    weights = logits.sub_(peak).exp_().mul_(count_KNS)
    total = weights.sum(-1, keepdim=True)
    if ring is not None:
        total = torch.stack(ring.gather_equal(total)).sum(0)
    # 0 only of a row that sees nothing, or only logits of -inf; the peak's own weight is 1.
    return weights.div_(total.clamp(min=1.0)).flatten(1, 2)


def _query_rows(q: Tensor, own_S: Tensor, at_N: Tensor, ring: RingContext | None) -> Tensor:
    """Return the rows (B, N, H, D) of the whole q at these positions, wherever they lie."""
    if ring is None:
        return q[:, at_N]
    here_NS = at_N[:, None] == own_S
    own_rows = q[:, here_NS.long().argmax(1)].contiguous()
    held = torch.stack(ring.gather_equal(here_NS.any(1).long()))  # ranks, N
    found = torch.stack(ring.gather_equal(own_rows), 2)  # B, N, ranks, H, D
    return found[:, torch.arange(len(at_N), device=q.device), held.argmax(0)]


def _times_seen(at_N: Tensor, own_S: Tensor, shape: ModuleShape, total_length: int) -> Tensor:
    """Return (Hkv, N, S): through how many branches the query at each position sees each key."""
    counts = torch.zeros(shape.kv_heads, len(at_N), len(own_S), dtype=torch.int16, device=own_S.device)
    for branch in shape.pattern.resolved(total_length):
        offsets = [
            head_offset_of(head, shape.kv_heads, branch.rate, shape.pattern.head_offset)
            for head in range(shape.kv_heads)
        ]
        offset_K1 = torch.tensor(offsets, device=own_S.device)[:, None]
        queries_KN, keys_KS = (x % branch.segment % branch.rate == offset_K1 for x in (at_N, own_S))
        one_segment_NS = at_N[:, None] // branch.segment == own_S // branch.segment
        counts += one_segment_NS & queries_KN[..., None] & keys_KS[:, None]
    if shape.causal:
        counts *= own_S <= at_N[:, None]
    if shape.window:
        counts *= own_S > at_N[:, None] - shape.window
    return counts
