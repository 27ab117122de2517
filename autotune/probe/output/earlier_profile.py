"""Earlier profiles: whether the rows at a probe's output path stay, and the plans that served its workloads before."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

from autotune.exit_codes import UsageFailure
from autotune.probe.machine.environment import Environment
from autotune.probe.probe_context import ProbeContext
from autotune.probe.request import CellReport, ProbeRequest, ProbeResult
from autotune.probe.verify import verify_cells
from autotune.probe.workloads.grid import Cell
from ringattn.errors import ProfileError
from ringattn.planning.heuristic import NO_WISHES
from ringattn.planning.matching import entries_for
from ringattn.planning.plan import Conditions
from ringattn.planning.table import ModuleShape, PlanTable, fitted
from ringattn.profile.precedence import effort_rank, row_effort_and_day
from ringattn.profile.resolve import mismatch, resolve
from ringattn.profile.schema import PlanEntry, Profile
from ringattn.profile.yaml_io import load_profile
from ringattn.wording import plural
from ringattn.workload import Tunables, Workload

from .writer import same_machine

# A row has 390 values in the mean of 55 of an H200, of which a file may have 200,000.
MOST_ROWS = 400


def earlier_profile(context: ProbeContext, path: Path) -> Profile | None:
    """Return the profile of this very machine and software, whose other rows stay; others are replaced.

    A broken file is replaced by ``--fresh`` alone: nobody's file is overwritten unseen.
    """
    if not path.exists():
        return None
    try:
        profile = load_profile(path)
    except ProfileError as error:
        if context.request.resume:
            raise
        context.observer.note(f"{error}; it will be replaced")
        return None
    if profile.source != "measured" or not same_machine(profile, context.environment.facts):
        context.observer.note(f"{path.name}: of another machine or other software; it will be replaced")
        return None
    return profile


def check_rows(path: Path, old: Profile | None, cells: Sequence[Cell]) -> None:
    """Raise UsageFailure where the file could not hold the rows of ``old`` and of these cells."""
    kept = set() if old is None else {entry.workload for entry in old.plans}
    rows = len(kept | {cell.workload for cell in cells})
    if rows > MOST_ROWS and rows > len(kept):
        there = f", {len(kept)} of them there already" if kept else ""
        raise UsageFailure(
            f"{path}: would hold {rows} rows{there}; {MOST_ROWS} is the most for one file: ask for fewer lengths, or "
            "name further files with --output"
        )


def rows_not_searched(old: Profile | None, request: ProbeRequest, cells: Sequence[Cell]) -> tuple[PlanEntry, ...]:
    """Return the measured rows of these cells that a probe does not search anew.

    All of them where each was measured, which are verified; else those of its effort or a higher one, which stay as
    they are. None with ``--fresh``; and of a shared search all or none, as other nodes may have other rows.
    """
    if old is None or not request.resume:
        return ()
    wanted = {cell.workload for cell in cells}
    found = tuple(entry for entry in old.plans if entry.workload in wanted and entry.evidence is not None)
    if len(found) == len(wanted):
        return found
    least = effort_rank(request.effort)
    stay = tuple(entry for entry in found if row_effort_and_day(old, entry)[0] >= least)
    return stay if request.storage is None else ()


def verified_instead(
    old: Profile, context: ProbeContext, path: Path, cells: Sequence[Cell]
) -> ProbeResult | tuple[Cell, ...]:
    """Return the result of re-timing the recorded rows, or the cells that are left to search."""
    recorded = rows_not_searched(old, context.request, cells)
    there = {entry.workload for entry in recorded}
    if missing := tuple(cell for cell in cells if cell.workload not in there):
        if there:
            of = f"{len(there)} of {plural(len(cells), 'cell')}"
            context.observer.note(f"{path.name}: {of} measured before: kept, --fresh measures them again")
        return missing
    context.observer.note(f"{path.name}: of this machine already; verifying instead of searching")
    outcome = verify_cells(context, old, recorded, tell_end=False)
    stale = {cell.workload for cell in outcome.cells if cell.stale}
    if stale:
        for line in outcome.stale:
            context.observer.note(f"stale, searching again: {line}")
        return tuple(cell for cell in cells if cell.workload in stale)
    reports = tuple(
        CellReport(cell.workload, "resumed", cell.recorded, note=cell.note or "still the winner")
        for cell in outcome.cells
    )
    return ProbeResult(path, old, reports, outcome.elapsed_s, outcome.inconclusive, verified=True)


def profiles_before(path: Path, environment: Environment, ranks: int) -> tuple[Profile, ...]:
    """Return the measured profiles that may have served this machine before a probe: that at its output path first.

    Also one of other software, whose rows the probe replaces.
    """
    found = []
    with contextlib.suppress(ProfileError):  # earlier_profile raises it, or says that it replaces the file
        found += [load_profile(path)] if path.exists() else []
    found += [source.profile for source in resolve(environment.profiles, environment.facts, world=ranks).sources]
    return tuple(
        profile for profile in found if profile.source == "measured" and not mismatch(profile, environment.facts)
    )


def plans_before(
    workload: Workload, profiles: Sequence[Profile], environment: Environment, layout: str
) -> tuple[tuple[Tunables, ...], tuple[Tunables, ...]]:
    """Return the plans of earlier profiles that served a workload, and those that they have for the nearest length.

    ``layout`` is that of the sequence over several ranks.
    """
    conditions = Conditions(layout="" if layout == "auto" else layout)
    shape = ModuleShape.of(workload)
    served: list[Tunables] = []
    nearest: list[Tunables] = []
    for profile in profiles:
        entries, _ = entries_for(profile, workload)
        table = PlanTable(
            shape, entries, environment.policy, environment.facts, conditions, NO_WISHES, auto_dtype=False
        )
        row = table.row_of(workload)
        if row.plan is not None and row.origin.source == "profile":
            served.append(row.plan.tunables)
        alike = [
            entry for entry in entries if (entry.workload.mode, entry.workload.dtype) == (workload.mode, workload.dtype)
        ]
        alike.sort(key=lambda entry: abs(math.log2(entry.workload.seq_len / workload.seq_len)))
        nearest += [fitted(entry.choice.tunables, workload) for entry in alike[:1] if entry.choice is not None]
    return tuple(dict.fromkeys(served)), tuple(dict.fromkeys(nearest))
