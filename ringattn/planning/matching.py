"""The rows of a profile that answer a module, nearest first. Pure: everything it reads is handed to it."""

from __future__ import annotations

import math

from ringattn.profile.schema import PlanEntry, Profile
from ringattn.wording import plural
from ringattn.workload import Pattern

from .table import ModuleShape


def entries_for(profile: Profile, shape: ModuleShape) -> tuple[tuple[PlanEntry, ...], str]:
    """Return the rows of ``profile`` that answer the module, and a note on how they were chosen.

    Pattern, causal, head_dim and world match exactly or not at all; of the head counts measured for a mode and dtype
    the nearest in log2 is taken. One row at most for each (mode, dtype, length): the smallest batch.
    """
    exactly = shape.causal, shape.head_dim, shape.world
    same = [
        entry
        for entry in profile.plans
        if _same_pattern(entry.workload.pattern, shape.pattern)
        and (entry.workload.causal, entry.workload.head_dim, entry.workload.world) == exactly
    ]
    asked = f"{shape.pattern} {'causal' if shape.causal else 'full'} D{shape.head_dim}"
    asked += f" world={shape.world}" if shape.world > 1 else ""
    if not same:
        return (), f"no plan for {asked}"

    def distance(entry: PlanEntry) -> tuple[float, int, int]:
        h, kv = entry.workload.heads, entry.workload.kv_heads
        apart = abs(math.log2(h / shape.heads)) + abs(math.log2((h / kv) / (shape.heads / shape.kv_heads)))
        return (apart, h, kv)

    nearest: dict[tuple[str, str], tuple[float, int, int]] = {}
    for entry in same:
        key = (entry.workload.mode, entry.workload.dtype)
        nearest[key] = min(nearest.get(key, distance(entry)), distance(entry))
    rows: dict[tuple[str, str, int], PlanEntry] = {}
    for entry in sorted(same, key=lambda entry: entry.workload.batch):
        w = entry.workload
        if distance(entry) == nearest[w.mode, w.dtype]:
            rows.setdefault((w.mode, w.dtype, w.seq_len), entry)
    used = sorted({(entry.workload.heads, entry.workload.kv_heads) for entry in rows.values()})
    note = f"{plural(len(rows), 'plan')} for {asked}"
    if used != [(shape.heads, shape.kv_heads)]:
        measured = ", ".join(f"{h}/{kv}" for h, kv in used)
        note += f", measured with {measured} heads where {shape.heads}/{shape.kv_heads} were asked for"
    return tuple(rows[key] for key in sorted(rows)), note


def _same_pattern(one: Pattern, other: Pattern) -> bool:
    """Return whether two patterns select the same positions: the offset rule matters only where a rate is above 1."""
    dilated = any(branch.rate > 1 for branch in one.branches)
    return one.branches == other.branches and (one.head_offset == other.head_offset or not dilated)
