"""Methods of ``RingAttention`` about its plans: which one serves a call, why, and what a call needs and costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ringattn.autograd.warmup import first_calls_ms
from ringattn.errors import InputError
from ringattn.hardware.free_memory import free_bytes
from ringattn.planning.memory_need import Fit, fit_of
from ringattn.planning.module_setup import ModuleSetup, say_once
from ringattn.planning.plan import Plan
from ringattn.planning.table import ModuleShape, PlanTable, Row
from ringattn.planning.unmeasured_workloads import Arguments, Result, count_calls, meet
from ringattn.runtime.inputs import check_length

from .arguments import input_dtype, integer
from .workload import Workload


class PlannedModule:
    """Base of ``RingAttention``, which has what is declared here."""

    plan: PlanTable
    shape: ModuleShape
    device: torch.device
    dropout: float
    training: bool
    forward: Callable[..., Any]
    _setup: ModuleSetup
    _logs: bool
    _record_path: str

    def plan_for(self, seq_len: int, dtype: torch.dtype | str, train: bool, batch: int = 1) -> Plan:
        """Return the plan of a call with ``seq_len`` positions of this input dtype; PlanError where it is refused.

        ``dtype`` is a torch.dtype or its name, ``"bf16"`` or ``"bfloat16"``. The plan's ``origin``, printed with it,
        says whether the profile has it, measured or not, or the heuristic made it. With dropout, a module in training
        mode has one plan, with gradients or without.
        """
        return self.plan.row_of(self._workload_of(seq_len, dtype, train, batch)).runnable()

    def fits(
        self, seq_len: int, batch: int = 1, *, train: bool = True, dtype: torch.dtype | str = torch.bfloat16
    ) -> Fit:
        """Return whether a call with ``seq_len`` positions (of this rank) of this input dtype fits into memory now.

        The answer is true where the peak of its plan, which is that of ``plan_for``, is free on the module's device,
        beyond q, k, v and in training dout. The peak is that which the profile recorded, scaled where it measured
        another shape, or estimated where it measured none; the answer's ``need.source`` and its text say which. They
        also name the leaner plans that fit.

        PlanError where the plan is a refusal; InputError for arguments that do not fit.
        """
        workload = self._workload_of(seq_len, dtype, train, batch)
        return fit_of(self.plan, workload, free_bytes(self.device), backward=train)

    def _workload_of(self, seq_len: int, dtype: torch.dtype | str, train: bool, batch: int) -> Workload:
        """Return the workload of a call in the mode, training or eval, that the module is in."""
        seq_len, batch = integer("the sequence length", seq_len), integer("batch", batch)
        if not isinstance(train, bool):
            raise InputError(f"train is {train!r}; it must be True or False")
        check_length(seq_len, self.shape.max_seq_len)
        dropout = self.dropout if self.training else 0.0
        return self.shape.workload(seq_len, input_dtype(dtype), train or dropout > 0, batch, dropout=dropout)

    def explain(self) -> str:
        """Return why these plans were chosen, as text: profiles looked at, the tier, the table, choices passed over."""
        lines = [*self._setup.trace, "", "plans:", *(f"  {row}" for row in self.plan.rows)]
        if self.dropout:
            lines.append("  in training mode every call runs a plan with dropout, in eval mode one without")
        lines += [f"  note, {row.kind}: {row.note}" for row in self.plan.rows if row.note]
        return "\n".join(lines)

    def served(self, row: Row) -> Plan:
        """Return the plan of the row of a call, what gives way to it said and what was not measured recorded."""
        plan = row.runnable()
        if not self._measurable(plan):
            return plan
        note = self.plan.fallback_note(row, searched=self._setup.resolution is not None)
        if note.text and self._logs:
            say_once(logging.WARNING, *note)
        meet(self._record_path, plan)
        return plan

    def counted(self, run: Callable[Arguments, Result], plan: Plan) -> Callable[Arguments, Result]:
        """Return ``run`` with its calls counted in the record, if there is one and the plan was not measured."""
        return count_calls(self._record_path, run, plan) if self._record_path and self._measurable(plan) else run

    def _measurable(self, plan: Plan) -> bool:
        """Tell whether a row could serve: what each of several ranks does by itself is in no profile of so many."""
        return plan.workload.world == self.shape.world

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
