"""Dry run: what a probe would do, without a single measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune.probe.cells.space import space_or_refusal
from autotune.probe.output.earlier_profile import check_rows, earlier_profile, rows_not_searched
from autotune.probe.output.joined_layout import joined_layout
from autotune.probe.workloads.grid import Cell
from autotune.search.budget import RESERVE_S
from autotune.space.space import Space
from ringattn.errors import PlanError
from ringattn.workload import Tunables

from .probe_context import ProbeContext
from .request import DryCell, DryRun, ProbeResult


def dry_run(context: ProbeContext, path: Path, cells: Sequence[Cell]) -> ProbeResult:
    """Estimate a probe by splitting its budget, as no call is timed; ``path`` is only read.

    Where a profile is there that the rows would join, cells lie over several ranks as its rows do, and those that it
    has already are marked. Raises what the probe would raise of it: ProfileError for a broken file, ProbeFailure for
    another layout than its rows', UsageFailure for more rows than it can hold.
    """
    budget_s = context.preset.budget_s
    old = earlier_profile(context, path)
    check_rows(path, old, cells)
    new = {cell.workload for cell in cells}
    rows, searched = [], dict[str, dict[str, None]]()
    layouts = [joined_layout(cell.workload, context.request.layout, old, new, path) for cell in cells]
    spaces = [
        (cell, space_or_refusal(cell, context.environment, layout)) for cell, layout in zip(cells, layouts, strict=True)
    ]
    sizes = [space.size() if isinstance(space, Space) else 0 for _, space in spaces]
    there = {entry.workload for entry in rows_not_searched(old, context.request, cells)}
    verifies = there == new
    timed = sum(size > 0 and (verifies or cell.workload not in there) for cell, size in zip(cells, sizes, strict=True))
    share = max(0.0, budget_s - RESERVE_S) / max(1, timed)
    for (cell, space), size in zip(spaces, sizes, strict=True):
        if isinstance(space, PlanError):
            rows.append(DryCell(cell.workload, (), 0, 0.0, tuple(space.rejected.items())))
            continue
        names = tuple(dict.fromkeys(_kernel_names(plan) for plan in space.kernel_plans))
        measured = cell.workload in there
        estimate_s = 0.0 if measured and not verifies else share
        rows.append(DryCell(cell.workload, names, size, estimate_s, space.rejected, space.default.layout, measured))
        for name, values in space.searched():
            searched.setdefault(name, {}).update(dict.fromkeys(values))
    tunables = tuple((name, tuple(values)) for name, values in searched.items())
    context.observer.plan([cell.workload for cell in cells], budget_s)
    return ProbeResult(path, None, (), 0.0, dry_run=DryRun(tuple(rows), budget_s, tunables, verifies))


def _kernel_names(plan: Tunables) -> str:
    branch = plan.branches[0]
    return f"{branch.forward}/{branch.backward}" if branch.backward else branch.forward
