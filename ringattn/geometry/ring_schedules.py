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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .layout import Shard, Span, length_of
from .pattern import Call


class Rectangle(NamedTuple):
    """Queries [q_begin, q_end) of a member's rows against keys [k_begin, k_end) of a hop's rows, unmasked."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int


class Transfer(NamedTuple):
    """Rows [begin, begin + rows) of member ``owner``, from or to member ``peer``; ``at`` is where they lie in the
    buffer of the hop that receives (keys) or computed (gradients) them."""

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


def hops_of(chunk: Chunk, causal: bool, transport: str, group: int) -> Iterator[Hop]:
    if len(chunk.members) == 1:
        return
    if transport == "all-gather":
        yield _gather_hop(chunk, causal, 1 + group)
        return
    direction = min((1, -1), key=lambda d: _travelling(chunk, causal, d))
    for step in range(1, len(chunk.members)):
        yield _ring_hop(chunk, causal, direction, step)


def _carried(chunk: Chunk, causal: bool, direction: int, owner: int, step: int) -> int:
    """Return the rows of ``owner`` that travel at hop ``step``: what the receiver or anyone behind it needs."""
    n = len(chunk.members)
    return max(needed(chunk, (owner + direction * t) % n, owner, causal) for t in range(step, n))


def _travelling(chunk: Chunk, causal: bool, direction: int) -> int:
    """Sum ``_carried`` over all owners and hops, in one pass: 128 ranks took 9 s by calling it, and take 0.1 s."""
    n, total = len(chunk.members), 0
    for owner in range(n):
        carried = 0
        for step in range(n - 1, 0, -1):
            carried = max(carried, needed(chunk, (owner + direction * step) % n, owner, causal))
            total += carried
    return total


def _ring_hop(chunk: Chunk, causal: bool, direction: int, step: int) -> Hop:
    n, me = len(chunk.members), chunk.me
    owner, previous = (me - direction * step) % n, (me - direction * (step - 1)) % n
    reader = (me + direction * step) % n
    rows = _carried(chunk, causal, direction, owner, step)
    passed = _carried(chunk, causal, direction, previous, step)
    used, asked = needed(chunk, me, owner, causal), needed(chunk, reader, me, causal)
    return Hop(
        step=step,
        rows=rows,
        receives=_some(Transfer(owner, (me - direction) % n, 0, rows)),
        sends=_some(Transfer(previous, (me + direction) % n, 0, passed)),
        work=rectangles(chunk.spans[me], chunk.spans[owner], causal),
        gives=_some(Transfer(owner, owner, 0, used)),
        takes=_some(Transfer(me, reader, 0, asked)),
    )


def _gather_hop(chunk: Chunk, causal: bool, step: int) -> Hop:
    others = [i for i in range(len(chunk.members)) if i != chunk.me]
    arriving = sorted(
        (span, i, begin) for i in others for begin, span in _prefix(chunk.spans[i], needed(chunk, chunk.me, i, causal))
    )
    receives, at = [], 0
    for span, i, begin in arriving:
        receives.append(Transfer(i, i, begin, span.length, at))
        at += span.length
    # Between two members rows travel in ascending order, as the one that receives them lists them.
    sends = [
        Transfer(chunk.me, i, begin, span.length)
        for i in others
        for begin, span in _prefix(chunk.spans[chunk.me], needed(chunk, i, chunk.me, causal))
    ]
    return Hop(
        step=step,
        rows=at,
        receives=tuple(receives),
        sends=tuple(sends),
        work=rectangles(chunk.spans[chunk.me], [span for span, _, _ in arriving], causal) if at else (),
        gives=tuple(receives),
        takes=tuple(sends),
    )


def _prefix(spans: Shard, rows: int) -> Iterator[tuple[int, Span]]:
    """Yield (first row, span) of the spans that the first ``rows`` rows are."""
    begin = 0
    for span in spans:
        if begin >= rows:
            return
        yield begin, span
        begin += span.length


def _some(transfer: Transfer) -> tuple[Transfer, ...]:
    return (transfer,) if transfer.rows else ()
