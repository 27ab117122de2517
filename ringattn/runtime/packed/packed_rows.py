"""Lays out the selected rows of every branch when all documents of a batch are packed: one call runs all of them.

A branch of rate 1 reads the packed rows where they are: its sequences are the segments of all documents. Of another,
each (segment, key/value head) is a sequence of its own, since heads select unequally many rows: the rows of its group
of query heads are gathered side by side.

Legend: T packed rows, H query heads, K key/value heads, G = H / K, R gathered rows, D head dimension.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.errors import RingAttentionError
from ringattn.geometry.documents import Document
from ringattn.geometry.pattern import head_offset_of
from ringattn.kernels.contract import Sequences
from ringattn.workload import Branch, Pattern

from .documents import Documents

# Batches whose rows are remembered, for all modules of the process: those of a step of training with its micro-batches.
_MOST_BATCHES = 8


class PackedBranch(NamedTuple):
    """Sequences of one branch; ``taken`` (R,) are the rows of (T * K) that it gathers, None where it gathers none."""

    sequences: Sequences
    taken: Tensor | None


class PackedRows(NamedTuple):
    """Stretches of a batch that packed rows come from, one after the other, and what each branch reads of them."""

    stretches: tuple[Document, ...]
    rows: int
    branches: tuple[PackedBranch, ...]


@functools.lru_cache(maxsize=_MOST_BATCHES)
def packed_rows(
    documents: Documents, batch: int, length: int, pattern: Pattern, kv_heads: int, device: torch.device
) -> PackedRows:
    """Return where the rows of a batch's documents lie; without any there is no branch.

    RingAttentionError while a CUDA graph is captured: it cannot hold the copies that this makes.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RingAttentionError(
            f"{documents!r} were not met before this CUDA graph is captured; call once with them before the capture"
        )
    placed = documents.placed(batch, length)
    bounds = tuple(itertools.accumulate((document.length for document in placed), initial=0))
    branches = pattern.resolved(max(length, 1)) if placed else ()
    found = tuple(_branch(branch, bounds, pattern, kv_heads, device) for branch in branches)
    return PackedRows(tuple(_stretches(placed)), bounds[-1], found)


def _stretches(documents: Sequence[Document]) -> list[Document]:
    """Return the documents with neighbours that touch made one."""
    found: list[Document] = []
    for document in documents:
        if found and (found[-1].row, found[-1].end) == (document.row, document.begin):
            found[-1] = found[-1]._replace(end=document.end)
        else:
            found.append(document)
    return found


def _branch(
    branch: Branch, bounds: Sequence[int], pattern: Pattern, kv_heads: int, device: torch.device
) -> PackedBranch:
    starts = [start for begin, end in itertools.pairwise(bounds) for start in range(begin, end, branch.segment)]
    edges = [*starts, bounds[-1]]  # a segment ends where the next begins, of this document or another
    if branch.rate == 1:
        return PackedBranch(_sequences(edges, device), None)
    lengths = [end - start for start, end in itertools.pairwise(edges)]
    offsets = [head_offset_of(head, kv_heads, branch.rate, pattern.head_offset) for head in range(kv_heads)]
    offset_K = torch.tensor(offsets, device="cpu")
    # (segments, K): rows that a head selects of a segment, and the first of them among (T * K)
    counts = ((torch.tensor(lengths, device="cpu")[:, None] - offset_K + branch.rate - 1) // branch.rate).clamp(min=0)
    firsts = (torch.tensor(starts, device="cpu")[:, None] + offset_K) * kv_heads + torch.arange(kv_heads, device="cpu")
    counts, firsts = counts.flatten(), firsts.flatten()
    counts, firsts = counts[counts > 0], firsts[counts > 0]
    begins = counts.cumsum(0) - counts
    total = int(counts.sum())
    of_sequence = (firsts - begins * branch.rate * kv_heads).to(device)
    taken = torch.arange(total, device=device) * (branch.rate * kv_heads)
    taken += torch.repeat_interleave(of_sequence, counts.to(device), output_size=total)
    return PackedBranch(_sequences([*begins.tolist(), total], device), taken)


def _sequences(bounds: Sequence[int], device: torch.device) -> Sequences:
    longest = max((end - begin for begin, end in itertools.pairwise(bounds)), default=0)
    return Sequences(tuple(bounds), longest, torch.tensor(bounds, dtype=torch.int32, device=device))
