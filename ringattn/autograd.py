"""The autograd Function that runs a plan both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checkpoint import MODES, Mode
from .errors import RingAttentionError
from .layout import check_own
from .program import Program

if TYPE_CHECKING:
    from .ring_program import RingProgram

Runner = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class _Attend(torch.autograd.Function):
    """Forward by the plan; backward of every partial against the final out and LSE.

    What is saved is the plan's checkpoint: by default q, k, v, out and lse, whatever the number of branches.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, program: Program | RingProgram) -> tuple[Tensor, Tensor]:
        if not isinstance(program, Program):
            program = program.of_this_call()  # ranks tell the backward of this call from those of others
        out, lse, saved = MODES[program.checkpoint].forward(program, q, k, v)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # a grad of lse never exists: no zeros are made for it at each call
        ctx.save_for_backward(*saved.tensors)
        ctx.program, ctx.elsewhere = program, saved.elsewhere
        # Over ranks: what a rank that cannot begin its backward needs to exchange the messages of it.
        ctx.like = [] if isinstance(program, Program) else [(x.shape, x.dtype, x.device) for x in saved.tensors]
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return None, None, None, None
        program, mode = ctx.program, MODES[ctx.program.checkpoint]
        if isinstance(program, Program):
            saved = _saved_for_once(ctx, dout)
        else:
            saved = _saved_over_ranks(ctx, dout, program, mode)
        wanted = ctx.needs_input_grad[:3]
        if torch.is_autocast_enabled(dout.device.type):
            with torch.autocast(dout.device.type, enabled=False):
                grads = mode.backward(program, dout, saved, ctx.elsewhere, wanted)
        else:
            grads = mode.backward(program, dout, saved, ctx.elsewhere, wanted)
        return *grads, None


def _saved_for_once(ctx: Any, dout: Tensor) -> Sequence[Tensor]:
    if torch.is_grad_enabled():  # only under create_graph=True
        raise RingAttentionError(
            "double backward (create_graph=True) is not supported: the kernels have no second derivative"
        )
    if type(dout) is not Tensor:
        check_own("dout", dout)
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    return saved


def _saved_over_ranks(ctx: Any, dout: Tensor, program: RingProgram, mode: Mode) -> Sequence[Tensor]:
    """The same; a rank that does not get it exchanges the messages of the backward, which the others are in."""

    def messages() -> None:
        with torch.no_grad(), torch.autocast(dout.device.type, enabled=False):
            saved = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
            blank = torch.zeros(dout.shape, dtype=dout.dtype, device=dout.device)
            mode.backward(program, blank, saved, ctx.elsewhere, ctx.needs_input_grad[:3])

    try:
        return _saved_for_once(ctx, dout)
    except Exception as error:
        program.sit_out(error, messages)
        raise


def differentiable(program: Program | RingProgram, q: Tensor) -> Runner:
    """How to run ``program`` on tensors like q so that autograd can come back."""
    one_op = program.differentiable(q.shape) if q.dtype is program.dtype else None
    if one_op is not None:
        return one_op

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _Attend.apply(q, k, v, program)  # type: ignore[no-untyped-call, no-any-return]

    return attend
