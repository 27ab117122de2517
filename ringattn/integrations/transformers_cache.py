"""Layers of a transformers cache that are ``KVCache``, whose positions the ranks of a group hold together.

A layer is given the new keys and values before the attention knows which of them are padding, and which module attends.
So it hands on a tensor without elements in their place, which no other attention takes for keys, and appends when the
attention comes to it. Every row is kept without its padding: its positions count from its first token.

Legend: B batch, S new positions, P cached ones, L both, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ringattn.attention import RingAttention
from ringattn.decoding.cache import KVCache
from ringattn.errors import InputError
from ringattn.modules.attend import Result, equally_wide
from ringattn.modules.masks import Keys, remembered
from ringattn.modules.pool import AttentionPool
from ringattn.runtime.dropout_program import dropout_refusal
from ringattn.runtime.sinks import check_sinks, with_sinks

from .transformers_calls import Call, keys_of


class _New(NamedTuple):
    layer: CachedLayer
    key: Tensor
    value: Tensor


_handed_on: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the tensor in place of keys: what is new


class CachedLayer:
    """One layer of a cache, with the methods of transformers' ``CacheLayerMixin``.

    ``cache`` holds the positions; None before the first call.
    """

    is_compileable = False
    is_croppable = True
    is_initialized = True
    is_sliding = False  # its mask is of all positions, whatever a window lets drop
    supports_early_init = False

    def __init__(self, max_length: int | None, rollback: int) -> None:
        self._max_length, self._rollback = max_length, rollback
        self.cache: KVCache | None = None
        self._length = 0
        self._kept: Tensor | None = None  # (B, P), on the host; None: no position is padding
        self._lengths: tuple[int, ...] = ()  # of the rows, without padding

    # --- what transformers calls ---------------------------------------------------------------------------------

    @torch.compiler.disable(reason="a cache counts on the host")  # type: ignore[no-untyped-call, untyped-decorator]
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep key (B, Hkv, S, D) and value for the attention that follows, and return what stands for them."""
        handed_on = key_states.new_empty(0)
        _handed_on[handed_on] = _New(self, key_states, value_states)
        return handed_on, handed_on

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases

    def reset(self) -> None:
        if self.cache is not None:
            self.cache.reset()
            self._became(0, None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(beam_idx)
            self._became(self._length, None if self._kept is None else self._kept[beam_idx.cpu()])

    def crop(self, positions: int) -> None:
        """Forget so many positions at the end where it is negative, else all from there on."""
        length = max(self._length + positions, 0) if positions <= 0 else min(positions, self._length)
        if self.cache is None or length == self._length:
            return
        kept = None if self._kept is None else self._kept[:, :length]
        self.cache.truncate(length if kept is None else kept.sum(1).tolist())
        self._became(length, kept)

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise InputError(f"a cache cannot repeat its rows {repeats} times; repeat the prompts instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise InputError("a cache cannot leave rows out; make another one for the rest of the batch")

    # --- what the attention calls --------------------------------------------------------------------------------

    def grown(self, keys: Keys | None, batch: int, new: int) -> Tensor | None:
        """Return which of all positions are no padding (B, L); None for all. InputError where the cache has others."""
        length = self._length + new
        if self.cache is not None and self.cache.batch != batch:
            raise InputError(f"q has batch size {batch}, and the cache {self.cache.batch} rows; make another cache")
        if keys is not None and keys.length != length:
            raise InputError(
                f"the attention mask has {keys.length} positions, the cache {self._length} and q {new}; give the model "
                "a mask of all of them"
            )
        if keys is not None and not keys.single:
            raise InputError("packed documents and chunks of fixed length are not for this cache; use DynamicCache")
        kept = None if keys is None or keys.plain else (keys.codes > 0).expand(batch, -1)
        before = (
            torch.ones(1, self._length, dtype=torch.bool, device="cpu") if kept is None else kept[:, : self._length]
        )
        there = torch.ones_like(before[:1]) if self._kept is None else self._kept
        if (kept is not None or self._kept is not None) and not bool((before == there).all()):
            raise InputError(
                f"the attention mask has other padding in the {self._length} positions of the cache than that with "
                "which they came; give the model a mask of all positions, whose beginning stays"
            )
        return kept

    def attend(
        self, attention: RingAttention, q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Append k and v (B, S, Hkv, D); return out (B, S, H, D) and lse (B, H, S) of q."""
        if self.cache is None:
            self.cache = attention.kv_cache(
                len(q), self._max_length, dtype=k.dtype, window=window, rollback=self._rollback
            )
            self._lengths = self.cache.lengths
        if self.cache.window != window:
            raise InputError(f"sliding_window is {window}, and was {self.cache.window}; make another cache")
        if self.cache.lengths != self._lengths:
            raise InputError("an earlier call with this cache failed; reset() it")
        new = None if kept is None else kept[:, self._length :]
        found: Any = attention.prefill(q, k, v, self.cache, return_lse=True, kept=new)
        self._became(self._length + q.shape[1], kept)
        out, lse = found
        return out, lse

    def _became(self, length: int, kept: Tensor | None) -> None:
        assert self.cache is not None
        self._length, self._kept, self._lengths = length, kept, self.cache.lengths


@torch.compiler.disable(reason="a cache counts on the host")  # type: ignore[no-untyped-call, untyped-decorator]
def attend_cached(
    pool: AttentionPool, q: Tensor, handed_on: Tensor, mask: Tensor | None, call: Call, options: dict[str, Any]
) -> Result:
    """Attend with q (B, S, H, D) over a cache, to which the new keys and values are appended."""
    found: _New | None = _handed_on.pop(handed_on, None)  # type: ignore[no-untyped-call]
    with pool.reporting(q.device):
        if found is None:
            raise InputError(
                f"key has shape {tuple(handed_on.shape)}, and stands for no new keys of a cache; give the attention "
                "what the cache returned, once"
            )
        _check_call(call, options)
    value_dim, scale = found.value.shape[3], options["scale"]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q, k, v = equally_wide(q, found.key.transpose(1, 2), found.value.transpose(1, 2))
    attention = pool.module_for(q, k, True, scale, options.get("softcap"))
    with attention.reporting():
        keys = None if mask is None else keys_of(mask, True)
        if keys is not None and not keys.causal:
            raise InputError("a cache is for causal attention, and the attention mask is not causal")
        kept = found.layer.grown(keys, *q.shape[:2])
        _check_positions(call.position_ids, kept, found.layer.get_seq_length(), q.shape[1])
        window = _window(call.sliding_window, keys, kept, found.layer.get_seq_length() + q.shape[1])
        sinks = options.get("sinks")
        if sinks is not None:
            check_sinks(sinks, attention.shape.heads, attention.device)
        out, lse = found.layer.attend(attention, q, k, v, kept, window)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return out[..., :value_dim], lse


def _check_call(call: Call, options: dict[str, Any]) -> None:
    """Raise InputError for what a call over a cache does not follow."""
    if not call.causal:
        raise InputError("a cache is for causal attention, and this is not; use DynamicCache, on one rank")
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "total_length", "lengths"):
        if getattr(call, name) is not None:
            raise InputError(f"{name} is given with a cache, of which every rank is given all rows; leave it out")
    if options.get("dropout"):
        raise dropout_refusal(options["dropout"], "without a cache")


def _check_positions(position_ids: Tensor | None, kept: Tensor | None, past: int, new: int) -> None:
    """Raise InputError where positions of a prompt start again at 0: documents, which may not see each other."""
    if position_ids is None or new == 1 or position_ids.dim() != 2 or position_ids.shape[1] != new:
        return
    zeros = remembered(_zeros, position_ids)
    there = torch.ones(1, past + new, dtype=torch.bool, device="cpu") if kept is None else kept
    later = there.cumsum(1)[:, past:] > 1  # not the first of its row
    if bool((zeros & there[:, past:] & later).any()):
        raise InputError("position_ids start again at 0, and packed documents are not for this cache; use DynamicCache")


def _zeros(position_ids: Tensor) -> Tensor:
    return (position_ids == 0).cpu()


def _window(window: int | None, keys: Keys | None, kept: Tensor | None, length: int) -> int | None:
    """Return the sliding window of a call; InputError where mask and model disagree, or padding lies within it."""
    of_mask = None if keys is None else keys.window
    if of_mask not in (None, window) or (
        keys is not None and window is not None and of_mask is None and window < length
    ):
        raise InputError(f"sliding_window is {window}, and the attention mask has {of_mask or 'no window'}")
    if kept is not None and window is not None and window < length:
        ends = length - kept.flip(1).int().argmax(1)  # of the last that is kept, where any is
        if bool((kept.any(1) & (ends - kept.int().argmax(1) != kept.sum(1))).any()):
            raise InputError("a sliding window counts positions, and a row has padding inside of it; pad on the left")
    return window
