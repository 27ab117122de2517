"""The plan of a workload that nobody measured: a policy's kernels, and rules for the rest. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ringattn.errors import PlanError
from ringattn.geometry.layout import resolve_layout
from ringattn.geometry.pattern import nests
from ringattn.hardware.facts import HardwareFacts
from ringattn.kernels.contract import KernelNeed
from ringattn.profile.schema import Policy
from ringattn.workload import BranchTunables, Tunables, Workload, describe

from .equal_plans import plainest
from .launches import blocks_per_launch, forward_gflop, launches
from .plan import ORDINARY, Conditions, Direction, Plan, build_plan, kernel_needs, kernel_rejections, rejection_reasons
from .ring import exchanges_heads, travelling_branches, window_reason


@dataclass(frozen=True, slots=True)
class Wishes:
    """Explicit choices of the user; each beats the profile and the heuristic."""

    forward: str | None = None
    backward: str | None = None
    dtype: str | None = None
    checkpoint: str | None = None


NO_WISHES = Wishes()


def heuristic_tunables(
    workload: Workload,
    policy: Policy,
    facts: HardwareFacts,
    *,
    conditions: Conditions = ORDINARY,
    wishes: Wishes = NO_WISHES,
) -> Tunables:
    """Return the tunables of the heuristic's plan, which see."""
    return heuristic_plan(workload, policy, facts, conditions=conditions, wishes=wishes).tunables


def heuristic_plan(
    workload: Workload,
    policy: Policy,
    facts: HardwareFacts,
    *,
    conditions: Conditions = ORDINARY,
    wishes: Wishes = NO_WISHES,
) -> Plan:
    """Return what to run where nothing was measured: per branch the first kernel of the policy that can.

    Raises PlanError with every candidate and its reasons when none can.
    """
    gathers = _default_gathers(workload, policy, facts)
    tunables = Tunables(
        dtype=wishes.dtype or policy.dtype_for(workload.dtype),
        branches=tuple(BranchTunables("", gather=gather) for gather in gathers),
        window_tokens=_default_window(workload, facts),
    )
    if workload.world > 1:
        tunables = _spread(workload, tunables, facts, conditions.layout)
        if reason := window_reason(workload, tunables):
            raise PlanError(f"cannot run {workload}", {describe(tunables): (reason,)})
    if wishes.checkpoint and workload.train:
        tunables = replace(tunables, checkpoint=wishes.checkpoint)
    branches = []
    for number, branch in enumerate(tunables.branches):
        if workload.dropout and len({wishes.forward, wishes.backward} - {None}) < 2:
            name = _both_ways(workload, number, tunables, policy, facts, conditions, wishes)
            branches.append(replace(branch, forward=name, backward=name))
            continue
        chosen: dict[Direction, str] = {"forward": "", "backward": ""}
        directions: tuple[Direction, ...] = ("forward", "backward") if workload.train else ("forward",)
        for direction in directions:
            wish = wishes.forward if direction == "forward" else wishes.backward
            work = _launch_gflop(workload, number, branch.gather)
            order = policy.kernels_for(direction, tunables.dtype, work, packed=workload.packed and workload.world == 1)
            candidates = (wish,) if wish else order
            if workload.decode and not wish:
                candidates = (*_decoders(workload), *candidates)
            needs = kernel_needs(
                workload, tunables, number, facts, backward=direction == "backward", conditions=conditions
            )
            chosen[direction] = _first_that_can(candidates, needs, facts, workload, number, direction)
        branches.append(replace(branch, **chosen))
    tunables = replace(tunables, branches=tuple(branches))
    if workload.packed and workload.world == 1:
        tunables = _packed(workload, tunables, facts, conditions)
    return build_plan(workload, tunables, facts, conditions=conditions)


def _decoders(workload: Workload) -> tuple[str, ...]:
    """Return the kernels to try first for one query over a cache: cudnn where one call does, then what reads caches.

    A step of 32/8 heads over 64 to 65,536 keys takes an H200's host 22 us by cudnn and 66 by split-kv, and the device
    as long by either; 64 sequences of 8192 keys take it 0.49 and 0.55 ms.
    """
    return ("cudnn", "split-kv") if workload.pattern.dense else ("split-kv",)


def _packed(workload: Workload, tunables: Tunables, facts: HardwareFacts, conditions: Conditions) -> Tunables:
    """Return the tunables with all documents in one call, where the kernels that would run one by one can do that.

    Math is left as it is: its entry goes through the documents by itself.
    """
    at_once = plainest(workload, replace(tunables, packing="varlen"))
    loops = "math" in tunables.kernels
    return tunables if loops or rejection_reasons(workload, at_once, facts, conditions=conditions) else at_once


def _launch_gflop(workload: Workload, branch: int, gather: str) -> float:
    """Return the GFLOP of a launch of a branch, infinite where launching costs no more than torch's own function does.

    A dense forward alone is that function: 64 sequences of 197 took an H200 0.048 ms so and 0.071 on flash, 1024
    positions 0.037 and 0.046, as a program waits for them. Training, flash saves more launches than it loses.
    """
    w = workload
    if w.decode or (w.pattern.dense and not w.train and w.world == 1 and not w.packed):
        return math.inf
    return forward_gflop(workload, branch) / launches(workload, branch, gather)


