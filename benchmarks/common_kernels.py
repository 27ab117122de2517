"""Bare kernels on their own tensors: what a module is measured against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringattn import detect
from ringattn.block_kernel import KernelConfig, KernelNeed
from ringattn.kernels import KERNELS

Forward = Callable[[], object]


class BareKernel:
    """One kernel bound to q, k, v (N, M, H, D) of its own; ``forward`` and ``backward`` are the two launches."""

    def __init__(self, name: str, blocks: int, rows: int, heads: int, head_dim: int, dtype: torch.dtype, causal: bool):
        self.q, self.k, self.v, self.dout = (
            torch.randn(blocks, rows, heads, head_dim, device="cuda", dtype=dtype) for _ in range(4)
        )
        self._bound = KERNELS[name].load(KernelConfig(causal=causal, scale=head_dim**-0.5))
        self.out, self.lse = (x.contiguous() for x in self._bound.forward(self.q, self.k, self.v))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self._bound.forward(self.q, self.k, self.v)

    def backward(self) -> object:
        return self._bound.backward(self.dout, self.q, self.k, self.v, self.out, self.lse)


def runnable(dtype: str, head_dim: int, heads: int, rows: int, blocks: int, causal: bool) -> list[str]:
    """The kernels that can run this shape here, forward and backward."""
    facts = detect()
    need = KernelNeed(facts.vendor, facts.arch, dtype, head_dim, heads, heads, rows, blocks, causal, backward=True)
    return [
        name
        for name, kernel in KERNELS.items()
        if name not in ("math", "xformers") and not kernel.unsupported_reasons(need, facts)
    ]
