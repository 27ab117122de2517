"""First calls to make ahead, so that what they compile is compiled on many cores before anything is timed.

Of the 170 s of a standard probe on an H200, 76 went into first calls, one after the other: 24 plans took 0.3 to 12 s
each, nearly all of it Triton's and flash-attn-4's compilers on one core. A second probe, which found their kernels on
disk, spent 12.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ringattn.planning.fused_steps import FUSED_STEPS
from ringattn.workload import Tunables, Workload

from .space import Space

Call = tuple[Workload, Tunables]

MOST_CALLS = 48  # six for each of a full pool of workers


def calls_worth_making(spaces: Iterable[Space]) -> tuple[Call, ...]:
    """Return the plans that between them need most of what a probe of these spaces compiles, the slowest first.

    What is compiled depends on the kernels and on which branches copy, not on the length, but for whether segments
    end with it: one length is enough that all segments divide. Only flash-attn-4 compiles once more, 5 s at a time,
    where segments are clipped to a short sequence.
    """
    spaces = list(spaces)
    alike: dict[Workload, list[Space]] = {}
    for space in spaces:
        alike.setdefault(replace(space.workload, seq_len=1, mode="train", total_length=0), []).append(space)
    calls: list[Call] = []
    for group in alike.values():
        example = min(group, key=_as_example)
        calls += _calls_of(example)
        shortest = min(group, key=lambda space: (not space.workload.train, space.workload.seq_len))
        if shortest is not example:
            calls += [(cell, plan) for cell, plan in _calls_of(shortest) if "flash-attn-4" in plan.kernels]
    defaults = [space.default for space in spaces]
    calls.sort(key=lambda call: (_turn(call[1], defaults), call[0].pattern.dense, not call[0].train))
    return tuple(calls[:MOST_CALLS])


def _turn(plan: Tunables, defaults: Sequence[Tunables]) -> int:
    """Return the turn: what the defaults compile first, then flash-attn-4, which takes longest; gathers last."""
    of_a_default = any(plan.dtype == other.dtype and plan.kernels <= other.kernels for other in defaults)
    if of_a_default:
        return 0 if any(_gathers(plan) == _gathers(other) for other in defaults) else 3
    return 1 if "flash-attn-4" in plan.kernels else 2


def _gathers(plan: Tunables) -> tuple[str, ...]:
    return tuple(branch.gather for branch in plan.branches)


def _as_example(space: Space) -> tuple[bool, bool, int]:
    workload = space.workload
    ragged = any(workload.seq_len % branch.segment for branch in workload.pattern.branches)
    return (not workload.train, ragged, workload.seq_len)


def _calls_of(space: Space) -> list[Call]:
    compiled = space.machine.just_in_time
    plans: list[Tunables] = []
    covered = set[object]()
    # Another dtype is tried once or twice, and given up where it is slow: the first of its plans is called below.
    for plan in sorted((p for p in space.kernel_plans if p.dtype == space.default.dtype), key=_is_mixed):
        if (needed := _compiled_for(plan, compiled)) - covered:
            covered |= needed
            plans.append(plan)
    if not space.workload.pattern.dense and compiled.intersection(FUSED_STEPS):
        wider = {p.dtype: p for p in reversed(space.kernel_plans) if p.dtype != space.default.dtype}
        plans += wider.values()
        # A kernel that reads strides is compiled for rows in place and for the layout of copies.
        both_ways = [_gathered(space, plan, end) for plan in plans for end in (0, -1)]
        plans = [plan for plan in both_ways if plan is not None]
        plans += _every_gather(space)
    return [(space.workload, plan) for plan in dict.fromkeys(plans)]


def _is_mixed(plan: Tunables) -> bool:
    """Return whether the backward is another kernel's than the forward."""
    return any(branch.backward not in ("", branch.forward) for branch in plan.branches)


def _compiled_for(plan: Tunables, compiled: frozenset[str]) -> set[object]:
    """Return what this plan of one kernel a direction compiles; nothing is said of plans whose branches differ.

    A backward after another kernel's forward reads what that one wrote: flash-attn-4's took 5 s after flash's, though
    its own had been compiled.
    """
    if len({(branch.forward, branch.backward) for branch in plan.branches}) > 1:
        return set()
    forward, backward = plan.branches[0].forward, plan.branches[0].backward
    ways = {(forward,): forward, (backward, forward == backward): backward}
    return {way for way, kernel in ways.items() if kernel in compiled}


def _gathered(space: Space, plan: Tunables, end: int) -> Tunables | None:
    """Return the plan with every branch read in place (0) or copied where it may be (-1); None if that cannot run."""
    knobs = {name: values[end] for name, values in space.knobs.items() if name.startswith("gather.")}
    return space.combine(plan, knobs)


def _every_gather(space: Space) -> list[Tunables]:
    """Return the default with every choice of branches that copy their rows."""
    knobs = {name: values for name, values in space.knobs.items() if name.startswith("gather.")}
    every = (dict(zip(knobs, values, strict=True)) for values in itertools.product(*knobs.values()))
    plans = (space.combine(space.default, choice) for choice in itertools.islice(every, MOST_CALLS))
    return [plan for plan in plans if plan is not None]
