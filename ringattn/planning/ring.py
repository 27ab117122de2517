"""What a plan over several ranks may be: the reasons against one, the blocks its kernels meet, and the heuristic.

Pure; ``plan`` asks these three questions and nothing else of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ringattn.geometry.layout import Shard, grouped, no_shard_reason, resolve_layout, shards_of
from ringattn.geometry.ring_geometry import HeadRange, ring_geometry, stays
from ringattn.geometry.ring_schedules import ulysses_degree
from ringattn.hardware.facts import HardwareFacts
from ringattn.wording import plural
from ringattn.workload import COMPUTE_DTYPES, Pattern, Tunables, Workload

_EXCHANGES = ("ulysses", "ulysses-ring")


class Block(NamedTuple):
    """The largest call of one kind that a branch's kernel meets: ``blocks`` of ``rows`` rows (of queries or keys)."""

    branch: int
    rows: int
    blocks: int
    causal: bool
    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the sequence of a workload lies over the ranks of a plan's ring."""

    parts: tuple[Shard, ...]
    degree: int

    @classmethod
    def of(cls, workload: Workload, tunables: Tunables) -> Ranks:
        parts = shards_of(tunables.layout, workload.total, workload.world)
        degree = ulysses_degree(tunables, workload.world)
        return cls(grouped(parts, degree), degree)

    def travelling(self, workload: Workload) -> tuple[int, ...]:
        """The branches that cross from one member of the ring to another."""
        if workload.pattern.dense:
            return (0,) if len(self.parts) > 1 else ()
        branches = workload.pattern.branches
        return tuple(n for n, branch in enumerate(branches) if len(self.parts) > 1 and not stays(branch, self.parts))


def one_rank_reasons(tunables: Tunables) -> list[str]:
    """Why these tunables are not for a single rank."""
    fields = ("layout", "ulysses", "head_groups", "grad_wire", "exchange")
    given = [name for name in fields if getattr(tunables, name)]
    if tunables.schedule != "local":
        given.insert(0, f"schedule {tunables.schedule}")
    return [f"{name} is for a sequence over several ranks" for name in given]


def ring_reasons(workload: Workload, tunables: Tunables, layout: str) -> list[str]:
    """Why this schedule cannot run, or would change nothing, over ``workload.world`` ranks.

    ``layout`` is what the module's sequences lie in, empty where any may be chosen.
    """
    if not tunables.layout:
        return [f"has no layout, and world is {workload.world}; use contiguous or zigzag"]
    if layout and tunables.layout != layout:
        return [f"layout {tunables.layout}, but this module's sequences lie in {layout} layout"]
    if reason := no_shard_reason(tunables.layout, workload.total, workload.world):
        return [reason]
    reasons = _degree_reasons(workload, tunables)
    if reasons:
        return reasons
    ranks = Ranks.of(workload, tunables)
    travelling = ranks.travelling(workload)
    alone = replace(tunables, schedule="ring", ulysses=0)
    crossing = travelling if ranks.degree == 1 else Ranks.of(workload, alone).travelling(workload)
    if tunables.schedule == "local" and crossing:
        segments = ", ".join(str(b.segment) for n, b in enumerate(workload.pattern.branches) if n in crossing)
        reasons.append(f"schedule local: {f'segments of {segments}' if segments else 'dense attention'} crosses ranks")
    if tunables.schedule != "local" and not crossing:
        reasons.append(f"schedule {tunables.schedule}: every segment stays on one rank; use local")
    return [
        *reasons,
        *_group_reasons(workload, tunables),
        *_wire_reasons(workload, tunables),
        *([f"exchange {tunables.exchange}: {tunables.schedule} exchanges no heads"] if _is_idle(tunables) else []),
        *_keeping_reasons(workload, tunables, travelling),
    ]


