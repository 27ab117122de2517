"""Defines ``scaled_dot_product_attention``, in the place of torch's.

Legend: B batch, H query heads, Hkv key/value heads, Sq queries, Sk keys, D head dimension, Dv that of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.arguments import check_dropout
from ringattn.errors import InputError

from .attend import attend
from .masks import Keys, keys_of_mask, remembered
from .pool import AttentionPool

_pool = AttentionPool()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as ``torch.nn.functional.scaled_dot_product_attention`` does, by this machine's profile.

    query is (..., H, Sq, D), key (..., H, Sk, D) and value (..., H, Sk, Dv); with ``enable_gqa`` key and value have Hkv
    heads, a divisor of H. Returns (..., H, Sq, Dv) in query's dtype. ``is_causal`` is aligned to the first query and
    key, as torch's. The ``RingAttention`` of each kind of call is made when it is first met, and kept.

    ``attn_mask`` may be a causal mask of as many queries as keys, or one of keys alone, the same for all queries and
    heads, (B or 1, 1, 1, Sk). A query that no key is left for gets 0, where torch gives NaN.

    Raises:
        InputError: another mask, a bias on the logits, dropout with padding or of other queries than keys, or tensors
            that do not fit; with what does it.
    """
    check_dropout("dropout_p", dropout_p)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.dim() < 2:
            shape = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
            raise InputError(f"{name} {shape}; it must be a tensor (..., heads, sequence, head_dim)")
        if x.shape[-1] == 0 and x is not value:
            raise InputError(f"{name} has shape {tuple(x.shape)}; its last dimension, head_dim, must not be 0")
    lead = tuple(query.shape[:-3])
    q, k, v = (_four_dimensions(x) for x in (query, key, value))
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise InputError(f"query has {q.shape[1]} heads and key {k.shape[1]}; use enable_gqa=True")
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise InputError(
            f"query, key and value have shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; all "
            "but the sequence of key and value, the heads of both with enable_gqa, and value's last must be equal"
        )
    keys = None
    if attn_mask is not None:
        _check_mask(attn_mask, is_causal, (*lead, *q.shape[1:3], k.shape[2]))
        keys = _keys(attn_mask, q, k)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, _ = attend(_pool, q, k, v, causal=is_causal, scale=scale, keys=keys, aligned="start", dropout=dropout_p)
    out = out.transpose(1, 2)
    return out.reshape(*lead, *out.shape[1:]) if query.dim() > 3 else out.reshape(*query.shape[:-1], out.shape[-1])


def _four_dimensions(x: Tensor) -> Tensor:
    """Return (B, heads, S, D) of a tensor of 2 dimensions or more; torch takes the third from the end for heads."""
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x.flatten(0, -4)


def _check_mask(mask: object, is_causal: bool, scores: tuple[int, ...]) -> None:
    """Raise InputError unless the mask can be broadcast to the scores, (..., H, Sq, Sk), as torch's must be."""
    if is_causal:
        raise InputError("attn_mask and is_causal are both given; give one of them")
    if not isinstance(mask, Tensor):
        raise InputError(f"attn_mask is a {type(mask).__name__}; it must be a tensor")
    fits = all(size in (1, wanted) for size, wanted in zip(reversed(mask.shape), reversed(scores), strict=False))
    if not 2 <= mask.dim() <= len(scores) or mask.dim() > 4 or not fits:
        raise InputError(
            f"attn_mask has shape {tuple(mask.shape)}, which does not broadcast to the scores, {scores}; it must be "
            "(B or 1, 1, Sq or 1, Sk)"
        )


@torch.compiler.disable(reason="what a mask means is read on the host")  # type: ignore[no-untyped-call, untyped-decorator]
def _keys(mask: Tensor, q: Tensor, k: Tensor) -> Keys:
    keys = remembered(_keys_of_broadcast, mask, q.shape[2], k.shape[2])
    if len(keys.codes) not in (1, len(q)):
        raise InputError(f"attn_mask has shape {tuple(mask.shape)}; it must be (B or 1, 1, Sq or 1, Sk)")
    return keys


def _keys_of_broadcast(mask: Tensor, queries: int, keys: int) -> Keys:
    """Return what a mask means whose last dimension, or last two, may be 1 for all keys and queries."""
    return keys_of_mask(mask.expand(*mask.shape[:-2], queries, keys))
