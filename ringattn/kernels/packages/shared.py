"""Imports a package, checks its functions, and hands it tensors as its C++ takes them: shared by all wrappers.

A wrapper has pure reasons (architecture, dtype, head dimension, published faults with their source) and a ``load_*``
that imports its package once, when a plan is built, checks that the functions take what is passed to them, and
binds them. A package that is absent, broken or of another release is a KernelLoadError of one line.

All take (N, M, H, D) tensors whose last stride is 1 and whose other strides are free (FlashAttention 4: multiples of
16 bytes, or it copies). Causal blocks are square: these packages align a mask bottom-right, torch top-left.
FlashAttention's own packages read any layout whose last stride is 1 in the backward, too, and write gradients where
they are told.

Legend: N blocks, M rows, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ringattn.errors import KernelLoadError
from ringattn.kernels.aten.shared import cuda_reasons
from ringattn.kernels.contract import Grads, KernelConfig, KernelNeed
from ringattn.kernels.grid_limits import MAX_GRID


def refusal(kernel: str, fault: object, remedy: str) -> KernelLoadError:
    return KernelLoadError(kernel, " ".join(str(fault).split()) or type(fault).__name__, remedy)


def import_package(kernel: str, module: str, remedy: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as fault:  # an extension built for another torch can fail at import with anything
        raise refusal(kernel, f"import {module}: {type(fault).__name__}: {fault}", remedy) from fault


def checked_function(kernel: str, module: Any, name: str, positional: int, keywords: Iterable[str], remedy: str) -> Any:
    """Return ``module.name`` if it accepts that call: these names are private and have changed before."""
    function = getattr(module, name, None)
    if function is None:
        raise refusal(kernel, f"{module.__name__} has no {name}", remedy)
    plain = getattr(function, "_init_fn", function)  # a torch.library custom op keeps its function there
    try:
        inspect.signature(plain).bind(*(None,) * positional, **dict.fromkeys(keywords))
    except TypeError as fault:
        raise refusal(kernel, f"{module.__name__}.{name}: {fault}", remedy) from fault
    return function


def no_more_params(kernel: str, config: KernelConfig, known: Iterable[str] = ()) -> None:
    unknown = sorted(set(config.params) - set(known))
    if unknown:
        raise refusal(kernel, f"unknown parameter {', '.join(unknown)}", f"It takes {', '.join(known) or 'none'}")


def contiguous_lse(lse_NHM: Tensor) -> Tensor:
    """Return the LSE contiguous: the C++ kernels take its address and check neither strides nor dtype."""
    assert lse_NHM.dtype is torch.float32
    return lse_NHM.contiguous()


def unit_last(x: Tensor) -> Tensor:
    """Return dout with a last stride of 1: it may arrive expanded (from ``out.sum()``)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_grads(q: Tensor, k: Tensor, v: Tensor) -> Grads:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def package_reasons(need: KernelNeed, lowest_sm: int) -> list[str]:
    reasons = cuda_reasons(need, ("fp16", "bf16"), lowest_sm, 8, 256)
    if need.vendor == "nvidia" and need.blocks > MAX_GRID:
        reasons.append(f"{need.blocks} blocks; its launch grid ends at {MAX_GRID}")
    return reasons
