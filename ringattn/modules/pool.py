"""Holds one ``RingAttention`` for each kind of call that a function meets, so that profiles and plans serve it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ringattn.attention import RingAttention
from ringattn.errors import InputError
from ringattn.workload import Pattern

# Kinds of call whose module is kept. A model has a handful; who meets more than these makes the oldest again.
MOST_KINDS = 64

_OPTIONS = inspect.signature(RingAttention).parameters.keys() - {
    "num_heads", "head_dim", "num_kv_heads", "causal", "scale", "dropout", "device", "window", "softcap", "head_dim_v",
}  # fmt: skip


class AttentionPool:
    """Dense ``RingAttention`` modules of one set of options, made on first need.

    Over several ranks every rank must meet the kinds of call in the same order, as it must build modules.
    """

    def __init__(self, **options: Any) -> None:
        """Keep ``options``, those of ``RingAttention`` that a call does not decide; InputError for others."""
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise InputError(f"{unknown[0]} is no option here; the options are {', '.join(sorted(_OPTIONS))}")
        self._options = options
        self._numbers: dict[tuple[Any, ...], int] = {}  # of each kind of call whose module is kept
        self._modules: dict[int, RingAttention] = {}
        pattern = Pattern.of(
            options.get("segment_lengths"), options.get("dilation_rates"), options.get("head_offset", "interleaved")
        )
        self.dilated = not pattern.dense

    def module_for(
        self,
        q: Tensor,
        k: Tensor,
        causal: bool,
        scale: float | None,
        softcap: float | None = None,
        window: int | None = None,
    ) -> RingAttention:
        """Return the module for q (B, S, H, D) and k (B, S, Hkv, D); raises what ``RingAttention`` raises."""
        heads, head_dim = q.shape[2:]
        return self._modules[self._number(heads, k.shape[2], head_dim, causal, scale, softcap, window, q.device)]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _number(
        self, heads: int, kv_heads: int, head_dim: int, causal: bool, scale: float | None, softcap: float | None,
        window: int | None, device: torch.device,
    ) -> int:  # fmt: skip
        """Return the number of a kind of call, its module made if there was none.

        A compiler runs this while it traces and keeps the number, so that a graph has no break where a module is made.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        kind = (heads, kv_heads, head_dim, causal, scale, softcap, window, device, deterministic)
        number = self._numbers.get(kind)
        if number is not None:
            return number
        if device.type == "meta":
            raise InputError("q is on meta, where tensors hold no data; give it data with to_empty() first")
        made = RingAttention(
            heads, head_dim, kv_heads, causal=causal, scale=scale, softcap=softcap, window=window, device=device,
            **self._options,
        )  # fmt: skip
        if len(self._numbers) >= MOST_KINDS:
            oldest = next(iter(self._numbers))
            del self._modules[self._numbers.pop(oldest)]
        number = self._numbers[kind] = max(self._modules, default=-1) + 1
        self._modules[number] = made
        return number
