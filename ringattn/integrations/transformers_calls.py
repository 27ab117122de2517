"""Reads what a call of a transformers model asks for, mask and packing, and attends.

Legend: B batch, Sq queries, Sk keys, S both, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.attention import RingAttention
from ringattn.errors import InputError
from ringattn.modules.attend import Result, attend
from ringattn.modules.masks import (
    Keys,
    keys_of_bounds,
    keys_of_mask,
    keys_of_padding,
    keys_of_positions,
    remembered,
)
from ringattn.modules.pool import AttentionPool
from ringattn.runtime.packed.documents import Documents, documents_of

from .transformers_masks import keys_of_codes


class Call(NamedTuple):
    """Keywords of a call that say which keys a query attends to; ``causal`` of a call without a mask.

    ``lengths`` (B,) are of whole rows over several ranks, whose padding is at their ends.
    """

    causal: bool
    sliding_window: int | None
    position_ids: Tensor | None
    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    total_length: int | None
    lengths: Tensor | None = None


def attend_here(
    pool: AttentionPool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call, options: dict[str, Any]
) -> Result:
    """Attend over q (B, Sq, H, D) with k (B, Sk, Hkv, D) and v of all positions, as ``attend`` does."""
    if call.total_length not in (None, q.shape[1]):
        raise InputError(
            f"total_length is {call.total_length}, but this rank holds all {q.shape[1]} positions; leave it out, or "
            "register(process_group=...)"
        )
    if call.lengths is not None:
        raise InputError(
            "lengths are of rows that several ranks hold together, and this rank holds all; give the model "
            "attention_mask, or register(process_group=...)"
        )
    queries, length = q.shape[1], k.shape[1]
    packed = call.cu_seq_lens_q is not None or call.cu_seq_lens_k is not None
    positions = call.position_ids is not None and queries == length > 1 and not torch.compiler.is_compiling()
    if mask is not None or packed or positions:
        result: Result = _with_keys(pool, q, k, v, mask, call, options)
        return result
    return _without(pool, q, k, v, call, options)


def _without(pool: AttentionPool, q: Tensor, k: Tensor, v: Tensor, call: Call, options: dict[str, Any]) -> Result:
    """Attend to all keys, or causally where the last query is at the last key."""
    queries, length = q.shape[1], k.shape[1]
    window = call.sliding_window
    if window is not None and window >= length:
        window = None
    if window is not None and not call.causal:
        raise InputError(
            f"sliding_window is {window} without a causal mask, and there are {length} keys; use "
            "attn_implementation='flex_attention' or 'flash_attention_2', or shorter sequences"
        )
    if call.causal and queries not in (1, length):
        raise InputError(
            f"there are {queries} queries, {length} keys, a causal mask and no attention_mask to say where the queries "
            "are; give the model's attention the mask of create_causal_mask"
        )
    return attend(pool, q, k, v, causal=call.causal, window=window, **options)


@torch.compiler.disable(reason="what a mask means is read on the host")  # type: ignore[no-untyped-call, untyped-decorator]
def _with_keys(
    pool: AttentionPool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call, options: dict[str, Any]
) -> Result:
    keys = _keys(mask, q, k, call)
    if keys is None:
        return _without(pool, q, k, v, call, options)
    window = call.sliding_window
    if window is not None and keys.causal and keys.window != window < keys.length:
        raise InputError(f"sliding_window is {window}, and the attention mask has {keys.window or 'no window'}")
    # A model may have given any queries with a mask of keys, as many by chance; a pattern is for one sequence.
    return attend(pool, q, k, v, causal=keys.causal, keys=keys, of_one=pool.dilated, **options)


def _keys(mask: Tensor | None, q: Tensor, k: Tensor, call: Call) -> Keys | None:
    """Return the keys that the mask allows, and of these the documents apart; None for a call without either."""
    keys = None if mask is None else keys_of(mask, call.causal)
    positions, length = call.position_ids, q.shape[1]
    same = length == k.shape[1] if keys is None else keys.causal and length == keys.length
    if same and positions is not None and positions.dim() == 2 and positions.shape[1] == length:
        keys = remembered(keys_of_positions, positions, keys, call.causal, call.sliding_window)
    packed = _of_bounds(q, k, call)
    if packed is None:
        return keys
    if keys is not None and (keys.documents != packed.documents or keys.causal != packed.causal):
        raise InputError("cu_seq_lens_q disagrees with the attention mask or position_ids; give one of them")
    return packed if keys is None else keys


def keys_of(mask: Tensor, causal: bool) -> Keys:
    """Return the keys that a mask allows; ``causal`` is that of a call whose mask is of padding alone."""
    if mask.dtype is torch.int32 and mask.dim() == 4 and mask.shape[1:3] == (1, 2):
        return remembered(keys_of_codes, mask)
    if mask.dim() == 2:
        return remembered(keys_of_padding, mask, causal)
    return remembered(keys_of_mask, mask)


def _of_bounds(q: Tensor, k: Tensor, call: Call) -> Keys | None:
    """Return the keys of documents that ``cu_seq_lens`` bound; None without it."""
    packed = _bounds_given(call)
    if packed is None:
        return None
    if q.shape[:2] != k.shape[:2] or len(q) != 1:
        raise InputError(
            f"cu_seq_lens_q is for documents packed into one row, and q has {len(q)} rows of {q.shape[1]} positions, k "
            f"{len(k)} of {k.shape[1]}"
        )
    assert call.cu_seq_lens_q is not None
    return remembered(keys_of_bounds, call.cu_seq_lens_q, q.shape[1], call.causal, call.sliding_window)


@torch.compiler.disable(reason="ranks agree on every call")  # type: ignore[no-untyped-call, untyped-decorator]
def attend_over_ranks(
    pool: AttentionPool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call, options: dict[str, Any]
) -> Result:
    """Attend with q, k and v (B, S, H or Hkv, D) of this rank's positions of whole sequences, which all ranks hold."""
    window = call.sliding_window if call.causal else None
    attention = pool.module_for(
        q, k, call.causal, options["scale"], options.get("softcap"), window, options.get("dropout", 0.0)
    )
    with attention.reporting():
        documents = _check_over_ranks(attention, q, k, mask, call)
    over_ranks: dict[str, Any] = {"total_length": call.total_length, "window_of_module": window}
    if documents is not None:
        over_ranks[documents.name] = documents
    return attend(pool, q, k, v, causal=call.causal, **over_ranks, **options)


