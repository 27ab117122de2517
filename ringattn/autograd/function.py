"""Runs a plan both ways under autograd, in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.errors import RingAttentionError
from ringattn.geometry.layout import check_own
from ringattn.kernels.torch_entry import Attend
from ringattn.runtime.executor import Executor
from ringattn.runtime.sinks import SinkExecutor

from . import checkpoint
from .out_of_memory import note_plan

# (q, k, v), and sinks if the call has some -> out and lse; None in its place where a call asked for none and its kernel
# gives none
Runner = Callable[..., tuple[Tensor, Any]]
T = TypeVar("T")


class _Attend(torch.autograd.Function):
    """Forward by the plan; backward of every partial against the final out and LSE, saving what its checkpoint says."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, program: Executor, with_lse: bool, *sinks: Tensor
    ) -> tuple[Tensor, Tensor]:
        if sinks:
            program = SinkExecutor(program, *sinks)
        program = program.of_this_call()  # ranks tell the backward of this call from those of others
        out, lse, saved = checkpoint.forward(program, q, k, v)
        if not with_lse:  # autograd lets a view be changed in place only if it is the one output with a gradient
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # zeros for a gradient of lse that nobody asked for would cost a backward
        ctx.save_for_backward(*saved.tensors)
        ctx.program, ctx.on_host, ctx.random = program, saved.on_host, saved.random
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        some = dlse if dout is None else dout
        if some is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = _saved(ctx, dout, dlse)
        if torch.is_autocast_enabled(some.device.type):
            with torch.autocast(some.device.type, enabled=False):
                return _gradients(ctx, dout, dlse, saved)
        return _gradients(ctx, dout, dlse, saved)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, kept: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradient of every input of the Function."""
    program: Executor = ctx.program
    try:
        saved = checkpoint.restore(program, kept, ctx.on_host, ctx.random)
        grads = program.gradients(dout, saved, ctx.needs_input_grad[:3], dlse)
        if isinstance(program, SinkExecutor):
            of_sinks = program.sink_gradient(dout, saved, dlse) if ctx.needs_input_grad[5] else None
            return *grads, None, None, of_sinks
        return *grads, None, None
    except Exception as error:
        some = dlse.transpose(1, 2) if dout is None and dlse is not None else dout
        assert some is not None
        note_plan(error, program, some)
        raise


def _saved(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Sequence[Tensor]:
    """Return the saved tensors; other ranks are told of an error, as they wait for this one's messages."""
    program: Executor = ctx.program
    try:
        if dlse is not None and program.plan.workload.world > 1:
            raise RingAttentionError(
                "lse takes part in the loss, but over several ranks it has no gradient: use lse.detach(), or "
                "process_group=None on ranks that hold whole sequences"
            )
        if torch.is_grad_enabled():  # only under create_graph=True
            raise RingAttentionError(
                "double backward (create_graph=True) is not supported: the kernels have no second derivative"
            )
        if dout is not None and type(dout) is not Tensor:
            check_own("dout", dout)
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except Exception as error:
        program.refuse(error)
        raise
    return saved


def runner_of(
    program: Executor, q: Tensor, k: Tensor, v: Tensor, train: bool, with_lse: bool, *, sinks: bool = False
) -> Runner:
    """Return the function that runs ``program`` on tensors of these shapes, strides and dtype.

    With ``train`` autograd can come back, to lse too if ``with_lse``. It takes ``sinks`` (H,) as well if there are any.
    """
    if sinks:
        return _with_sinks(program, train, with_lse)
    run = differentiable(program, q, with_lse) if train else inferring(program, q)
    if all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (q, k, v)):
        if not with_lse and q.dtype is program.dtype:
            entry = program.torch_entry(q, k, v)
            if entry is not None:
                return _of_torch(entry, program)
        return run
    return lambda q, k, v: run(*unit_stride_rows(q, k, v))


def outside_graphs(call: Callable[..., T], *arguments: Any) -> T:
    """Make a call that torch.compile leaves alone: a graph breaks around it."""
    if torch.compiler.is_compiling():
        # Not as a decorator: that imports torch._dynamo, 1.1 of the 3 s in which a rank starts.
        call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return call(*arguments)


def without_autocast(run: Runner, device_type: str, dtype: torch.dtype | None) -> Runner:
    """Wrap ``run``: autocast is off, so that it narrows no step, and inputs are converted to ``dtype`` (None: kept)."""

    def wrapped(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device_type, enabled=False):
            if dtype is None:
                return run(q, k, v, *sinks)
            out, lse = run(q.to(dtype), k.to(dtype), v.to(dtype), *sinks)
        return out.to(q.dtype), lse

    return wrapped


def unit_stride_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs with a last stride of 1, copied where it is another.

    Kernels take any strides but the last: flash-cpu reads garbage there, the CUDA ones copy one by one.
    """
    return _unit_stride(q), _unit_stride(k), _unit_stride(v)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def differentiable(program: Executor, q: Tensor, with_lse: bool) -> Runner:
    """Return the function that runs ``program`` on tensors like q so that autograd can come back, to lse if asked."""
    one_op = program.differentiable(q.shape) if q.dtype is program.dtype and not with_lse else None
    if one_op is not None:
        return one_op

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return _Attend.apply(q, k, v, program, with_lse)  # type: ignore[no-untyped-call, no-any-return]
        except Exception as error:
            note_plan(error, program, q)
            raise

    return attend


def inferring(program: Executor, q: Tensor) -> Runner:
    """Return the function that runs ``program`` on tensors like q without autograd."""
    run = program.direct(q.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return run(q, k, v)
        except Exception as error:
            note_plan(error, program, q)
            raise

    return attend


def _with_sinks(program: Executor, train: bool, with_lse: bool) -> Runner:
    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        inputs = unit_stride_rows(q, k, v)
        try:
            if train:
                return _Attend.apply(*inputs, program, with_lse, sinks)  # type: ignore[no-untyped-call, no-any-return]
            return SinkExecutor(program, sinks).attend(*inputs)
        except Exception as error:
            note_plan(error, program, q)
            raise

    return attend


def _of_torch(entry: Attend, program: Executor) -> Runner:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        try:
            return entry(q, k, v), None
        except Exception as error:
            note_plan(error, program, q)
            raise

    return attend
