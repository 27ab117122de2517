"""Arithmetic of a reference: exact, or with the roundings of a right kernel of a compute dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.dtypes import TORCH_DTYPES

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Roundings: ``dtype`` accumulates, ``operand`` rounds what enters a product, ``result`` what leaves.

    ``recomputed`` is the relative error between a logit of the forward and the same logit worked out again in the
    backward, by other instructions in another order, and of an out merged from several: it is what keeps the sums
    of the backward from cancelling. ``kept`` is that of an out which is kept for the backward, rounded by half a
    unit by its branch and by another half merged: as much as it may be, not what these values happen to round by.
    """

    dtype: torch.dtype
    operand: Rounding
    result: Rounding
    recomputed: float = 0.0
    kept: float = 0.0


def _same(x: Tensor) -> Tensor:
    return x


def _through(dtype: torch.dtype) -> Rounding:
    return lambda x: x.to(dtype).to(x.dtype)


def _to_tf32(x: Tensor) -> Tensor:
    """Round to ten bits after the point, to nearest."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


_RECOMPUTED = 2.0**-22
EXACT = Arithmetic(torch.float64, _same, _same)


def modelled(compute_dtype: str, input_dtype: str) -> Arithmetic:
    """Return the roundings of a right kernel that computes in this dtype and returns in the input dtype."""
    if compute_dtype == "fp64":
        return EXACT
    returned = _through(TORCH_DTYPES[input_dtype])
    kept = UNIT_ROUNDOFF[input_dtype]
    if compute_dtype == "fp32":
        return Arithmetic(torch.float32, _same, returned, _RECOMPUTED, kept)
    if compute_dtype == "tf32":
        return Arithmetic(torch.float32, _to_tf32, returned, _RECOMPUTED, kept)
    narrow = _through(TORCH_DTYPES[compute_dtype])
    kept = max(kept, UNIT_ROUNDOFF[compute_dtype])
    return Arithmetic(torch.float32, narrow, lambda x: returned(narrow(x)), _RECOMPUTED, kept)
