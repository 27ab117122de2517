"""The autograd Function that runs a plan both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checkpoint import MODES
from .errors import RingAttentionError
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
        out, lse, saved = MODES[program.checkpoint].forward(program, q, k, v)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # a grad of lse never exists: no zeros are made for it at each call
        ctx.save_for_backward(*saved.tensors)
        ctx.program, ctx.elsewhere = program, saved.elsewhere
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return None, None, None, None
        if torch.is_grad_enabled():  # only under create_graph=True
            raise RingAttentionError(
                "double backward (create_graph=True) is not supported: the kernels have no second derivative"
            )
        program, mode = ctx.program, MODES[ctx.program.checkpoint]
        if torch.is_autocast_enabled(dout.device.type):
            with torch.autocast(dout.device.type, enabled=False):
                grads = mode.backward(program, dout, ctx.saved_tensors, ctx.elsewhere, ctx.needs_input_grad[:3])
        else:
            grads = mode.backward(program, dout, ctx.saved_tensors, ctx.elsewhere, ctx.needs_input_grad[:3])
        return *grads, None


def differentiable(program: Program | RingProgram, q: Tensor) -> Runner:
    """How to run ``program`` on tensors like q so that autograd can come back."""
    one_op = program.differentiable(q.shape) if q.dtype is program.dtype else None
    if one_op is not None:
        return one_op

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _Attend.apply(q, k, v, program)  # type: ignore[no-untyped-call, no-any-return]

    return attend
