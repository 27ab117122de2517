"""The plans that exist for a workload: knobs from the table of tunables, and the one constraint function.

A ``Space`` is pure: it is built from a ``Machine``, which for a real one binds ``ringattn.planning.plan`` to its
facts and in tests is any pair of functions. Plans that would execute the same steps are one candidate.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ringattn.planning.equal_plans import case_of, plainest
from ringattn.planning.fused_steps import FUSED_PARAMS, FUSED_STEPS, steps_not_taken
from ringattn.tunable_rules import EXCHANGES
from ringattn.tunable_rules import Value as Value
from ringattn.tunables import TABLE, Tunable
from ringattn.workload import BranchTunables, ParamValue, Tunables, Workload

from .ring_space import ring_knobs, schedule_plans, too_heavy, with_degree

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts

Assignment = dict[str, Value]
_PARAM = "param:"  # begins the knobs of kernels' parameters

NARROWER: Mapping[str, tuple[str, ...]] = {"bf16": (), "fp16": (), "fp32": ("tf32", "bf16", "fp16"), "fp64": ()}


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine as a space sees it: its kernels, what they refuse, and which plans are the same.

    ``reasons`` is the one constraint function; of plans with equal steps it refuses all but the plainest.
    ``identity`` maps a plan that can run to something equal for plans that the machine cannot tell apart; ``params``
    gives a kernel's tunable parameters for a workload and compute dtype. ``fuses`` says whether the steps between
    kernels are GPU kernels with parameters of their own. ``just_in_time`` are the kernels, and the steps between them,
    that are compiled at their first call. ``exchanges`` are the ways in which so many ranks can exchange heads.
    """

    kernels: tuple[str, ...]
    reasons: Callable[[Workload, Tunables], tuple[str, ...]]
    identity: Callable[[Workload, Tunables], Hashable] = lambda workload, plan: plan
    params: Callable[[Workload, str, str], Mapping[str, tuple[ParamValue, ...]]] = lambda workload, kernel, dtype: {}
    fuses: Callable[[str], bool] = lambda dtype: False
    just_in_time: frozenset[str] = frozenset()
    exchanges: Callable[[int], tuple[str, ...]] = lambda world: ("",)


def machine_of(facts: HardwareFacts) -> Machine:
    """Return the real machine: ``ringattn.planning.plan`` bound to its facts."""
    from ringattn.kernels.registry import KERNELS
    from ringattn.planning.plan import fuses, kernel_need, rejection_reasons
    from ringattn.planning.ring import exchange_reasons

    def params(workload: Workload, kernel: str, dtype: str) -> Mapping[str, tuple[ParamValue, ...]]:
        needs = [
            kernel_need(workload, branch, dtype, arch=facts.arch, vendor=facts.vendor, backward=backward)
            for branch in range(len(workload.pattern.resolved(workload.seq_len)))
            for backward in ((False, True) if workload.train else (False,))
        ]
        return {name: values for need in needs for name, values in KERNELS[kernel].params(need).items()}

    return Machine(
        kernels=tuple(KERNELS),
        reasons=lambda workload, plan: rejection_reasons(workload, plan, facts),
        params=params,
        fuses=lambda dtype: fuses(facts, dtype),
        just_in_time=frozenset(_compiled_kernels(facts)).union(FUSED_STEPS if fuses(facts, "bf16") else ()),
        exchanges=lambda world: tuple(way for way in EXCHANGES if not exchange_reasons(world, way, facts, "")),
    )


def _compiled_kernels(facts: HardwareFacts) -> Iterator[str]:
    from ringattn.kernels.registry import KERNELS

    if facts.vendor == "nvidia":
        yield from (name for name, kernel in KERNELS.items() if kernel.just_in_time)


def candidate_key(tunables: Tunables) -> str:
    """Return one plan as one line of text, the same in every process: how records find it again."""
    return json.dumps(dataclasses.asdict(tunables), separators=(",", ":"))


def from_key(key: str) -> Tunables:
    """Return the inverse of ``candidate_key``."""
    fields = json.loads(key)
    fields["branches"] = tuple(BranchTunables(**branch) for branch in fields["branches"])
    fields["params"] = tuple((name, value) for name, value in fields["params"])
    return Tunables(**fields)


