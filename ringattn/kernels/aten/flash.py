"""Wraps FlashAttention 2 as torch has it, with the faults of its backward wherever it was compiled into."""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.contract import (
    BlockKernel,
    BoundDropout,
    BoundKernel,
    BoundVarlen,
    DropoutBackward,
    DropoutState,
    Grads,
    KernelConfig,
    KernelNeed,
    Sequences,
)
from ringattn.kernels.grid_limits import FLASH_2_MAX_ELEMENTS, flash_2_elements, flash_2_empty_rows, in_parts

from .shared import ATEN, cuda_reasons, far_rows_faults, random_state


def _window(config: KernelConfig) -> dict[str, int]:
    """Return the keywords of a sliding window, of which FlashAttention counts the keys before a row's own."""
    return {"window_size_left": config.window - 1, "window_size_right": 0} if config.window else {}


def bind(config: KernelConfig) -> BoundKernel:
    forward_op = ATEN._flash_attention_forward.default
    causal, fixed = config.causal, {"scale": config.scale, **_window(config)}

    def attend(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        result = forward_op(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, **fixed)
        return result[0], result[1]

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v)
        return out, flash_2_empty_rows(lse)

    return BoundKernel(forward, _bind_backward(config), lambda shape: attend)


def _bind_backward(config: KernelConfig) -> DropoutBackward:
    backward_op = ATEN._flash_attention_backward.default
    causal, p, fixed = config.causal, config.dropout, {"scale": config.scale, **_window(config)}

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: DropoutState = (), /
    ) -> Grads:
        state = state or (random_state(2, torch.uint64, q.device),) * 2
        rows, keys = q.shape[1], k.shape[1]
        grads = backward_op(dout, q, k, v, out, lse, None, None, rows, keys, p, causal, *state, **fixed)
        return grads[0], grads[1], grads[2]

    return backward


def _bind_dropout(config: KernelConfig) -> BoundDropout:
    """Bind FlashAttention 2 with dropout, whose probability it rounds to 1/256 and whose factor it does not."""
    forward_op = ATEN._flash_attention_forward.default
    causal, p, fixed = config.causal, config.dropout, {"scale": config.scale, **_window(config)}

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor, DropoutState]:
        out, lse, *state, _ = forward_op(q, k, v, None, None, q.shape[1], k.shape[1], p, causal, False, **fixed)
        return out, flash_2_empty_rows(lse), tuple(state)

    return BoundDropout(forward, _bind_backward(config))


def _bind_varlen(config: KernelConfig) -> BoundVarlen:
    """Bind the entry that ``torch.nn.attention.varlen.varlen_attn`` runs, with the LSE both ways."""
    forward_op = ATEN._flash_attention_forward.default
    backward_op = ATEN._flash_attention_backward.default
    causal, fixed = config.causal, {"scale": config.scale, **_window(config)}

    def forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, /) -> tuple[Tensor, Tensor]:
        cu_seqlens, longest = sequences.cu_seqlens, sequences.longest
        result = forward_op(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal, False, **fixed
        )  # fmt: skip
        return result[0], flash_2_empty_rows(result[1])

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, /
    ) -> Grads:
        state = random_state(2, torch.uint64, q.device)
        cu_seqlens, longest = sequences.cu_seqlens, sequences.longest
        grads = backward_op(
            dout, q, k, v, out, lse, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal, state, state, **fixed
        )
        return grads[0], grads[1], grads[2]

    return BoundVarlen(forward, backward)


def flash_2_head_dim_is_unsafe(head_dim: int) -> bool:
    """Tell whether FlashAttention 2's backward reads out of bounds at this head dimension."""
    return 128 < head_dim < 192


def flash_2_reads_out_of_bounds(need: KernelNeed) -> bool:
    return need.backward and flash_2_head_dim_is_unsafe(need.head_dim)


def flash_2_backward_faults(need: KernelNeed) -> list[str]:
    """Return what is wrong with FlashAttention 2's backward, wherever it was compiled into."""
    reasons = []
    # More blocks run in parts; packed sequences are one call, with 128 rows more for each.
    rows = need.packed_rows + 128 * need.blocks if need.packed_rows else need.rows
    accumulated = flash_2_elements(1, rows, need.heads, need.head_dim)
    if accumulated > FLASH_2_MAX_ELEMENTS:
        reasons.append(
            f"its backward's 32-bit offsets end at 2^31 elements of dq and one call has {accumulated} "
            "(Dao-AILab/flash-attention#2260)"
        )
    if need.dropout and flash_2_elements(need.blocks, rows, need.heads, need.head_dim) > FLASH_2_MAX_ELEMENTS:
        reasons.append("its backward would run in parts, and dropout is of one call")
    if flash_2_head_dim_is_unsafe(need.head_dim):
        reasons.append(f"its backward reads out of bounds at head_dim {need.head_dim} (pytorch/pytorch#173953)")
    return reasons


def _reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = cuda_reasons(need, ("fp16", "bf16"), 80, 8, 256) + far_rows_faults(need)
    if need.backward:
        reasons += flash_2_backward_faults(need)
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 of torch's sdp_utils.cpp: 232 to 256 fit
        # in the shared memory of these cards where there is no dropout
        most = 256 if need.dropout else 224
        if 192 < need.head_dim <= most and need.sm in (86, 89, 120, 121):
            with_it = " with dropout" if need.dropout else ""
            reasons.append(f"its backward has no head_dim from 200 to {most}{with_it} on {need.arch}")
    return tuple(reasons)


KERNEL = BlockKernel(
    "flash",
    "",
    _reasons,
    lambda config: in_parts(bind(config), flash_2_backward=True),
    load_varlen=_bind_varlen,
    load_dropout=_bind_dropout,
    reads_out_of_bounds=flash_2_reads_out_of_bounds,
    features=frozenset({"window", "dropout"}),
)
