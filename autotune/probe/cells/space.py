"""The plans to search for one cell, around the one that the heuristic takes on this machine."""

from __future__ import annotations

from autotune.probe.machine.environment import Environment
from autotune.probe.workloads.grid import Cell
from autotune.space.space import Space, build_space
from ringattn.errors import PlanError
from ringattn.planning.heuristic import heuristic_tunables
from ringattn.planning.plan import Conditions
from ringattn.workload import describe


def space_for(cell: Cell, environment: Environment, layout: str = "auto") -> Space:
    """Return the space around the default plan; raise PlanError when nothing can run the workload.

    ``layout`` is that of a sequence over several ranks; auto is what the module takes by rule.
    """
    conditions = Conditions(layout="" if layout == "auto" else layout)
    default = heuristic_tunables(cell.workload, environment.policy, environment.facts, conditions=conditions)
    reasons = environment.machine.reasons(cell.workload, default)
    if reasons:
        raise PlanError(f"cannot run {cell.workload}", {describe(default): reasons})
    dtypes = tuple(dict.fromkeys((*cell.main_dtypes, default.dtype, *cell.narrow_dtypes)))
    return build_space(cell.workload, environment.machine, default, dtypes)


def space_or_refusal(cell: Cell, environment: Environment, layout: str) -> Space | PlanError:
    """Return the space, or why nothing can run the cell: an answer, too, where there are others."""
    try:
        return space_for(cell, environment, layout)
    except PlanError as error:
        return error
