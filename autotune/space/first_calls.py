"""First calls to make ahead, so that what they compile is compiled on many cores before anything is timed.

Of the 170 s of a standard probe on an H200, 76 went into first calls, one after the other: 24 plans took 0.3 to 12 s
each, nearly all of it Triton's and flash-attn-4's compilers on one core. A second probe, which found their kernels on
disk, spent 12.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from ringattn.planning.fused_steps import FUSED_STEPS
from ringattn.workload import Mode, Tunables, Workload

from .space import Space, decode, encode

Call = tuple[Workload, Tunables]

MOST_CALLS = 64  # eight for each of a full pool of workers


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel of one shape class, compiled for one direction.

    ``workload`` is that of the class. ``reads`` says whose forward a backward follows, ``rows`` how it reads its rows.
    """

    workload: Workload
    dtype: str
    direction: str
    kernel: str
    reads: str
    rows: str
    params: tuple[tuple[str, object], ...] = ()


def shape_class(workload: Workload) -> Workload:
    """Return what is equal for the workloads that share compiled kernels: all but length and mode."""
    mode: Mode = "decode" if workload.decode else "train"
    return replace(workload.at(1), mode=mode, total_length=0)


def kernels_compiled(workload: Workload, plan: Tunables, just_in_time: frozenset[str]) -> frozenset[CompiledKernel]:
    """Return the kernels that a first call of the plan compiles, where no other call has.

    A backward after another kernel's forward reads what that one wrote: flash-attn-4's took 5 s after flash's, though
    its own had been compiled. Segments clipped to a short sequence, copied rows, all documents in one call and
    parameters are compiled apart.
    """
    if just_in_time.isdisjoint(plan.kernels):
        return frozenset()
    found: set[CompiledKernel] = set()
    for branch, selected in zip(plan.branches, workload.pattern.resolved(workload.seq_len), strict=True):
        clipped = " clipped" if selected.segment > workload.seq_len else ""
        at_once = " at once" if plan.packing == "varlen" else ""
        rows = f"{branch.gather if selected.rate > 1 else ''}{clipped}{at_once}"
        own = branch.backward == branch.forward
        for direction, kernel in (("forward", branch.forward), ("backward", branch.backward)):
            if kernel in just_in_time:
                params = tuple(pair for pair in plan.params if pair[0].startswith(f"{kernel}."))
                reads = "" if direction == "forward" else "its own" if own else "another's"
                found.add(CompiledKernel(shape_class(workload), plan.dtype, direction, kernel, reads, rows, params))
    return frozenset(found)


def steps_compiled(workload: Workload, plan: Tunables, just_in_time: frozenset[str]) -> frozenset[Hashable]:
    """Return the steps between kernels, and the whole of a compiled plan, that its first call compiles."""
    found: set[Hashable] = set()
    if plan.compile:
        found.add((shape_class(workload), workload.train, plan))
    if not workload.pattern.dense and just_in_time.intersection(FUSED_STEPS):
        steps = tuple(pair for pair in plan.params if pair[0].rpartition(".")[0] in FUSED_STEPS)
        found.add((shape_class(workload), workload.train, plan.dtype, _gathers(plan), steps))
    return frozenset(found)


def calls_worth_making(spaces: Iterable[Space], standing: Sequence[Call] = ()) -> tuple[Call, ...]:
    """Return the plans that between them need most of what a probe of these spaces compiles, the slowest first.

    What is compiled depends on the kernels and on which branches copy, not on the length, but for whether segments
    end with it: one length is enough that all segments divide. Only flash-attn-4 compiles once more, 5 s at a time,
    where segments are clipped to a short sequence. Before all others goes what the defaults compile, which the probe
    waits for first (8 of the 50 s of a quick probe on an H200), and then ``standing`` plans, which won here before, as
    far as one compiles a kernel that those before it do not.
    """
    spaces = list(spaces)
    alike: dict[Workload, list[Space]] = {}
    for space in spaces:
        alike.setdefault(shape_class(space.workload), []).append(space)
    calls: list[Call] = []
    examples = set[int]()
    for group in alike.values():
        example = min(group, key=_as_example)
        examples.add(example.workload.seq_len)
        covered = set[CompiledKernel]()
        for space in sorted(group, key=lambda space: (space is not example, space.workload.seq_len)):
            for cell, plan in _calls_of(space):
                needed = kernels_compiled(cell, plan, frozenset({"flash-attn-4"}))
                if space is example or needed - covered:
                    calls.append((cell, plan))
                    covered |= needed
    defaults = [space.default for space in spaces]
    calls.sort(key=lambda call: (_turn(call[1], defaults), _depth(call, examples), call[0].pattern.dense))
    just_in_time = frozenset().union(*(space.machine.just_in_time for space in spaces))
    first = [call for call in calls if _turn(call[1], defaults) == 0]
    known = set[CompiledKernel]()
    for cell, plan in standing:
        if needed := kernels_compiled(cell, plan, just_in_time) - known:
            first.append((cell, plan))
            known |= needed
    return tuple(dict.fromkeys([*first, *calls]))[:MOST_CALLS]


def _turn(plan: Tunables, defaults: Sequence[Tunables]) -> int:
    """Return the turn: what the defaults compile first, then flash-attn-4, which takes longest; gathers last."""
    of_a_default = any(plan.dtype == other.dtype and plan.kernels <= other.kernels for other in defaults)
    if of_a_default:
        return 0 if any(_gathers(plan) == _gathers(other) for other in defaults) else 3
    return 1 if "flash-attn-4" in plan.kernels else 2


def _depth(call: Call, examples: Collection[int]) -> tuple[bool, bool, int]:
    """Return the turn among calls of one kernel: its directions apart, on rows in place, then what adds to that.

    So every shape class has something of a kernel before any has all of it.
    """
    workload, plan = call
    copies = "copy" in _gathers(plan)
    return workload.seq_len not in examples, copies, 0 if not workload.train else 1 if _is_mixed(plan) else 2


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
    calls = [(space.workload, plan) for plan in dict.fromkeys(plans)]
    return [*_forwards(space, [plan for plan in plans if not compiled.isdisjoint(plan.kernels)]), *calls]


def _forwards(space: Space, plans: Sequence[Tunables]) -> list[Call]:
    """Return inference's calls of these plans of training: a forward compiles beside its backward, not before it."""
    if not space.workload.train:
        return []
    infer = replace(space.workload, mode="infer")
    both = [plan for plan in plans if plan.branches[0].forward == plan.branches[0].backward]
    alone = [decode(infer, encode(space.workload, plan)) for plan in both]
    return [(infer, plan) for plan in dict.fromkeys(alone) if not space.machine.reasons(infer, plan)]


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
