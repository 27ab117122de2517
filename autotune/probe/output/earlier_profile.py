"""The profile at a probe's output path: whether its rows stay, and whether they are searched again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune.probe.grid import Cell
from autotune.probe.request import CellReport, ProbeResult
from autotune.probe.task import Task
from autotune.probe.verify import verify_cells
from ringattn.errors import ProfileError
from ringattn.profile.schema import PlanEntry, Profile
from ringattn.profile.yaml_io import load_profile

from .writer import same_machine


def earlier_profile(task: Task, path: Path) -> Profile | None:
    """Return the profile of this very machine and software, whose other rows stay; others are replaced.

    A broken file is replaced by ``--fresh`` alone: nobody's file is overwritten unseen.
    """
    if not path.exists():
        return None
    try:
        profile = load_profile(path)
    except ProfileError as error:
        if task.request.resume:
            raise
        task.observer.note(f"{error}; it will be replaced")
        return None
    if profile.source != "measured" or not same_machine(profile, task.environment.facts):
        task.observer.note(f"{path.name}: of another machine or other software; it will be replaced")
        return None
    return profile


def recorded_rows(old: Profile, cells: Sequence[Cell]) -> tuple[PlanEntry, ...]:
    """Return the rows of these cells, where each of them was measured; else none."""
    wanted = {cell.workload for cell in cells}
    found = tuple(entry for entry in old.plans if entry.workload in wanted and entry.evidence is not None)
    return found if len(found) == len(wanted) else ()


def verified_instead(old: Profile, task: Task, path: Path, cells: Sequence[Cell]) -> ProbeResult | tuple[Cell, ...]:
    """Return the result of re-timing the recorded rows, or the cells that are left to search."""
    recorded = recorded_rows(old, cells)
    if not recorded:
        return tuple(cells)
    task.observer.note(f"{path.name}: of this machine already; verifying instead of searching")
    outcome = verify_cells(task, old, recorded, tell_end=False)
    stale = {cell.workload for cell in outcome.cells if cell.stale}
    if stale:
        for line in outcome.stale:
            task.observer.note(f"stale, searching again: {line}")
        return tuple(cell for cell in cells if cell.workload in stale)
    reports = tuple(
        CellReport(cell.workload, "resumed", cell.recorded, note=cell.note or "still the winner")
        for cell in outcome.cells
    )
    return ProbeResult(path, old, reports, outcome.elapsed_s, outcome.inconclusive, verified=True)
