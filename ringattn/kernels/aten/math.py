"""Binds ``ringattn.kernels.math``, matrix products and a softmax of torch, as a kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels import math as kernels_math
from ringattn.kernels.contract import (
    FEATURE_WORDS,
    BlockKernel,
    BoundDropout,
    BoundKernel,
    BoundVarlen,
    DropoutState,
    Grads,
    KernelConfig,
    KernelNeed,
)


def _fixed(config: KernelConfig) -> dict[str, Any]:
    return {"causal": config.causal, "scale": config.scale, "window": config.window, "softcap": config.softcap}


def bind(config: KernelConfig) -> BoundKernel:
    fixed = _fixed(config)
    return BoundKernel(
        functools.partial(kernels_math.forward, **fixed), functools.partial(kernels_math.backward, **fixed)
    )


def _bind_varlen(config: KernelConfig) -> BoundVarlen:
    fixed = _fixed(config)
    return BoundVarlen(
        functools.partial(kernels_math.varlen_forward, **fixed),
        functools.partial(kernels_math.varlen_backward, **fixed),
    )


def _bind_dropout(config: KernelConfig) -> BoundDropout:
    """Bind math with factors from a seed that torch's random numbers on the CPU give, whatever the device."""
    fixed, dropout = _fixed(config), config.dropout

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor, DropoutState]:
        seed = torch.randint(2**62, (), device="cpu")
        factors = kernels_math.drawn_factors(seed, dropout, q.device)
        return *kernels_math.forward(q, k, v, **fixed, factors=factors), (seed,)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: DropoutState = (), /
    ) -> Grads:
        factors = kernels_math.drawn_factors(state[0], dropout, q.device) if state else None
        return kernels_math.backward(dout, q, k, v, out, lse, **fixed, factors=factors)

    return BoundDropout(forward, backward)


def _reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = []
    if need.dtype == "tf32":
        reasons.append("its matrix products take TF32 only from torch's global flag, which stays untouched")
    return tuple(reasons)


KERNEL = BlockKernel(
    "math",
    "",
    _reasons,
    bind,
    load_varlen=_bind_varlen,
    load_dropout=_bind_dropout,
    features=frozenset(FEATURE_WORDS),
)
