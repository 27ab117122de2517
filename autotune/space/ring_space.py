"""The knobs that a plan over several ranks has beside a one-rank plan's, and the plans that a race begins with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ringattn.planning.equal_plans import case_of, plainest
from ringattn.planning.ring import ring_reasons
from ringattn.tunable_rules import EXCHANGES, EXCHANGING, SCHEDULES, Value, degrees
from ringattn.tunables import TABLE
from ringattn.workload import Tunables, Workload

FIRST_HEAD_GROUPS = (0, 4)  # that the race of schedules tries
MATH_ROWS = 8192  # whose logits take 256 MiB a head


def ring_knobs(
    workload: Workload, default: Tunables, dtypes: Sequence[str], exchanges: Sequence[str]
) -> dict[str, tuple[Value, ...]]:
    """Return the knobs with the values that some plan can have, whatever its kernels; none at one rank.

    The layout is the default plan's, the same for a whole profile. ``exchanges`` are those that the machine can do.
    """
    if workload.world == 1:
        return {}
    case = case_of(workload, default)
    values = {entry.name: entry.tried(case) for entry in TABLE.values() if entry.stage == "ranks"}
    values["exchange"] = tuple(exchanges)
    plans: dict[Tunables, None] = {}
    for turned in itertools.product(dtypes, *values.values()):
        changes: dict[str, Any] = dict(zip(("dtype", *values), turned, strict=True))
        plan = plainest(workload, with_degree(workload, replace(default, **changes)))
        if plan not in plans and not ring_reasons(workload, plan, default.layout):
            plans[plan] = None
    return {
        name: tuple(value for value in listed if any(getattr(plan, name) == value for plan in plans))
        for name, listed in values.items()
    }


def with_degree(workload: Workload, plan: Tunables) -> Tunables:
    """Return the plan with the smallest degree where its schedule needs one: one turn of a knob is a whole plan."""
    if plan.schedule != "ulysses-ring" or plan.ulysses:
        return plan
    return replace(plan, ulysses=next(iter(degrees(workload.world)), 0))


def too_heavy(workload: Workload, plan: Tunables) -> tuple[str, ...]:
    """Return why a plan that could run is not raced over ranks: it would likely run out of memory.

    On one device that costs nothing, over several the workers of all of them are started anew.
    """
    if workload.world == 1 or "math" not in plan.kernels:
        return ()
    branches = workload.pattern.resolved(workload.total)
    rows = max(-(-min(branch.segment, workload.total) // branch.rate) for branch in branches)
    if rows <= MATH_ROWS:
        return ()
    return (f"math holds the logits of {rows} rows at once; over ranks it is tried up to {MATH_ROWS}",)


def schedule_plans(workload: Workload, default: Tunables) -> Iterator[Tunables]:
    """Yield each schedule with the default's kernels, in its few main forms, also those that cannot run."""
    if workload.world == 1:
        return
    checkpoints = ("selective", "none") if workload.train else ("selective",)
    for schedule in SCHEDULES:
        for degree in degrees(workload.world) if schedule == "ulysses-ring" else (0,):
            exchanges = EXCHANGES if schedule in EXCHANGING else ("",)
            for exchange, groups, checkpoint in itertools.product(exchanges, FIRST_HEAD_GROUPS, checkpoints):
                plan = replace(default, schedule=schedule, ulysses=degree, head_groups=groups)
                yield plainest(workload, replace(plan, checkpoint=checkpoint, exchange=exchange))