def _default_gathers(workload: Workload, policy: Policy, facts: HardwareFacts) -> tuple[str, ...]:
    branches = workload.pattern.resolved(workload.seq_len)
    usual = tuple(
        "copy" if _leaves_idle(workload, number, facts) else policy.gather_for(branch.rate)
        for number, branch in enumerate(branches)
    )
    if not workload.train:
        # Copying saved a forward of launches 4 % (LongNet, 4096 positions, H200), a training step 25 %.
        return usual
    count = sum(launches(workload, number, gather) for number, gather in enumerate(usual))
    work = sum(forward_gflop(workload, number) for number in range(len(branches)))
    return tuple("copy" if branch.rate > 1 else "view" for branch in branches) if policy.binds(work / count) else usual


_ENOUGH_WAVES = 2


def _leaves_idle(workload: Workload, branch: int, facts: HardwareFacts) -> bool:
    """Return whether a launch for each set of heads, read in place, leaves multiprocessors of a GPU without work.

    Of Prov-GigaPath's pattern over 100,003 positions (16 heads of 48, an H200) rates 8 and 16 have 196 and 49 blocks a
    launch: a training step took 36.9 ms with them in place and 23.7 with them copied, 10 of that less for the sums.
    """
    if workload.pattern.head_offset != "blocked":  # neighbouring heads, a row further each, are one launch
        return False
    if facts.vendor != "nvidia" or workload.world > 1 or workload.decode or workload.packed:
        return False
    in_place = launches(workload, branch, "view")
    return in_place > 1 and blocks_per_launch(workload, branch, "view") < _ENOUGH_WAVES * facts.sm_count


def _both_ways(
    workload: Workload,
    number: int,
    tunables: Tunables,
    policy: Policy,
    facts: HardwareFacts,
    conditions: Conditions,
    wishes: Wishes,
) -> str:
    """Return the first kernel that can run a branch forward and backward: the one knows what the other dropped.

    The backward's order comes first, which is twice the work.
    """
    directions: tuple[Direction, ...] = ("backward", "forward")
    wished = [name for name in (wishes.backward, wishes.forward) if name]
    candidates = wished or [name for way in directions for name in policy.kernels_for(way, tunables.dtype)]
    needs = [
        need
        for way in directions
        for need in kernel_needs(workload, tunables, number, facts, backward=way == "backward", conditions=conditions)
    ]
    return _first_that_can(tuple(dict.fromkeys(candidates)), tuple(needs), facts, workload, number, "backward")


def _first_that_can(
    candidates: tuple[str, ...],
    needs: tuple[KernelNeed, ...],
    facts: HardwareFacts,
    workload: Workload,
    branch: int,
    direction: Direction,
) -> str:
    rejected = {}
    for name in candidates:
        rejected[name] = kernel_rejections(name, needs, facts)
        if not rejected[name]:
            return name
    raise PlanError(f"no kernel can run {workload}, branch {branch} {direction}", rejected)


# Positions alive at a time in the workspace when nobody measured better. LongNet at 262144 positions, H16 D128 on an
# H100: without windows training peaks at 10.1 GiB (cudnn both ways), the forward alone at 3.0; windows of 65536 make
# the forward 9 % slower and a training step 2 to 6 %.
_WINDOW_TOKENS = {"train": 65536, "infer": 262144}


def _default_window(workload: Workload, facts: HardwareFacts) -> int | None:
    """Return the window of nested patterns longer than a few of their longest segments; None for the others."""
    if workload.pattern.dense or workload.decode:
        return None
    longest = max(branch.segment for branch in workload.pattern.branches)
    window = longest * max(1, _WINDOW_TOKENS[workload.mode] // longest)
    return window if nests(workload.pattern, window) and window < workload.seq_len else None


def _spread(workload: Workload, tunables: Tunables, facts: HardwareFacts, layout: str) -> Tunables:
    """Return the tunables with the schedule to use over several ranks where none was measured.

    Dense: Ulysses where NVLink makes its all-to-all cheap and the heads divide; else the ring, which sends to one
    neighbour. Of a dilated pattern few rows travel: all are sent at once, while what stays is computed.
    """
    exchanges = exchanges_heads(workload.pattern, workload.kv_heads, workload.world, facts)
    layout = layout or resolve_layout(
        "auto", workload.pattern, workload.causal, exchanged=exchanges, windowed=workload.window > 0
    )
    rows = "ring" if workload.pattern.dense else "all-gather"
    chosen = replace(tunables, schedule="ulysses" if exchanges else rows, layout=layout)
    travelling = travelling_branches(workload, chosen) if not exchanges else ()
    if not exchanges and not travelling:
        return replace(chosen, schedule="local")
    if exchanges and workload.train:
        chosen = replace(chosen, checkpoint="none")  # what was exchanged takes the place of q, k, v, out and lse
    return plainest(workload, chosen)