def _places(workload: Workload) -> tuple[tuple[str, Tunable, int], ...]:
    """Return the knob of every entry of the table: its name, the entry, and the branch that it is of."""
    return _places_of(max(1, len(workload.pattern.branches)), workload.train)


@functools.cache  # a search decodes thousands of plans, and their names took a third of the time
def _places_of(branches: int, train: bool) -> tuple[tuple[str, Tunable, int], ...]:
    entries = [entry for entry in TABLE.values() if train or entry.name != "backward"]
    return (
        *((f"{e.name}.{branch}", e, branch) for branch in range(branches) for e in entries if e.per_branch),
        *((e.name, e, 0) for e in entries if not e.per_branch),
    )


def encode(workload: Workload, tunables: Tunables) -> Assignment:
    """Return a plan as values of knobs; the names are those of ``knobs_of``."""
    assignment = {name: entry.value(tunables, branch) for name, entry, branch in _places(workload)}
    return assignment | {f"param:{name}": value for name, value in tunables.params}


def distance(workload: Workload, plan: Tunables, default: Tunables) -> int:
    """Return the number of knobs in which a plan differs from the default."""
    here, there = encode(workload, plan), encode(workload, default)
    return sum(here.get(name) != there.get(name) for name in here.keys() | there.keys())


def decode(workload: Workload, assignment: Mapping[str, Value]) -> Tunables:
    """Return the plan of an assignment, in the plainest of the forms that mean the same.

    What has no effect takes its plainest value, by the rules in the table of tunables; a parameter of a kernel or of
    a step that is not used goes.
    """
    whole: dict[str, Any] = {}
    of_branches: list[dict[str, Any]] = [{} for _ in workload.pattern.resolved(workload.seq_len)]
    for name, entry, branch in _places(workload):
        if entry.required or name in assignment:
            (of_branches[branch] if entry.per_branch else whole)[entry.name] = assignment[name]
    branches = tuple(BranchTunables(**values) for values in of_branches)
    plan = plainest(workload, with_degree(workload, Tunables(branches=branches, **whole)))
    named = {name: value for name, value in assignment.items() if name.startswith(_PARAM) and value is not None}
    if not named:
        return plan
    used = plan.kernels.union(FUSED_STEPS).difference(steps_not_taken(workload, plan))
    params = [(name.removeprefix(_PARAM), value) for name, value in named.items() if _owner(name) in used]
    return replace(plan, params=tuple(sorted(params)))


def _owner(knob: str) -> str:
    """Return the kernel or the step that a parameter is of."""
    return knob.removeprefix(_PARAM).rpartition(".")[0]


def knobs_of(workload: Workload, machine: Machine, dtypes: tuple[str, ...]) -> dict[str, tuple[Value, ...]]:
    """Return every knob of a workload on one rank with its values, the plainest first, also those with one value."""
    branches = tuple(BranchTunables("") for _ in workload.pattern.resolved(workload.seq_len))
    case = case_of(workload, Tunables(dtypes[0], branches))
    of_the_machine = {"dtype": dtypes, "forward": machine.kernels, "backward": machine.kernels}
    knobs: dict[str, tuple[Value, ...]] = {"dtype": dtypes}
    for name, entry, branch in _places(workload):
        if entry.name in of_the_machine:
            knobs[name] = of_the_machine[entry.name]
        elif entry.stage == "finalists":  # which the search turns itself
            knobs[name] = (entry.plain,)
        elif entry.stage != "ranks":
            knobs[name] = entry.tried(replace(case, branch=branch))
    for kernel in machine.kernels:
        for dtype in dtypes:
            for name, values in machine.params(workload, kernel, dtype).items():
                # The first value is the kernel's own choice, which a plan says by saying nothing.
                knobs.setdefault(f"{_PARAM}{kernel}.{name}", (None, *values[1:]))
    if max(case.rates) > 1 and any(map(machine.fuses, dtypes)):
        for name, blocks in FUSED_PARAMS.items():
            if name != "sum.block" or workload.train:
                knobs[f"{_PARAM}{name}"] = (None, *blocks)
    return knobs


@dataclass(frozen=True, slots=True)
class Move:
    """One step away from a plan: the knob that was turned and the plan it gives."""

    knob: str
    tunables: Tunables


