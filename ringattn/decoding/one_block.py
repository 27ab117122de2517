"""Runs calls in which every query sees every key, as one call of a kernel: the steps of a cache, and cross attention.

Legend: B batch, Sq queries, Sk keys, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ringattn.kernels.aten.flash_cpu import groups_as_rows
from ringattn.kernels.contract import Forward
from ringattn.kernels.torch_entry import Attend, torch_entry, torch_kernel
from ringattn.runtime.executor import Executor, Kept

from .program import CrossProgram


class OneBlock(Executor):
    """Plan of such calls, without gradients; k and v may have about as many rows as those that it was made with."""

    def __init__(self, program: CrossProgram, scale: float, q: Tensor, kv_heads: int) -> None:
        self.plan, self.dtype, self._scale = program.plan, program.dtype, scale
        self._name, kernel = program.kernel_over_all(q, kv_heads)
        self._forward = kernel.forward

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None) -> tuple[Tensor, Tensor]:
        if q.dtype is self.dtype:
            return self._forward(q, k, v)
        out, lse = self._forward(q.to(self.dtype), k.to(self.dtype), v.to(self.dtype))
        return out.to(q.dtype), lse

    def direct(self, dtype: torch.dtype) -> Forward:
        return self._forward if dtype is self.dtype else self.attend

    def torch_entry(self, q: Tensor, k: Tensor, v: Tensor) -> Attend | None:
        if self._name != "flash-cpu":
            return torch_entry(self._name, False, self._scale, q, k, v, train=False)
        entry = self.heads_first(q, k, v)
        if entry is None:
            return None
        return lambda q, k, v: entry(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

    def heads_first(self, q: Tensor, k: Tensor, v: Tensor) -> Attend | None:
        """Return torch's function as ``torch_entry`` does, of (B, heads, S, D) with out (B, Sq, H, D)."""
        if self._name == "flash-cpu":
            return _on_cpu(self._forward, self._scale, q, k) if torch_kernel(False, q, k, v) == self._name else None
        if torch_entry(self._name, False, self._scale, q, k, v, train=False) is None:
            return None
        sdpa = partial(F.scaled_dot_product_attention, scale=self._scale, enable_gqa=q.shape[2] != k.shape[2])
        return lambda query, key, value: sdpa(query, key, value).transpose(1, 2)


def _on_cpu(kernel: Forward, scale: float, q: Tensor, k: Tensor) -> Attend:
    """Return torch's function, where it runs ``kernel``: a step of 64 keys takes 7 us so, and 21 by the operator.

    It gives rows of zeros where a logit is NaN, as it does where all are -inf, which the kernel tells apart.
    """
    sdpa = flash_cpu_through_torch(scale, q.transpose(1, 2), k.transpose(1, 2))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = sdpa(query, key, value)
        if int(torch.count_nonzero(out)) != out.numel():
            return kernel(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))[0]
        return out

    return attend


def flash_cpu_through_torch(scale: float, query: Tensor, key: Tensor) -> Callable[..., Tensor]:
    """Return torch's function, by which it runs flash-cpu, for calls with query (B, H, Sq, D) and key (B, Hkv, Sk, D).

    It takes query, key, value and a mask, if there is one, and gives out (B, Sq, H, D).
    """
    batch, heads, queries, head_dim = query.shape
    group = heads // key.shape[1]
    sdpa = partial(F.scaled_dot_product_attention, scale=scale)
    if queries == 1 and groups_as_rows(query.dtype, group, key.shape[2]):

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
            return sdpa(query.view(batch, -1, group, head_dim), key, value, mask).reshape(batch, 1, heads, head_dim)

        return attend
    if group > 1:
        sdpa = partial(sdpa, enable_gqa=True)
    return lambda query, key, value, mask=None: sdpa(query, key, value, mask).transpose(1, 2)
