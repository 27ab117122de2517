"""Public ring attention for ``ring.py`` to be measured beside: as callables of local q, k, v (B, S, heads, D).

ring-flash-attention (zhuzilin) is taken from a folder, its FlashAttention 2 functions being those that torch ships,
since the flash-attn package need not be installed. PyTorch's own is ``context_parallel`` on cudnn, all-gather.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel


def _flash_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    """Run flash-attn 2's function, of whose signature the peer reads the names, on torch's."""
    out, lse, _, state, mask = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False, scale=softmax_scale
    )
    return out, lse, mask, state


def _flash_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out, softmax_lse.contiguous(), None, None, q.shape[1], k.shape[1], dropout_p,
        causal, state, state, scale=softmax_scale,
    )  # fmt: skip
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad)


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    return module


def zigzag(folder: str) -> Callable[..., Tensor]:
    """Return ring-flash-attention's zigzag ring on torch's FlashAttention 2; inputs are zigzag shards."""
    names = {f"_flash_attn_{way}": step for way, step in (("forward", _flash_forward), ("backward", _flash_backward))}
    varlen = {f"_flash_attn_varlen_{way}": None for way in ("forward", "backward")}
    if importlib.util.find_spec("flash_attn") is None:  # else it is flash-attn-4's, which our plans may use
        sys.modules["flash_attn"] = _module("flash_attn", __path__=[])
    sys.modules["flash_attn.flash_attn_interface"] = _module("flash_attn.flash_attn_interface", **names, **varlen)
    adapters = dict.fromkeys(("substitute_hf_flash_attn", "update_ring_flash_attn_params"))
    sys.modules["ring_flash_attn.adapters"] = _module("ring_flash_attn.adapters", **adapters)
    sys.path.insert(0, folder)
    from ring_flash_attn import zigzag_ring_flash_attn_func

    return lambda q, k, v: zigzag_ring_flash_attn_func(q, k, v, causal=True)


@contextlib.contextmanager
def context_parallel(mesh: DeviceMesh, length: int) -> Iterator[Callable[..., Tensor]]:
    """Yield PyTorch's context_parallel on cudnn, keys and values by all-gather; inputs are shards as it balances.

    While it lasts it takes the place of ``torch.nn.functional.scaled_dot_product_attention``.
    """
    from torch.distributed.tensor.experimental import context_parallel as over
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method("allgather")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)

    whole = torch.empty(mesh.size() * length, dtype=torch.uint8, device="cuda")  # it must have something to shard
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), over(mesh, buffers=[whole], buffer_seq_dims=[0]):
        yield attend
