"""Runs a decoding step of a transformers model by what ran the one before it, without a way through the module.

Legend: B batch, Sk keys, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.autograd.function import Runner
from ringattn.decoding.cross import run_steps
from ringattn.decoding.kernel_choice import rounded
from ringattn.decoding.spans import SpanStep, run_over_spans
from ringattn.modules.masks import Keys
from ringattn.modules.pool import AttentionPool

T = TypeVar("T")
_MOST_RUNS = 256


class Steps:
    """Functions of the steps met: one query of each sequence, which sees every key that is not padding, no gradient.

    A step of 512 keys on a CPU takes 37 us by the module and 23 so; transformers' own function, 20.
    """

    def __init__(self, pool: AttentionPool) -> None:
        self._pool = pool
        self._runs: dict[tuple[Any, ...], Runner] = {}
        self._span_runs: dict[tuple[Any, ...], SpanStep] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Keys | None,
        causal: bool,
        scale: float | None,
        softcap: float | None,
    ) -> tuple[Tensor, None] | None:
        """Return out (B, 1, H, D) and None of query (B, H, 1, D), key and value (B, Hkv, Sk, D).

        ``causal`` is that of a call without ``keys``. None for a call that is no such step.
        """
        if not (type(query) is type(key) is type(value) is Tensor) or value.shape != key.shape:
            return None
        if not (query.layout is key.layout is value.layout is torch.strided):
            return None
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return None
        device = query.device
        if torch.is_autocast_enabled(device.type):
            return None
        if keys is not None and keys.plain and keys.length <= key.shape[2]:  # in a cache with room for more
            key, value, causal = key[:, :, : keys.length], value[:, :, : keys.length], keys.causal
        elif keys is not None:
            return self._over_spans(query, key, value, keys, scale, softcap)
        looks = (*_looks_of(query, key, value), causal, scale, softcap)
        run = self._runs.get(looks)
        if run is None:
            module = self._pool.module_for(query.transpose(1, 2), key.transpose(1, 2), causal, scale, softcap)
            run = run_steps(module, query, key, value)
            if run is None:
                return None
            _remember(self._runs, looks, run)
        return run(query, key, value)

    def _over_spans(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Keys, scale: float | None, softcap: float | None
    ) -> tuple[Tensor, None] | None:
        spans = keys.spans
        if spans is None or len(spans.firsts) != len(query) or spans.length > key.shape[2]:
            return None
        looks = (*_looks_of(query, key, value), rounded(spans.length), keys.causal, scale, softcap)
        run = self._span_runs.get(looks)
        if run is None:
            module = self._pool.module_for(query.transpose(1, 2), key.transpose(1, 2), keys.causal, scale, softcap)
            run = run_over_spans(module, query, key, value, spans)
            if run is None:
                return None
            _remember(self._span_runs, looks, run)
        out = run(query, key, value, spans)
        return None if out is None else (out, None)


def _looks_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """Return what steps have in common that one function runs: a cache grows, and lengths are alike nearby."""
    batch, kv_heads, keys, head_dim = key.shape
    return (
        query.shape, query.stride(), batch, kv_heads, rounded(keys), head_dim, key.stride(3), value.stride(3),
        query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def _remember(runs: dict[tuple[Any, ...], T], looks: tuple[Any, ...], run: T) -> None:
    if len(runs) >= _MOST_RUNS:
        runs.clear()
    runs[looks] = run
