"""The table of block kernels by name, in the order in which they are described to users."""

from __future__ import annotations

from collections.abc import Mapping

from . import kernels_aten, kernels_optional, kernels_triton
from .block_kernel import BlockKernel, BoundKernel, KernelConfig, KernelNeed

__all__ = ["KERNELS", "BlockKernel", "BoundKernel", "KernelConfig", "KernelNeed"]

KERNELS: Mapping[str, BlockKernel] = {
    kernel.name: kernel for kernel in (*kernels_aten.KERNELS, *kernels_optional.KERNELS, *kernels_triton.KERNELS)
}
