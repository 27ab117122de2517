"""Runs calls in which every query sees every key, as one call of a kernel: the steps of a cache, and cross attention.

Legend: B batch, Sq queries, Sk keys, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        if self._name == "flash-cpu" and torch_kernel(False, q, k, v) == self._name:
            return _on_cpu(self._forward, self._scale, grouped=q.shape[2] != k.shape[2])
        return torch_entry(self._name, False, self._scale, q, k, v, train=False)


def _on_cpu(kernel: Forward, scale: float, grouped: bool) -> Attend:
    """Return torch's function, where it runs ``kernel``: a step of 64 keys takes 7 us so, and 21 by the operator.

    It gives rows of zeros where a logit is NaN, as it does where all are -inf, which the kernel tells apart.
    """
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = sdpa(query, key, value, scale=scale, enable_gqa=grouped)
        if int(torch.count_nonzero(out)) != out.numel():
            return kernel(q, k, v)[0]
        return out.transpose(1, 2)

    return attend
