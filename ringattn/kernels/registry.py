"""Holds the table of block kernels by name, in the order in which they are described to users."""

from __future__ import annotations

from collections.abc import Mapping

from . import aten as kernels_aten
from . import packages as kernels_optional
from . import split_kv as kernels_split_kv
from . import triton as kernels_triton
from .contract import BlockKernel, BoundKernel, KernelConfig, KernelNeed

__all__ = ["KERNELS", "BlockKernel", "BoundKernel", "KernelConfig", "KernelNeed"]

KERNELS: Mapping[str, BlockKernel] = {
    kernel.name: kernel
    for kernel in (
        *kernels_aten.KERNELS,
        *kernels_optional.KERNELS,
        *kernels_triton.KERNELS,
        *kernels_split_kv.KERNELS,
    )
}
