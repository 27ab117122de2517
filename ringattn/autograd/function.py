"""The autograd Function that runs a plan both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringattn.errors import RingAttentionError
from ringattn.geometry.layout import check_own
from ringattn.runtime.program import Program

from .checkpoint import MODES, Mode, OutputGrads

if TYPE_CHECKING:
    from ringattn.distributed.program import RingProgram

Runner = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class _Attend(torch.autograd.Function):
    """Forward by the plan; backward of every partial against the final out and LSE.

    What is saved is the plan's checkpoint: by default q, k, v, out and lse, whatever the number of branches.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, program: Program | RingProgram, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(program, Program):
            program = program.of_this_call()  # ranks tell the backward of this call from those of others
        out, lse, saved = MODES[program.checkpoint].forward(program, q, k, v)
        if not with_lse:  # autograd lets a view be changed in place only if it is the one output with a gradient
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # zeros for a gradient of lse that nobody asked for would cost a backward
        ctx.save_for_backward(*saved.tensors)
        ctx.program, ctx.elsewhere = program, saved.elsewhere
        # Over ranks: what a rank that cannot begin its backward needs to exchange the messages of it.
        ctx.like = [] if isinstance(program, Program) else [_like(x) for x in (out, *saved.tensors)]
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        some = dlse if dout is None else dout
        if some is None:
            return None, None, None, None, None
        output_grads, device = OutputGrads(dout, dlse), some.device.type
        program, mode = ctx.program, MODES[ctx.program.checkpoint]
        if isinstance(program, Program):
            saved = _saved_for_once(ctx, output_grads)
        else:
            saved = _saved_over_ranks(ctx, output_grads, program, mode)
        wanted = ctx.needs_input_grad[:3]
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                grads = mode.backward(program, output_grads, saved, ctx.elsewhere, wanted)
        else:
            grads = mode.backward(program, output_grads, saved, ctx.elsewhere, wanted)
        return *grads, None, None


def _like(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device


def _saved_for_once(ctx: Any, output_grads: OutputGrads) -> Sequence[Tensor]:
    if torch.is_grad_enabled():  # only under create_graph=True
        raise RingAttentionError(
            "double backward (create_graph=True) is not supported: the kernels have no second derivative"
        )
    if output_grads.dout is not None and type(output_grads.dout) is not Tensor:
        check_own("dout", output_grads.dout)
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    return saved


def _saved_over_ranks(ctx: Any, output_grads: OutputGrads, program: RingProgram, mode: Mode) -> Sequence[Tensor]:
    """The same; a rank that does not get it exchanges the messages of the backward, which the others are in."""

    def messages() -> None:
        with torch.no_grad(), torch.autocast(ctx.like[0][2].type, enabled=False):
            dout, *saved = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
            mode.backward(program, OutputGrads(dout, None), saved, ctx.elsewhere, ctx.needs_input_grad[:3])

    try:
        if output_grads.dlse is not None:
            raise RingAttentionError(
                "lse takes part in the loss, but over several ranks it has no gradient: use lse.detach(), or "
                "process_group=None on ranks that hold whole sequences"
            )
        return _saved_for_once(ctx, output_grads)
    except Exception as error:
        program.sit_out(error, messages)
        raise


def differentiable(program: Program | RingProgram, q: Tensor, with_lse: bool) -> Runner:
    """How to run ``program`` on tensors like q so that autograd can come back, to lse too if it is asked for."""
    one_op = program.differentiable(q.shape) if q.dtype is program.dtype and not with_lse else None
    if one_op is not None:
        return one_op

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _Attend.apply(q, k, v, program, with_lse)  # type: ignore[no-untyped-call, no-any-return]

    return attend