def _check_over_ranks(
    attention: RingAttention, q: Tensor, k: Tensor, mask: Tensor | None, call: Call
) -> Documents | None:
    """Return the documents, packed or padded; InputError unless every query sees all of its own, or up to itself."""
    length = q.shape[1]
    if k.shape[1] != length:
        raise InputError(
            "over several ranks there is no cross attention, and no cache but that of "
            "ringattn.integrations.transformers.kv_cache(); use it, or one rank"
        )
    total = attention.shape.world * length if call.total_length is None else call.total_length
    documents = _bounds_given(call)
    if call.lengths is not None:
        if documents is not None:
            raise InputError(
                "cu_seq_lens_q and lengths are both given; use the first for packed documents, else lengths"
            )
        documents = documents_of(None, call.lengths)
    longest = total if documents is None else documents.sizes(len(q), total)[1]
    if call.sliding_window is not None and call.sliding_window < longest and not call.causal:
        raise InputError(
            f"sliding_window is {call.sliding_window} without a causal mask, and a sequence has {longest} positions on "
            "all ranks together; use one rank, or set the config's sliding_window to None"
        )
    if call.position_ids is None or call.position_ids.dim() != 2:
        raise InputError("over several ranks the model's call needs position_ids, those of RingAttention.positions")
    if not remembered(_are_positions, call.position_ids, attention, total, documents):
        raise InputError(
            f"position_ids are not this rank's of {total} positions in layout {attention.layout!r}; give the model "
            "those of RingAttention.positions, total_length where ranks hold unequal numbers of positions, and with "
            "packed documents cu_seq_lens_q and cu_seq_lens_k of the whole row, and positions from each one's start"
        )
    if mask is not None:
        remembered(_check_mask, mask, attention, total, documents, call.causal, call.sliding_window)
    return documents


def _check_mask(
    mask: Tensor,
    attention: RingAttention,
    total: int,
    documents: Documents | None,
    causal: bool,
    sliding_window: int | None,
) -> None:
    """Raise InputError unless the mask of this rank's positions says what holds without it."""
    keys = keys_of(mask, causal)
    if keys.window not in (None, sliding_window):
        raise InputError(f"sliding_window is {sliding_window}, and the attention mask has {keys.window}")
    if keys.causal != causal:
        raise InputError("over several ranks an attention mask is of padding alone; use one rank for others")
    kept = keys.codes > 0
    if documents is None or not documents.padded:
        if not bool(kept.all()):
            raise InputError(
                "over several ranks an attention_mask says nothing of the other ranks' padding; give the model's call "
                "lengths as well, how many positions each whole row has before its padding, which is at the end"
            )
        return
    there = attention.positions(total).cpu() < documents.tensor[:, None]
    if kept.shape[1] != there.shape[1] or not bool((kept == there).all()):
        raise InputError(
            f"attention_mask is not that of this rank's positions of rows with lengths {list(documents.values)}; over "
            "several ranks padding is at the end of every row, and the mask is cut as tokens are, by "
            "RingAttention.shard"
        )


def _bounds_given(call: Call) -> Documents | None:
    """Return the documents that ``cu_seq_lens`` bound; None without it."""
    bounds, of_keys = call.cu_seq_lens_q, call.cu_seq_lens_k
    if bounds is None and of_keys is None:
        return None
    if bounds is None or of_keys is None:
        raise InputError("one of cu_seq_lens_q and cu_seq_lens_k is given; give both")
    packed, other = (documents_of(given, None) for given in (bounds, of_keys))
    if other != packed:
        raise InputError("cu_seq_lens_q and cu_seq_lens_k differ; documents that attend to others are not supported")
    return packed


def _are_positions(
    position_ids: Tensor, attention: RingAttention, total_length: int, documents: Documents | None
) -> bool:
    padded = documents is not None and documents.padded
    expected = attention.positions(total_length, None if padded else documents)
    if position_ids.shape[1] != len(expected):
        return False
    found = position_ids.to(expected.device)
    if documents is None:
        return bool((found == expected).all())
    bounds = documents.tensor.to(expected.device)
    if padded:  # what a model gives padding does not matter
        if len(found) not in (1, len(bounds)):
            return False
        return bool(((found == expected) | (expected >= bounds[:, None])).all())
    inside = expected < bounds[-1]  # each document counts from its own start; what lies beyond the last is padding
    expected = expected[inside]
    return bool((found[:, inside] == expected - bounds[torch.searchsorted(bounds, expected, right=True) - 1]).all())
