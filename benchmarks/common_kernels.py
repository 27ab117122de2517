"""Bare kernels on their own tensors: what a module is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn import detect
from ringattn.dtypes import DTYPE_NAMES
from ringattn.kernels.contract import KernelConfig, KernelNeed
from ringattn.kernels.registry import KERNELS


class BareKernel:
    """One kernel bound to compact q, k, v (N, M, H, D); ``forward`` and ``backward`` are the two launches.

    The rows are the first N * M of ``tensors`` (q, k, v, dout; each (B, S, H, D), contiguous), so that the kernels of
    many branches need no memory of their own for inputs.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor], blocks: int, rows: int, causal: bool):
        head_dim = tensors[0].shape[-1]
        self.q, self.k, self.v, self.dout = (
            x.detach().view(-1)[: blocks * rows * x.shape[2] * head_dim].view(blocks, rows, x.shape[2], head_dim)
            for x in tensors
        )
        config = KernelConfig(causal=causal, scale=head_dim**-0.5, dtype=DTYPE_NAMES[tensors[0].dtype])
        self._bound = KERNELS[name].load(config)
        self.out, self.lse = (x.contiguous() for x in self._bound.forward(self.q, self.k, self.v))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self._bound.forward(self.q, self.k, self.v)

    def backward(self) -> object:
        return self._bound.backward(self.dout, self.q, self.k, self.v, self.out, self.lse)


def runnable(
    dtype: str, head_dim: int, heads: int, rows: int, blocks: int, causal: bool, kv_heads: int = 0
) -> list[str]:
    """Return the kernels that can run this shape here, both ways; no ``kv_heads`` means as many as ``heads``."""
    facts = detect()
    need = KernelNeed(
        facts.vendor, facts.arch, dtype, head_dim, heads, kv_heads or heads, rows, blocks, causal, backward=True
    )
    return [
        name
        for name, kernel in KERNELS.items()
        if name not in ("math", "xformers") and not kernel.unsupported_reasons(need, facts)
    ]


def flash_for_torchscale(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, bias=None, softmax_scale=None, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Run torch's FlashAttention 2 as torchscale calls flash-attn's function: out (B, S, H, D), lse."""
    assert (dropout, bias, softmax_scale) == (0.0, None, None)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, is_causal, False
    )[:2]
    return out.transpose(1, 2), lse.detach()
