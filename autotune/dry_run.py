"""What a probe would do, without a single measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringattn.errors import PlanError
from ringattn.workload import Tunables

from .budget import RESERVE_S
from .cell_space import space_or_refusal
from .grid import Cell
from .probe import DryCell, DryRun, ProbeResult
from .space import Space
from .task import Task


def dry_run(task: Task, path: Path, cells: Sequence[Cell]) -> ProbeResult:
    """The time of a call is unknown without measuring, so the estimate is the budget's split. ``path``: not touched."""
    budget_s = task.preset.budget_s
    rows, knobs = [], dict[str, dict[str, None]]()
    spaces = [(cell, space_or_refusal(cell, task.edge, task.request.layout)) for cell in cells]
    sizes = [space.size() if isinstance(space, Space) else 0 for _, space in spaces]
    share = max(0.0, budget_s - RESERVE_S) / max(1, sum(size > 0 for size in sizes))
    for (cell, space), size in zip(spaces, sizes, strict=True):
        if isinstance(space, PlanError):
            rows.append(DryCell(cell.workload, (), 0, 0.0, tuple(space.rejected.items())))
            continue
        names = tuple(dict.fromkeys(_kernel_names(plan) for plan in space.kernel_plans))
        rows.append(DryCell(cell.workload, names, size, share, space.rejected))
        for name, values in space.searched():
            knobs.setdefault(name, {}).update(dict.fromkeys(values))
    tunables = tuple((name, tuple(values)) for name, values in knobs.items())
    task.observer.plan([cell.workload for cell in cells], budget_s)
    return ProbeResult(path, None, (), 0.0, dry_run=DryRun(tuple(rows), budget_s, tunables))


def _kernel_names(plan: Tunables) -> str:
    branch = plan.branches[0]
    return f"{branch.forward}/{branch.backward}" if branch.backward else branch.forward
