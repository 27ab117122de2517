"""Runs the module under torch.func (grad, vjp, vmap, jacrev and what is made of them) by two Functions they can map.

A transform wants a Function whose ``setup_context`` is apart, which costs eager calls 30 us more than the one in
``function``; that is why both exist. The mapped dimension is folded into the batch, so a plan sees plain tensors.

Legend: V mapped dimension, B batch, S sequence, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active

from ringattn.errors import InputError, RingAttentionError
from ringattn.runtime.inputs import check_inputs
from ringattn.runtime.packed.documents import NO_DOCUMENTS, Given

from . import torch_compile
from .function import unit_stride_rows
from .torch_compile import Module, ProgramSource, traced_program

__all__ = ["attend", "attend_traced", "transforms_active"]


def attend_traced(
    module: Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    train: bool,
    narrow: torch.dtype | None,
    given: Given = NO_DOCUMENTS,
) -> tuple[Tensor, Tensor]:
    """Run a call under torch.compile or torch.export as one operator, under torch.func as one Function.

    Only operators take ``given`` documents. Inputs are converted to ``narrow``, unless that is None, and out back.
    """
    wished = module.plan.wishes.checkpoint
    if train and wished not in (None, "selective"):
        raise InputError(
            f"checkpoint is {wished!r}, but under torch.compile and torch.func q, k, v, out and lse are what is "
            "kept, or less where the compiler decides; use checkpoint=None there"
        )
    dtype = q.dtype
    if narrow is not None:
        q, k, v = q.to(narrow), k.to(narrow), v.to(narrow)
    compiling, exporting = torch.compiler.is_compiling(), torch.compiler.is_exporting()
    if exporting or not compiling:
        # A program that nobody can call is not exported. What a Function checks has the samples of a vmap in its batch.
        check_inputs(q, k, v, module.shape, module.device, packed=given.values is not None)
    if compiling:
        name = module.configuration if exporting else module.digest
        out, lse = torch_compile.attend(q, k, v, name, train, given.values, given.padded)
    else:
        if given.values is not None:
            raise InputError("torch.func takes neither cu_seqlens nor lengths; call for each document")
        out, lse = attend(module, q, k, v, train)
    return out.to(dtype), lse


def attend(source: ProgramSource, q: Tensor, k: Tensor, v: Tensor, train: bool) -> tuple[Tensor, Tensor]:
    """Return out (B, S, H, D) and lse (B, H, S) of tensors that a transform may have wrapped."""
    return _Attend.apply(q, k, v, source, train)  # type: ignore[no-untyped-call, no-any-return]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, source: ProgramSource, train: bool) -> tuple[Tensor, Tensor]:
        program = traced_program(source, q, k, v, train)
        with torch.autocast(q.device.type, enabled=False):
            return program.attend(*unit_stride_rows(q, k, v))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, source, _ = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)  # None, not zeros, of an lse that nothing depends on: it costs a backward
        ctx.source = source

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 5
        grads = _Gradients.apply(dout, *ctx.saved_tensors, ctx.source, dlse)  # type: ignore[no-untyped-call]
        return (*grads, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> tuple[Any, Any]:
        return _over_batch(_Attend, info.batch_size, in_dims, inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_forward_mode()


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor | None, ...]:
        dout, q, k, v, out, lse, source, dlse = inputs
        program = traced_program(source, q, k, v, True)
        with torch.autocast(q.device.type, enabled=False):
            return program.gradients(dout, (*unit_stride_rows(q, k, v), out, lse), dlse=dlse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RingAttentionError(
            "a second derivative (torch.func.hessian, grad of grad) is not supported: the kernels have none"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> tuple[Any, Any]:
        return _over_batch(_Gradients, info.batch_size, in_dims, inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_forward_mode()


def _over_batch(
    function: Any, size: int, in_dims: Sequence[int | None], inputs: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Apply ``function`` to tensors (V, B, ...) as to (V * B, ...); return its results and where their V is."""
    folded = [_folded(x, dim, size) if isinstance(x, Tensor) else x for x, dim in zip(inputs, in_dims, strict=True)]
    results = tuple(x.unflatten(0, (size, -1)) for x in function.apply(*folded))
    return results, (0,) * len(results)


def _folded(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Return (V * B, ...) of a tensor that is mapped along ``dim``, or the same for all of V."""
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _refuse_forward_mode() -> NoReturn:
    raise RingAttentionError(
        "forward-mode differentiation (torch.func.jvp, jacfwd) is not supported: use reverse mode, vjp or jacrev"
    )
