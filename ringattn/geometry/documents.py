"""Documents of a packed or padded batch: stretches of positions that attend to themselves alone. Plain numbers.

A document is a sequence of its own: segments of a pattern count from its start, and what lies outside of all documents
is padding. Equally long ones that lie evenly are a batch of sequences, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .layout import Shard, Span, joined
from .pattern import StridedView

# Documents shorter than a rank's even share by this factor stay whole: ranks differ by 1/8 of it at most.
_WHOLE_PARTS = 8


class Document(NamedTuple):
    """Positions begin <= p < end of batch element ``row``; never empty."""

    row: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


class DocumentGroup(NamedTuple):
    """``documents`` of one length: each begins ``rows`` batch elements and ``positions`` positions further."""

    first: Document
    documents: int
    rows: int
    positions: int

    def view(self, strides: Sequence[int], heads: int, head_dim: int) -> StridedView:
        """View the documents in a tensor with axes (B, S, heads, D) as (documents, length, heads, D)."""
        stride_b, stride_s, stride_h, stride_d = strides
        step = self.rows * stride_b + self.positions * stride_s
        size = (self.documents, self.first.length, heads, head_dim)
        return StridedView(size, (step, stride_s, stride_h, stride_d), self._offset(stride_b, stride_s))

    def lse_view(self, strides: Sequence[int], heads: int) -> StridedView:
        """View the documents in an LSE with axes (B, heads, S) as (documents, heads, length)."""
        stride_b, stride_h, stride_s = strides
        step = self.rows * stride_b + self.positions * stride_s
        size = (self.documents, heads, self.first.length)
        return StridedView(size, (step, stride_h, stride_s), self._offset(stride_b, stride_s))

    def _offset(self, stride_b: int, stride_s: int) -> int:
        return self.first.row * stride_b + self.first.begin * stride_s


def grouped_documents(documents: Sequence[Document]) -> tuple[DocumentGroup, ...]:
    """Return the documents, in order, as the fewest groups that one pass finds."""
    groups: list[DocumentGroup] = []
    for document in documents:
        if groups and groups[-1].first.length == document.length:
            first, count, rows, positions = groups[-1]
            last = (first.row + (count - 1) * rows, first.begin + (count - 1) * positions)
            step = (document.row - last[0], document.begin - last[1])
            if count == 1 or step == (rows, positions):
                groups[-1] = DocumentGroup(first, count + 1, *step)
                continue
        groups.append(DocumentGroup(document, 1, 0, document.length))
    return tuple(groups)


def document_shards(documents: Sequence[Document], total: int, world: int) -> tuple[Shard, ...]:
    """Return what each rank holds of packed documents in zigzag layout: of each an equal share of rows and of work.

    A document is cut in ``2 * world`` pieces, of which rank i has i and ``2 * world - 1 - i``; some are empty where it
    has fewer positions. One so short that it unbalances little stays whole, on the rank with the fewest rows so far.
    Padding goes to the ranks that have less than others.
    """
    held: list[list[Span]] = [[] for _ in range(world)]
    rows = [0] * world

    def give(rank: int, begin: int, end: int) -> None:
        if begin < end:
            held[rank].append(Span(begin, end))
            rows[rank] += end - begin

    whole: list[Document] = []
    for document in documents:
        if document.length < total / (_WHOLE_PARTS * world):
            whole.append(document)
            continue
        edges = [document.begin + i * document.length // (2 * world) for i in range(2 * world + 1)]
        for piece in range(2 * world):
            give(min(piece, 2 * world - 1 - piece), edges[piece], edges[piece + 1])
    for document in sorted(whole, key=lambda document: -document.length):
        give(rows.index(min(rows)), document.begin, document.end)
    begin = max((document.end for document in documents), default=0)
    for rank in sorted(range(world), key=rows.__getitem__):
        end = min(total, begin + max(0, -(-total // world) - rows[rank]))
        give(rank, begin, end)
        begin = end
    assert begin == total, "padding fits below an even share"
    return tuple(joined(spans) for spans in held)


def positions_in(documents: Sequence[Document]) -> int:
    """Return the positions of all documents together."""
    return sum(document.length for document in documents)
