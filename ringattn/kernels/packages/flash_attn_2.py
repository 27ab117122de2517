"""Wraps FlashAttention 2, the package flash-attn; see ``shared`` for what all wrappers keep to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ringattn.kernels.aten.flash import flash_2_backward_faults, flash_2_reads_out_of_bounds
from ringattn.kernels.aten.shared import far_rows_faults
from ringattn.kernels.contract import (
    BlockKernel,
    BoundDropout,
    BoundKernel,
    BoundVarlen,
    DropoutState,
    Grads,
    KernelConfig,
    KernelNeed,
    Sequences,
)
from ringattn.kernels.grid_limits import flash_2_empty_rows, in_parts

from .shared import contiguous_lse, empty_grads, import_package, no_more_params, package_reasons, refusal, unit_last

_REMEDY = "Install flash-attn >= 2.8 built for this torch"


def _window(config: KernelConfig) -> tuple[int, int]:
    """Return how many keys a row sees before and after its own; -1 is all."""
    return (config.window - 1, 0) if config.window else (-1, -1)


def _extension(config: KernelConfig) -> Any:
    """Return the extension of flash-attn; PlanError where it is not there, or has not the functions of 2.7.1."""
    name = "flash-attn-2"
    no_more_params(name, config)
    module = import_package(name, "flash_attn.flash_attn_interface", _REMEDY)
    extension = getattr(module, "flash_attn_gpu", None)  # so called since 2.7.1, with these arguments
    if extension is None:
        raise refusal(name, "flash_attn.flash_attn_interface has no flash_attn_gpu", _REMEDY)
    return extension


def load_flash_attn_2(config: KernelConfig) -> BoundKernel:
    """Bind FlashAttention 2's extension module: the package's own functions are custom ops, which cost host time."""
    extension = _extension(config)
    fwd, bwd = extension.fwd, extension.bwd
    causal, scale, deterministic = config.causal, config.scale, config.deterministic
    left, right, softcap = *_window(config), config.softcap

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        # out, alibi slopes, dropout, scale, causal, window left and right, softcap, return softmax, generator
        result = fwd(q, k, v, None, None, 0.0, scale, causal, left, right, softcap, False, None)
        return result[0], flash_2_empty_rows(result[1])

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /, grads: Grads | None = None
    ) -> Grads:
        dq, dk, dv = grads or empty_grads(q, k, v)
        bwd(
            *(unit_last(dout), q, k, v, out, contiguous_lse(lse), dq, dk, dv, None),
            *(0.0, scale, causal, left, right, softcap, deterministic, None, None),
        )
        return dq, dk, dv

    return in_parts(BoundKernel(forward, backward), flash_2_backward=True)


def load_flash_attn_2_dropout(config: KernelConfig) -> BoundDropout:
    """Bind FlashAttention 2 with dropout; of the probability see torch's own."""
    extension = _extension(config)
    fwd, bwd = extension.fwd, extension.bwd
    causal, scale, deterministic, p = config.causal, config.scale, config.deterministic, config.dropout
    left, right = _window(config)

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor, DropoutState]:
        out, lse, _, rng_state = fwd(q, k, v, None, None, p, scale, causal, left, right, 0.0, False, None)
        return out, flash_2_empty_rows(lse), (rng_state,)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: DropoutState = (), /
    ) -> Grads:
        (rng_state,) = state or (None,)
        dq, dk, dv = empty_grads(q, k, v)
        bwd(
            *(unit_last(dout), q, k, v, out, contiguous_lse(lse), dq, dk, dv, None),
            *(p if state else 0.0, scale, causal, left, right, 0.0, deterministic, None, rng_state),
        )
        return dq, dk, dv

    return BoundDropout(forward, backward)


def load_flash_attn_2_varlen(config: KernelConfig) -> BoundVarlen:
    extension = _extension(config)
    fwd, bwd = extension.varlen_fwd, extension.varlen_bwd
    causal, scale, deterministic = config.causal, config.scale, config.deterministic
    left, right, softcap = *_window(config), config.softcap

    def forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, /) -> tuple[Tensor, Tensor]:
        cu_seqlens, longest = sequences.cu_seqlens, sequences.longest
        # out, bounds, used keys, left padding, block table, alibi slopes, longest
        # dropout, scale, zero tensors, causal, window left and right, softcap, return softmax, generator
        result = fwd(
            *(q, k, v, None, cu_seqlens, cu_seqlens, None, None, None, None, longest, longest),
            *(0.0, scale, False, causal, left, right, softcap, False, None),
        )
        return result[0], flash_2_empty_rows(result[1])

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, /
    ) -> Grads:
        cu_seqlens, longest = sequences.cu_seqlens, sequences.longest
        dq, dk, dv = empty_grads(q, k, v)
        bwd(
            *(unit_last(dout), q, k, v, out, contiguous_lse(lse), dq, dk, dv, cu_seqlens, cu_seqlens, None),
            *(longest, longest, 0.0, scale, False, causal, left, right, softcap, deterministic, None, None),
        )
        return dq, dk, dv

    return BoundVarlen(forward, backward)


def flash_attn_2_reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = package_reasons(need, 80) + far_rows_faults(need)
    if need.backward:
        reasons += flash_2_backward_faults(need)
    if need.dropout and need.softcap:
        reasons.append("no dropout with a softcap")
    if need.dropout and need.head_dim > 192 and need.sm not in (80, 90):
        reasons.append(f"its backward has no head_dim above 192 with dropout on {need.arch}")
    return tuple(reasons)


KERNEL = BlockKernel(
    "flash-attn-2",
    "flash_attn",
    flash_attn_2_reasons,
    load_flash_attn_2,
    load_varlen=load_flash_attn_2_varlen,
    remedy=_REMEDY,
    strided_backward=True,
    writes_grads=True,
    load_dropout=load_flash_attn_2_dropout,
    reads_out_of_bounds=flash_2_reads_out_of_bounds,
    features=frozenset({"window", "softcap", "dropout"}),
)
