"""Adds to an out-of-memory error which plan ran, what it needs, and which leaner ones fit.

The handlers are in frames that a call has anyway: a ``try`` costs nothing while nothing is raised.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ringattn.device_errors import is_out_of_memory
from ringattn.hardware.free_memory import free_bytes
from ringattn.planning.memory_need import fit_of
from ringattn.runtime.executor import Executor

_NOTED = "_ringattn_plan_noted"


def note_plan(error: Exception, program: Executor, q: Tensor) -> None:
    """Add a note to an error of ``program`` on tensors like q (B, S, H, D), where it is one of memory; once."""
    if not is_out_of_memory(error) or _NOTED in vars(error):
        return
    vars(error)[_NOTED] = True
    if program.table is not None:
        workload = program.workload_of(q)
        ran = replace(program.plan, workload=workload)
        fit = fit_of(program.table, workload, free_bytes(q.device), ran)
        error.add_note(f"ringattn: {fit}")
