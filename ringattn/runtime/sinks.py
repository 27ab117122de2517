"""Attention sinks: one more logit for every query that sees a key, of a key whose value is 0.

It enters the softmax's denominator once, when all is merged, so that it works with every kernel, pattern and number of
ranks: the result is scaled, and its LSE grows. The backward of every block is against the final out and LSE anyway.

Legend: B batch, S length, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn.errors import InputError

from .executor import ALL, Executor, Grads, Kept, Wanted


def check_sinks(sinks: object, heads: int, device: torch.device) -> None:
    """Raise InputError unless ``sinks`` is a logit for each query head, on the module's device."""
    if not isinstance(sinks, Tensor):
        raise InputError(f"sinks is a {type(sinks).__name__}; it must be a tensor, one logit for each head, ({heads},)")
    if tuple(sinks.shape) != (heads,) or not sinks.is_floating_point():
        raise InputError(
            f"sinks is {sinks.dtype} of shape {tuple(sinks.shape)}; it must be floating, one for each head, ({heads},)"
        )
    if sinks.layout is not torch.strided:
        raise InputError(f"sinks has layout {sinks.layout}; make it a dense tensor with to_dense()")
    if sinks.device != device:
        raise InputError(f"sinks is on {sinks.device}, the module's plans are for {device}; move it there")


def with_sinks(out: Tensor, lse: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (B, S, H, D) and lse (B, H, S) with the sinks in the denominator; a query without a key keeps its own.

    Differentiable.
    """
    empty_BHS, sinks_H1 = lse == -torch.inf, sinks_H.to(lse.dtype)[:, None]
    there_BHS = lse.masked_fill(empty_BHS, 0.0)  # -inf - -inf is no number
    share_BSH1 = torch.sigmoid(there_BHS - sinks_H1).transpose(1, 2).unsqueeze(-1)
    lse = torch.logaddexp(there_BHS, sinks_H1).masked_fill(empty_BHS, -torch.inf)
    return (out * share_BSH1).to(out.dtype), lse


class SinkExecutor(Executor):
    """Executor with sinks (H,) at the end of its merge.

    It keeps nothing beside q, k, v, out, lse and the state of a dropout: rows that a plan with checkpoint "none" keeps
    are gathered again.
    """

    def __init__(self, program: Executor, sinks_H: Tensor) -> None:
        self._program, self._sinks_H = program, sinks_H
        self.plan, self.dtype, self.table, self.draws = program.plan, program.dtype, program.table, program.draws

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None) -> tuple[Tensor, Tensor]:
        return with_sinks(*self._program.attend(q, k, v, kept if self.draws else None), self._sinks_H)

    def gradients(
        self, dout: Tensor | None, saved: Sequence[Tensor], wanted: Wanted = ALL, dlse: Tensor | None = None
    ) -> Grads:
        return self._program.gradients(dout, saved, wanted, dlse)

    def sink_gradient(self, dout: Tensor | None, saved: Sequence[Tensor], dlse: Tensor | None) -> Tensor:
        """Return the gradient (H,) of the sinks, over the queries that this rank has."""
        _, _, _, out, lse, *_ = saved
        share_BHS = torch.exp(self._sinks_H.to(lse.dtype)[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
        grad_BHS = torch.zeros_like(lse) if dlse is None else dlse
        if dout is not None:
            grad_BHS = grad_BHS - (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
        return (share_BHS * grad_BHS).sum((0, 2)).to(self._sinks_H.dtype)

    def of_this_call(self) -> SinkExecutor:
        return SinkExecutor(self._program.of_this_call(), self._sinks_H)

    def refuse(self, error: Exception) -> None:
        self._program.refuse(error)

    @property
    def workspace_bytes(self) -> int:
        return self._program.workspace_bytes
