"""Rows of a profile that answer a module, and the one that answers a call. Pure: everything is handed to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ringattn.profile.schema import PlanEntry, Profile
from ringattn.wording import plural
from ringattn.workload import Pattern, Workload, nearest_bucket

from .launches import occupancy, total_forward_gflop


def entries_for(profile: Profile, module: Workload) -> tuple[tuple[PlanEntry, ...], str]:
    """Return the rows of ``profile`` that answer a module, and a note on how they were chosen.

    ``module`` is any of its workloads. Pattern, causal, head_dim and world match exactly or not at all. Of several
    ranks, whose module takes one layout for all its rows, only the head counts nearest to its own are taken for a mode
    and dtype.
    """
    exactly = module.causal, module.head_dim, module.world
    rows = [
        entry
        for entry in profile.plans
        if _same_pattern(entry.workload.pattern, module.pattern)
        and (entry.workload.causal, entry.workload.head_dim, entry.workload.world) == exactly
    ]
    asked = f"{module.pattern} {'causal' if module.causal else 'full'} D{module.head_dim}"
    asked += f" world={module.world}" if module.world > 1 else ""
    if not rows:
        return (), f"no plan for {asked}"
    if module.world > 1:
        multiprocessors = profile.fingerprint.sm_count if profile.fingerprint is not None else 0

        def apart(entry: PlanEntry) -> tuple[float, int, int]:
            w = entry.workload
            own = replace(w, heads=module.heads, kv_heads=module.kv_heads)
            return distance(w, own, multiprocessors), w.heads, w.kv_heads

        nearest: dict[tuple[str, str], tuple[int, int]] = {}
        for entry in sorted(rows, key=apart):
            nearest.setdefault(_kind(entry), _heads(entry))
        rows = [entry for entry in rows if _heads(entry) == nearest[_kind(entry)]]
    used = sorted({_heads(entry) for entry in rows})
    note = f"{plural(len(rows), 'plan')} for {asked}"
    if used != [(module.heads, module.kv_heads)]:
        measured = ", ".join(f"{h}/{kv}" for h, kv in used)
        note += f", measured with {measured} heads where {module.heads}/{module.kv_heads} were asked for"
    return tuple(sorted(rows, key=_order)), note


def distance(one: Workload, other: Workload, multiprocessors: int) -> float:
    """Return how far apart two workloads of one length are, in powers of two.

    Batch and heads count by the work and the occupancy that they mean: 8 sequences of 2 heads are 1 of 16, and on a
    full device more of either is more work alone. Query heads to a key/value head count by their number.
    """
    work = math.log2(total_forward_gflop(one) / total_forward_gflop(other))
    filled = math.log2(occupancy(one, multiprocessors) / occupancy(other, multiprocessors))
    group = math.log2((one.heads / one.kv_heads) / (other.heads / other.kv_heads))
    return abs(work) + abs(filled) + abs(group)


def entry_for(entries: Sequence[PlanEntry], workload: Workload, multiprocessors: int) -> PlanEntry | None:
    """Return the row that serves a workload, or None outside the measured lengths.

    Documents are served by rows that were measured with documents, and other calls by the others.
    Of the rows with equal batch and heads that reach its length, those nearest in ``distance`` count, and of them the
    nearest length. Where none reaches it but all together do, the nearest length counts first.
    """
    alike = [
        entry
        for entry in entries
        if _kind(entry) == (workload.mode, workload.dtype) and entry.workload.packed == workload.packed
    ]
    series: dict[tuple[int, int, int], list[PlanEntry]] = {}
    for entry in alike:
        series.setdefault((entry.workload.batch, *_heads(entry)), []).append(entry)
    found = [entry for of_series in series.values() for entry in _at_nearest_length(of_series, workload.seq_len)]
    found = found or _at_nearest_length(alike, workload.seq_len)
    if len(found) < 2:
        return found[0] if found else None

    def apart(entry: PlanEntry) -> tuple[float, float, int, int, int]:
        w = entry.workload
        batches = abs(math.log2(w.batch / workload.batch))  # between rows of equal work, such as 8 x 2 and 1 x 16 heads
        return distance(w.at(workload.seq_len), workload, multiprocessors), batches, w.batch, *_heads(entry)

    return min(found, key=apart)


def _at_nearest_length(entries: Sequence[PlanEntry], seq_len: int) -> list[PlanEntry]:
    bucket = nearest_bucket(seq_len, [entry.workload.seq_len for entry in entries])
    return [entry for entry in entries if entry.workload.seq_len == bucket]


def _kind(entry: PlanEntry) -> tuple[str, str]:
    return entry.workload.mode, entry.workload.dtype


def _heads(entry: PlanEntry) -> tuple[int, int]:
    return entry.workload.heads, entry.workload.kv_heads


def _order(entry: PlanEntry) -> tuple[str, str, int, int, int, int]:
    w = entry.workload
    return w.mode, w.dtype, w.seq_len, w.batch, w.heads, w.kv_heads


def _same_pattern(one: Pattern, other: Pattern) -> bool:
    """Return whether two patterns select the same positions: the offset rule matters only where a rate is above 1."""
    dilated = any(branch.rate > 1 for branch in one.branches)
    return one.branches == other.branches and (one.head_offset == other.head_offset or not dilated)
