"""Which plans there are for a workload: a table of knobs, and the one constraint function deciding what can run.

A ``Space`` is pure: it is built from a ``Machine``, which for a real one binds ``ringattn.planning.plan`` to its
facts and in tests is any pair of functions. Plans that would execute the same steps are one candidate.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ringattn.planning.fused_steps import FUSED_PARAMS, FUSED_STEPS, steps_not_taken
from ringattn.workload import EXCHANGES, BranchTunables, ParamValue, Tunables, Workload

from .ring_space import plainest, ring_knobs, schedule_plans, too_heavy

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts

Value = str | int | bool | None
Assignment = dict[str, Value]

WIDER: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bf16", "tf32", "fp32"),
    "fp16": ("fp16", "tf32", "fp32"),
    "fp32": ("fp32",),
    "fp64": ("fp64",),
}
NARROWER: Mapping[str, tuple[str, ...]] = {"bf16": (), "fp16": (), "fp32": ("tf32", "bf16", "fp16"), "fp64": ()}
POOL_THRESHOLDS_MIB: tuple[int | None, ...] = (None, 1, 16)
WINDOW_MULTIPLES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a space has to know of a machine: its kernels, what they refuse, and which plans are the same.

    ``reasons`` is the one constraint function; ``identity`` maps a plan that can run to something equal for plans
    with equal steps; ``params`` gives a kernel's tunable parameters for a workload and compute dtype. ``fuses`` says
    whether the steps between kernels are GPU kernels with parameters of their own. ``just_in_time`` are the kernels,
    and the steps between them, that are compiled at their first call. ``exchanges`` are the ways in which so many
    ranks can exchange heads.
    """

    kernels: tuple[str, ...]
    reasons: Callable[[Workload, Tunables], tuple[str, ...]]
    identity: Callable[[Workload, Tunables], Hashable]
    params: Callable[[Workload, str, str], Mapping[str, tuple[ParamValue, ...]]] = lambda workload, kernel, dtype: {}
    fuses: Callable[[str], bool] = lambda dtype: False
    just_in_time: frozenset[str] = frozenset()
    exchanges: Callable[[int], tuple[str, ...]] = lambda world: ("",)


def machine_of(facts: HardwareFacts) -> Machine:
    """The real machine: ``ringattn.planning.plan`` bound to its facts."""
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
        identity=_identity,
        params=params,
        fuses=lambda dtype: fuses(facts, dtype),
        just_in_time=frozenset(_compiled_kernels(facts)).union(FUSED_STEPS if fuses(facts, "bf16") else ()),
        exchanges=lambda world: tuple(way for way in EXCHANGES if not exchange_reasons(world, way, facts, "")),
    )


def _compiled_kernels(facts: HardwareFacts) -> Iterator[str]:
    from ringattn.kernels.registry import KERNELS

    if facts.vendor == "nvidia":
        yield from (name for name, kernel in KERNELS.items() if kernel.just_in_time)


def _identity(workload: Workload, plan: Tunables) -> Tunables:
    """The plan without what a dense one never looks at: it has no workspace to pool and no pattern to keep."""
    if not workload.pattern.dense:
        return plan
    return replace(plan, pool_threshold_mib=None, pool_strategy="shape", pattern_cache=True)


def candidate_key(tunables: Tunables) -> str:
    """One plan as one line of text, the same in every process: how records find it again."""
    return json.dumps(dataclasses.asdict(tunables), separators=(",", ":"))


def from_key(key: str) -> Tunables:
    """The inverse of ``candidate_key``."""
    fields = json.loads(key)
    fields["branches"] = tuple(BranchTunables(**branch) for branch in fields["branches"])
    fields["params"] = tuple((name, value) for name, value in fields["params"])
    return Tunables(**fields)


# Knobs that hold for the whole plan, beside those of its branches; their plainest values are the fields' defaults.
_WHOLE = tuple(f.name for f in dataclasses.fields(Tunables) if f.name not in ("branches", "params"))


def encode(workload: Workload, tunables: Tunables) -> Assignment:
    """A plan as values of knobs; the names are those of ``knobs_of``."""
    assignment: Assignment = {}
    for index, branch in enumerate(tunables.branches):
        assignment[f"forward.{index}"] = branch.forward
        if workload.train:
            assignment[f"backward.{index}"] = branch.backward
        assignment[f"gather.{index}"] = branch.gather
    assignment |= {name: getattr(tunables, name) for name in _WHOLE}
    return assignment | {f"param:{name}": value for name, value in tunables.params}


