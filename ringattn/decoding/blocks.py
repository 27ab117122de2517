"""Cuts attention of some positions over others into blocks that every kernel runs. Plain numbers, no torch.

Queries are consecutive positions of a sequence, and so are the keys, wherever either begin. Of a segment a branch
selects the positions ``offset + i * rate``, so that query row i may see key row j where j <= i: whatever begins where,
that is a *full* block, a *causal-diagonal* one of as many rows as keys, or nothing. A sliding window has a third
kind at its far edge, where row i sees key j for j >= i: the diagonal one with both sides in reverse order.

Legend: S positions, H query heads, Hkv key/value heads; M rows of a block in a segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ringattn.geometry.pattern import head_offset_of, selected_rows
from ringattn.workload import Branch, Pattern


@dataclass(frozen=True, slots=True)
class Extent:
    """Positions of queries and keys: ``queries`` positions from ``query_begin`` on, ``keys`` from ``key_begin`` on.

    ``window``: a position sees no more than so many, itself among them; None is no limit, and a number is for causal
    dense attention. A query before position 0 sees nothing where it is causal or dilated.
    """

    query_begin: int
    queries: int
    key_begin: int
    keys: int
    window: int | None = None

    @property
    def query_end(self) -> int:
        return self.query_begin + self.queries

    @property
    def key_end(self) -> int:
        return self.key_begin + self.keys


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ``begin + s * length + offset + i * step`` of a tensor, for i < count and s < segments."""

    begin: int
    offset: int
    step: int
    count: int
    segments: int = 1
    length: int = 0

    @property
    def first(self) -> int:
        return self.begin + self.offset


@dataclass(frozen=True, slots=True)
class Heads:
    """Key/value heads ``first + j * step`` for j < count."""

    first: int
    step: int
    count: int


@dataclass(frozen=True, slots=True)
class Block:
    """One kernel call: rows of q against rows of k and v, for some heads of a branch; ``reverse`` both, in order."""

    branch: int
    heads: Heads
    q: Rows
    k: Rows
    causal: bool = False
    reverse: bool = False


class _Part(NamedTuple):
    """Block in rows of one segment: [q_begin, q_end) against [k_begin, k_end)."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    causal: bool = False
    reverse: bool = False


@lru_cache(maxsize=1024)
def blocks_of(extent: Extent, pattern: Pattern, causal: bool, kv_heads: int) -> tuple[Block, ...]:
    """Return the blocks in which every query meets every key that it may see, once per branch that shows it."""
    assert extent.window is None or (causal and pattern.dense)
    if extent.queries == 0 or extent.keys == 0:
        return ()
    everything = Heads(0, 1, kv_heads)
    if pattern.dense and not causal:
        return (Block(0, everything, Rows(0, 0, 1, extent.queries), Rows(0, 0, 1, extent.keys)),)
    found: list[Block] = []
    longest = max(extent.query_end, extent.key_end)
    for number, branch in enumerate(pattern.resolved(longest)):
        for heads, offset in _heads_by_offset(kv_heads, branch.rate, pattern.head_offset):
            for segment, segments in _segments(extent, branch.segment):
                found += _of_segment(extent, branch, causal, number, heads, offset, segment, segments)
    return tuple(found)


def _heads_by_offset(kv_heads: int, rate: int, rule: str) -> Iterator[tuple[Heads, int]]:
    """Yield heads that select the same positions, which lie evenly by either rule, and their offset."""
    by_offset: dict[int, list[int]] = {}
    for head in range(kv_heads):
        offset = head_offset_of(head, kv_heads, rate, "blocked" if rule == "blocked" else "interleaved")
        by_offset.setdefault(offset, []).append(head)
    for offset, heads in by_offset.items():
        step = heads[1] - heads[0] if len(heads) > 1 else 1
        yield Heads(heads[0], step, len(heads)), offset


def _segments(extent: Extent, length: int) -> Iterator[tuple[int, int]]:
    """Yield (segment, how many), the first of segments that queries and keys both fill, or one that they do not."""
    begin = max(extent.query_begin, 0)
    first = max(begin, extent.key_begin) // length
    last = (min(extent.query_end, extent.key_end) - 1) // length if extent.key_end > begin // length * length else -1
    whole_from = max(-(-begin // length), -(-extent.key_begin // length))
    whole_to = min(extent.query_end, extent.key_end) // length
    segment = first
    while segment <= last:
        count = whole_to - segment if whole_from <= segment < whole_to else 1
        yield segment, count
        segment += count


def _of_segment(
    extent: Extent, branch: Branch, causal: bool, number: int, heads: Heads, offset: int, segment: int, segments: int
) -> Iterator[Block]:
    begin = segment * branch.segment

    def row(position: int) -> int:
        """Return how many selected rows of the segment lie before a position."""
        return selected_rows(min(max(position - begin, 0), branch.segment), branch.rate, offset)

    q_begin, q_end = row(max(extent.query_begin, 0)), row(extent.query_end)
    k_begin, k_end = row(extent.key_begin), row(extent.key_end)

    def rows(origin: int, first: int, end: int) -> Rows:
        return Rows(begin - origin, offset + first * branch.rate, branch.rate, end - first, segments, branch.segment)

    for part in _parts(q_begin, q_end, k_begin, k_end, causal, extent.window):
        q = rows(extent.query_begin, part.q_begin, part.q_end)
        k = rows(extent.key_begin, part.k_begin, part.k_end)
        yield Block(number, heads, q, k, part.causal, part.reverse)


def _parts(q_begin: int, q_end: int, k_begin: int, k_end: int, causal: bool, window: int | None) -> Iterator[_Part]:
    if q_begin >= q_end or k_begin >= k_end:
        return
    if causal and q_end - q_begin == 1:  # all that one row sees is one block, with the row itself
        first = k_begin if window is None else max(k_begin, q_end - window)
        if first < min(k_end, q_end):
            yield _Part(q_begin, q_end, first, min(k_end, q_end))
    elif not causal:
        yield _Part(q_begin, q_end, k_begin, k_end)
    elif window is None:
        yield from _causal(q_begin, q_end, k_begin, k_end)
    else:
        for begin in range(q_begin, q_end, window):
            yield from _windowed(begin, min(begin + window, q_end), k_begin, k_end, window)


def _causal(q_begin: int, q_end: int, k_begin: int, k_end: int) -> Iterator[_Part]:
    """Yield where row i sees keys j <= i: keys before every row, keys among the rows, and keys that end before them."""
    if k_begin < min(q_begin, k_end):
        yield _Part(q_begin, q_end, k_begin, min(q_begin, k_end))
    begin, end = max(q_begin, k_begin), min(q_end, k_end)
    if begin < end:
        yield _Part(begin, end, begin, end, causal=True)
        if end < q_end:
            yield _Part(end, q_end, begin, end)


def _windowed(q_begin: int, q_end: int, k_begin: int, k_end: int, window: int) -> Iterator[_Part]:
    """Yield where row i sees keys i - window < j <= i, for no more rows than the window holds."""
    near = max(q_end - window, k_begin)  # from here on every row's window has begun
    yield from _causal(q_begin, q_end, near, k_end)
    far = max(q_begin - window + 1, k_begin)  # where the first row's begins, of the keys that are there
    end = min(q_end - window, k_end)
    if far >= end:
        return
    last = end - 1 + window  # the last row that sees any of these: row i sees j > i - window
    edge = far - 1 + window  # the last row that sees all of them from ``far`` on
    if edge > q_begin:
        yield _Part(q_begin, edge, far, end)
    # row edge + n sees keys from far + n on
    yield _Part(edge, last, far, end, causal=True, reverse=True)
