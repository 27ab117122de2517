"""Attention of Hugging Face transformers: ``attn_implementation="ringtune"``, by its public interfaces alone.

Legend: B batch, Sq queries, Sk keys, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ringattn.arguments import integer
from ringattn.errors import InputError
from ringattn.modules.pool import AttentionPool
from ringattn.planning.preference import Launch, Preference
from ringattn.profile.schema import Profile
from ringattn.wording import needs_package
from ringattn.workload import LONGEST, HeadOffset

from .transformers_cache import CachedLayer, attend_cached
from .transformers_calls import Call, attend_here, attend_over_ranks, keys_of
from .transformers_masks import mask_codes
from .transformers_steps import Steps

# What models hand on to their attention and what changes no number of it: what they return and how, positions that
# rotary embeddings have used, and hints to other implementations. Anything else that is not None is refused.
_NO_MATHEMATICS = frozenset(
    {
        "cache",
        "cache_position",
        "deterministic",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "return_dict",
        "seq_idx",
        "shift_labels",
        "use_cache",
    }
)
# Why a keyword that a kernel would have to follow is refused, and what does follow it.
_REFUSED = {
    "block_indices": "sparse attention by indices; use attn_implementation='eager'",
    "head_mask": "a factor on the weights of a head; use attn_implementation='eager'",
    "indices": "sparse attention by indices; use attn_implementation='eager'",
    "output_attentions": "attention weights, which no kernel here keeps; use attn_implementation='eager'",
    "position_bias": "a bias on the logits, as ALiBi's; use attn_implementation='flex_attention' or 'eager'",
}


def register(
    name: str = "ringtune",
    *,
    segment_lengths: list[int] | None = None,
    dilation_rates: list[int] | None = None,
    head_offset: HeadOffset = "interleaved",
    profile: Literal["auto"] | str | Path | Profile | None = "auto",
    backend: str | tuple[str, str] | None = None,
    dtype: torch.dtype | str | None = None,
    checkpoint: str | None = None,
    max_seq_len: int | None = None,
    process_group: Any = None,
    layout: str = "auto",
    prefer: Preference | None = None,
    launch: Launch = "eager",
) -> None:
    """Make ``attn_implementation=name`` work in every transformers model that uses its attention interface.

    Registers a function in ``AttentionInterface`` and one in ``AttentionMaskInterface``. Models need no change and
    nothing is patched. The other arguments are those of ``RingAttention``; heads, head_dim, causality and scale are the
    model's. Register under several names for several of them; a name that is registered again takes the new ones.

    Over several ranks of ``process_group`` each holds the positions that ``RingAttention.positions`` says, which the
    model is given as ``position_ids``, and labels that were shifted before they were cut. Two arguments of the model's
    call are of the whole sequences: ``total_length``, how long they are, where ranks hold unequal numbers of positions;
    and ``lengths`` (B,), how many positions each has before its padding.

    Raises:
        ImportError: transformers is not installed, or older than 5.6.
        InputError: an argument that makes no sense.
    """
    transformers, masks = _imported()
    pool = AttentionPool(
        segment_lengths=segment_lengths,
        dilation_rates=dilation_rates,
        head_offset=head_offset,
        profile=profile,
        backend=backend,
        dtype=dtype,
        checkpoint=checkpoint,
        max_seq_len=max_seq_len,
        process_group=process_group,
        layout=layout,
        prefer=prefer,
        launch=launch,
    )
    steps = Steps(pool) if process_group is None and not pool.dilated else None
    transformers.AttentionInterface.register(name, partial(_attention, pool, process_group is not None, steps))
    codes = partial(mask_codes, masks.causal_mask_function, masks.bidirectional_mask_function)
    transformers.AttentionMaskInterface.register(name, codes)


def kv_cache(max_length: int | None = None, rollback: int = 0) -> Any:
    """Return an empty cache for a model's call, or for ``generate(past_key_values=...)``, of this attention alone.

    Over several ranks of the ``process_group`` that was registered they hold its positions together: every rank is
    given all rows and all positions of them, keeps the keys that are its own, and has all results. Rows may be padded
    on either side, and are kept without their padding. ``max_length`` and ``rollback`` are those of ``KVCache``; the
    positions that ``crop`` takes back of a sliding window or a pattern need the latter.

    Raises:
        ImportError: transformers is not installed, or older than 5.6.
        InputError: an argument that makes no sense.
    """
    transformers, _ = _imported()
    if max_length is not None:
        max_length = integer("max_length", max_length, most=LONGEST)
    rollback = integer("rollback", rollback, least=0, most=LONGEST)
    transformers.cache_utils.CacheLayerMixin.register(CachedLayer)
    return transformers.Cache(layer_class_to_replicate=partial(CachedLayer, max_length, rollback))


def _imported() -> tuple[Any, Any]:
    """Return transformers and its module of masks; ImportError where it is missing or too old."""
    needed = needs_package("its models", "transformers 5.6 or newer", "transformers")
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(needed) from None
    masks = importlib.import_module("transformers.masking_utils")
    if "q_offset" not in inspect.signature(masks.sdpa_mask).parameters:
        raise ImportError(f"transformers is {transformers.__version__}; {needed}")
    return transformers, masks


def _attention(
    pool: AttentionPool,
    over_ranks: bool,
    steps: Steps | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    total_length: int | None = None,
    lengths: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return out (B, Sq, H, Dv) of query (B, H, Sq, D), key (B, Hkv, Sk, D) and value (B, Hkv, Sk, Dv), and None.

    The signature is that of ``AttentionInterface``. InputError for a keyword that is not followed.
    """
    for name, given in others.items():
        if given is None or given is False or name in _NO_MATHEMATICS:
            continue
        why = _REFUSED.get(name, "nothing that is known here; leave it out, or use attn_implementation='sdpa'")
        with pool.reporting(query.device):
            raise InputError(f"{name} is given to attn_implementation='ringtune' and asks for {why}")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)
    sinks = sinks if s_aux is None else s_aux
    in_cache = key.dim() == 1  # a ``CachedLayer`` stands for its keys
    if steps is not None and query.shape[2] == 1 and not in_cache and not dropout and not torch.compiler.is_compiling():
        windowed = sliding_window is not None and sliding_window < key.shape[2]
        packed = cu_seq_lens_q is not None or cu_seq_lens_k is not None or lengths is not None
        if not windowed and not packed and sinks is None and total_length is None:
            keys = None if attention_mask is None else keys_of(attention_mask, causal)
            found = steps(query, key, value, keys, causal, scaling, softcap or None)
            if found is not None:
                return found
    call = Call(causal, sliding_window, position_ids, cu_seq_lens_q, cu_seq_lens_k, total_length, lengths)
    options = {"scale": scaling, "softcap": softcap or None, "sinks": sinks, "dropout": dropout}
    if in_cache:
        return attend_cached(pool, query.transpose(1, 2), key, attention_mask, call, options)[0], None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out, _ = (attend_over_ranks if over_ranks else attend_here)(pool, q, k, v, attention_mask, call, options)
    return out, None