def decode(workload: Workload, assignment: Mapping[str, Value]) -> Tunables:
    """The plan of an assignment, in the plainest of the forms that mean the same.

    What has no effect takes its plainest value: a backward or a checkpoint mode without gradients, a gather of rows
    that lie together, a pool strategy without a pool, a parameter of a kernel that is not used.
    """
    branches = []
    for index, branch in enumerate(workload.pattern.resolved(workload.seq_len)):
        gather = str(assignment.get(f"gather.{index}", "view")) if branch.rate > 1 else "view"
        backward = str(assignment[f"backward.{index}"]) if workload.train else ""
        branches.append(BranchTunables(str(assignment[f"forward.{index}"]), backward, gather))
    used = {b.forward for b in branches} | {b.backward for b in branches}
    used |= set(FUSED_STEPS) - set(steps_not_taken(workload, branches))
    params = {
        name.removeprefix("param:"): value
        for name, value in assignment.items()
        if name.startswith("param:") and value is not None and name.removeprefix("param:").rsplit(".", 1)[0] in used
    }
    whole: dict[str, Any] = {name: assignment[name] for name in _WHOLE if name in assignment}
    if not workload.train:
        whole.pop("checkpoint", None)
    if whole.get("pool_threshold_mib") is None:
        whole.pop("pool_strategy", None)
    if (whole.get("window_tokens") or 0) >= workload.seq_len:
        whole.pop("window_tokens", None)
    plan = Tunables(branches=tuple(branches), params=tuple(sorted(params.items())), **whole)
    return plainest(workload, plan)


def _window_values(workload: Workload) -> tuple[Value, ...]:
    """Whole multiples of the largest segment, where every branch nests in it; otherwise only all at once."""
    branches = workload.pattern.branches
    if not branches:
        return (None,)
    widest = max(branch.segment for branch in branches)
    if any(widest % branch.segment for branch in branches):
        return (None,)
    return (None, *(widest * n for n in WINDOW_MULTIPLES if widest * n < workload.seq_len))


def knobs_of(workload: Workload, machine: Machine, dtypes: tuple[str, ...]) -> dict[str, tuple[Value, ...]]:
    """Every knob of a workload with its values, the plainest first; knobs with one value are left out of nothing."""
    dilated = any(branch.rate > 1 for branch in workload.pattern.branches)
    knobs: dict[str, tuple[Value, ...]] = {"dtype": dtypes}
    for index, branch in enumerate(workload.pattern.resolved(workload.seq_len)):
        knobs[f"forward.{index}"] = machine.kernels
        if workload.train:
            knobs[f"backward.{index}"] = machine.kernels
        knobs[f"gather.{index}"] = ("view", "copy") if branch.rate > 1 else ("view",)
    knobs["checkpoint"] = ("selective", "none", "full", "offload") if workload.train else ("selective",)
    knobs["window_tokens"] = _window_values(workload)
    knobs["pattern_cache"] = (True, False) if dilated else (True,)
    knobs["pool_threshold_mib"] = POOL_THRESHOLDS_MIB
    knobs["pool_strategy"] = ("shape", "bucket")
    knobs["compile"] = (False,)  # tried on finalists only: it costs seconds a plan
    for kernel in machine.kernels:
        for dtype in dtypes:
            for name, values in machine.params(workload, kernel, dtype).items():
                # The first value is the kernel's own choice, which a plan says by saying nothing.
                knobs.setdefault(f"param:{kernel}.{name}", (None, *values[1:]))
    if dilated and any(map(machine.fuses, dtypes)):
        for name, blocks in FUSED_PARAMS.items():
            if name != "sum.block" or workload.train:
                knobs[f"param:{name}"] = (None, *blocks)
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
    every kernel pair and dtype with everything else as in the default, the default itself first.
    """

    workload: Workload
    machine: Machine
    default: Tunables
    knobs: Mapping[str, tuple[Value, ...]]
    kernel_plans: tuple[Tunables, ...]
    rejected: tuple[tuple[str, tuple[str, ...]], ...]  # uniform plans that cannot run, by name, and why
    _identities: dict[Tunables, Hashable] = field(default_factory=dict, compare=False, repr=False)

    def holds(self, tunables: Tunables) -> bool:
        """Whether every value of the plan is one of its knob here, and it can run."""
        there = encode(self.workload, tunables)
        known = all(there.get(name, values[0]) in values for name, values in self.knobs.items())
        return known and self.valid(tunables)

    def valid(self, tunables: Tunables) -> bool:
        return self.identity(tunables) is not None

    def identity(self, tunables: Tunables) -> Hashable | None:
        """Equal for plans with equal steps; None for a plan that cannot run."""
        if tunables not in self._identities:
            runs = not self.machine.reasons(self.workload, tunables)
            self._identities[tunables] = self.machine.identity(self.workload, tunables) if runs else None
        return self._identities[tunables]

    def distinct(self, plans: Iterator[Tunables]) -> Iterator[Tunables]:
        """Those of ``plans`` that can run, each once however it is spelled."""
        seen: set[Hashable] = set()
        for plan in plans:
            identity = self.identity(plan)
            if identity is not None and identity not in seen:
                seen.add(identity)
                yield plan

    def neighbours(self, tunables: Tunables) -> tuple[Move, ...]:
        """Every distinct plan one knob away."""
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
        """``base`` with several knobs turned at once, or None where that cannot run."""
        plan = decode(self.workload, encode(self.workload, base) | dict(changes))
        return plan if self.valid(plan) else None

    def all_plans(self, limit: int | None = None) -> tuple[Tunables, ...] | None:
        """Every distinct plan; None as soon as there are more than ``limit``, or far too many to look through."""
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
        """The number of distinct plans, or the number of spellings where counting would take too long."""
        plans = self.all_plans(limit)
        if plans is not None:
            return len(plans)
        spellings = 1
        for values in self.knobs.values():
            spellings *= len(values)
        return spellings

    def searched(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The knobs with more than one value, as text."""
        return tuple((name, tuple(map(_text, values))) for name, values in self.knobs.items() if len(values) > 1)