def _degree_reasons(workload: Workload, tunables: Tunables) -> list[str]:
    if tunables.schedule == "ulysses-ring":
        if not 1 < tunables.ulysses < workload.world or workload.world % tunables.ulysses:
            return [f"ulysses {tunables.ulysses} is no divisor of {workload.world} ranks other than 1 and all"]
    elif tunables.ulysses:
        return [f"ulysses {tunables.ulysses} belongs to schedule ulysses-ring, this is {tunables.schedule}"]
    degree = ulysses_degree(tunables, workload.world)
    return [
        f"{tunables.schedule} over {degree} ranks needs a multiple of {degree} {what}, not {count}"
        for what, count in (("heads", workload.heads), ("key/value heads", workload.kv_heads))
        if count % degree
    ]


def _group_reasons(workload: Workload, tunables: Tunables) -> list[str]:
    groups = tunables.head_groups
    if groups == 0:
        return []
    if groups == 1:
        return ["head_groups 1 is what 0 means"]
    if tunables.schedule in _EXCHANGES:
        own = workload.kv_heads // ulysses_degree(tunables, workload.world)
        heads = plural(own, "key/value head")
        return [f"head_groups {groups} does not divide the {heads} of a rank"] if own % groups else []
    if tunables.schedule == "all-gather":
        few = groups > workload.kv_heads
        return [f"head_groups {groups} is more than the {plural(workload.kv_heads, 'key/value head')}"] if few else []
    return [f"head_groups {groups}: {tunables.schedule} does not cut heads in groups"]


def _wire_reasons(workload: Workload, tunables: Tunables) -> list[str]:
    if not tunables.grad_wire:
        return []
    if not workload.train:
        return ["grad_wire matters in training alone"]
    if tunables.schedule in ("local", "ulysses"):
        return [f"grad_wire: schedule {tunables.schedule} sends no gradients of keys that are to be added"]
    order = COMPUTE_DTYPES.index
    if tunables.dtype == workload.dtype or order(tunables.dtype) < order(workload.dtype):
        return [f"grad_wire compute: {tunables.dtype} is no wider than the inputs, {workload.dtype}"]
    return []


def _is_idle(tunables: Tunables) -> bool:
    return bool(tunables.exchange) and tunables.schedule not in _EXCHANGES


def exchange_reasons(world: int, exchange: str, facts: HardwareFacts, apart: str) -> list[str]:
    """Why ``world`` ranks cannot exchange heads in this way on this machine; ``apart`` as in ``plan.Conditions``."""
    if not exchange:
        return []
    reasons = []
    if facts.vendor != "nvidia":
        reasons.append("exchange symmetric copies between NVIDIA GPUs")
    elif not facts.link.startswith("nv"):
        reasons.append(f"exchange symmetric copies over NVLink, and the GPUs' link here is {facts.link or 'not known'}")
    elif facts.device_count < world:
        reasons.append(
            f"exchange symmetric is for ranks on one host that see all its GPUs: {world} ranks, and each sees "
            f"{plural(facts.device_count, 'GPU')}"
        )
    return [*reasons, *([f"exchange symmetric: {apart}"] if apart else [])]


def _keeping_reasons(workload: Workload, tunables: Tunables, travelling: Sequence[int]) -> list[str]:
    reasons = []
    if tunables.checkpoint == "none" and tunables.schedule not in ("local", *_EXCHANGES):
        reasons.append(f"checkpoint none: {tunables.schedule} keeps nothing that it receives; use selective")
    if tunables.schedule != "local":
        reasons += _unused(workload, tunables, staying=len(travelling) < len(tunables.branches))
    reasons += [
        f"branch {n}: rows that travel are always gathered; use view"
        for n in travelling
        if tunables.branches[n].gather == "copy"
    ]
    return reasons


