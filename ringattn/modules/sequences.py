"""Checks the sequences that a module with projections is given: each fault is one line that names it.

Legend: B batch, S sequence, E width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ringattn.errors import InputError
from ringattn.geometry.layout import check_own


def check_sequences(widths: Mapping[str, tuple[Tensor, int]], weight: Tensor) -> None:
    """Raise InputError unless these are sequences of their widths for ``weight``, all of as many dimensions, 2 or 3.

    ``widths`` are tensors and the E that each must have, by name.
    """
    first: Tensor | None = None
    for name, (x, width) in widths.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is a {type(x).__name__}; it must be a tensor")
        check_own(name, x)
        if x.is_nested or x.layout is not torch.strided:
            raise InputError(f"{name} is no dense tensor; call once for each sequence, or with padding and its mask")
        if x.dim() not in (2, 3) or (first is not None and x.dim() != first.dim()):
            raise InputError(
                f"{name} has shape {tuple(x.shape)}; it must have two dimensions, or three with a batch, as the others"
            )
        if x.shape[-1] != width:
            raise InputError(f"{name} has shape {tuple(x.shape)}; its last dimension must be {width}")
        if x.numel() == 0:
            raise InputError(f"{name} has shape {tuple(x.shape)}; batch and sequence must not be empty")
        if x.device != weight.device:
            raise InputError(f"{name} is on {x.device} and the module's parameters on {weight.device}; move it there")
        cast = torch.is_autocast_enabled(x.device.type) and x.is_floating_point()
        if x.dtype != weight.dtype and not cast:
            raise InputError(f"{name} is {x.dtype} and the module's parameters {weight.dtype}; convert it")
        first = x if first is None else first


def check_alike(query: Tensor, key: Tensor, value: Tensor, batch_dim: int) -> None:
    """Raise InputError unless the batches are equal, and key and value of one length; ``batch_dim`` is of three."""
    if query.dim() == 3:
        for name, x in (("key", key), ("value", value)):
            if x.shape[batch_dim] != query.shape[batch_dim]:
                raise InputError(
                    f"{name} has shape {tuple(x.shape)} and query {tuple(query.shape)}; dimension {batch_dim}, the "
                    "batch, must be equal"
                )
    if key.shape[:-1] != value.shape[:-1]:
        raise InputError(
            f"value has shape {tuple(value.shape)} and key {tuple(key.shape)}; all but the last dimension must be equal"
        )


def check_mask(name: str, mask: object) -> None:
    """Raise InputError unless it is a mask, boolean or floating point, or None."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise InputError(f"{name} is a {type(mask).__name__}; it must be a tensor")
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise InputError(f"{name} is of {mask.dtype}; it must be boolean, or floating point with 0 and -inf")
