"""Wraps the memory-efficient kernel of CUTLASS as torch has it, "efficient"."""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.contract import (
    BlockKernel,
    BoundDropout,
    BoundKernel,
    DropoutBackward,
    DropoutForward,
    DropoutState,
    Grads,
    KernelConfig,
    KernelNeed,
)
from ringattn.kernels.grid_limits import cutlass_empty_rows, in_parts, without_empty_rows

from .shared import ATEN, cuda_reasons, far_rows_faults, heads_first


def _expand_heads(x_NMKD: Tensor, heads: int) -> Tensor:
    """Copy each key/value head for its query heads, for kernels without grouped-query support."""
    n, m, kv_heads, d = x_NMKD.shape
    if kv_heads == heads:
        return x_NMKD
    return x_NMKD[:, :, :, None].expand(n, m, kv_heads, heads // kv_heads, d).reshape(n, m, heads, d)


def _sum_heads(grad_NMHD: Tensor, kv_heads: int) -> Tensor:
    n, m, heads, d = grad_NMHD.shape
    if kv_heads == heads:
        return grad_NMHD
    wide = torch.float32 if grad_NMHD.dtype in (torch.float16, torch.bfloat16) else grad_NMHD.dtype
    return grad_NMHD.view(n, m, kv_heads, heads // kv_heads, d).sum(3, dtype=wide).to(grad_NMHD.dtype)


def _bind_forward(config: KernelConfig) -> DropoutForward:
    forward_op = ATEN._scaled_dot_product_efficient_attention.default
    causal, p, scale = config.causal, config.dropout, config.scale

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor, DropoutState]:
        rows, heads = q.shape[1], q.shape[2]
        k, v = _expand_heads(k, heads), _expand_heads(v, heads)
        out, lse, seed, offset = forward_op(*heads_first(q, k, v), None, True, p, causal, scale=scale)
        lse = lse[:, :, :rows]  # it pads the rows of its LSE to a multiple of 32
        return out.transpose(1, 2), cutlass_empty_rows(lse, q, k, scale), (seed, offset)

    return forward


def _bind(config: KernelConfig) -> BoundKernel:
    whole = _bind_forward(config)

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        out, lse, _ = whole(q, k, v)
        return out, lse

    return BoundKernel(forward, _bind_backward(config))


def _bind_dropout(config: KernelConfig) -> BoundDropout:
    return BoundDropout(_bind_forward(config), _bind_backward(config))


def _bind_backward(config: KernelConfig) -> DropoutBackward:
    backward_op = ATEN._scaled_dot_product_efficient_attention_backward.default
    causal, p, scale = config.causal, config.dropout, config.scale
    unused, wanted = (torch.zeros((), dtype=torch.int64, device="cpu"),) * 2, [True, True, True, False]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: DropoutState = (), /
    ) -> Grads:
        rows, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
        padded = -(-rows // 32) * 32
        # The kernel reads out as if its rows were H * D apart, whatever its strides say. Of an out laid out by heads,
        # as math gives it, heads but the first took delta from uninitialised memory: dq and dk wrong by 0.15 to NaN.
        out, lse = out.contiguous(), without_empty_rows(lse)
        if padded != rows or not lse.is_contiguous():
            padded_lse = lse.new_full((*lse.shape[:2], padded), float("inf"))
            padded_lse[:, :, :rows] = lse
            lse = padded_lse
        k, v = _expand_heads(k, heads), _expand_heads(v, heads)
        *inputs, out = heads_first(dout, q, k, v, out)
        dq, dk, dv, _ = backward_op(*inputs, None, out, lse, *(state or unused), p, wanted, causal, scale=scale)
        dk, dv = _sum_heads(dk.transpose(1, 2), kv_heads), _sum_heads(dv.transpose(1, 2), kv_heads)
        return dq.transpose(1, 2), dk, dv

    return backward


def _reasons(need: KernelNeed) -> tuple[str, ...]:
    dtypes = ("fp16", "bf16", "fp32") if need.sm >= 80 else ("fp16", "fp32")
    return tuple(cuda_reasons(need, dtypes, 50, 4 if need.dtype == "fp32" else 8, 65536) + far_rows_faults(need))


KERNEL = BlockKernel(
    "efficient",
    "",
    _reasons,
    lambda config: in_parts(_bind(config)),
    load_dropout=_bind_dropout,
    features=frozenset({"head_dim_v", "dropout"}),
)
