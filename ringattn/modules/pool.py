"""Holds one ``RingAttention`` for each kind of call that a function meets, so that profiles and plans serve it."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ringattn.attention import RingAttention
from ringattn.errors import InputError
from ringattn.planning.module_setup import group_size
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
        self.over_ranks = group_size(options.get("process_group")) > 1
        pattern = Pattern.of(
            options.get("segment_lengths"), options.get("dilation_rates"), options.get("head_offset", "interleaved")
        )
        self.dilated = not pattern.dense

    def reporting(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which an error of this rank aborts the group; see ``RingAttention.reporting``.

        For what comes before a module is found: the other ranks may be making theirs, or calling it.
        """
        if not self.over_ranks:
            return nullcontext()
        from ringattn.distributed.context import group_of
        from ringattn.distributed.watchdog import watchdog_of

        return watchdog_of(group_of(self._options["process_group"]), device).reporting()

    def module_for(
        self,
        q: Tensor,
        k: Tensor,
        causal: bool,
        scale: float | None,
        softcap: float | None = None,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> RingAttention:
        """Return the module for q (B, S, H, D) and k (B, S, Hkv, D); raises what ``RingAttention`` raises."""
        heads, head_dim = q.shape[2:]
        scores = causal, scale, softcap, window, dropout
        return self._modules[self._number(heads, k.shape[2], head_dim, *scores, q.device)]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _number(
        self, heads: int, kv_heads: int, head_dim: int, causal: bool, scale: float | None, softcap: float | None,
        window: int | None, dropout: float, device: torch.device,
    ) -> int:  # fmt: skip
        """Return the number of a kind of call, its module made if there was none.

        A compiler runs this while it traces and keeps the number, so that a graph has no break where a module is made.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        kind = (heads, kv_heads, head_dim, causal, scale, softcap, window, dropout, device, deterministic)
        number = self._numbers.get(kind)
        if number is not None:
            return number
        if device.type == "meta":
            raise InputError("q is on meta, where tensors hold no data; give it data with to_empty() first")
        scores: dict[str, Any] = {"causal": causal, "scale": scale, "softcap": softcap, "window": window}
        scores |= {"dropout": dropout} if dropout else {}
        made = RingAttention(heads, head_dim, kv_heads, device=device, **scores, **self._options)
        if len(self._numbers) >= MOST_KINDS:
            oldest = next(iter(self._numbers))
            del self._modules[self._numbers.pop(oldest)]
        number = self._numbers[kind] = max(self._modules, default=-1) + 1
        self._modules[number] = made
        return number
