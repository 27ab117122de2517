"""Schedules of a ring: which rows of a chunk travel between ranks, when, and what is computed on them.

Plain numbers, the same on every rank. A chunk's *hops* say what a member receives and sends. The two transports differ
in nothing else:

- *ring*: hop t brings the rows of the member t places away, handed on by the neighbour; only rows that somebody
  further along still needs travel.
- *all-gather*: one hop brings everything; the heads are cut in groups, each a chunk with its hop one step later.

Gradients of received keys go straight back to the member that owns them, which adds them in float32: nothing is
rounded twice, whatever the number of ranks.

Legend: a member's rows are numbered in the order of its compact spans; J key/value heads of a chunk, G = H / Hkv.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .layout import Shard, Span, length_of
from .pattern import Call


class Rectangle(NamedTuple):
    """Queries [q_begin, q_end) of a member's rows against keys [k_begin, k_end) of a hop's rows, unmasked.

    ``edge``: the far edge of a sliding window instead, where query i of as many sees key j for j >= i.
    """

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    edge: bool = False


class Transfer(NamedTuple):
    """Rows [begin, begin + rows) of member ``owner``, from or to member ``peer``; ``at`` is where they lie in the
    buffer of the hop that receives (keys) or computed (gradients) them. Rows that are handed on are counted in the
    buffer of the hop that brought them."""

    owner: int
    peer: int
    begin: int
    rows: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class Hop:
    """One exchange of a chunk and the work on what it brings, seen from one member.

    ``receives`` and ``sends`` are keys and values, ``gives`` and ``takes`` their gradients in the backward.
    """

    step: int
    rows: int
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    work: tuple[Rectangle, ...]
    gives: tuple[Transfer, ...]
    takes: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Equally selected heads of one segment (or of ``segments`` whole ones, all on this rank).

    ``members`` are the ranks of the ring that hold rows of it, ``me`` this rank's place among them, ``spans`` what
    each holds in compact coordinates, ``calls`` where this rank's rows lie in its own tensors.
    """

    branch: int
    members: tuple[int, ...]
    me: int
    spans: tuple[Shard, ...]
    calls: tuple[Call, ...]
    hops: tuple[Hop, ...] = ()

    @property
    def kv_heads(self) -> int:
        return self.calls[0].kv_heads

    @property
    def rows(self) -> int:
        return sum(call.rows for call in self.calls)

    @property
    def segments(self) -> int:
        return self.calls[0].segments


def needed(chunk: Chunk, reader: int, owner: int, causal: bool) -> int:
    """Return how many of the first rows of member ``owner`` the queries of member ``reader`` see."""
    if not causal:
        return length_of(chunk.spans[owner])
    latest = chunk.spans[reader][-1].begin
    return sum(span.length for span in chunk.spans[owner] if span.end <= latest)


def seen(chunk: Chunk, reader: int, owner: int, causal: bool, window: int) -> tuple[int, int]:
    """Return [begin, end) of the rows of member ``owner`` that the queries of member ``reader`` see.

    With a ``window`` (0 is none) every member holds one span.
    """
    rows = needed(chunk, reader, owner, causal)
    if not window or not rows:
        return 0, rows
    first = chunk.spans[reader][0].begin - window + 1
    begin = max(0, first - chunk.spans[owner][0].begin)
    return (begin, rows) if begin < rows else (0, 0)


def windowed(queries: Span, keys: Span, window: int) -> tuple[Rectangle, ...]:
    """Return the blocks of these queries against keys before them, of which position t sees those beyond t - window."""
    first = max(keys.begin, queries.begin - window + 1)
    end = min(queries.end, keys.end - 1 + window)  # of the queries that see any
    edge = first + window - 1  # before it they see every key from ``first`` on, and it sees one less at every step
    rows = max(0, end - edge)

    def block(q_begin: int, q_end: int, k_begin: int, k_end: int, edge: bool = False) -> Rectangle:
        q, k = queries.begin, keys.begin
        return Rectangle(q_begin - q, q_end - q, k_begin - k, k_end - k, edge)

    found = (
        block(queries.begin, min(edge, end), first, keys.end),
        block(edge, edge + rows, first, first + rows, edge=True),
        block(edge, edge + rows, first + rows, keys.end),
    )
    return tuple(each for each in found if each.q_begin < each.q_end and each.k_begin < each.k_end)


def rectangles(queries: Shard, keys: Sequence[Span], causal: bool) -> tuple[Rectangle, ...]:
    """Return the full blocks of these queries against keys of other members, ascending; every key is in at most one."""
    rows = length_of(queries)
    if not causal:
        return (Rectangle(0, rows, 0, length_of(tuple(keys))),)
    found: list[Rectangle] = []
    row = done = 0
    for span in queries:
        visible = sum(key.length for key in keys if key.end <= span.begin)
        if visible > done:
            found.append(Rectangle(row, rows, done, visible))
            done = visible
        row += span.length
    return tuple(found)


