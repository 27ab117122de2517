"""All-to-all over heads (DeepSpeed-Ulysses, arXiv:2309.14509): every position of some heads for some of every head.

``degree`` ranks exchange, so that each holds the rows of all of them, in ascending position, for its own 1/degree of
the heads; after attention the results go back. Heads can go in groups, one exchange each, so that one group travels
while another is computed.

Legend: B batch, S rows of this rank, T rows of all ``degree`` ranks together, M = degree, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ringattn.geometry.layout import Shard, joined, length_of, rows_within

from .comm import Comm, Pending


class HeadExchange:
    """Exchange among ``members``, ranks that hold ``shards``, in ``groups`` of heads."""

    # Head groups under way before they are needed. A message that is sent while a kernel holds every processor of a
    # GPU waits for that kernel: with two under way the next group is there all the same.
    PREFETCHED = 2
    # Results of a single group under way home: each has a buffer that it arrives in, which decides the peak.
    IN_FLIGHT = 1

    def __init__(self, comm: Comm, members: tuple[int, ...], shards: tuple[Shard, ...], groups: int) -> None:
        self._comm, self._members, self._groups = comm, members, groups
        self._lengths = [length_of(shard) for shard in shards]
        whole = joined([span for shard in shards for span in shard])
        # Of every member's spans, in its order: where each begins among the rows of all, and how long it is.
        self._spans = [[(rows_within(span, whole), span.length) for span in shard] for shard in shards]
        # The rows of all members, one member after the other, are the rows of all in ascending position.
        self._ascending = all(len(shard) == 1 for shard in shards)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of memory that torch's allocator does not count."""
        return 0

    def start_call(self) -> None:
        """Begin a forward or a backward."""

    def keep(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what ``scatter_heads`` brought as memory that lasts beyond the call."""
        return list(tensors)

    def scatter_heads(self, tensors: Sequence[Tensor], group: int, dtype: torch.dtype) -> tuple[Pending, list[Tensor]]:
        """Start to bring a head group of each (B, S, heads, D) tensor here: (B, T, heads / degree / groups, D).

        They travel as one message in ``dtype``, and are views of one buffer, valid after ``wait``.
        """
        batch, length, _, head_dim = tensors[0].shape
        counts = [x.shape[2] // len(self._members) // self._groups for x in tensors]
        heads = sum(counts)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=tensors[0].device)

        sent = empty(len(self._members), batch, length, heads, head_dim)
        for x, part in zip(tensors, torch.split(sent, counts, 3), strict=True):
            part.copy_(self._by_member(x, group).permute(2, 0, 1, 3, 4))
        rows = empty(batch, sum(self._lengths), heads, head_dim)
        arriving, after = rows, list[Callable[[], object]]()
        if not self._in_order(batch):
            arriving = empty(*rows.shape)
            after = [lambda there=there, here=here: there.copy_(here) for there, here in self._pieces(rows, arriving)]  # type: ignore[misc]
        mine = [length] * len(self._members)
        return self._start(sent, arriving, mine, self._lengths, after), list(torch.split(rows, counts, 2))

    def gather_heads(self, result: Tensor, target: Tensor, group: int) -> Pending:
        """Start to send the rows of a (B, T, heads, D) result home, into a (B, S, all heads, D) target.

        The target is written when ``wait`` returns.
        """
        batch, length = target.shape[:2]
        heads, head_dim = result.shape[2:]
        sent = result
        if not self._in_order(batch) or not result.is_contiguous():
            sent = torch.empty_like(result, memory_format=torch.contiguous_format)
            for here, there in self._pieces(result, sent):
                there.copy_(here)
        arriving = result.new_empty(len(self._members), batch, length, heads, head_dim)
        place = self._by_member(target, group).permute(2, 0, 1, 3, 4)
        mine = [length] * len(self._members)
        return self._start(sent, arriving, self._lengths, mine, [lambda: place.copy_(arriving)])

    def _by_member(self, x: Tensor, group: int) -> Tensor:
        """View (B, S, M, heads of the group, D) of a (B, S, all heads, D) tensor, in place."""
        return torch.unflatten(x, 2, (len(self._members), self._groups, -1))[:, :, :, group]

    def _in_order(self, batch: int) -> bool:
        """Return whether what arrives, member after member, is the rows of all as they are wanted."""
        return batch == 1 and self._ascending

    def _pieces(self, rows: Tensor, by_member: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield where each span of each member lies in ``rows`` and in ``by_member``.

        ``rows`` are (B, T, heads, D) of ascending position, ``by_member`` one (B, its S, heads, D) after the other.
        """
        batch, _, heads, head_dim = rows.shape
        pieces = torch.split(by_member.view(-1), [batch * length * heads * head_dim for length in self._lengths])
        for spans, length, piece in zip(self._spans, self._lengths, pieces, strict=True):
            own, row = piece.view(batch, length, heads, head_dim), 0
            for begin, count in spans:
                yield rows[:, begin : begin + count], own[:, row : row + count]
                row += count

    def _start(
        self,
        sent: Tensor,
        arriving: Tensor,
        rows_to: Sequence[int],
        rows_from: Sequence[int],
        after: Sequence[Callable[[], object]],
    ) -> Pending:
        """Start a message; ``rows_to`` and ``rows_from`` are how many rows go to and come from each member."""
        row_bytes = sent.nbytes // sum(rows_to)

        def by_rank(rows: Sequence[int]) -> list[int]:
            of_rank = dict(zip(self._members, rows, strict=True))
            return [of_rank.get(rank, 0) * row_bytes for rank in range(self._comm.size)]

        return self._comm.all_to_all(sent, arriving, by_rank(rows_to), by_rank(rows_from), after)
