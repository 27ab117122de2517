"""Holds the table of block kernels by name, in the order in which they are described to users."""

from __future__ import annotations

from collections.abc import Mapping

from .aten import cudnn, efficient, flash, flash_cpu, math
from .contract import BlockKernel, BoundKernel, KernelConfig, KernelNeed
from .own import split_kv, triton
from .packages import flash_attn_2, flash_attn_3, flash_attn_4, xformers

__all__ = ["KERNELS", "BlockKernel", "BoundKernel", "KernelConfig", "KernelNeed"]

KERNELS: Mapping[str, BlockKernel] = {
    kernel.name: kernel
    for kernel in (
        *(of_torch.KERNEL for of_torch in (cudnn, flash, efficient, flash_cpu, math)),
        *(package.KERNEL for package in (flash_attn_2, flash_attn_3, flash_attn_4, xformers)),
        *triton.KERNELS,
        *split_kv.KERNELS,
    )
}