def _text(value: Value) -> str:
    return "off" if value is None or value is False else "on" if value is True else str(value) or "as the inputs"


def _uniform_plans(
    workload: Workload, machine: Machine, default: Tunables, dtypes: tuple[str, ...]
) -> Iterator[tuple[str, Tunables]]:
    """Every kernel pair on all branches, by name."""
    base = encode(workload, default)
    backwards: tuple[str, ...] = machine.kernels if workload.train else ("",)
    for dtype, forward, backward in itertools.product(dtypes, machine.kernels, backwards):
        turned: Assignment = {"dtype": dtype}
        for index in range(len(default.branches)):
            turned[f"forward.{index}"] = forward
            turned[f"backward.{index}"] = backward
        plan = decode(workload, base | turned)
        kernels = f"{forward}/{backward}" if backward else forward
        yield f"{kernels} {dtype}", plan


def build_space(workload: Workload, machine: Machine, default: Tunables, dtypes: tuple[str, ...]) -> Space:
    """The space of ``workload`` for these compute dtypes, around ``default`` (which must be able to run)."""
    knobs = knobs_of(workload, machine, dtypes) | ring_knobs(
        workload, default, dtypes, machine.exchanges(workload.world)
    )
    space = Space(workload, machine, default, knobs, (), ())
    assert space.valid(default), f"the default plan cannot run: {machine.reasons(workload, default)}"
    rejected, plans = [], [default]
    for name, plan in _uniform_plans(workload, machine, default, dtypes):
        reasons = machine.reasons(workload, plan)
        if reasons and any(branch.rate > 1 for branch in workload.pattern.branches):
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
    knobs = _within_reach(knobs, workload, plans)
    return Space(workload, machine, default, knobs, tuple(space.distinct(iter(plans))), tuple(rejected))


def _within_reach(
    knobs: Mapping[str, tuple[Value, ...]], workload: Workload, plans: Sequence[Tunables]
) -> dict[str, tuple[Value, ...]]:
    """The knobs without values that no plan can use (they would only cost the sampler asks), with all that one has."""
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
        elif not name.startswith("param:") or name.removeprefix("param:").rsplit(".", 1)[0] in parts:
            reached[name] = tuple(dict.fromkeys((*values, *taken.get(name, ()))))
    return reached
