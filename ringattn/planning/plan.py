"""The one constraint function: from a workload and tunables to a plan, or to the reasons against it.

Pure: decisions depend on the workload, the tunables and the facts alone. The search space, the writer of profiles
and the loader all ask the same ``rejection_reasons``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ringattn.errors import KernelReason, PlanError
from ringattn.geometry.pattern import nests
from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Combination
from ringattn.kernels.contract import FEATURE_WORDS, KernelNeed
from ringattn.kernels.registry import KERNELS
from ringattn.wording import plural
from ringattn.workload import BranchTunables, ParamValue, Pattern, Tunables, Workload, describe

from .equal_plans import void_reasons
from .fused_steps import FUSED_PARAMS, FUSED_STEPS, steps_not_taken
from .ring import blocks_of, exchange_reasons, ring_reasons

Direction = Literal["forward", "backward"]
Params = Mapping[str, ParamValue]
NO_PARAMS: Params = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of all plans of a module: a deterministic torch refuses kernels whose backward is not.

    ``layout`` is how the user's sequences lie over several ranks, empty where a plan may choose. ``apart`` is why ranks
    cannot reach each other's memory, empty where they can or where nobody has asked.
    """

    deterministic: bool = False
    layout: str = ""
    apart: str = ""


ORDINARY = Conditions()


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a plan. ``user``: in part from what was asked for explicitly. ``measured``: by a profile."""

    source: Literal["profile", "heuristic"]
    user: bool = False
    measured: bool = True

    def __str__(self) -> str:
        return self.source + (" + user" if self.user else "") + ("" if self.measured else ", not measured")


@dataclass(frozen=True, slots=True)
class Plan:
    """One resolved row: nothing in it is left to decide.

    ``fused`` says whether the steps between kernels run as one GPU kernel each or as torch operations. ``origin`` is
    where a module's table has it from; None for a plan of no table.
    """

    workload: Workload
    tunables: Tunables
    fused: bool
    conditions: Conditions = ORDINARY
    origin: Origin | None = None

    def __str__(self) -> str:
        return f"{self.workload}: {describe(self.tunables)}" + (f"  ({self.origin})" if self.origin else "")


def fuses(facts: HardwareFacts, dtype: str) -> bool:
    """Return whether the steps between kernels run as our Triton kernels: those need sm_70, triton and no float64."""
    if facts.vendor != "nvidia" or "triton" not in facts.packages or dtype == "fp64":
        return False
    return int(facts.arch.removeprefix("sm_")) >= 70


def kernel_need(
    workload: Workload,
    branch: int,
    dtype: str,
    *,
    arch: str,
    vendor: str,
    gather: str = "view",
    window_tokens: int | None = None,
    backward: bool = False,
    conditions: Conditions = ORDINARY,
) -> KernelNeed:
    """Return what branch number ``branch`` asks of its kernel: the largest of its calls."""
    segment_and_rate = workload.pattern.resolved(workload.seq_len)[branch]
    tokens = min(workload.seq_len, window_tokens or workload.seq_len)
    length = min(segment_and_rate.segment, tokens)
    rows = -(-length // segment_and_rate.rate)
    blocks = workload.batch * (1 if workload.decode else max(1, tokens // length))
    rows_apart = 1 if gather == "copy" else segment_and_rate.rate
    return KernelNeed(
        vendor=vendor,
        arch=arch,
        dtype=dtype,
        head_dim=workload.head_dim,
        heads=workload.heads,
        kv_heads=workload.kv_heads,
        rows=rows,
        blocks=blocks,
        causal=workload.causal,
        backward=backward,
        row_elements=rows_apart * workload.heads * workload.head_dim,
        deterministic=conditions.deterministic,
        dropout=workload.dropout > 0,
        window=workload.window,
        softcap=workload.softcap > 0,
        head_dim_v=workload.head_dim_v,
        queries=1 if workload.decode else 0,
    )


def kernel_needs(
    workload: Workload,
    tunables: Tunables,
    branch: int,
    facts: HardwareFacts,
    *,
    backward: bool,
    conditions: Conditions,
) -> tuple[KernelNeed, ...]:
    """Return all that a branch asks of a kernel: one block on one rank, blocks of several kinds where rows travel."""
    one = kernel_need(
        workload,
        branch,
        tunables.dtype,
        arch=facts.arch,
        vendor=facts.vendor,
        gather=tunables.gathers[branch],
        window_tokens=tunables.window_tokens,
        backward=backward,
        conditions=conditions,
    )
    if workload.world == 1:
        return (_packed_need(one, workload, branch) if tunables.packing == "varlen" else one,)
    needs = [
        replace(
            one,
            rows=block.rows,
            blocks=block.blocks,
            causal=block.causal,
            heads=block.heads,
            kv_heads=block.kv_heads,
            row_elements=block.heads * workload.head_dim,  # rows that travel are gathered
            window=one.window if block.windowed else 0,
        )
        for block in blocks_of(workload, tunables)
        if block.branch == branch
    ]
    return tuple(needs) or (one,)


def _packed_need(one: KernelNeed, workload: Workload, branch: int) -> KernelNeed:
    """Return the need of all documents at once: of dilated rows each key/value head is a sequence of its own."""
    rate = workload.pattern.resolved(workload.seq_len)[branch].rate
    if rate == 1:
        return replace(one, packed_rows=workload.packed_tokens, row_elements=one.heads * one.head_dim)
    group, sequences = one.heads // one.kv_heads, one.blocks * one.kv_heads
    rows = -(-workload.packed_tokens * one.kv_heads // rate) + sequences
    return replace(one, packed_rows=rows, blocks=sequences, heads=group, kv_heads=1, row_elements=group * one.head_dim)


def kernel_rejections(
    name: str, needs: tuple[KernelNeed, ...], facts: HardwareFacts, params: Params = NO_PARAMS
) -> tuple[str, ...]:
    """Return why a kernel with these parameters cannot serve all of ``needs``."""
    return tuple(dict.fromkeys(why for need in needs for why in kernel_reasons(name, need, facts, params)))


def kernel_reasons(name: str, need: KernelNeed, facts: HardwareFacts, params: Params = NO_PARAMS) -> tuple[str, ...]:
    """Return why a kernel with these parameters cannot serve ``need``: its own rules, then what failed here."""
    if name not in KERNELS:
        return (f"unknown kernel; use one of {', '.join(KERNELS)}",)
    reasons = KERNELS[name].unsupported_reasons(need, facts)
    if lacking := [FEATURE_WORDS[feature] for feature in need.features if feature not in KERNELS[name].features]:
        able = [kernel.name for kernel in KERNELS.values() if kernel.features.issuperset(need.features)]
        reasons += (f"no {', no '.join(lacking)}; {', '.join(able)} have it",)
    if facts.faults and not reasons:
        asked = combination_of(name, need, params)
        reasons = tuple(fault.reason for fault in facts.faults if fault.combination == asked)
    return reasons


def combination_of(name: str, need: KernelNeed, params: Params = NO_PARAMS) -> Combination:
    """Return what must be validated for a kernel to serve ``need``; of ``params`` those count that it has there.

    One query sees all keys that a kernel is given, which only a kernel that reads caches is told where the query is.
    """
    offered, one_query = KERNELS[name].params(need), need.queries == 1 and not need.backward
    return Combination(
        kernel=name,
        head_dim=need.head_dim,
        dtype=need.dtype,
        backward=need.backward,
        causal=need.causal and (not one_query or KERNELS[name].reads_caches),
        grouped=need.heads != need.kv_heads,
        deterministic=need.deterministic and need.backward,
        params=tuple(sorted((key, value) for key, value in params.items() if key in offered)),
        packed=need.packed_rows > 0,
        window=need.window > 0,
        softcap=need.softcap,
        head_dim_v=need.head_dim_v,
        dropout=need.dropout,
        one_query=one_query,
    )


def combinations(
    workload: Workload, tunables: Tunables, facts: HardwareFacts, *, conditions: Conditions = ORDINARY
) -> tuple[Combination, ...]:
    """Return all that must be validated for a plan of these tunables to run; math is the formula itself."""
    found: dict[Combination, None] = {}
    for number, choice in enumerate(tunables.branches):
        for direction, name in _kernels_of(choice, workload.train):
            backward, params = direction == "backward", tunables.params_of(name)
            for need in kernel_needs(workload, tunables, number, facts, backward=backward, conditions=conditions):
                if name != "math" and name in KERNELS:
                    found[combination_of(name, need, params)] = None
    return tuple(found)


def rejection_reasons(
    workload: Workload, tunables: Tunables, facts: HardwareFacts, *, conditions: Conditions = ORDINARY
) -> tuple[str, ...]:
    """Return why these tunables cannot run this workload on this machine; empty when all is well.

    This is the one constraint function. It also refuses a value that changes nothing (a window as long as the
    sequence, a copy at rate 1), by the rules in the table of tunables: plans with equal steps are one candidate.
    """
    pattern = workload.pattern
    branches = pattern.resolved(workload.seq_len)
    if len(tunables.branches) != len(branches):
        return (f"has {plural(len(tunables.branches), 'branch')}, the pattern {pattern} has {len(branches)}",)
    void = void_reasons(workload, tunables)
    reasons = [*_dtype_reasons(workload, tunables), *void, *_memory_reasons(workload, tunables, facts)]
    reasons += _dropout_reasons(workload, tunables)
    if workload.world > 1:
        spread = [*void, *ring_reasons(workload, tunables, conditions.layout)]
        reasons += exchange_reasons(workload.world, tunables.exchange, facts, conditions.apart)
        if spread:  # without a layout and a schedule that fit there are no blocks to ask kernels about
            return tuple(dict.fromkeys((*reasons, *spread)))
    needs: list[tuple[str, KernelNeed]] = []
    for number, choice in enumerate(tunables.branches):
        for direction, name in _kernels_of(choice, workload.train):
            asked = kernel_needs(
                workload, tunables, number, facts, backward=direction == "backward", conditions=conditions
            )
            why_not = kernel_rejections(name, asked, facts, tunables.params_of(name))
            reasons += [KernelReason(number, direction, name, why) for why in why_not]
            if name in KERNELS:
                needs += [(name, need) for need in asked]
        if workload.train and not choice.backward:
            reasons.append(f"branch {number}: has no backward kernel, and this is train; name one")
    reasons += _param_reasons(workload, tunables, needs, facts)
    return tuple(dict.fromkeys(reasons))


def _kernels_of(choice: BranchTunables, train: bool) -> tuple[tuple[Direction, str], ...]:
    if train and choice.backward:
        return (("forward", choice.forward), ("backward", choice.backward))
    return (("forward", choice.forward),)


def _dtype_reasons(workload: Workload, tunables: Tunables) -> list[str]:
    if (workload.dtype == "fp64") != (tunables.dtype == "fp64"):
        return [f"computes in {tunables.dtype}, but float64 inputs, and only they, run in float64"]
    if tunables.dtype == "tf32" and workload.dtype != "fp32":
        return [f"tf32 is for fp32 inputs, not {workload.dtype}"]
    return []


DROPOUT_IN_ONE_BLOCK = "dropout is exact in one block of one kernel: in dense attention on one device"


def several_blocks(pattern: Pattern, world: int, *, packed: bool = False) -> str:
    """Return of what an attention has more than one block, so that no kernel drops its weights; "" for one block."""
    return "documents" if packed else f"{world} ranks" if world > 1 else "" if pattern.dense else "branches"


def _dropout_reasons(workload: Workload, tunables: Tunables) -> list[str]:
    if not workload.dropout:
        return []
    if several := several_blocks(workload.pattern, workload.world, packed=workload.packed):
        return [f"{DROPOUT_IN_ONE_BLOCK}, not over {several}; set it to 0.0, or call eval()"]
    reasons = []
    if any(branch.backward not in ("", branch.forward) for branch in tunables.branches):
        reasons.append("dropout: the backward needs the kernel of the forward, which knows what it dropped")
    if tunables.launch == "graph":
        reasons.append("dropout: a graph would replay the random numbers of its capture")
    return reasons


def _memory_reasons(workload: Workload, tunables: Tunables, facts: HardwareFacts) -> list[str]:
    reasons = []
    window = tunables.window_tokens
    if window is not None and not nests(workload.pattern, window):
        reasons.append(f"window_tokens {window} is not a multiple of every segment of the pattern {workload.pattern}")
    if tunables.checkpoint == "none" and tunables.is_local and "copy" not in tunables.gathers:
        reasons.append("checkpoint none keeps gathered rows, and no branch gathers; use selective")
    if tunables.checkpoint == "offload" and facts.vendor == "cpu":
        reasons.append("checkpoint offload moves tensors to the host, where a CPU has them already")
    if tunables.compile and fuses(facts, tunables.dtype):
        reasons.append("compile: the steps between kernels are fused GPU kernels already")
    if tunables.launch == "graph" and facts.vendor != "nvidia":
        reasons.append("launch graph: CUDA graphs are for NVIDIA GPUs")
    return reasons


def _fused_param_reasons(
    workload: Workload, tunables: Tunables, facts: HardwareFacts, name: str, value: ParamValue
) -> list[str]:
    if not fuses(facts, tunables.dtype):
        return [f"parameter {name}: the steps between kernels are not fused here"]
    if name not in FUSED_PARAMS:
        return [f"parameter {name}: no step between kernels has it; there are {', '.join(FUSED_PARAMS)}"]
    not_taken = steps_not_taken(workload, tunables).get(name.partition(".")[0])
    if not_taken:
        return [f"parameter {name}: {not_taken}"]
    if isinstance(value, bool) or value not in FUSED_PARAMS[name]:
        return [f"{name}={value!r}: use one of {', '.join(map(str, FUSED_PARAMS[name]))}"]
    return []


def _param_reasons(
    workload: Workload, tunables: Tunables, needs: list[tuple[str, KernelNeed]], facts: HardwareFacts
) -> list[str]:
    """Return the parameters of kernels that do not run, that a kernel does not have here, or of no listed value."""
    reasons = []
    for name, value in tunables.params:
        kernel, _, key = name.rpartition(".")
        if kernel in FUSED_STEPS:
            reasons += _fused_param_reasons(workload, tunables, facts, name, value)
            continue
        asked = [need for used, need in needs if used == kernel]
        offered = [params[key] for params in map(KERNELS[kernel].params, asked) if key in params] if asked else []
        if not asked:
            reasons.append(f"parameter {name}: no branch runs the kernel it belongs to")
        elif not offered:
            reasons.append(f"parameter {name}: {kernel} has no such parameter here")
        reasons += [
            f"{name}={value!r}: use one of {', '.join(map(repr, values))}" for values in offered if value not in values
        ]
    return reasons


def build_plan(
    workload: Workload, tunables: Tunables, facts: HardwareFacts, *, conditions: Conditions = ORDINARY
) -> Plan:
    """Return the plan of these tunables; PlanError with every reason where they cannot run."""
    reasons = rejection_reasons(workload, tunables, facts, conditions=conditions)
    if reasons:
        raise PlanError(f"cannot run {workload}", {describe(tunables): reasons})
    return Plan(workload, tunables, fuses(facts, tunables.dtype), conditions)
