"""Stages 1 and 3: whole kernels against each other, and the whole space by TPE; ``climb`` is stage 2.

Each takes a cell's context and leaves estimates in it. A stage that an earlier run finished is recognised by its
note in the record and not entered again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autotune.journal.stage_record import Entry, StageRecord
from autotune.measure.evaluator import Checked, Fault
from autotune.space.space import Value, candidate_key, decode, encode, from_key
from ringattn.workload import Tunables

from .arena import Arena
from .budget import Deadline
from .cell import CellContext
from .nearby import HOPELESS
from .race import PROMISING, WORTH_TRYING, race, screen, within_reach

NARROW_REACH = 1.5  # times the best main plan, by the calls of their checks, which may be disturbed
CLOSE = math.log(1.5)  # times the best at a length nearby: such plans are checked before others
RECOMPUTED = ("full", "offload")  # checkpoints that save memory and cost time, always
BATCH = 4  # plans asked of TPE at a time; one block serves them all


# --- stage 1: whole plans --------------------------------------------------------------------------------------------


def race_plans(
    context: CellContext,
    stage: str,
    plans: Sequence[Tunables],
    *,
    keep: int,
    deadline: Deadline,
    reach: float,
    max_blocks: int | None = None,
) -> list[Tunables]:
    """Successive elimination; main and narrower dtypes race each to their own leader. Returns the main ones left.

    A narrower dtype is wanted only where it is faster, so that one far behind the main ones is not timed in pairs: on a
    CPU those of 3 s a call, beside a best of 0.35 s, took half of a probe's longest cell.
    Plans whose parts add up to more than ``reach`` times the best are left out. ``max_blocks``: the preset's.
    """
    context.listener.stage(context.cell, stage)
    record = context.record(stage)
    arena = context.arena(stage, record)
    standing = record.noted("standing")
    if standing is None:
        entries = _admit_within_reach(context, arena, plans, deadline, reach)
        mains = [entry for entry in entries if context.is_main(entry.tunables)]
        narrow = [entry for entry in entries if not context.is_main(entry.tunables) and entry.fault is None]
        narrow = within_reach(arena, narrow, NARROW_REACH * arena.fastest_call_ms(mains))
        blocks = max_blocks or context.preset.race_blocks
        left = race(arena, mains, keep=keep, max_blocks=blocks, deadline=deadline)
        left += race(arena, narrow, keep=1, max_blocks=blocks, deadline=deadline)
        for entry in left:
            arena.leave(entry, "stood to the end")
        standing = [candidate_key(entry.tunables) for entry in left]
        record.abandon_open("not timed: the stage was over")
        record.note("standing", standing)
    context.learn(arena, record.entries())
    return [plan for plan in map(from_key, standing) if context.is_main(plan)]


def _admit_within_reach(
    context: CellContext, arena: Arena, plans: Sequence[Tunables], deadline: Deadline, reach: float
) -> list[Entry]:
    """Check the most promising plans first, and leave out those that their parts say are far too slow.

    The default is first, then what won elsewhere and what was close at a length nearby, then what is nearest to the
    default. Two changes together cost about the sum of what each costs alone. What is left out is noted.
    """
    changes = {plan: _changes(context, plan) for plan in plans}
    entries: list[Entry] = []
    left_out: dict[str, str] = {}
    for plan in sorted(plans, key=lambda p: (p.checkpoint in RECOMPUTED, *_expected(context, p), len(changes[p]))):
        if context.lessons.has_lost(plan):
            left_out[candidate_key(plan)] = "a kernel of it cannot be loaded"
            continue
        hung = [done for done in changes if _timed_out(context, done) and changes[done] < changes[plan]]
        if hung:
            left_out[candidate_key(plan)] = "a part of it did not end in time"
            continue
        known = [entry for entry in entries if entry.checked is not None]
        if (behind := _dtype_behind(context, arena, plan)) > HOPELESS:
            left_out[candidate_key(plan)] = f"its dtype took {behind:.1f} times the best"
            continue
        if _recomputes_for_nothing(context, arena, plan, known):
            left_out[candidate_key(plan)] = "what it adds to save memory is worth it for the fastest kernels only"
            continue
        calls_ms = {changes[e.tunables]: e.checked.call_ms for e in known if e.checked is not None}
        rivals = [e for e in known if context.is_main(e.tunables) or not context.is_main(plan)]
        predicted_ms, best_ms = _sum_of_parts(changes[plan], calls_ms), arena.fastest_call_ms(rivals)
        if predicted_ms is not None and predicted_ms > reach * best_ms:
            left_out[candidate_key(plan)] = f"its parts add up to {predicted_ms / best_ms:.1f} times the best"
        else:
            entries += arena.admit([plan], deadline)
    arena.record.note("left_out", left_out)
    return entries


def _recomputes_for_nothing(context: CellContext, arena: Arena, plan: Tunables, known: Sequence[Entry]) -> bool:
    """Whether it trades time for memory around kernels that are not the fastest, where nothing but time is asked for.

    Such plans, two for each pair of kernels, took two thirds of the time of an H100's longest cell. With the fastest
    kernels they are the lean end of the front.
    """
    settings = context.settings
    if plan.checkpoint not in RECOMPUTED or settings.prefer != "time" or settings.limits.peak_bytes is not None:
        return False
    plain = [e for e in known if e.tunables.dtype == plan.dtype and e.tunables.checkpoint not in RECOMPUTED]
    if not plain:
        return False
    fastest = min(plain, key=lambda entry: arena.checked_ms(entry.checked) if entry.checked else math.inf)
    return fastest.tunables.branches != plan.branches


def _dtype_behind(context: CellContext, arena: Arena, plan: Tunables) -> float:
    """How many times the best the best plan of this dtype took; math, which is slow in any, is no evidence.

    0 for the default's dtype, and where none of this one was checked.
    """
    if plan.dtype == context.default.dtype:
        return 0.0
    calls_ms = {
        known: arena.checked_ms(result)
        for known, result in context.ledger.checked.items()
        if isinstance(result, Checked)
    }
    alike = [ms for known, ms in calls_ms.items() if known.dtype == plan.dtype and "math" not in known.kernels]
    return min(alike) / min(calls_ms.values()) if alike else 0.0


def _expected(context: CellContext, plan: Tunables) -> tuple[int, float]:
    if plan == context.default:
        return 0, 0.0
    if plan in context.seeds:
        return 1, float(context.seeds.index(plan))
    behind = context.nearby.behind(plan) if context.nearby is not None else None
    return (2, behind) if behind is not None and behind < CLOSE else (3, 0.0)


def _timed_out(context: CellContext, plan: Tunables) -> bool:
    result = context.ledger.checked.get(plan)
    return isinstance(result, Fault) and result.kind == "timeout"


Changes = frozenset[tuple[str, Value]]


def _changes(context: CellContext, plan: Tunables) -> Changes:
    default = encode(context.cell, context.default)
    return frozenset((name, v) for name, v in encode(context.cell, plan).items() if default.get(name) != v)


def _sum_of_parts(wanted: Changes, calls_ms: Mapping[Changes, float]) -> float | None:
    """The smallest sum over two known plans whose changes together are the wanted ones; None without such a pair."""
    default_ms = calls_ms.get(frozenset())
    if default_ms is None:
        return None
    sums = [
        calls_ms[part] + calls_ms[wanted - part] - default_ms
        for part in calls_ms
        if part < wanted and part and wanted - part in calls_ms
    ]
    return min(sums, default=None)


# --- stage 3: the whole space ----------------------------------------------------------------------------------------


def explore(context: CellContext, deadline: Deadline) -> None:
    """TPE over the whole valid space, told everything known, a few plans per block against the incumbent."""
    context.listener.stage(context.cell, "explore")
    record = context.record("explore")
    arena = context.arena("explore", record)
    if not record.entries():
        _teach(context, record)
    incumbent = record.open(context.best_plan())
    if incumbent.finished or not arena.enter(incumbent):
        context.learn(arena, record.entries())
        return
    asked = sum(1 for entry in record.entries() if entry.finished)
    while asked < context.preset.explore_plans and deadline.allows(BATCH * arena.sample_s):
        fresh, used = _ask_batch(context, arena, record, deadline)
        asked += used
        if not used:
            break
        good = screen(arena, incumbent, fresh, context.preset.race_blocks, deadline) if fresh else []
        overtaken = bool(good) and arena.chance_faster(good[0], incumbent, by=WORTH_TRYING / 2) >= PROMISING
        if overtaken:
            arena.leave(incumbent, "overtaken")
            incumbent = good[0]
        for entry in fresh:
            if entry is not incumbent:
                arena.leave(entry, "explored")
    arena.leave(incumbent, "stood to the end")
    record.abandon_open("not timed: the stage was over")
    context.learn(arena, record.entries())


def _teach(context: CellContext, record: StageRecord) -> None:
    for plan, interval in context.estimates.items():
        checked = context.ledger.checked.get(plan)
        constraints = context.settings.limits.constraints(checked) if isinstance(checked, Checked) else {}
        record.learn(plan, interval.median, constraints)
    for plan in context.ledger.failures():
        record.learn(plan, None, {})


def _ask_batch(context: CellContext, arena: Arena, record: StageRecord, deadline: Deadline) -> tuple[list[Entry], int]:
    """Up to BATCH new plans of the sampler that can run, and how many asks that took."""
    fresh: list[Entry] = []
    asks = 0
    while len(fresh) < BATCH and asks < 8 * BATCH and deadline.allows(arena.sample_s):
        trial, assignment = record.ask()
        asks += 1
        plan = decode(context.cell, assignment)
        reasons = context.space.machine.reasons(context.cell, plan)
        if context.lessons.has_lost(plan):
            reasons = (*reasons, "a kernel of it cannot be loaded")
        if (behind := _dtype_behind(context, arena, plan)) > HOPELESS:
            reasons = (*reasons, f"its dtype took {behind:.1f} times the best")
        if reasons:
            record.reject(trial, reasons)
        elif record.find(plan) is not None or plan in context.estimates:
            record.repeat(trial, _known_value(context, record, plan))
        else:
            entry = record.adopt(trial, plan)
            if arena.enter(entry):
                fresh.append(entry)
    return fresh, asks


def _known_value(context: CellContext, record: StageRecord, plan: Tunables) -> float:
    if plan in context.estimates:
        return context.estimates[plan].median
    entry = record.find(plan)
    ratios = list(entry.log_ratios.values()) if entry is not None else []
    return float(np.median(ratios)) if ratios else math.log(2.0)
