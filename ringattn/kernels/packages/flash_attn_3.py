"""Wraps FlashAttention 3, built from hopper/ of its repository; see ``shared`` for what all wrappers keep to."""

from __future__ import annotations

from torch import Tensor

from ringattn.kernels.contract import BlockKernel, BoundKernel, Grads, KernelConfig, KernelNeed

from .shared import checked_function, contiguous_lse, empty_grads, import_package, no_more_params, package_reasons

_REMEDY = "Build FlashAttention 3 (hopper/ of the flash-attention repository) at 3.0.0 or newer"


def load_flash_attn_3(config: KernelConfig) -> BoundKernel:
    name = "flash-attn-3"
    no_more_params(name, config)
    module = import_package(name, "flash_attn_interface", _REMEDY)
    forward_keywords = {"softmax_scale": config.scale, "causal": config.causal}
    backward_keywords = {"softmax_scale": config.scale, "is_causal": config.causal}
    into = ("dq", "dk", "dv")
    fwd = checked_function(name, module, "_flash_attn_forward", 3, forward_keywords, _REMEDY)
    bwd = checked_function(name, module, "_flash_attn_backward", 6, (*into, *backward_keywords), _REMEDY)

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        result = fwd(q, k, v, **forward_keywords)
        return result[0], result[1]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /, grads: Grads | None = None
    ) -> Grads:
        dq, dk, dv = grads or empty_grads(q, k, v)  # it returns none of them
        bwd(dout, q, k, v, out, contiguous_lse(lse), dq=dq, dk=dk, dv=dv, **backward_keywords)
        return dq, dk, dv

    return BoundKernel(forward, backward)


def flash_attn_3_reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = package_reasons(need, 90)
    if need.vendor == "nvidia" and need.sm > 90:
        reasons.append(f"is built for sm_90, this is {need.arch}")
    if need.backward and need.deterministic:
        reasons.append("builds of 2025 drop its deterministic flag silently (Dao-AILab/flash-attention#1766)")
    return tuple(reasons)


KERNEL = BlockKernel(
    "flash-attn-3",
    "flash_attn_interface",
    flash_attn_3_reasons,
    load_flash_attn_3,
    remedy=_REMEDY,
    strided_backward=True,
    writes_grads=True,
)
