"""All-to-all over heads (DeepSpeed-Ulysses, arXiv:2309.14509): every position of some heads for some of every head.

``degree`` ranks exchange, so that each holds the rows of all of them, in ascending position, for its own 1/degree of
the heads; after attention the results go back. Heads can go in groups, one exchange each, so that one group travels
while another is computed.

Legend: B batch, S rows of this rank, T rows of all ``degree`` ranks together, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .comm import Comm, Message, Pending
from .layout import Share, joined, length_of, rows_within


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """``members`` are the ranks that exchange, ``me`` this one's place among them, ``parts`` what each holds."""

    comm: Comm
    members: tuple[int, ...]
    me: int
    parts: tuple[Share, ...]
    groups: int

    @property
    def share(self) -> Share:
        """What the members hold together."""
        return joined([span for part in self.parts for span in part])

    def heads_of(self, heads: int, member: int, group: int) -> slice:
        """Which of ``heads`` a member computes in a group."""
        own = heads // len(self.members)
        count = own // self.groups
        first = member * own + group * count
        return slice(first, first + count)

    def spread(self, tensors: Sequence[Tensor], group: int, dtype: torch.dtype) -> tuple[Pending, list[Tensor]]:
        """Starts to bring a head group of each (B, S, heads, D) tensor here: (B, T, heads / degree / groups, D).

        They travel as one message in ``dtype``, and are views of one buffer, valid after ``wait``.
        """
        batch, _, _, head_dim = tensors[0].shape
        counts = [x.shape[2] // len(self.members) // self.groups for x in tensors]
        rows = torch.empty((batch, length_of(self.share), sum(counts), head_dim), dtype=dtype, device=tensors[0].device)
        sends: list[Message] = []
        receives: list[Message] = []
        after: list[Callable[[], object]] = []
        for member, rank in enumerate(self.members):
            parts = [x[:, :, self.heads_of(x.shape[2], member, group)] for x in tensors]
            if member == self.me:
                self._place(torch.split(rows, counts, 2), parts, member)
                continue
            packed = torch.cat([part.to(dtype) for part in parts], 2)
            sends += [Message(part, rank) for part in self._pieces(packed, self.me, 0)]
            self._receive(rows, member, rank, receives, after)
        return self.comm.exchange(sends, receives, after), list(torch.split(rows, counts, 2))

    def collect(self, results: Sequence[Tensor], targets: Sequence[Tensor], group: int) -> Pending:
        """Starts to send the rows of each (B, T, heads, D) result home, into (B, S, all heads, D) targets.

        The targets are written when ``wait`` returns.
        """
        sends: list[Message] = []
        receives: list[Message] = []
        after: list[Callable[[], object]] = []
        for result, target in zip(results, targets, strict=True):
            for member, rank in enumerate(self.members):
                place = target[:, :, self.heads_of(target.shape[2], member, group)]
                if member == self.me:
                    for here, there in self._rows(member):
                        place[:, here].copy_(result[:, there])
                    continue
                sends += [Message(part, rank) for part in self._pieces(result, member, 1)]
                for here, _ in self._rows(self.me):
                    target_rows = place[:, here]
                    part = torch.empty(target_rows.shape, dtype=result.dtype, device=result.device)
                    receives.append(Message(part, rank))
                    after.append(lambda rows=target_rows, part=part: rows.copy_(part))  # type: ignore[misc]
        return self.comm.exchange(sends, receives, after)

    def _rows(self, member: int) -> list[tuple[slice, slice]]:
        """(rows among the member's own, rows among all) of each span that the member holds."""
        pairs, row = [], 0
        for span in self.parts[member]:
            begin = rows_within(span, self.share)
            pairs.append((slice(row, row + span.length), slice(begin, begin + span.length)))
            row += span.length
        return pairs

    def _pieces(self, x: Tensor, member: int, which: int) -> list[Tensor]:
        """The messages that hold a member's rows of ``x``: one a span, and contiguous as they are at batch size 1."""
        return [x[:, rows[which]].contiguous() for rows in self._rows(member)]

    def _place(self, rows: Sequence[Tensor], parts: Sequence[Tensor], member: int) -> None:
        for here, there in self._rows(member):
            for target, part in zip(rows, parts, strict=True):
                target[:, there].copy_(part[:, here])

    def _receive(
        self, rows: Tensor, member: int, rank: int, receives: list[Message], after: list[Callable[[], object]]
    ) -> None:
        for _, there in self._rows(member):
            target = rows[:, there]
            part = target if target.is_contiguous() else torch.empty(target.shape, dtype=rows.dtype, device=rows.device)
            receives.append(Message(part, rank))
            if part is not target:
                after.append(lambda target=target, part=part: target.copy_(part))  # type: ignore[misc]
