"""Runs cuDNN's kernel or FlashAttention 2 through ``F.scaled_dot_product_attention``, where torch would pick that one.

It is one call from Python where the aten operator takes a slower way into the dispatcher: on an H200's host a cudnn
training step of 16 sequences of 577 takes the host 206 us so and 272 by the operators, and 299 with a backward of our
own. It gives no LSE, so it serves calls that ask for none, and only where the kernel need not be told anything else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from .grid_limits import FLASH_2_MAX_ELEMENTS, MAX_GRID, flash_2_elements

_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_NAMES = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_kernel(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the kernel to which ``F.scaled_dot_product_attention`` dispatches tensors (B, S, heads, D), by our name.

    Tensors that require a gradient say that it is a training step.
    """
    grouped = q.shape[2] != k.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    name = _NAMES[torch._fused_sdp_choice(query, key, value, None, 0.0, causal, enable_gqa=grouped)]
    return "flash-cpu" if name == "flash" and q.device.type == "cpu" else name


def torch_entry(kernel: str, causal: bool, scale: float, q: Tensor, k: Tensor, v: Tensor, train: bool) -> Attend | None:
    """Return torch's function for tensors like these (B, S, heads, D); None where it is not exactly ``kernel``.

    With ``train`` autograd takes its gradient by itself, for dout of any strides.
    """
    if kernel not in _BACKENDS or q.device.type != "cuda" or not _whole(kernel, causal, q, train):
        return None
    grouped = q.shape[2] != k.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    if chosen != _BACKENDS[kernel].value:
        return None
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = sdpa(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=causal,
            scale=scale,
            enable_gqa=grouped,
        ).transpose(1, 2)
        if train:
            # cudnn keys the plan of its backward on the strides of q, k and v, and is silently wrong for another layout
            # of dout. A hook takes an H200's host 8 to 20 us of a step, two views with contiguous gradients 15 to 75.
            out.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        return out

    return attend


def _whole(kernel: str, causal: bool, q: Tensor, train: bool) -> bool:
    """Tell whether the kernel takes the call in one piece and without the stand-ins of ``aten`` for odd lengths."""
    blocks, rows, heads, head_dim = q.shape
    if blocks > MAX_GRID or blocks * rows == 0:
        return False
    if kernel == "flash":
        return not train or flash_2_elements(blocks, rows, heads, head_dim) <= FLASH_2_MAX_ELEMENTS
    return not train or (rows > 1 and (causal or rows % 128 != 64))
