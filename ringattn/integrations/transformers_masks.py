"""Mask function for transformers' ``AttentionMaskInterface``: a code for each position in place of a mask of S x S.

transformers describes a mask as a function of (batch element, head, query position, key position) that it composes of
its own parts; a mask function of a model's or user's own comes with ``use_vmap`` and is refused. What a composition is
this finds out by calling it for every key and the positions where its parts begin and end: causal and full masks,
documents of a packed batch or chunks of fixed length, and causal sliding windows. Other compositions are marked, and
refused where the first layer reads them. Of the device only whether there is any padding is waited for here.

The result, int32 (B, 1, 2, Sk), has the shape of a mask, so that a model hands it on as it is: the codes of ``Keys``,
and below them one number, the same everywhere, for causal and window.

Legend: B batch, Sq queries, Sk keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringattn.errors import InputError
from ringattn.modules.masks import ABSENT, PADDING, Keys

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_UNKNOWN = -1
_CUSTOM = (
    "the model's mask is neither causal nor full, nor of documents, chunks or a causal sliding window; use "
    "attn_implementation='flex_attention', which follows any mask"
)


def mask_codes(
    causal_mask: MaskFunction,
    full_mask: MaskFunction,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """Return the codes (B, 1, 2, Sk), or None for a mask that the attention's ``is_causal`` says.

    ``causal_mask`` and ``full_mask`` are transformers' functions of these; the others are what it passes to every mask
    function. ``dtype``, ``config`` and what else may be left out of a mask are of no concern here.

    Raises:
        InputError: for a mask function of the user's own, which may be anything.
    """
    if use_vmap:
        raise InputError(_CUSTOM)
    mask_function = causal_mask if mask_function is None else mask_function
    full = mask_function is full_mask
    end = kv_offset + kv_length if full else q_offset + q_length
    if attention_mask is not None and not torch.compiler.is_compiling():  # in which nothing is read
        there = attention_mask[:, kv_offset : kv_offset + kv_length]
        if there.shape[1] == kv_length and bool(there.all()):  # the mask of all that generate() passes on
            attention_mask = None
    if attention_mask is None and (full or mask_function is causal_mask) and isinstance(end, int):
        all_there = end == kv_offset + kv_length
        if full or (all_there and q_length in (1, kv_length)):
            return None
    at = kv_offset + torch.arange(kv_length, device=device)
    if full or mask_function is causal_mask:
        documents = torch.ones(batch_size, kv_length, dtype=torch.long, device=device)
        kind = torch.full((), int(not full), device=device)
    else:
        documents, kind = _probed(mask_function, batch_size, at, local_size)
    codes = documents
    if attention_mask is not None:
        lacking = max(kv_offset + kv_length - attention_mask.shape[1], 0)
        kept = pad(attention_mask, (0, lacking))[:, kv_offset : kv_offset + kv_length]
        codes = torch.where(kept.bool(), codes, PADDING)
    codes = torch.where(at < end, codes, ABSENT)
    return torch.stack((codes, kind.to(codes).expand_as(codes)), 1)[:, None].int()


def _probed(mask_function: MaskFunction, batch: int, at: Tensor, local_size: int | None) -> tuple[Tensor, Tensor]:
    """Return the documents (B, Sk), numbered from 1, and what kind of mask it is, of key positions ``at``."""
    rows = torch.arange(batch, device=at.device)[:, None]
    first, last = at[:1], at[-1:]

    def allows(query: Tensor, key: Tensor) -> Tensor:
        query, key = query.expand(batch, -1), key.expand(batch, -1)
        return mask_function(rows, torch.zeros_like(rows), query, key).expand(batch, len(at))

    begins = ~allows(at, (at - 1).clamp(min=first)) | (at == first)
    later = allows(at, (at + 1).clamp(max=last)) & (at < last)
    own = at.expand(batch, -1)
    start = torch.where(begins, own, first).cummax(1).values  # of the document that a position is in
    whole = allows(own, start).all()
    causal = ~later.any() & ~(allows(own, (start - 1).clamp(min=first)) & (start > first)).any()
    window = torch.zeros_like(whole)
    if local_size is not None:
        edge = own - local_size
        inside = allows(own, torch.maximum(edge + 1, start)).all()
        window = inside & ~(allows(own, torch.maximum(edge, start)) & (edge >= start)).any() & causal & ~whole
    kind = torch.where(causal & whole, 1, _UNKNOWN)
    if local_size is not None:
        kind = torch.where(window, 1 + 2 * local_size, kind)
    both = allows(own, first).all() & allows(own, last).all()
    kind = torch.where(both & (at[0] != at[-1]), 0, kind)
    return torch.where(kind == 0, 1, begins.cumsum(1)), kind


def keys_of_codes(mask: Tensor) -> Keys:
    """Return what the codes (B, 1, 2, Sk) say; InputError where the mask was not recognised."""
    codes, kinds = mask[:, 0].cpu().unbind(1)
    kind = int(kinds[0, 0])
    if kind == _UNKNOWN:
        raise InputError(_CUSTOM)
    return Keys(codes[:, : int((codes[0] != ABSENT).sum())], causal=bool(kind % 2), window=kind // 2 or None)
