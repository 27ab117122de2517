"""Checks the tensors of a call: a message names the tensor, what it is, and what would fit."""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.arguments import is_integer, shown
from ringattn.dtypes import DTYPE_NAMES
from ringattn.errors import InputError
from ringattn.geometry.layout import check_own
from ringattn.planning.table import ModuleShape
from ringattn.wording import plural


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: ModuleShape,
    device: torch.device,
    *,
    packed: bool = False,
    cross: bool = False,
) -> tuple[int, int]:
    """Return (B, S) of q (B, S, H, D), k and v (B, S, Hkv, D); InputError where one does not fit the module.

    Where documents are ``packed`` the module's limit on length is on each, and not looked at here. With ``cross`` k and
    v may have another length than q, equal for both.
    """
    if torch._C._get_tracing_state() is not None:
        raise InputError("torch.jit.trace records one shape and plan; use torch.export, or torch.compile")
    for name, x, heads in (("q", q, shape.heads), ("k", k, shape.kv_heads), ("v", v, shape.kv_heads)):
        _check_type(name, x)
        if x.is_nested:
            raise InputError(
                f"{name} is a nested tensor; call once for each sequence, or for batches of sequences of one length"
            )
        if x.layout is not torch.strided:
            raise InputError(f"{name} has layout {x.layout}; make it a dense tensor with to_dense()")
        if x.dim() != 4:
            raise InputError(f"{name} has shape {tuple(x.shape)}; it must be (batch, sequence, heads, head_dim)")
        size, size_of = (
            (shape.value_dim, "head_dim_v") if name == "v" and shape.head_dim_v else (shape.head_dim, "head_dim")
        )
        if x.shape[2] != heads or x.shape[3] != size:
            argument = "num_heads" if name == "q" else "num_kv_heads"
            raise InputError(
                f"{name} has shape {tuple(x.shape)}; the module has {argument} {heads} and {size_of} {size}, "
                f"so it must be (batch, sequence, {heads}, {size})"
            )
        if x.is_meta:
            raise InputError(f"{name} is on meta, where tensors hold no data; give it data with to_empty() first")
        if x.device != device:
            raise InputError(
                f"{name} is on {x.device}, the module's plans are for {device}; move it there, "
                "or build the module with the device of its tensors"
            )
        _check_dtype(name, x)
        if x.dtype != q.dtype:
            raise InputError(f"{name} is {x.dtype} and q is {q.dtype}; convert them to one dtype")
        if x.shape[0] != q.shape[0]:
            raise InputError(f"{name} has batch size {x.shape[0]} and q {q.shape[0]}; they must be equal")
        if x.shape[1] != q.shape[1] and not cross:
            raise InputError(
                f"{name} has {plural(x.shape[1], 'position')} and q {q.shape[1]}; give q, k and v of one length, or "
                "call cross() for other positions of the queries, prefill() and decode() with a cache"
            )
    if k.shape[1] != v.shape[1]:
        raise InputError(f"v has {plural(v.shape[1], 'position')} and k {k.shape[1]}; they must be equal")
    if k.shape[1] == 0 and q.shape[1] > 0:
        raise InputError(f"k has shape {tuple(k.shape)}; give at least one key")
    batch, length = q.shape[:2]
    if batch == 0 or length == 0:
        raise InputError(f"q has shape {tuple(q.shape)}; batch and sequence must not be empty")
    if packed and shape.head_dim_v:
        raise InputError(
            f"head_dim_v is {shape.head_dim_v} and head_dim {shape.head_dim}; documents take one size: pad the smaller "
            "with zeros"
        )
    if not packed:
        check_length(max(length, k.shape[1]), shape.max_seq_len)
    return batch, length


def check_length(length: int, max_seq_len: int | None) -> None:
    """Raise InputError for a sequence longer than the module's limit, if it has one."""
    if max_seq_len is not None and length > max_seq_len:
        raise InputError(f"the sequence has {length} positions, more than max_seq_len, {max_seq_len}")


def check_total_length(total_length: object, length: int) -> None:
    """Raise InputError for a length of the whole sequence that is not the one of this rank, which holds all."""
    if not is_integer(total_length) or total_length != length:
        raise InputError(f"total_length is {shown(total_length)}, but this rank holds all {length}; leave it out")


def check_types(q: object, k: object, v: object) -> None:
    """Raise InputError for anything but tensors of this rank."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_type(name, x)


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise InputError for a dtype that no kernel computes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_dtype(name, x)


def _check_type(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"{name} is a {type(x).__name__}; it must be a tensor")
    check_own(name, x)


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in DTYPE_NAMES:
        raise InputError(f"{name} is {x.dtype}; use one of {', '.join(map(str, DTYPE_NAMES))}")