@dataclass(frozen=True, slots=True)
class Space:
    """All plans of one workload that this machine can run, around its default plan.

    ``default`` is what the runtime would do without a profile. ``kernel_plans`` are the uniform plans stage 1 races:
    every kernel pair and dtype with everything else as in the default, the default itself first. Of documents they
    have all in one call, where the kernels can.
    """

    workload: Workload
    machine: Machine
    default: Tunables
    knobs: Mapping[str, tuple[Value, ...]]
    kernel_plans: tuple[Tunables, ...]
    rejected: tuple[tuple[str, tuple[str, ...]], ...]  # uniform plans that cannot run, by name, and why
    _identities: dict[Tunables, Hashable] = field(default_factory=dict, compare=False, repr=False)

    def holds(self, tunables: Tunables) -> bool:
        """Return whether every value of the plan is one of its knob here, and it can run."""
        there = encode(self.workload, tunables)
        known = all(there.get(name, values[0]) in values for name, values in self.knobs.items())
        return known and decode(self.workload, there) == tunables and self.valid(tunables)

    def valid(self, tunables: Tunables) -> bool:
        return self.identity(tunables) is not None

    def identity(self, tunables: Tunables) -> Hashable | None:
        """Return a key, equal for plans with equal steps; None for a plan that cannot run."""
        if tunables not in self._identities:
            runs = not self.machine.reasons(self.workload, tunables)
            self._identities[tunables] = self.machine.identity(self.workload, tunables) if runs else None
        return self._identities[tunables]

    def including(self, plans: Iterable[Tunables]) -> Space:
        """Return the space with the values of further plans, as far as those can run in its dtypes."""
        knobs = dict(self.knobs)
        for plan in plans:
            there, own = encode(self.workload, plan), encode(self.workload, self.default)
            fixed = [name for name in there if name not in knobs and not name.startswith(_PARAM)]
            if plan.dtype not in knobs["dtype"] or any(there[name] != own[name] for name in fixed):
                continue
            if not plan.kernels <= {*self.machine.kernels}:
                continue
            if decode(self.workload, there) == plan and self.valid(plan):
                for name in there.keys() - set(fixed):
                    knobs[name] = tuple(dict.fromkeys((*knobs.get(name, (None,)), there[name])))
        return replace(self, knobs=knobs)

    def distinct(self, plans: Iterator[Tunables]) -> Iterator[Tunables]:
        """Yield those of ``plans`` that can run, each once however it is spelled."""
        seen: set[Hashable] = set()
        for plan in plans:
            identity = self.identity(plan)
            if identity is not None and identity not in seen:
                seen.add(identity)
                yield plan

    def neighbours(self, tunables: Tunables) -> tuple[Move, ...]:
        """Return every distinct plan one knob away."""
        here = encode(self.workload, tunables)
        moves = []
        seen = {self.identity(tunables)}
        for knob, values in self.knobs.items():
            for value in values:
                plan = decode(self.workload, here | {knob: value})
                identity = self.identity(plan)
                if identity is not None and identity not in seen:
                    seen.add(identity)
                    moves.append(Move(knob, plan))
        return tuple(moves)

    def combine(self, base: Tunables, changes: Mapping[str, Value]) -> Tunables | None:
        """Return ``base`` with several knobs turned at once, or None where that cannot run."""
        plan = decode(self.workload, encode(self.workload, base) | dict(changes))
        return plan if self.valid(plan) else None

    def all_plans(self, limit: int | None = None) -> tuple[Tunables, ...] | None:
        """Return every distinct plan; None as soon as there are more than ``limit``, or too many to look through."""
        spellings = 1
        for values in self.knobs.values():
            spellings *= len(values)
        if limit is not None and spellings > max(20_000, 64 * limit):
            return None
        names = list(self.knobs)
        every = (
            decode(self.workload, dict(zip(names, values, strict=True)))
            for values in itertools.product(*self.knobs.values())
        )
        plans = tuple(itertools.islice(self.distinct(every), None if limit is None else limit + 1))
        return None if limit is not None and len(plans) > limit else plans

    def size(self, limit: int = 256) -> int:
        """Return the number of distinct plans, or the number of spellings where counting would take too long."""
        plans = self.all_plans(limit)
        if plans is not None:
            return len(plans)
        spellings = 1
        for values in self.knobs.values():
            spellings *= len(values)
        return spellings

    def searched(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the knobs with more than one value, as text."""
        return tuple((name, tuple(map(_text, values))) for name, values in self.knobs.items() if len(values) > 1)


def _text(value: Value) -> str:
    return "off" if value is None or value is False else "on" if value is True else str(value) or "as the inputs"


def _uniform_plans(
    workload: Workload, machine: Machine, default: Tunables, dtypes: tuple[str, ...]
) -> Iterator[tuple[str, Tunables]]:
    """Yield every kernel pair on all branches, by name."""
    base = encode(workload, default)
    backwards: tuple[str, ...] = machine.kernels if workload.train else ("",)
    for dtype, forward, backward in itertools.product(dtypes, machine.kernels, backwards):
        turned: Assignment = {"dtype": dtype}
        for index in range(len(default.branches)):
            turned[f"forward.{index}"] = forward
            turned[f"backward.{index}"] = backward
        if workload.packed:
            turned["packing"] = "documents"  # that of the default is its own kernels'
        plan = decode(workload, base | turned)
        if workload.packed and "math" not in plan.kernels:  # all documents at once, as the runtime's own plan has them
            at_once = decode(workload, base | turned | {"packing": "varlen"})
            plan = plan if machine.reasons(workload, at_once) else at_once
        kernels = f"{forward}/{backward}" if backward else forward
        yield f"{kernels} {dtype}", plan


def build_space(workload: Workload, machine: Machine, default: Tunables, dtypes: tuple[str, ...]) -> Space:
    """Return the space of ``workload`` for these compute dtypes, around ``default`` (which must be able to run)."""
    knobs = knobs_of(workload, machine, dtypes) | ring_knobs(
        workload, default, dtypes, machine.exchanges(workload.world)
    )
    space = Space(workload, machine, default, knobs, (), ())
    assert space.valid(default), f"the default plan cannot run: {machine.reasons(workload, default)}"
    rejected, plans = [], [default]
    for name, plan in _uniform_plans(workload, machine, default, dtypes):
        reasons = machine.reasons(workload, plan)
        if reasons and workload.pattern.dilated:
            # A kernel that cannot read rows in place may still run on copied ones.
            copied = {f"gather.{index}": "copy" for index in range(len(default.branches))}
            plan = decode(workload, encode(workload, plan) | copied)
            reasons = machine.reasons(workload, plan)
        reasons = reasons or (too_heavy(workload, plan) if plan != default else ())
        if reasons:
            rejected.append((name, reasons))
        else:
            plans.append(plan)
    plans += [plan for plan in schedule_plans(workload, default) if space.valid(plan)]
    knobs = _usable(_within_reach(knobs, workload, plans), space, plans)
    return Space(workload, machine, default, knobs, tuple(space.distinct(iter(plans))), tuple(rejected))


def _within_reach(
    knobs: Mapping[str, tuple[Value, ...]], workload: Workload, plans: Sequence[Tunables]
) -> dict[str, tuple[Value, ...]]:
    """Return the knobs without values that no plan can use, which only cost the sampler asks, with all that one has."""
    taken: dict[str, dict[Value, None]] = {}
    for plan in plans:
        for name, value in encode(workload, plan).items():
            taken.setdefault(name, {})[value] = None
    kernels = {str(value) for name in taken if name.startswith(("forward.", "backward.")) for value in taken[name]}
    parts = kernels.union(FUSED_STEPS)
    reached: dict[str, tuple[Value, ...]] = {}
    for name, values in knobs.items():
        if name == "dtype" or name.startswith(("forward.", "backward.")):
            reached[name] = tuple(value for value in values if value in taken[name])
        elif not name.startswith(_PARAM) or _owner(name) in parts:
            reached[name] = tuple(dict.fromkeys((*values, *taken.get(name, ()))))
    return reached


def _usable(
    knobs: Mapping[str, tuple[Value, ...]], space: Space, plans: Sequence[Tunables]
) -> dict[str, tuple[Value, ...]]:
    """Return the knobs without values that this machine refuses in every plan, such as offload to the host on a CPU.

    A value may need another one beside it: to keep gathered rows, some must be gathered.
    """

    def is_usable(name: str, value: Value) -> bool:
        if any(space.combine(plan, {name: value}) is not None for plan in plans):
            return True
        return any(
            space.combine(space.default, {name: value, other: beside}) is not None
            for other, others in knobs.items()
            if other != name
            for beside in others
        )

    return {name: tuple(value for value in values if is_usable(name, value)) for name, values in knobs.items()}