def hops_of(chunk: Chunk, causal: bool, transport: str, group: int, window: int = 0) -> Iterator[Hop]:
    if len(chunk.members) == 1:
        return
    assert not window or all(len(spans) == 1 for spans in chunk.spans), "a window is for rows without gaps"
    if transport == "all-gather":
        yield _gather_hop(chunk, causal, window, 1 + group)
        return
    direction = min((1, -1), key=lambda d: _travelling(chunk, causal, window, d))
    for step in range(1, len(chunk.members)):
        hop = _ring_hop(chunk, causal, window, direction, step)
        if not window or hop.sends or hop.receives or hop.gives or hop.takes:  # beyond its reach nobody sees anything
            yield hop


def _joint(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Return the rows from the first to the last of two stretches, either of which may be empty."""
    if one[0] == one[1] or other[0] == other[1]:
        return other if one[0] == one[1] else one
    return min(one[0], other[0]), max(one[1], other[1])


def _carried(chunk: Chunk, causal: bool, window: int, direction: int, owner: int, step: int) -> tuple[int, int]:
    """Return the rows of ``owner`` that travel at hop ``step``: what the receiver or anyone behind it needs."""
    n = len(chunk.members)
    readers = ((owner + direction * t) % n for t in range(step, n))
    return functools.reduce(_joint, (seen(chunk, reader, owner, causal, window) for reader in readers))


def _travelling(chunk: Chunk, causal: bool, window: int, direction: int) -> int:
    """Sum ``_carried`` over all owners and hops, in one pass: 128 ranks took 9 s by calling it, and take 0.1 s."""
    n, total = len(chunk.members), 0
    for owner in range(n):
        carried = 0, 0
        for step in range(n - 1, 0, -1):
            carried = _joint(carried, seen(chunk, (owner + direction * step) % n, owner, causal, window))
            total += carried[1] - carried[0]
    return total


def _ring_hop(chunk: Chunk, causal: bool, window: int, direction: int, step: int) -> Hop:
    n, me = len(chunk.members), chunk.me
    owner, previous = (me - direction * step) % n, (me - direction * (step - 1)) % n
    reader = (me + direction * step) % n
    begin, end = _carried(chunk, causal, window, direction, owner, step)
    passed = _carried(chunk, causal, window, direction, previous, step)
    held = _carried(chunk, causal, window, direction, previous, step - 1)[0] if step > 1 else 0
    used, asked = seen(chunk, me, owner, causal, window), seen(chunk, reader, me, causal, window)
    if window:
        origin = chunk.spans[owner][0].begin
        work = windowed(chunk.spans[me][0], Span(origin + begin, origin + end), window) if used[0] < used[1] else ()
    else:
        work = rectangles(chunk.spans[me], chunk.spans[owner], causal)
    return Hop(
        step=step,
        rows=end - begin,
        receives=_some(Transfer(owner, (me - direction) % n, begin, end - begin)),
        sends=_some(Transfer(previous, (me + direction) % n, passed[0] - held, passed[1] - passed[0])),
        work=work,
        gives=_some(Transfer(owner, owner, used[0], used[1] - used[0], used[0] - begin)),
        takes=_some(Transfer(me, reader, asked[0], asked[1] - asked[0])),
    )


def _gather_hop(chunk: Chunk, causal: bool, window: int, step: int) -> Hop:
    others = [i for i in range(len(chunk.members)) if i != chunk.me]
    arriving = sorted(
        (span, i, begin)
        for i in others
        for begin, span in _within(chunk.spans[i], *seen(chunk, chunk.me, i, causal, window))
    )
    receives, at = [], 0
    for span, i, begin in arriving:
        receives.append(Transfer(i, i, begin, span.length, at))
        at += span.length
    # Between two members rows travel in ascending order, as the one that receives them lists them.
    sends = [
        Transfer(chunk.me, i, begin, span.length)
        for i in others
        for begin, span in _within(chunk.spans[chunk.me], *seen(chunk, i, chunk.me, causal, window))
    ]
    spans = [span for span, _, _ in arriving]
    if window:  # what it sees before its own rows has no gaps
        work = windowed(chunk.spans[chunk.me][0], Span(spans[0].begin, spans[-1].end), window) if at else ()
    else:
        work = rectangles(chunk.spans[chunk.me], spans, causal) if at else ()
    return Hop(
        step=step,
        rows=at,
        receives=tuple(receives),
        sends=tuple(sends),
        work=work,
        gives=tuple(receives),
        takes=tuple(sends),
    )


def _within(spans: Shard, begin: int, end: int) -> Iterator[tuple[int, Span]]:
    """Yield (first row, span) of the parts of spans that rows [begin, end) are."""
    row = 0
    for span in spans:
        first, last = max(begin, row), min(end, row + span.length)
        if first < last:
            yield first, Span(span.begin + first - row, span.begin + last - row)
        row += span.length


def _some(transfer: Transfer) -> tuple[Transfer, ...]:
    return (transfer,) if transfer.rows else ()