def _unused(workload: Workload, tunables: Tunables, *, staying: bool) -> list[str]:
    """What belongs to branches that stay on single ranks, where there are none (a dense plan has none anyway)."""
    reasons = []
    if tunables.window_tokens is not None:
        reasons.append("window_tokens: only schedule local goes window by window")
    if staying or workload.pattern.dense:
        return reasons
    for name, is_used in (
        ("compile", tunables.compile),
        ("pool_threshold_mib", tunables.pool_threshold_mib is not None),
        ("pattern_cache off", not tunables.pattern_cache),
    ):
        if is_used:
            reasons.append(f"{name}: every branch travels, and this is for those that do not")
    return reasons


def blocks_of(workload: Workload, tunables: Tunables) -> tuple[Block, ...]:
    """The blocks that kernels meet on the first, a middle and the last member of the ring."""
    ranks = Ranks.of(workload, tunables)
    groups, gathers = max(1, tunables.head_groups), tunables.schedule == "all-gather"
    own = workload.kv_heads // ranks.degree // (1 if gathers else groups)
    return _blocks(
        workload.pattern,
        workload.causal,
        ranks.parts,
        workload.batch,
        workload.heads // workload.kv_heads,
        HeadRange(0, own, workload.kv_heads),
        "all-gather" if gathers else "ring",
        groups if gathers else 1,
    )


@functools.lru_cache(maxsize=1024)
def _blocks(
    pattern: Pattern,
    causal: bool,
    parts: tuple[Shard, ...],
    batch: int,
    group: int,
    own: HeadRange,
    transport: str,
    head_groups: int,
) -> tuple[Block, ...]:
    found: dict[Block, None] = {}
    for me in sorted({0, len(parts) // 2, len(parts) - 1}):
        for chunk in ring_geometry(pattern, causal, parts, me, batch, own, transport, head_groups).chunks:
            blocks, heads = batch * chunk.segments, chunk.kv_heads * group
            found[Block(chunk.branch, chunk.rows, blocks, causal, heads, chunk.kv_heads)] = None
            for rectangle in (rectangle for hop in chunk.hops for rectangle in hop.work):
                for rows in (rectangle.q_end - rectangle.q_begin, rectangle.k_end - rectangle.k_begin):
                    found[Block(chunk.branch, rows, blocks, False, heads, chunk.kv_heads)] = None
    return tuple(found)


def exchanges_heads(pattern: Pattern, kv_heads: int, world: int, facts: HardwareFacts) -> bool:
    """Whether Ulysses is what ranks do by rule: NVLink makes its all-to-all cheap, and the heads divide."""
    over_nvlink = facts.link.startswith("nv") and facts.device_count >= world
    return over_nvlink and pattern.dense and kv_heads % world == 0


def ring_heuristic(
    workload: Workload, tunables: Tunables, facts: HardwareFacts, layout: str, *, keep: bool
) -> Tunables:
    """The tunables with the schedule to use where none was measured; ``keep``: the checkpoint was asked for.

    Dense: Ulysses where NVLink makes its all-to-all cheap and the heads divide; else the ring, which sends to one
    neighbour. Of a dilated pattern few rows travel: all are sent at once, while what stays is computed.
    """
    exchanges = exchanges_heads(workload.pattern, workload.kv_heads, workload.world, facts)
    layout = layout or resolve_layout("auto", workload.pattern, workload.causal, exchanged=exchanges)
    rows = "ring" if workload.pattern.dense else "all-gather"
    chosen = replace(tunables, schedule="ulysses" if exchanges else rows, layout=layout)
    travelling = Ranks.of(workload, chosen).travelling(workload) if not exchanges else ()
    if not exchanges and not travelling:
        return replace(chosen, schedule="local")
    chosen = replace(
        chosen,
        window_tokens=None,
        branches=tuple(
            replace(branch, gather="view") if n in travelling else branch for n, branch in enumerate(chosen.branches)
        ),
    )
    if exchanges and workload.train and not keep:
        chosen = replace(chosen, checkpoint="none")  # what was exchanged takes the place of q, k, v, out and lse
    return chosen
