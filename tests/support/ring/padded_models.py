"""Padded chunks as a transformers model gives them to its attention, with the cache that ranks hold together.

Legend: B batch, S positions of a chunk, L all so far, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from oracle import lists_of
from padded_cases import PaddedCase
from torch import Tensor
from transformers import masking_utils

from ringattn.integrations.transformers import kv_cache, register


class ByTransformers:
    """Chunks that are given to the functions that ``register`` registers, with a cache of ``kv_cache``."""

    def __init__(self, case: PaddedCase) -> None:
        lists: Any = {} if case.pattern.dense else lists_of(case.pattern)
        register("padded", profile=None, process_group=dist.group.WORLD, **lists)
        self.case, self.cache = case, kv_cache(rollback=case.back)
        self.module = torch.nn.Identity()
        self.module.is_causal = True  # type: ignore[assignment]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept_BL: Tensor) -> tuple[Tensor, None]:
        window, new = self.case.window, q.shape[1]
        length, offset = self.cache.get_mask_sizes(new, 0)
        assert (length, offset) == (kept_BL.shape[1], 0)
        causal = masking_utils.causal_mask_function
        function = causal if window is None else masking_utils.sliding_window_causal_mask_function(window)
        mask = transformers.AttentionMaskInterface()["padded"](
            batch_size=len(q), q_length=new, kv_length=length, q_offset=self.cache.get_seq_length(), kv_offset=0,
            mask_function=function, attention_mask=kept_BL, local_size=window,
        )  # fmt: skip
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        key, value = self.cache.update(key, value, 0)
        attention = transformers.AttentionInterface()["padded"]
        return attention(self.module, query, key, value, mask, sliding_window=window)[0], None

    def crop(self, kept_BL: Tensor, columns: int) -> None:
        self.cache.crop(-columns)

    @property
    def lengths(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self.cache.layers[0].cache.lengths
        return found
