"""The chunks of a rank: how a pattern over several ranks falls into dense attention over some of them.

A branch of a pattern that does not stay on single ranks falls into *chunks*: one segment, and the key/value heads that
select equally many of its rows on every rank. Dense attention is one chunk. In *compact* coordinates (the number of
selected rows of the segment before a position) a chunk is dense attention over ranks that hold ascending spans, so one
description serves every pattern and layout. Offsets being equal inside a chunk, what one rank's queries may see of
another's keys is a prefix of them: rectangles of full blocks, never a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ringattn.workload import Branch, Pattern

from .documents import Document
from .layout import Shard, Span, rows_within
from .pattern import Call, HeadRun, head_offset_of, selected_rows
from .ring_schedules import Chunk, hops_of


class HeadRange(NamedTuple):
    """The key/value heads [first, first + size) of ``total``: those that one rank computes on."""

    first: int
    size: int
    total: int


@dataclass(frozen=True, slots=True)
class RingGeometry:
    """All chunks of one rank for one shape. ``local`` are the branches that need none: they stay on single ranks."""

    shard: Shard
    local: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def steps(self) -> int:
        """Number of times that rows travel."""
        return max((hop.step for chunk in self.chunks for hop in chunk.hops), default=0)


def stays(branch: Branch, shards: Sequence[Shard]) -> bool:
    """Return whether every segment lies on one rank, and at multiples of its length among that rank's rows."""
    total = max(span.end for shard in shards for span in shard)
    for shard in shards:
        row = 0
        for span in shard:
            cut = span.end % branch.segment and span.end != total
            if span.begin % branch.segment or row % branch.segment or cut:
                return False
            row += span.length
    return True


@functools.lru_cache(maxsize=256)
def ring_geometry(
    pattern: Pattern,
    causal: bool,
    shards: tuple[Shard, ...],
    me: int,
    batch: int,
    heads: HeadRange,
    transport: str,
    head_groups: int,
    window: int = 0,
) -> RingGeometry:
    """Return the chunks of ring member ``me`` where ``shards`` says what each member holds.

    ``transport`` is "ring" or "all-gather"; ``head_groups`` cuts the chunks of the latter. ``window`` is that of causal
    dense attention over members that hold one span each; 0 is none.
    """
    total = max(span.end for shard in shards for span in shard)
    branches = pattern.resolved(total)
    local = (
        ()
        if pattern.dense
        else tuple(
            n
            for n, branch in enumerate(branches)
            if stays(branch, shards) and _offsets_as_alone(branch, pattern, heads)
        )
    )
    chunks = [
        replace(chunk, hops=tuple(hops_of(chunk, causal, transport, group, window)))
        for number, branch in enumerate(branches)
        if number not in local
        for group, chunk in _chunks_of(number, branch, pattern, shards, me, batch, heads, total, head_groups)
    ]
    return RingGeometry(shards[me], local, tuple(chunks))


@functools.lru_cache(maxsize=64)
def documents_geometry(
    pattern: Pattern,
    causal: bool,
    documents: tuple[Document, ...],
    shards: tuple[Shard, ...],
    me: int,
    heads: HeadRange,
    transport: str,
    head_groups: int,
    window: int = 0,
) -> RingGeometry:
    """Return the chunks of ring member ``me`` of every document, each a sequence of its own.

    ``shards`` says what each member holds of the positions of a batch element, the same of all of them. A document may
    lie on any of the members. Every branch falls into chunks, those that stay on a rank too.
    """
    chunks: list[Chunk] = []
    for document in documents:
        whole = Span(document.begin, document.end)
        inside = [_inside(shard, whole) for shard in shards]
        if not inside[me]:
            continue
        parts = tuple(tuple(Span(b - whole.begin, e - whole.begin) for b, e in spans) for spans in inside)
        row = rows_within(inside[me][0], shards[me])
        for number, branch in enumerate(pattern.resolved(document.length)):
            found = _chunks_of(number, branch, pattern, parts, me, 1, heads, document.length, head_groups)
            for group, chunk in found:
                calls = tuple(replace(c, batch_start=document.row, start=c.start + row) for c in chunk.calls)
                chunks.append(replace(chunk, calls=calls, hops=tuple(hops_of(chunk, causal, transport, group, window))))
    return RingGeometry(shards[me], (), tuple(chunks))


def _offsets(branch: Branch, pattern: Pattern, heads: HeadRange) -> list[int]:
    return [head_offset_of(heads.first + j, heads.total, branch.rate, pattern.head_offset) for j in range(heads.size)]


def _offsets_as_alone(branch: Branch, pattern: Pattern, heads: HeadRange) -> bool:
    """Return whether these heads select what they would if there were no others."""
    return _offsets(branch, pattern, heads) == _offsets(branch, pattern, HeadRange(0, heads.size, heads.size))


# --- chunks -------------------------------------------------------------------------------------------------------


