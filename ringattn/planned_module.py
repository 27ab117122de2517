"""Methods of ``RingAttention`` about its plans: which one serves a call, why, and what its first call costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ringattn.autograd.warmup import first_calls_ms
from ringattn.planning.plan import Plan
from ringattn.planning.setup import Setup
from ringattn.planning.table import ModuleShape, PlanTable
from ringattn.runtime.inputs import check_length

from .arguments import input_dtype, integer


class PlannedModule:
    """Base of ``RingAttention``, which has what is declared here."""

    plan: PlanTable
    shape: ModuleShape
    device: torch.device
    forward: Callable[..., Any]
    _setup: Setup

    def plan_for(self, seq_len: int, dtype: torch.dtype | str, train: bool, batch: int = 1) -> Plan:
        """Return the plan of a call with ``seq_len`` positions of this input dtype; PlanError where it is refused.

        ``dtype`` is a torch.dtype or its name, ``"bf16"`` or ``"bfloat16"``. The plan's ``origin``, printed with it,
        says whether the profile has it, measured or not, or the heuristic made it.
        """
        seq_len, batch = integer("the sequence length", seq_len), integer("batch", batch)
        check_length(seq_len, self.shape.max_seq_len)
        return self.plan.plan_at(seq_len, input_dtype(dtype), train, batch).runnable()

    def explain(self) -> str:
        """Return why these plans were chosen, as text: profiles looked at, the tier, the table, choices passed over."""
        lines = [*self._setup.trace, "", "plans:", *(f"  {row}" for row in self.plan.rows)]
        lines += [f"  note, {row.dtype} {row.mode}: {row.note}" for row in self.plan.rows if row.note]
        return "\n".join(lines)

    def warmup(
        self,
        lengths: Iterable[int] | int,
        dtype: torch.dtype | str = torch.float32,
        batch_size: int = 1,
        train: bool = False,
    ) -> dict[int, float]:
        """Make the first call at each length ahead (kernel plans and compilation), through autograd if ``train``.

        ``dtype`` is that of the inputs. Returns the milliseconds that each took.
        """
        return first_calls_ms(self.forward, self.shape, self.device, lengths, dtype, batch_size, train)
