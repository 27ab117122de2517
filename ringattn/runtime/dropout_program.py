"""Runs a plan with dropout: one block, whose kernel says what it dropped and is told so in the backward.

Legend: B batch, S length, H query heads, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active

from ringattn.errors import InputError
from ringattn.kernels.contract import not_differentiable
from ringattn.planning.plan import DROPOUT_IN_ONE_BLOCK, Plan

from .executor import ALL, Kept, Triple, Wanted
from .loading import bind_dropout
from .program import Program, TravelBackward, TravelForward


def check_dropping(dropout: float, with_lse: bool, cu_seqlens: object, lengths: object) -> None:
    """Raise InputError for what a call with dropout cannot have."""
    if with_lse:
        raise dropout_refusal(dropout, "without return_lse: lse is of all weights, and has no gradient then")
    if cu_seqlens is not None or lengths is not None:
        raise dropout_refusal(dropout, "not of cu_seqlens or lengths")
    if torch.compiler.is_exporting() or transforms_active():
        raise dropout_refusal(dropout, "not under torch.export or torch.func")


def dropout_refusal(dropout: float, where: str) -> InputError:
    """Return the error for dropout in training mode where it is not exact."""
    return InputError(
        f"dropout is {dropout} in training mode; {DROPOUT_IN_ONE_BLOCK}, {where}; set it to 0.0, or call eval()"
    )


class DropoutProgram(Program):
    """Program that keeps the state of its dropout, whatever its checkpoint."""

    draws = True

    def __init__(self, plan: Plan, scale: float, *, ranges: bool = False) -> None:
        super().__init__(plan, scale, ranges=ranges)
        (branch,) = plan.tunables.branches
        self._kernel = bind_dropout(plan, branch.forward, scale, "branch 0" if ranges else "")
        self.differentiable = not_differentiable

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None, travel: TravelForward | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return out (B, S, H, D) and lse (B, H, S); ``kept``, if given, receives the state."""
        out, lse, state = self._kernel.forward(q, k, v)
        if kept is not None:
            kept.extend(state)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Iterable[Tensor] = (),
        wanted: Wanted = ALL,
        travel: TravelBackward | None = None,
    ) -> Triple:
        """Return dq, dk and dv for the state in ``kept``."""
        return self._kernel.backward(dout, q, k, v, out, lse, tuple(kept))
