"""Describes which keys the queries of a batch attend to, by a number for each position in place of a mask of S x S.

Legend: B batch, Sq queries, Sk keys, L positions that exist: a cache may have room for more keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ringattn.decoding.spans import Spans
from ringattn.errors import InputError
from ringattn.runtime.packed.documents import Documents

PADDING = -1
ABSENT = 0  # no position at all: the room that is left in a cache


class Job(NamedTuple):
    """Query and key positions (n,), ascending, of one batch element; under a causal mask the last of both is one."""

    row: int
    queries: Tensor
    keys: Tensor


class Jobs:
    """Jobs with as many queries and keys as each other, one kernel call.

    ``even`` are batch elements, query positions and key positions where all of these lie evenly, as views then have
    them; None where rows are gathered. ``gapless`` says whether the keys of every job are consecutive.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.rows = torch.tensor([job.row for job in jobs], device="cpu")
        self.queries, self.keys = torch.stack([job.queries for job in jobs]), torch.stack([job.keys for job in jobs])
        alike = bool((self.queries == self.queries[0]).all() and (self.keys == self.keys[0]).all())
        self.gapless = bool((self.keys.diff(dim=1) == 1).all())
        spans = [_span(x) for x in (self.rows, self.queries[0], self.keys[0])]
        self.even = tuple(spans) if alike and all(span is not None for span in spans) else None
        self._at: dict[tuple[torch.device, int, int], tuple[Tensor, Tensor]] = {}

    def at(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return query and key positions (jobs, n) on the device, counted through all rows of so many of either."""
        found = self._at.get((device, queries, keys))
        if found is None:
            rows = self.rows[:, None]
            found = (rows * queries + self.queries).to(device), (rows * keys + self.keys).to(device)
            self._at[device, queries, keys] = found
        return found


def _span(numbers: Tensor) -> slice | None:
    """Return consecutive numbers as a slice; None for others."""
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if bool((numbers.diff() == 1).all()) else None


class Keys:
    """Positions of a batch that may be attended: codes (B, L), int, on the host.

    A code is the number, from 1 on and ascending, of the document that a position belongs to, or ``PADDING``. The
    queries are the last of the positions, and each attends to its own document; where ``causal`` to what is up to
    itself there, to the last ``window`` of that alone if it is given. Without causality and with one document in each
    row the queries may be of another sequence, and every one of them, there is no padding among them, attends to it.
    """

    def __init__(self, codes_BL: Tensor, causal: bool, window: int | None = None) -> None:
        self.codes, self.causal, self.window = codes_BL, causal, window
        self.length = codes_BL.shape[1]
        self.plain = bool((codes_BL == 1).all())
        self.single = bool((codes_BL <= 1).all())  # one document in each row
        self._kept: dict[torch.device, Tensor] = {}
        self._jobs: dict[tuple[int, int], list[Jobs]] = {}

    @cached_property
    def lengths(self) -> Documents | None:
        """Positions of each row that are in its one document, where these come first; None where they do not."""
        kept = self.codes == 1
        lengths = kept.sum(1)
        first = torch.arange(self.length, device="cpu") < lengths[:, None]
        return Documents(lengths=lengths) if self.single and bool((first == kept).all()) else None

    @cached_property
    def spans(self) -> Spans | None:
        """Return where the keys of each row are if a query at the end sees all of these: one document, without gaps."""
        kept = self.codes == 1
        counts, first = kept.sum(1), kept.int().argmax(1)
        at, end = torch.arange(self.length, device="cpu"), (first + counts)[:, None]
        even = bool(((at >= first[:, None]) & (at < end) == kept).all()) and bool((counts > 0).all())
        if not (even and self.single) or (self.window is not None and self.window < self.length):
            return None
        if self.causal and not bool((end == self.length).all()):  # the query is padding
            return None
        return Spans(first.tolist(), end.flatten().tolist(), self.length)

    @cached_property
    def documents(self) -> Documents:
        """Return where documents begin and end among the positions that are in any, all rows one after the other."""
        rows, columns = (self.codes > 0).nonzero(as_tuple=True)
        found = torch.stack((rows, self.codes[rows, columns].long()))
        begins = (found[:, 1:] != found[:, :-1]).any(0).nonzero().flatten() + 1
        return Documents([0, *begins.tolist(), len(rows)])

    def kept_on(self, device: torch.device) -> Tensor:
        """Return the positions (T,) that are in any document, counted through all rows."""
        kept = self._kept.get(device)
        if kept is None:
            kept = self._kept[device] = (self.codes > 0).flatten().nonzero().flatten().to(device)
        return kept

    def calls(self, batch: int, queries: int) -> list[Jobs]:
        """Return the jobs that have queries and keys, those of one size together; found once for all layers."""
        calls = self._jobs.get((batch, queries))
        if calls is None:
            groups = defaultdict(list)
            for job in self.jobs(batch, queries):
                if len(job.queries) and len(job.keys):
                    groups[len(job.queries), len(job.keys)].append(job)
            calls = self._jobs[batch, queries] = [Jobs(jobs) for jobs in groups.values()]
        return calls

    def jobs(self, batch: int, queries: int) -> Iterator[Job]:
        """Yield what ``queries`` rows of each batch element attend to, document by document."""
        for row, codes in enumerate(self.codes.expand(batch, -1)):
            if not self.causal and self.single:
                yield Job(row, torch.arange(queries, device="cpu"), (codes > 0).nonzero().flatten())
                continue
            first = self.length - queries
            for document in codes[first:].unique().tolist():
                if document > 0:
                    keys = (codes == document).nonzero().flatten()
                    yield Job(row, keys[keys >= first] - first, keys)


T = TypeVar("T")
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor: its version, and what was read, by question


def remembered(read: Callable[..., T], x: Tensor, *arguments: Hashable) -> T:
    """Return ``read(x, *arguments)``, done once until x is freed or written to: all layers of a model get one mask.

    Reading a tensor waits for its device.
    """
    if x.is_inference():  # which counts no versions
        return read(x, *arguments)
    known = _read.get(x)  # type: ignore[no-untyped-call]
    if known is None or known[0] != x._version:
        known = _read[x] = (x._version, {})
    if (read, arguments) not in known[1]:
        known[1][read, arguments] = read(x, *arguments)
    found: T = known[1][read, arguments]
    return found


def keys_of_padding(kept_BL: Tensor, causal: bool) -> Keys:
    """Return the keys of a mask (B, L) that is False or 0 at padding."""
    return Keys(kept_BL.bool().int().mul(2).sub(1).cpu(), causal)


def keys_of_bounds(cu_seqlens: Tensor, length: int, causal: bool, window: int | None = None) -> Keys:
    """Return the keys of documents packed into one row of this length; what lies beyond the last is padding."""
    documents = Documents(cu_seqlens)
    placed = documents.placed(1, length)
    codes = torch.full((1, length), PADDING, dtype=torch.int, device="cpu")
    for number, document in enumerate(placed, 1):
        codes[0, document.begin : document.end] = number
    return Keys(codes, causal, window)


def keys_of_positions(
    position_ids: Tensor, keys: Keys | None, causal: bool = True, window: int | None = None
) -> Keys | None:
    """Return ``keys``, or all, with a new document wherever the positions (B or 1, S) of a row start again at 0.

    Other jumps of positions begin no document: tokens may have been left out, or lie in an image. None, as ``keys``,
    stands for whole rows, whose ``causal`` and ``window`` follow.
    """
    begins = torch.nn.functional.pad((position_ids[:, 1:] == 0).cpu(), (1, 0))
    if not bool(begins.any()):
        return keys
    documents = begins.int().cumsum(1) + 1
    if keys is None:
        return Keys(documents.int(), causal, window)
    both = torch.where(keys.codes > 0, keys.codes * (documents.max() + 1) + documents, keys.codes)
    return Keys(both.int(), keys.causal, keys.window)


def keys_of_mask(mask: Tensor) -> Keys:
    """Return what a mask (B or 1, H or 1, Sq or 1, Sk) means: True and 0 are attended; False and a dtype's least not.

    Recognised are a causal mask of as many queries as keys, and masks of keys, the same for every query and head.

    Raises:
        InputError: it is another mask, with what can follow it.
    """
    allowed = mask
    if mask.dtype != torch.bool:
        if not mask.dtype.is_floating_point:
            raise InputError(f"the attention mask is of {mask.dtype}; it must be boolean or floating point")
        allowed = mask == 0
        if not bool((allowed | (mask <= torch.finfo(mask.dtype).min)).all()):
            raise InputError(
                "the attention mask adds a bias to the logits, as ALiBi does, which no kernel here computes; use "
                "FlexAttention (torch.nn.attention.flex_attention), which does it exactly"
            )
    while allowed.dim() < 4:
        allowed = allowed.unsqueeze(0)
    queries, keys = allowed.shape[-2:]
    if bool((allowed[:, :1, :1] == allowed).all()):
        return Keys(allowed[:, 0, 0].int().mul(2).sub(1).cpu(), causal=False)
    if queries == keys and bool((allowed == torch.ones_like(allowed[0, 0]).tril()).all()):
        return Keys(torch.ones(1, keys, dtype=torch.int, device="cpu"), causal=True)
    raise InputError(
        f"the attention mask has shape {tuple(mask.shape)} and is neither causal nor the same for all queries and "
        "heads; use FlexAttention (torch.nn.attention.flex_attention), which follows any mask"
    )
