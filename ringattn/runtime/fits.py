"""Method of ``RingAttention`` that says whether a call fits into memory."""

from __future__ import annotations

import torch

from ringattn.arguments import input_dtype, integer
from ringattn.errors import InputError
from ringattn.hardware.free_memory import free_bytes
from ringattn.planning.memory_need import Fit, fit_of
from ringattn.planning.table import ModuleShape, PlanTable

from .inputs import check_length


class FitsMemory:
    """Base of ``RingAttention``, which has what is declared here."""

    plan: PlanTable
    shape: ModuleShape
    device: torch.device

    def fits(
        self, seq_len: int, batch: int = 1, *, train: bool = True, dtype: torch.dtype | str = torch.bfloat16
    ) -> Fit:
        """Return whether a call with ``seq_len`` positions (of this rank) of this input dtype fits into memory now.

        The answer is true where the peak of its plan, beyond q, k, v and in training dout, is free on the module's
        device. The peak is that which the profile recorded, scaled where it measured another shape, or estimated where
        it measured none; the answer's ``need.source`` and its text say which. They also name the leaner plans that fit.

        PlanError where the plan is a refusal; InputError for arguments that do not fit.
        """
        seq_len, batch = integer("the sequence length", seq_len), integer("batch", batch)
        if not isinstance(train, bool):
            raise InputError(f"train is {train!r}; it must be True or False")
        check_length(seq_len, self.shape.max_seq_len)
        return fit_of(
            self.plan, self.shape.workload(seq_len, input_dtype(dtype), train, batch), free_bytes(self.device)
        )
