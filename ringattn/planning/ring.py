"""Plans over several ranks: the reasons against one, and the blocks that its kernels meet. Pure."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from ringattn.geometry.layout import Shard, grouped, no_shard_reason, shards_of
from ringattn.geometry.ring_geometry import HeadRange, ring_geometry, stays
from ringattn.hardware.facts import HardwareFacts
from ringattn.wording import plural
from ringattn.workload import Pattern, Tunables, Workload


class Block(NamedTuple):
    """The largest call of one kind that a branch's kernel meets: ``blocks`` of ``rows`` rows (of queries or keys).

    ``windowed``: under the workload's sliding window.
    """

    branch: int
    rows: int
    blocks: int
    causal: bool
    heads: int
    kv_heads: int
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class Ranks:
    """Layout of the sequence of a workload over the ranks of a plan's ring."""

    parts: tuple[Shard, ...]
    degree: int

    @classmethod
    def of(cls, workload: Workload, tunables: Tunables) -> Ranks:
        parts = shards_of(tunables.layout, workload.total, workload.world)
        degree = tunables.exchange_degree(workload.world)
        return cls(grouped(parts, degree), degree)

    def travelling(self, workload: Workload) -> tuple[int, ...]:
        """Return the branches that cross from one member of the ring to another."""
        if workload.pattern.dense:
            return (0,) if len(self.parts) > 1 else ()
        branches = workload.pattern.branches
        return tuple(n for n, branch in enumerate(branches) if len(self.parts) > 1 and not stays(branch, self.parts))


def travelling_branches(workload: Workload, tunables: Tunables) -> tuple[int, ...]:
    """Return the branches whose rows go from rank to rank; none where the tunables cannot be laid out at all."""
    degree, layout = tunables.exchange_degree(workload.world), tunables.layout
    if workload.packed:
        return tuple(range(len(tunables.branches)))  # a document ends where it ends: no segment stays by its length
    if tunables.is_local or not layout or degree < 1 or workload.world % degree:
        return ()
    if no_shard_reason(layout, workload.total, workload.world):
        return ()
    return Ranks.of(workload, tunables).travelling(workload)


def ring_reasons(workload: Workload, tunables: Tunables, layout: str) -> list[str]:
    """Return why this schedule cannot run, or would change nothing, over ``workload.world`` ranks.

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
    if reason := window_reason(workload, tunables):
        return [reason]
    if workload.packed:
        return ["schedule local: documents cross ranks"] if tunables.is_local else []
    crossing = Ranks(shards_of(tunables.layout, workload.total, workload.world), 1).travelling(workload)
    if tunables.is_local and crossing:
        segments = ", ".join(str(b.segment) for n, b in enumerate(workload.pattern.branches) if n in crossing)
        reasons.append(f"schedule local: {f'segments of {segments}' if segments else 'dense attention'} crosses ranks")
    if not tunables.is_local and not crossing:
        reasons.append(f"schedule {tunables.schedule}: every segment stays on one rank; use local")
    return reasons


def window_reason(workload: Workload, tunables: Tunables) -> str:
    """Return why a sliding window cannot follow this layout, empty where it can."""
    degree = tunables.exchange_degree(workload.world)
    if workload.window and tunables.layout == "zigzag" and not tunables.is_local and degree < workload.world:
        return "layout zigzag: a sliding window is for rows without gaps, whose work is as even; use contiguous"
    return ""


def _degree_reasons(workload: Workload, tunables: Tunables) -> list[str]:
    degree = tunables.exchange_degree(workload.world)
    if tunables.schedule == "ulysses-ring" and (not 1 < degree < workload.world or workload.world % degree):
        return [f"ulysses {degree} is no divisor of {workload.world} ranks other than 1 and all"]
    return [
        f"{tunables.schedule} over {degree} ranks needs a multiple of {degree} {what}, not {count}"
        for what, count in (("heads", workload.heads), ("key/value heads", workload.kv_heads))
        if count % degree
    ]


def exchange_reasons(world: int, exchange: str, facts: HardwareFacts, apart: str) -> list[str]:
    """Return why ``world`` ranks cannot exchange heads in this way here; ``apart`` as in ``plan.Conditions``."""
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


def blocks_of(workload: Workload, tunables: Tunables) -> tuple[Block, ...]:
    """Return the blocks that kernels meet on the first, a middle and the last member of the ring."""
    ranks = Ranks.of(workload, tunables)
    exchanged_groups = max(1, tunables.head_groups) // tunables.transport_groups  # those that a rank computes in turn
    own = workload.kv_heads // ranks.degree // exchanged_groups
    return _blocks(
        workload.pattern,
        workload.causal,
        ranks.parts,
        workload.batch,
        workload.heads // workload.kv_heads,
        HeadRange(0, own, workload.kv_heads),
        tunables.transport,
        tunables.transport_groups,
        workload.window,
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
    window: int,
) -> tuple[Block, ...]:
    found: dict[Block, None] = {}
    for me in sorted({0, len(parts) // 2, len(parts) - 1}):
        for chunk in ring_geometry(pattern, causal, parts, me, batch, own, transport, head_groups, window).chunks:
            blocks, heads = batch * chunk.segments, chunk.kv_heads * group
            found[Block(chunk.branch, chunk.rows, blocks, causal, heads, chunk.kv_heads, window > 0)] = None
            for rectangle in (rectangle for hop in chunk.hops for rectangle in hop.work):
                for rows in (rectangle.q_end - rectangle.q_begin, rectangle.k_end - rectangle.k_begin):
                    found[Block(chunk.branch, rows, blocks, rectangle.edge, heads, chunk.kv_heads)] = None
    return tuple(found)


def exchanges_heads(pattern: Pattern, kv_heads: int, world: int, facts: HardwareFacts) -> bool:
    """Return whether Ulysses is what ranks do by rule: NVLink makes its all-to-all cheap, and the heads divide."""
    over_nvlink = facts.link.startswith("nv") and facts.device_count >= world
    return over_nvlink and pattern.dense and kv_heads % world == 0
