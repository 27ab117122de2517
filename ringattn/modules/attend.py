"""Attends over what ``Keys`` describes: in place, packed without its padding, or document by document.

Legend: B batch, S length, H query heads, Hkv key/value heads, D head dim; Sq and Sk where queries and keys differ; T
positions of all documents of a batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringattn.attention import RingAttention
from ringattn.decoding.cross import Align
from ringattn.errors import InputError
from ringattn.runtime.dropout_program import dropout_refusal
from ringattn.runtime.packed.documents import Documents
from ringattn.runtime.sinks import check_sinks, with_sinks

from .masks import Keys
from .pool import AttentionPool

Result = tuple[Tensor, Tensor | None]  # out (B, Sq, H, Dv); lse (B, H, Sq) if it was asked for


def attend(
    pool: AttentionPool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    window_of_module: int | None = None,
    aligned: Align = "end",
    with_lse: bool = False,
    keys: Keys | None = None,
    of_one: bool = False,
    total_length: int | None = None,
    cu_seqlens: Documents | None = None,
    lengths: Documents | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Result:
    """Attend over q (B, Sq, H, D) with k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv); out is like q, with Dv.

    ``keys`` says which keys there are; None that all are. With them ``causal`` and ``window`` are theirs. A causal mask
    is aligned to the end of queries and keys or to their start. ``total_length``, ``cu_seqlens`` and ``lengths`` are
    those of a call over several ranks, without ``keys``, and ``window_of_module`` the window of their whole sequences.
    ``sinks`` (H,) are those of ``RingAttention.forward``. A query without a key gets 0, and an lse of -inf; so does one
    at padding, where causality, documents or ``of_one`` say that queries and keys are one sequence. ``dropout`` is of a
    call in training mode, for whole sequences.
    """
    head_dim, value_dim = q.shape[3], v.shape[3]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    q, k, v = equally_wide(q, k, v)
    causal = causal if keys is None else keys.causal
    some_keys = keys is not None and not (keys.plain and keys.length == k.shape[1])
    if keys is not None and keys.plain:
        _check_length(keys, k)
        k, v, window, keys = k[:, : keys.length], v[:, : keys.length], keys.window, None
    one_sequence = keys is None and q.shape[1] == k.shape[1] and not pool.dilated
    if one_sequence and window is not None and window < k.shape[1]:  # a module's own takes one call, not blocks
        window, window_of_module = None, window
    attention = pool.module_for(q, k, causal, scale, softcap, window_of_module, dropout)
    if some_keys and attention.shape.world > 1:
        _refuse_over_ranks(attention)
    if keys is not None and dropout:
        raise dropout_refusal(dropout, "without padding and documents")
    if keys is not None:
        out, lse = _masked(attention, q, k, v, keys, of_one, with_lse, sinks)
    else:
        out, lse = _unmasked(attention, q, k, v, window, aligned, with_lse, sinks, total_length, cu_seqlens, lengths)
    return (out if value_dim == q.shape[3] else out[..., :value_dim]), lse


def equally_wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of one width: columns of zeros change no logit, and add columns of zeros to out."""
    head_dim, value_dim = q.shape[3], v.shape[3]
    if head_dim == value_dim:
        return q, k, v
    widest = max(head_dim, value_dim)
    q, k, v = (pad(x, (0, widest - x.shape[3])) for x in (q, k, v))
    return q, k, v


def _refuse_over_ranks(attention: RingAttention) -> None:
    """Raise InputError, on all ranks: a rank's mask says nothing of the others' keys."""
    with attention.reporting():
        raise InputError(
            "a mask of keys is for one rank; over several ranks give RingAttention cu_seqlens or lengths, which are of "
            "the whole sequence"
        )


def _unmasked(
    attention: RingAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    aligned: Align,
    with_lse: bool,
    sinks: Tensor | None,
    total_length: int | None = None,
    cu_seqlens: Documents | None = None,
    lengths: Documents | None = None,
) -> Result:
    if q.shape[1] != k.shape[1] or (window is not None and window < k.shape[1]):
        found: Any = attention.cross(q, k, v, aligned, with_lse or sinks is not None, window)
        if sinks is not None:
            check_sinks(sinks, attention.shape.heads, attention.device)
            out, lse = with_sinks(found[0], found[1], sinks)
            return out, lse if with_lse else None
    else:
        found = attention(q, k, v, with_lse, total_length, cu_seqlens, lengths, sinks)
    return found if with_lse else (found, None)