def _chunks_of(
    number: int,
    branch: Branch,
    pattern: Pattern,
    shards: tuple[Shard, ...],
    me: int,
    batch: int,
    heads: HeadRange,
    total: int,
    head_groups: int,
) -> Iterator[tuple[int, Chunk]]:
    """Yield (head group, chunk), in an order that all members of a chunk share."""
    offsets = _offsets(branch, pattern, heads)
    for first, segments in _segments_of(branch, shards[me], total):
        segment = Span(first * branch.segment, min((first + segments) * branch.segment, total))
        whole = segments > 1 or any(span.begin <= segment.begin and segment.end <= span.end for span in shards[me])
        held = (
            {me: (segment,)}
            if whole
            else {i: inside for i, shard in enumerate(shards) if (inside := _inside(shard, segment))}
        )
        for compact, members in _alike(branch, held, segment, segments, offsets).items():
            spans = {i: found for i, each in compact if (found := tuple(span for span in each if span.length))}
            if me not in spans:
                continue
            ranks = tuple(spans)
            for group, some in enumerate(_cut(_ordered(members, offsets, branch.rate), head_groups)):
                calls = _calls(held[me], shards[me], segment, segments, branch, batch, [(h, offsets[h]) for h in some])
                yield group, Chunk(number, ranks, ranks.index(me), tuple(spans.values()), calls)


_Compact = tuple[tuple[int, tuple[Span, ...]], ...]


def _alike(
    branch: Branch, held: Mapping[int, Shard], segment: Span, segments: int, offsets: Sequence[int]
) -> dict[_Compact, list[int]]:
    """Return the heads by what each rank holds of them in compact coordinates, span by span, empty ones too."""
    alike: dict[_Compact, list[int]] = {}
    for head, offset in enumerate(offsets):
        if segments > 1:
            rows = selected_rows(branch.segment, branch.rate, offset)
            key: _Compact = tuple((i, (Span(0, rows),)) for i in held)
        else:
            key = tuple((i, _compact(inside, segment.begin, offset, branch.rate)) for i, inside in held.items())
        alike.setdefault(key, []).append(head)
    return alike


def _segments_of(branch: Branch, shard: Shard, total: int) -> Iterator[tuple[int, int]]:
    """Yield (first segment, how many): segments cut by the shard one by one, full ones inside a span together."""
    seen: set[int] = set()
    for span in shard:
        first, last = span.begin // branch.segment, (span.end - 1) // branch.segment
        full_first, full_end = -(-span.begin // branch.segment), span.end // branch.segment
        if full_end > full_first:
            yield full_first, full_end - full_first
        for number in sorted({first, last} - set(range(full_first, full_end)) - seen):
            seen.add(number)
            yield number, 1


def _inside(shard: Shard, segment: Span) -> Shard:
    cut = (Span(max(span.begin, segment.begin), min(span.end, segment.end)) for span in shard)
    return tuple(span for span in cut if span.length > 0)


def _compact(spans: Shard, origin: int, offset: int, rate: int) -> tuple[Span, ...]:
    return tuple(Span(*(selected_rows(position - origin, rate, offset) for position in span)) for span in spans)


def _ordered(heads: Sequence[int], offsets: Sequence[int], rate: int) -> list[int]:
    """Return the heads in the order that makes the fewest affine runs of them; the same on every rank."""
    if -(-len(heads) // rate) <= min(rate, len(heads)):
        return list(heads)
    return sorted(heads, key=lambda head: (offsets[head], head))


def _cut(heads: Sequence[int], groups: int) -> Iterator[Sequence[int]]:
    groups = min(groups, len(heads))
    for g in range(groups):
        yield heads[g * len(heads) // groups : (g + 1) * len(heads) // groups]


def _calls(
    inside: Shard,
    shard: Shard,
    segment: Span,
    segments: int,
    branch: Branch,
    batch: int,
    heads: Sequence[tuple[int, int]],
) -> tuple[Call, ...]:
    """Return where the selected rows of a segment lie among the rows of the rank that holds ``shard``."""
    calls: list[Call] = []
    for span in inside:
        length = branch.segment if segments > 1 else span.length
        firsts = [(head, (offset + segment.begin - span.begin) % branch.rate) for head, offset in heads]
        rows = selected_rows(length, branch.rate, firsts[0][1])
        if rows == 0:
            continue
        start = rows_within(span, shard)
        last = calls[-1] if calls else None
        if last and branch.rate == 1 and last.start + last.rows == start:
            both = last.length + length
            calls[-1] = Call(0, batch, last.start, 1, both, 1, both, last.runs, False)
        else:
            runs = affine_runs(firsts)
            calls.append(Call(0, batch, start, segments, length, branch.rate, rows, runs, branch.rate > 1))
    return tuple(calls)


def affine_runs(heads: Iterable[tuple[int, int]]) -> tuple[HeadRun, ...]:
    """Return (head, offset) pairs in order as the few runs of evenly growing heads and offsets that one pass finds."""
    runs: list[HeadRun] = []
    for head, offset in heads:
        last = runs[-1] if runs else None
        if last is not None:
            step = head - (last.first + (last.count - 1) * last.step)
            offset_step = offset - (last.offset + (last.count - 1) * last.offset_step)
            fits = last.count == 1 or (step, offset_step) == (last.step, last.offset_step)
            if fits and step > 0 and offset_step >= 0:
                runs[-1] = HeadRun(last.first, step, last.count + 1, last.offset, offset_step)
                continue
        runs.append(HeadRun(head, 1, 1, offset, 0))
    return tuple(runs)
