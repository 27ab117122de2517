"""Documents of a packed or padded batch: stretches of positions that attend to themselves alone. Plain numbers.

A document is a sequence of its own: segments of a pattern count from its start, and what lies outside of all documents
is padding. Equally long ones that lie evenly are a batch of sequences, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .pattern import StridedView


class Document(NamedTuple):
    """Positions begin <= p < end of batch element ``row``; never empty."""

    row: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


class DocumentGroup(NamedTuple):
    """``count`` documents of one length: each begins ``rows`` batch elements and ``positions`` positions further."""

    first: Document
    count: int
    rows: int
    positions: int

    def view(self, strides: Sequence[int], heads: int, head_dim: int) -> StridedView:
        """View the documents in a tensor with axes (B, S, heads, D) as (count, length, heads, D)."""
        stride_b, stride_s, stride_h, stride_d = strides
        step = self.rows * stride_b + self.positions * stride_s
        size = (self.count, self.first.length, heads, head_dim)
        return StridedView(size, (step, stride_s, stride_h, stride_d), self._offset(stride_b, stride_s))

    def lse_view(self, strides: Sequence[int], heads: int) -> StridedView:
        """View the documents in an LSE with axes (B, heads, S) as (count, heads, length)."""
        stride_b, stride_h, stride_s = strides
        step = self.rows * stride_b + self.positions * stride_s
        size = (self.count, heads, self.first.length)
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


def positions_in(documents: Sequence[Document]) -> int:
    """Return the positions of all documents together."""
    return sum(document.length for document in documents)