def _masked(
    attention: RingAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Keys,
    of_one: bool,
    with_lse: bool,
    sinks: Tensor | None,
) -> Result:
    _check_length(keys, k)
    windowed = keys.window is not None and keys.window < keys.length
    if windowed and not keys.causal:
        raise InputError(f"a sliding window of {keys.window} needs a causal mask here; use FlexAttention or flash-attn")
    packs = (keys.causal or of_one or not keys.single) and q.shape[1] == keys.length
    if packs and not windowed and len(keys.codes) == len(q):
        return _packed(attention, q, k[:, : keys.length], v[:, : keys.length], keys, with_lse, sinks)
    if not attention.shape.pattern.dense:
        raise InputError(
            f"pattern {attention.shape.pattern} counts positions, which padding shifts where queries and keys are not "
            "one sequence; call without padding"
        )
    return _by_jobs(attention, q, k, v, keys, with_lse, sinks)


def _check_length(keys: Keys, k: Tensor) -> None:
    if keys.length > k.shape[1]:
        raise InputError(f"the attention mask has {keys.length} positions and k has {k.shape[1]}")


def _packed(
    attention: RingAttention, q: Tensor, k: Tensor, v: Tensor, keys: Keys, with_lse: bool, sinks: Tensor | None
) -> Result:
    """Attend over the documents alone; padding gets 0, an lse of -inf and no gradient."""
    if keys.lengths is not None:
        found = attention(q, k, v, return_lse=with_lse, lengths=keys.lengths, sinks=sinks)
        return found if with_lse else (found, None)
    batch, length, heads, head_dim = q.shape
    kept_T = keys.kept_on(q.device)
    if len(kept_T) == 0:
        return _nothing(q, k, v)
    whole = len(kept_T) == batch * length
    packed = (x.flatten(0, 1) if whole else x.flatten(0, 1).index_select(0, kept_T) for x in (q, k, v))
    row = (x.unsqueeze(0) for x in packed)
    out, lse = attention(*row, return_lse=True, cu_seqlens=keys.documents, sinks=sinks)
    out_TH, lse_TH = out[0], lse[0].transpose(0, 1)
    if not whole:
        out_TH = q.new_zeros(batch * length, heads, head_dim).index_copy(0, kept_T, out_TH)
        lse_TH = lse_TH.new_full((batch * length, heads), -torch.inf).index_copy(0, kept_T, lse_TH)
    return out_TH.view(q.shape), lse_TH.view(batch, length, heads).transpose(1, 2)


def _by_jobs(
    attention: RingAttention, q: Tensor, k: Tensor, v: Tensor, keys: Keys, with_lse: bool, sinks: Tensor | None
) -> Result:
    """Attend job by job, those of one shape together; in place where they lie evenly, as behind padding on the left."""
    batch, queries, heads, head_dim = q.shape
    out, lse = _nothing(q, k, v)
    out, lse_TH = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    for jobs in keys.calls(batch, queries):
        if keys.window is not None and not jobs.gapless:
            raise InputError("a sliding window counts positions, and a document has padding inside of it")
        at_q, at_k = jobs.at(queries, k.shape[1], q.device)
        if jobs.even is None:
            of_q, of_k, of_v = (x.flatten(0, 1)[at] for x, at in ((q, at_q), (k, at_k), (v, at_k)))
        else:
            rows, q_rows, k_rows = jobs.even
            of_q, of_k, of_v = q[rows, q_rows], k[rows, k_rows], v[rows, k_rows]
        part, part_lse = _unmasked(attention, of_q, of_k, of_v, keys.window, "end", with_lse, sinks)
        out = out.index_copy(0, at_q.flatten(), part.flatten(0, 1))
        if part_lse is not None:
            lse_TH = lse_TH.index_copy(0, at_q.flatten(), part_lse.transpose(1, 2).flatten(0, 1))
    return out.view(q.shape), lse_TH.view(batch, queries, heads).transpose(1, 2)


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of queries without keys, through which q, k and v get gradients of 0."""
    batch, queries, heads, head_dim = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    none = q.flatten(0, 1)[:0] + k[:0].sum() + v[:0].sum()
    out = torch.cat((none, q.new_zeros(batch * queries, heads, head_dim)))
    return out.view(q.shape), q.new_full((batch, heads, queries), -torch.inf, dtype=wide)
