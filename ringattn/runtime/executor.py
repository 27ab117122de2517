"""Defines what runs a plan both ways: on one device, replayed from CUDA graphs, or over the ranks of a group.

Legend: B batch, S length, H query heads, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from ringattn.kernels.contract import Differentiable, not_differentiable
from ringattn.kernels.torch_entry import Attend
from ringattn.planning.plan import Plan
from ringattn.planning.table import PlanTable
from ringattn.workload import Workload

# What checkpoint "none" keeps for the backward: gathered q, k, v of the copied calls, or what an exchange brought.
Kept = list[Tensor]

# q, k and v, or their gradients
Triple = tuple[Tensor, Tensor, Tensor]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]

# Which of dq, dk and dv are needed.
Wanted = tuple[bool, bool, bool]
ALL: Wanted = (True, True, True)


class Executor:
    """A plan with its kernels loaded, run on tensors of any dtype. ``dtype`` is the one that it computes in.

    ``table`` is the one that the plan was taken from, for what an error says of others. ``differentiable`` gives the
    forward, for inputs in that dtype, of a plan that autograd needs no help with.
    """

    plan: Plan
    dtype: torch.dtype
    table: PlanTable | None = None
    draws = False  # from torch's random numbers, what it has to keep for its backward
    differentiable: Differentiable = staticmethod(not_differentiable)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None) -> tuple[Tensor, Tensor]:
        """Return out (B, S, H, D) in the input dtype and lse (B, H, S); ``kept``, if given, receives rows."""
        raise NotImplementedError

    def direct(self, dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return what ``attend`` comes to for inputs of this dtype that keep nothing."""
        return self.attend

    def gradients(
        self, dout: Tensor | None, saved: Sequence[Tensor], wanted: Wanted = ALL, dlse: Tensor | None = None
    ) -> Grads:
        """Return dq, dk and dv in the input dtype, None where not wanted; tensors of any dtype and layout.

        ``saved`` are q, k, v, out and lse of the forward, and what it kept. dout and dlse are None where out, or lse,
        has no gradient, but not both.
        """
        raise NotImplementedError

    def torch_entry(self, q: Tensor, k: Tensor, v: Tensor) -> Attend | None:
        """Return torch's own function for calls like this one that ask for no lse; None where it does something else.

        q, k and v are in the compute dtype.
        """
        return None

    def workload_of(self, q: Tensor) -> Workload:
        """Return the workload of a call on q (B, S, H, D): that of the plan, which serves other sizes, too."""
        planned = self.plan.workload
        return planned if planned.packed else replace(planned, batch=q.shape[0], seq_len=q.shape[1])

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a call took at most of memory that peers write into."""
        return 0

    def of_this_call(self) -> Self:
        """Return what runs the call that begins now, and its backward, whenever that is."""
        return self

    def refuse(self, error: Exception) -> None:
        """Note that the backward of a call does not begin, for ``error``."""


def as_wanted(grads: Triple, dtype: torch.dtype, wanted: Wanted) -> Grads:
    """Return dq, dk and dv in the dtype of the inputs, None where not wanted."""
    dq, dk, dv = grads
    if wanted == ALL and dq.dtype is dk.dtype is dv.dtype is dtype:  # else a microsecond each, for nothing
        return grads
    made = [grad.to(dtype) if want else None for grad, want in zip(grads, wanted, strict=True)]
    return made[0], made[1], made[2]
