"""Choice of what to measure of the workloads that a program recorded: those that cost most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.exit_codes import UsageFailure
from autotune.probe.request import ProbeRequest
from autotune.search.budget import EFFORTS, RESERVE_S
from ringattn.planning.launches import total_forward_gflop
from ringattn.planning.unmeasured_workloads import read_record, unmeasurable
from ringattn.wording import plural
from ringattn.workload import Workload

SECONDS_PER_CELL = 5.75  # what each of the 8 cells of a quick probe of the grid has
FORWARD_AND_BACKWARD = 3.5  # times the forward's operations: its 2 products of matrices and the backward's 5
REACH = math.sqrt(2)  # a row serves lengths up to this factor away, see ``nearest_bucket``; batches are taken likewise
_NAMED = 3  # workloads left out that are named, the costliest; others are counted


@dataclass(frozen=True, slots=True)
class Choice:
    """Cells, the cheapest call first, and a line for each kind of workload that is left out."""

    chosen: tuple[Workload, ...]
    left_out: tuple[str, ...]


def read_workloads(path: Path) -> tuple[tuple[tuple[Workload, int], ...], tuple[str, ...]]:
    """Return the workloads of a record with their calls, and a note on each line skipped; or UsageFailure."""
    try:
        calls, notes = read_record(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise UsageFailure(f"{path}: cannot be read ({why}); --like names a file that a program recorded") from None
    if not calls:
        why = f" ({notes[0]})" if notes else ""
        raise UsageFailure(f"{path}: holds no workloads{why}; run your program with RINGTUNE_RECORD={path}")
    return tuple(calls.items()), notes


def choose_recorded(request: ProbeRequest) -> Choice:
    """Return the costliest recorded workloads, as many as the budget affords; UsageFailure where none can be measured.

    A cost is the calls times the estimated operations of one. A workload within ``REACH`` of a costlier one in length
    and batch, and equal in all else, will be served by its row: its cost is added to that one's.
    """
    if not request.recorded:
        return Choice((), ())
    left_out = []
    costs: dict[Workload, float] = {}
    other_ranks: set[int] = set()
    for workload, calls in request.recorded:
        if workload.world != request.ranks:
            other_ranks.add(workload.world)
        elif why := unmeasurable(workload):
            left_out.append(f"{workload} left out: {why}")
        else:
            cell = replace(workload, total_length=0)
            costs[cell] = costs.get(cell, 0.0) + max(calls, 1) * call_gflop(cell)
    if other_ranks:
        worlds = " or ".join(map(str, sorted(other_ranks)))
        left_out.append(f"workloads over other numbers of ranks left out: --nproc {worlds} measures them")
    if not costs:
        raise UsageFailure(f"--like: none of the recorded workloads can be measured: {'; '.join(left_out)}")
    ranked = _joined(costs)
    budget_s = EFFORTS[request.effort].with_budget(request.budget_s).budget_s
    most = max(1, int((budget_s - RESERVE_S) / SECONDS_PER_CELL))
    if rest := ranked[most:]:
        named = ", ".join(map(str, rest[:_NAMED]))
        more = f" and {len(rest) - _NAMED} more" if len(rest) > _NAMED else ""
        left_out.append(f"{plural(len(rest), 'workload')} left out for a larger --effort or --budget: {named}{more}")
    chosen = sorted(ranked[:most], key=lambda cell: (call_gflop(cell), str(cell)))
    return Choice(tuple(chosen), tuple(left_out))


def call_gflop(workload: Workload) -> float:
    """Return the estimated GFLOP of a call, in training with its backward."""
    return total_forward_gflop(workload) * (FORWARD_AND_BACKWARD if workload.train else 1.0)


def _joined(costs: dict[Workload, float]) -> Sequence[Workload]:
    """Return what to measure, costliest first, each with the costs of those near it added."""
    joined: dict[Workload, float] = {}
    near: dict[Workload, list[Workload]] = {}
    for workload in sorted(costs, key=lambda workload: (-costs[workload], str(workload))):
        kind = near.setdefault(replace(workload, seq_len=1, batch=1), [])
        served_by = next((cell for cell in kind if _reaches(cell, workload)), None)
        if served_by is None:
            kind.append(workload)
            joined[workload] = costs[workload]
        else:
            joined[served_by] += costs[workload]
    return sorted(joined, key=lambda workload: (-joined[workload], str(workload)))


def _reaches(cell: Workload, other: Workload) -> bool:
    pairs = ((cell.seq_len, other.seq_len), (cell.batch, other.batch))
    return all(max(pair) <= min(pair) * REACH for pair in pairs)
