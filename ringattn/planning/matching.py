"""Rows of a profile that answer a module, and the one that answers a call. Pure: everything is handed to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ringattn.profile.schema import PlanEntry, Profile
from ringattn.wording import plural
from ringattn.workload import Pattern, Workload, nearest_bucket, score_options

from .launches import occupancy, total_forward_gflop


def entries_for(profile: Profile, module: Workload) -> tuple[tuple[PlanEntry, ...], str]:
    """Return the rows of ``profile`` that answer a module, and a note on how they were chosen.

    ``module`` is any of its workloads, with its window. Pattern, causal, head dimensions, softcap and world match
    exactly or not at all, and so does the window, of which short sequences have none. Of several ranks, whose module
    takes one layout for all its rows, only the head counts nearest to its own are taken for a mode and dtype.
    """
    rows = [
        entry
        for entry in profile.plans
        if _same_pattern(entry.workload.pattern, module.pattern)
        and _exactly(entry.workload) == _exactly(module)
        and entry.workload.window in (0, module.window)
    ]
    asked = f"{module.pattern} {'causal' if module.causal else 'full'} D{module.head_dim}"
    asked += score_options(module) + (f" world={module.world}" if module.world > 1 else "")
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


def further_entries(entries: Sequence[PlanEntry], others: Sequence[PlanEntry]) -> tuple[PlanEntry, ...]:
    """Return those of ``others`` whose length none of ``entries`` with equal mode, dtype, batch and heads reaches."""

    def series(entry: PlanEntry) -> tuple[tuple[str, str], bool, int, int, tuple[int, int]]:
        w = entry.workload
        return _kind(entry), w.packed, w.window, w.batch, _heads(entry)

    def is_reached(entry: PlanEntry) -> bool:
        alike = [known for known in entries if series(known) == series(entry)]
        return _reaches(alike, entry.workload.seq_len)

    return tuple(entry for entry in others if not is_reached(entry))


def distance(one: Workload, other: Workload, multiprocessors: int) -> float:
    """Return how far apart two workloads are, in powers of two.

    Batch and heads count by the work and the occupancy that they mean: 8 sequences of 2 heads are 1 of 16, and on a
    full device more of either is more work alone. Query heads to a key/value head count by their number, and so does
    the length, beside the work that it means.
    """
    work = math.log2(total_forward_gflop(one) / total_forward_gflop(other))
    length = math.log2(one.seq_len / other.seq_len)
    filled = math.log2(occupancy(one, multiprocessors) / occupancy(other, multiprocessors))
    group = math.log2((one.heads / one.kv_heads) / (other.heads / other.kv_heads))
    return abs(work) + abs(length) + abs(filled) + abs(group)


def entry_for(entries: Sequence[PlanEntry], workload: Workload, multiprocessors: int) -> PlanEntry | None:
    """Return the row that serves a workload, or None outside the measured lengths.

    Documents are served by rows that were measured with documents, and other calls by the others.
    Of the rows with equal batch and heads the nearest length counts, where those have measured its surroundings. Else
    it is the row nearest in ``distance`` of those whose lengths reach it, by themselves or else all together: 4
    sequences of 2048 and 64 heads are as much work as one of 8192 and 16, and its plan for 1024, which waits for its
    host, took them 1.87 times as long on an H200.
    """
    alike = [
        entry
        for entry in entries
        if _kind(entry) == (workload.mode, workload.dtype)
        and (entry.workload.packed, entry.workload.window) == (workload.packed, workload.window)
        and entry.workload.dropout == workload.dropout
    ]
    series: dict[tuple[int, int, int], list[PlanEntry]] = {}
    for entry in alike:
        series.setdefault((entry.workload.batch, *_heads(entry)), []).append(entry)
    own = series.get((workload.batch, workload.heads, workload.kv_heads), [])
    if (nearest := _nearest_length(own, workload.seq_len)) is not None:
        return nearest
    found = [entry for of_series in series.values() if _reaches(of_series, workload.seq_len) for entry in of_series]
    if not found and _reaches(alike, workload.seq_len):
        found = alike

    def apart(entry: PlanEntry) -> tuple[float, int, float, int, int, int]:
        w = entry.workload
        batches = abs(math.log2(w.batch / workload.batch))  # between rows of equal work, such as 8 x 2 and 1 x 16 heads
        return distance(w, workload, multiprocessors), w.seq_len, batches, w.batch, *_heads(entry)

    return min(found, key=apart, default=None)


def _lengths(entries: Sequence[PlanEntry]) -> list[int]:
    return [entry.workload.seq_len for entry in entries]


def _reaches(entries: Sequence[PlanEntry], seq_len: int) -> bool:
    return nearest_bucket(seq_len, _lengths(entries)) is not None


def _nearest_length(entries: Sequence[PlanEntry], seq_len: int) -> PlanEntry | None:
    bucket = nearest_bucket(seq_len, _lengths(entries))
    return next((entry for entry in entries if entry.workload.seq_len == bucket), None)


def _exactly(w: Workload) -> tuple[object, ...]:
    return w.causal, w.head_dim, w.head_dim_v, w.softcap, w.world


def _kind(entry: PlanEntry) -> tuple[str, str]:
    return entry.workload.mode, entry.workload.dtype


def _heads(entry: PlanEntry) -> tuple[int, int]:
    return entry.workload.heads, entry.workload.kv_heads


def _order(entry: PlanEntry) -> tuple[str, str, int, int, int, int]:
    w = entry.workload
    return w.mode, w.dtype, w.seq_len, w.batch, w.heads, w.kv_heads


def _same_pattern(one: Pattern, other: Pattern) -> bool:
    """Return whether two patterns select the same positions: the offset rule matters only where a rate is above 1."""
    return one.branches == other.branches and (one.head_offset == other.head_offset or not one.dilated)
