"""Puts the positions that count in front of those that do not, sequence by sequence, and results back in their places.

A cache takes the first ``counts[b]`` positions of sequence b. Where padding is on the left, or between, the others are
not the first; how many positions there are is the same before and after, so that nothing is cut or padded.

Legend: B batch, S new positions, H query heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.errors import InputError

from .cache import KVCache


class Order(NamedTuple):
    """``counts`` of each sequence's positions that count; ways to the front and back, (B, S): None where none moves."""

    counts: list[int]
    to_front: Tensor | None = None
    places: Tensor | None = None

    @property
    def moves(self) -> bool:
        return self.to_front is not None

    def in_front(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return tensors (B, S, heads, D) with the positions that count first."""
        order = self.to_front
        return tensors if order is None else tuple(_taken(x, order) for x in tensors)

    def back(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return out (B, S, H, D) and lse (B, H, S) with every position where it was."""
        order = self.places
        if order is None:
            return out, lse
        return _taken(out, order), lse.gather(2, order[:, None].expand(lse.shape))


def order_of(cache: KVCache, new: int, counts: Sequence[int] | None, kept_BS: Tensor | None) -> Order:
    """Return the order for ``new`` positions of every sequence; InputError where ``counts`` or ``kept`` do not fit."""
    if kept_BS is None:
        return Order(cache.check_counts(counts, new))
    if counts is not None:
        raise InputError("counts and kept are both given; use kept alone where padding is not at the end")
    if not isinstance(kept_BS, Tensor) or kept_BS.dtype is not torch.bool or kept_BS.layout is not torch.strided:
        kind = kept_BS.dtype if isinstance(kept_BS, Tensor) else type(kept_BS).__name__
        raise InputError(f"kept is {kind}; it must be a dense boolean tensor, True at positions that count")
    if tuple(kept_BS.shape) != (cache.batch, new):
        raise InputError(f"kept has shape {tuple(kept_BS.shape)}; it must be ({cache.batch}, {new}), as q")
    if kept_BS.is_meta:
        raise InputError("kept is on meta, where tensors hold no data; give one on the CPU")
    if cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InputError("in a CUDA graph every sequence is given as many positions; leave kept out")
    host = kept_BS.cpu()
    counted = host.sum(1)
    if torch.equal(torch.arange(new, device="cpu") < counted[:, None], host):
        return Order(counted.tolist())
    to_front = host.logical_not().int().argsort(dim=1, stable=True)
    return Order(counted.tolist(), to_front.to(cache.device), to_front.argsort(1).to(cache.device))


def _taken(x_BSHD: Tensor, order_BS: Tensor) -> Tensor:
    return x_BSHD.gather(1, order_BS[..., None, None].expand(x_BSHD.shape))
