"""Wraps cuDNN's kernel as torch has it."""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.contract import (
    BlockKernel,
    BoundDropout,
    BoundKernel,
    DropoutBackward,
    DropoutState,
    Grads,
    KernelConfig,
    KernelNeed,
)
from ringattn.kernels.grid_limits import in_parts, without_empty_rows

from . import flash, math
from .shared import ATEN, cuda_reasons, heads_first, random_state

_WIDE_HEADS = (9, 10, 0, 3, 0)

# One query over 64 to 65,536 keys, also of grouped heads and read in place, was right on an H200 with this version.
_ONE_QUERY = (9, 19)


def _bind(config: KernelConfig) -> BoundKernel:
    """Bind cuDNN's kernel, and others for two shapes that ragged tails can have.

    It lacks blocks of one row, and in the backward of full blocks of 64 rows beyond a multiple of 128 dq can be NaN
    (see ``_reasons``). Math and FlashAttention 2, where it has the head dimension, run those; a plan whose *main*
    blocks have such a shape is refused. One query over several keys, which newer ones have, is an entry of its own.
    """
    one_row, odd_tail, whole_backward = math.bind(config), flash.bind(config), _bind_backward(config)
    forward_op = ATEN._scaled_dot_product_cudnn_attention.default
    causal, scale = config.causal, config.scale

    def several_rows(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        result = forward_op(*heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale)
        lse = result[1]
        return result[0].transpose(1, 2), lse.view(lse.shape[:3])

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        return one_row.forward(q, k, v) if q.shape[1] == 1 else several_rows(q, k, v)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /) -> Grads:
        rows = q.shape[1]
        if rows == 1:
            return one_row.backward(dout, q, k, v, out, lse)
        if not causal and rows % 128 == 64:
            apart = flash.flash_2_head_dim_is_unsafe(q.shape[3]) or v.shape[3] != q.shape[3]
            tail = one_row if apart else odd_tail
            return tail.backward(dout, q, k, v, out, lse)
        return whole_backward(dout, q, k, v, out, lse)

    return BoundKernel(forward, backward, one_query=several_rows)


def _bind_backward(config: KernelConfig) -> DropoutBackward:
    backward_op = ATEN._scaled_dot_product_cudnn_attention_backward.default
    causal, p, scale = config.causal, config.dropout, config.scale

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: DropoutState = (), /
    ) -> Grads:
        state = state or (random_state(1, torch.int64, q.device),) * 2
        heads, lse = heads_first(dout, q, k, v, out), without_empty_rows(lse)
        rows, keys = q.shape[1], k.shape[1]
        dq, dk, dv = backward_op(
            *heads, lse.unsqueeze(-1), *state, None, None, None, rows, keys, p, causal, scale=scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return backward


def _bind_dropout(config: KernelConfig) -> BoundDropout:
    forward_op = ATEN._scaled_dot_product_cudnn_attention.default
    causal, p, scale = config.causal, config.dropout, config.scale

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor, DropoutState]:
        result = forward_op(*heads_first(q, k, v), None, True, p, causal, False, scale=scale)
        lse = result[1]
        return result[0].transpose(1, 2), lse.view(lse.shape[:3]), (result[6], result[7])

    return BoundDropout(forward, _bind_backward(config))


def _head_dim_max(need: KernelNeed) -> int:
    """Return the largest head dimension of cuDNN, as torch's dispatcher has it (check_cudnn_tensor_shapes).

    128 everywhere, and from cuDNN 9.10 on 256 on sm_90 in both directions (pytorch/pytorch#161210): with 9.19 the
    results of an H200 at 192 and 256 were right, 2 to 3e-3 off in bf16, grouped heads and ragged lengths too. Newer
    torch asks for more than 9.22.0 there, and takes sm_10x then; nobody has measured that.
    """
    version = need.release("cudnn")
    return 256 if need.sm == 90 and version is not None and version >= _WIDE_HEADS else 128


def _reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = cuda_reasons(need, ("fp16", "bf16"), 80, 8, _head_dim_max(need))
    if need.rows == 1:
        reasons.append("one key row is not supported")
    if need.queries == 1 and not (need.sm == 90 and (need.release("cudnn") or ()) >= _ONE_QUERY):
        reasons.append("one query row was measured on sm_90 alone, with cuDNN 9.19")
    if need.backward and need.deterministic:
        reasons.append("its backward is not deterministic, and torch cannot ask it to be")
    if need.dropout and not need.causal and need.rows % 128 == 64:
        reasons.append(f"another kernel runs the backward of {need.rows} rows, which are 64 beyond a multiple of 128")
    if need.backward and not need.causal and need.sm == 90 and need.rows % 128 == 64:
        reasons.append(
            f"dq can be NaN on sm_90 where {need.rows} rows are 64 beyond a multiple of 128 (pytorch/pytorch#196678)"
        )
    return tuple(reasons)


KERNEL = BlockKernel(
    "cudnn",
    "",
    _reasons,
    lambda config: in_parts(_bind(config)),
    load_dropout=_bind_dropout,
    features=frozenset({"head_dim_v", "dropout"}),
)
