"""Wraps torch's flash attention for CPUs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ringattn.kernels import math as kernels_math
from ringattn.kernels.contract import BlockKernel, BoundKernel, Grads, KernelConfig, KernelNeed
from ringattn.kernels.grid_limits import without_empty_rows
from ringattn.kernels.window_blocks import in_window_blocks

from .shared import ATEN, heads_first


def _bind(config: KernelConfig) -> BoundKernel:
    """Bind torch's kernel for CPUs; math computes again the rows where its out and LSE are both 0.

    It gives these where every logit is -inf, and where one is NaN and the keys are few; other rows can have them, too.
    """
    if config.window:  # it has none: two calls a tile, where math takes 10 times as long (4096 rows, a window of 1024)
        whole = replace(config, window=0)
        return in_window_blocks(_bind(whole), _bind(replace(whole, causal=False)), config.window)
    forward_op = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    causal, scale = config.causal, config.scale

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        if q.shape[1] == 1 and not causal and groups_as_rows(q.dtype, q.shape[2] // k.shape[2], k.shape[1]):
            grouped = torch.unflatten(q[:, 0], 1, (k.shape[2], -1))
            out, lse = forward_op(grouped, *heads_first(k, v), 0.0, False, scale=scale)
            out, lse = out.flatten(1, 2).unsqueeze(1), lse.flatten(1, 2).unsqueeze(2)
        else:
            out, lse = forward_op(*heads_first(q, k, v), 0.0, causal, scale=scale)
            out = out.transpose(1, 2)
        # 2 us where a call of 64 rows and 8 heads takes 226, and 15 where one of 2048 and 16 takes 224,000
        if type(lse) is Tensor and int(torch.count_nonzero(lse)) != lse.numel():  # a FakeTensor has no values
            return _decided_by_math(q, k, v, out, lse, causal, scale)
        return out, lse

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /) -> Grads:
        dq, dk, dv = backward_op(*heads_first(dout, q, k, v, out), without_empty_rows(lse), 0.0, causal, scale=scale)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return BoundKernel(forward, backward, lambda shape: forward)


def groups_as_rows(dtype: torch.dtype, group: int, keys: int) -> bool:
    """Tell whether flash-cpu is faster where one query's heads of a group are given as rows of one head.

    It reads each key once then, and not once a query head: 32/8 heads of 128 over 4096 keys take 1.7 ms in place of
    5.0. In 16 bits that pays from many keys on: 0.2 ms either way with 512, 1.7 and 2.1 with 4096.
    """
    return group > 1 and (dtype.itemsize > 2 or group * keys >= 16384)


def _decided_by_math(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``, with those of math in the rows where both are 0."""
    empty_NHM = (lse == 0) & (out == 0).all(-1).transpose(1, 2)
    if not empty_NHM.any():
        return out, lse
    with torch.no_grad():
        exact_out, exact_lse = kernels_math.forward(q, k, v, causal, scale)
    return torch.where(empty_NHM.transpose(1, 2)[..., None], exact_out, out), torch.where(empty_NHM, exact_lse, lse)


def _reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = []
    if need.vendor != "cpu":
        reasons.append("runs on CPUs only")
    if need.dtype not in ("fp32", "fp16", "bf16"):
        reasons.append(f"no {need.dtype}; it has fp32, fp16 and bf16")
    return tuple(reasons)


KERNEL = BlockKernel("flash-cpu", "", _reasons, _bind, features=frozenset({"window"}))
