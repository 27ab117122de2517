"""The knobs that a plan over several ranks has beside a one-rank plan's, and the plans that a race begins with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ringattn.errors import InputError
from ringattn.geometry.ring_schedules import ulysses_degree
from ringattn.planning.ring import Ranks, ring_reasons
from ringattn.workload import EXCHANGES, GRAD_WIRES, SCHEDULES, Tunables, Workload

Value = str | int | bool | None

HEAD_GROUPS = (0, 2, 4, 8)
FIRST_HEAD_GROUPS = (0, 4)  # that the race of schedules tries
MATH_ROWS = 8192  # whose logits take 256 MiB a head
_EXCHANGES = ("ulysses", "ulysses-ring")


def ring_knobs(
    workload: Workload, default: Tunables, dtypes: Sequence[str], exchanges: Sequence[str]
) -> dict[str, tuple[Value, ...]]:
    """Knobs with the values that some plan can have, whatever its kernels; none at one rank.

    The layout is the default plan's, the same for a whole profile. ``exchanges`` are those that the machine can do.
    """
    if workload.world == 1:
        return {}
    values: dict[str, tuple[Value, ...]] = {
        "schedule": SCHEDULES,
        "ulysses": (0, *degrees(workload.world)),
        "head_groups": HEAD_GROUPS,
        "grad_wire": GRAD_WIRES,
        "exchange": tuple(exchanges),
    }
    base = replace(default, checkpoint="selective")  # which every schedule can do
    plans: dict[Tunables, None] = {}
    for turned in itertools.product(dtypes, *values.values()):
        changes: dict[str, Any] = dict(zip(("dtype", *values), turned, strict=True))
        plan = plainest(workload, replace(base, **changes))
        if plan not in plans and not ring_reasons(workload, plan, default.layout):
            plans[plan] = None
    reached = {
        name: tuple(value for value in listed if any(getattr(plan, name) == value for plan in plans))
        for name, listed in values.items()
    }
    return {"layout": (default.layout,), **reached}


def degrees(world: int) -> tuple[int, ...]:
    """How many consecutive ranks may exchange heads, with a ring across: divisors other than 1 and all."""
    return tuple(n for n in range(2, world) if world % n == 0)


def plainest(workload: Workload, plan: Tunables) -> Tunables:
    """The plan without what its schedule has no use for, so that one turn of the schedule's knob is a whole plan.

    A schedule that needs a degree takes the smallest.
    """
    if workload.world == 1:
        return plan
    changes: dict[str, Any] = {}
    if plan.schedule != "ulysses-ring":
        changes["ulysses"] = 0
    elif plan.ulysses == 0:
        changes["ulysses"] = next(iter(degrees(workload.world)), 0)
    if not _cuts_heads(workload, replace(plan, ulysses=changes.get("ulysses", plan.ulysses))):
        changes["head_groups"] = 0
    if plan.schedule in ("local", "ulysses"):
        changes["grad_wire"] = ""
    if plan.schedule not in _EXCHANGES:
        changes["exchange"] = ""
    if plan.schedule in ("ring", "all-gather") and plan.checkpoint == "none":
        changes["checkpoint"] = "selective"
    if plan.schedule != "local":
        changes["window_tokens"] = None
    plan = replace(plan, **changes)
    travelling = _travelling(workload, plan)
    if travelling:
        branches = tuple(
            replace(branch, gather="view") if n in travelling else branch for n, branch in enumerate(plan.branches)
        )
        plan = replace(plan, branches=branches)
    if len(travelling) == len(plan.branches):  # nothing stays that could use these
        plan = replace(plan, pool_threshold_mib=None, pool_strategy="shape", pattern_cache=True, compile=False)
    return plan


def _cuts_heads(workload: Workload, plan: Tunables) -> bool:
    """Whether the schedule can cut its heads in so many groups."""
    if plan.schedule == "all-gather":
        return plan.head_groups <= workload.kv_heads
    degree = ulysses_degree(plan, workload.world)
    return plan.schedule in _EXCHANGES and degree > 0 and workload.kv_heads // degree % max(1, plan.head_groups) == 0


def _travelling(workload: Workload, plan: Tunables) -> tuple[int, ...]:
    """The branches whose rows go from rank to rank; none where the plan cannot be laid out at all."""
    if plan.schedule == "local" or not plan.layout or (plan.schedule == "ulysses-ring" and not plan.ulysses):
        return ()
    if plan.ulysses and workload.world % plan.ulysses:
        return ()
    try:
        return Ranks.of(workload, plan).travelling(workload)
    except InputError:  # too short for so many ranks: the constraint function says so
        return ()


def too_heavy(workload: Workload, plan: Tunables) -> tuple[str, ...]:
    """Why a plan that could run is not raced over ranks: it would likely run out of memory.

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
    """Each schedule with the default's kernels, in its few main forms; what cannot run is for others to leave out."""
    if workload.world == 1:
        return
    checkpoints = ("selective", "none") if workload.train else ("selective",)
    for schedule in SCHEDULES:
        for degree in degrees(workload.world) if schedule == "ulysses-ring" else (0,):
            exchanges = EXCHANGES if schedule in _EXCHANGES else ("",)
            for exchange, groups, checkpoint in itertools.product(exchanges, FIRST_HEAD_GROUPS, checkpoints):
                plan = replace(default, schedule=schedule, ulysses=degree, head_groups=groups)
                yield plainest(workload, replace(plan, checkpoint=checkpoint, exchange=exchange))
