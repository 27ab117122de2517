"""Base of the programs for the documents of a batch: each is made for one batch from one that has the kernels."""

from __future__ import annotations

import copy
from typing import Self

from torch import Tensor

from ringattn.runtime.program import Program
from ringattn.workload import Workload

from .documents import Documents


class OverDocuments(Program):
    """Program for the documents of a batch."""

    _documents: Documents

    def over(self, documents: Documents, batch: int, length: int) -> Self:
        """Return the program, its kernels shared, for the documents of such a batch."""
        made = copy.copy(self)
        made._documents = documents
        return made

    def workload_of(self, q: Tensor) -> Workload:
        return self._documents.sized(self.plan.workload, q.shape[0], q.shape[1])
