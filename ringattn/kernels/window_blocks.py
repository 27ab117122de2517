"""Gives a sliding window to kernels that have none: blocks of causal ones, and of these with both sides in reverse.

Rows go in tiles of a window. A row sees its own tile up to itself, and of the tile before what comes after its own
place there: all tiles together that is one causal call, and one more in reverse order.

Legend: N blocks, M rows, H query heads, K key/value heads, D head dimension, W window, T tiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .contract import BoundKernel, Grads


class _Part(NamedTuple):
    """Rows of each of ``tiles`` tiles, a window apart, against keys that lie so as well."""

    kind: Literal["causal", "reverse", "full"]
    q_begin: int
    k_begin: int
    rows: int
    keys: int
    tiles: int = 1


@lru_cache(maxsize=256)
def _parts(rows: int, window: int) -> tuple[_Part, ...]:
    """Return the parts in which every row meets each key of its window once; the causal ones come first."""
    tiles, tail = divmod(rows, window)
    last, before = tiles * window, (tiles - 1) * window + 1
    edge = min(tail, window - 1)
    found = (
        _Part("causal", 0, 0, window, window, tiles),
        _Part("causal", last, last, tail, tail),
        _Part("reverse", window, 1, window - 1, window - 1, tiles - 1),
        _Part("reverse", last, before, edge, edge, min(tiles, 1)),
        _Part("full", last, before + edge, edge, window - 1 - edge, min(tiles, 1)),
    )
    return tuple(part for part in found if part.tiles > 0 and part.rows and part.keys)


def in_window_blocks(causal: BoundKernel, full: BoundKernel, window: int) -> BoundKernel:
    """Return the kernel of causal blocks of which a row sees the last ``window`` keys, made of two without one."""

    def rows_of(x: Tensor, begin: int, count: int, tiles: int) -> Tensor:
        """Return (N, T, count, heads, D), a view."""
        if tiles == 1:
            return x[:, begin : begin + count].unsqueeze(1)
        return torch.unflatten(x[:, begin : begin + tiles * window], 1, (tiles, window))[:, :, :count]

    def taken(x: Tensor, part: _Part, begin: int, count: int) -> Tensor:
        rows = rows_of(x, begin, count, part.tiles).flatten(0, 1)
        return rows.flip(1) if part.kind == "reverse" else rows

    def returned(x: Tensor, part: _Part, like: Tensor) -> Tensor:
        return (x.flip(1) if part.kind == "reverse" else x).reshape(like.shape)

    def inputs_of(part: _Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (taken(x, part, part.k_begin, part.keys) for x in (k, v))
        return taken(q, part, part.q_begin, part.rows), k, v

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        n, rows, heads, _ = q.shape
        wide = torch.float64 if q.dtype is torch.float64 else torch.float32
        total = torch.empty((n, rows, heads, v.shape[3]), dtype=wide, device=q.device)
        total_NMH = torch.empty((n, rows, heads, 1), dtype=wide, device=q.device)
        for part in _parts(rows, window):
            kernel = full if part.kind == "full" else causal
            out, lse = kernel.forward(*inputs_of(part, q, k, v))
            into, into_lse = (rows_of(x, part.q_begin, part.rows, part.tiles) for x in (total, total_NMH))
            out, lse = returned(out, part, into), returned(lse.transpose(1, 2).unsqueeze(3), part, into_lse)
            if part.kind == "causal":  # every row is in one of these
                into.copy_(out)
                into_lse.copy_(lse)
                continue
            share = torch.sigmoid(lse - into_lse).masked_fill_(lse == -torch.inf, 0.0)  # -inf - -inf is no number
            into.lerp_(out.to(wide), share)
            into_lse.copy_(torch.logaddexp(into_lse, lse))
        return total.to(q.dtype), total_NMH.squeeze(3).transpose(1, 2).contiguous()

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /) -> Grads:
        wide = torch.float64 if q.dtype is torch.float64 else torch.float32
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        lse_NMH1 = lse.transpose(1, 2).unsqueeze(3)
        for part in _parts(q.shape[1], window):
            kernel = full if part.kind == "full" else causal
            dout_rows, out_rows, lse_rows = (taken(x, part, part.q_begin, part.rows) for x in (dout, out, lse_NMH1))
            lse_rows = lse_rows.squeeze(3).transpose(1, 2).contiguous()
            grads = kernel.backward(dout_rows.contiguous(), *inputs_of(part, q, k, v), out_rows.contiguous(), lse_rows)
            places = (part.q_begin, part.rows), (part.k_begin, part.keys), (part.k_begin, part.keys)
            for total, grad, place in zip((dq, dk, dv), grads, places, strict=True):
                into = rows_of(total, *place, part.tiles)
                into.add_(returned(grad, part, into))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    return BoundKernel(forward, backward)
