"""flash-cpu with a fault put into it, for tests of what is done about wrong kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ringattn.kernels.contract import BlockKernel, BoundKernel, KernelConfig
from ringattn.kernels.registry import KERNELS

RIGHT = KERNELS["flash-cpu"]


def with_wrong_dq(factor: float = 1.4, when: Callable[[KernelConfig], bool] = lambda config: True) -> BlockKernel:
    """dq times ``factor``, wherever the kernel is bound ``when``; forward, dk and dv are right."""

    def load(config: KernelConfig) -> BoundKernel:
        right = RIGHT.load(config)
        if not when(config):
            return right

        def backward(*tensors: Tensor, **keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv = right.backward(*tensors, **keywords)
            return dq * factor, dk, dv

        return BoundKernel(right.forward, backward)

    return replace(RIGHT, load=load)


def raising(error: Exception) -> BlockKernel:
    """Its forward raises ``error``."""

    def load(config: KernelConfig) -> BoundKernel:
        def forward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            raise error

        return BoundKernel(forward, RIGHT.load(config).backward)

    return replace(RIGHT, load=load)
