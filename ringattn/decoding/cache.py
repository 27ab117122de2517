"""Holds keys and values of sequences that grow: append, evict what no query will see again, roll back, reorder.

Positions count from the start of a sequence, whatever was evicted. Lengths are known on the host, and on the device in
tensors that kernels read, so that nothing waits for the device and a CUDA graph can append and attend.

Legend: B batch (sequences), S new positions, Hkv key/value heads, D head dimension, C capacity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.arguments import input_dtype, integer, is_integer, is_list
from ringattn.dtypes import DTYPE_NAMES, TORCH_DTYPES
from ringattn.errors import InputError
from ringattn.planning.module_setup import device_of, group_size
from ringattn.wording import plural
from ringattn.workload import LONGEST, Pattern

STRIPE = 256  # consecutive positions that one rank holds


class Run(NamedTuple):
    """Consecutive positions [begin, end) that lie in consecutive rows of a cache from ``row`` on."""

    begin: int
    end: int
    row: int


class KVCache:
    """Keys and values of B sequences, each of its own length.

    Args:
        batch: B.
        num_kv_heads: Hkv.
        head_dim: D.
        max_length: most positions of a sequence, for which memory is taken at once where all are kept; None grows it.
        dtype: that of k and v, a torch.dtype or its name.
        device: None is the current CUDA device, else the CPU.
        window: a query sees its own position and the ``window - 1`` before it (causal dense attention alone). The cache
            drops what no query will see again when it needs the room. None: everything before.
        pattern: dilated pattern of the module, of which the cache keeps the segments that the next query is in.
        rollback: positions at the end that ``truncate`` may take back whatever the window or pattern lets drop.
        process_group: its ranks hold the positions together, 256 consecutive ones each in turn; None: all are here.

    Raises:
        InputError: an argument that makes no sense.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        max_length: int | None = None,
        *,
        dtype: torch.dtype | str,
        device: torch.device | str | int | None = None,
        window: int | None = None,
        pattern: Pattern | None = None,
        rollback: int = 0,
        process_group: Any = None,
    ) -> None:
        self.batch, self.num_kv_heads = integer("batch", batch), integer("num_kv_heads", num_kv_heads)
        self.head_dim = integer("head_dim", head_dim)
        self.max_length = None if max_length is None else integer("max_length", max_length, most=LONGEST)
        self.window = None if window is None else integer("window", window, most=LONGEST)
        self.pattern = Pattern() if pattern is None else pattern
        if self.window is not None and not self.pattern.dense:
            raise InputError(f"window is {window}, but the pattern {self.pattern} is dilated; a window is for dense")
        self.rollback = integer("rollback", rollback, least=0, most=LONGEST)
        self.dtype, self.device = TORCH_DTYPES[input_dtype(dtype)], device_of(device)
        self.world = group_size(process_group)
        self.rank = 0
        if self.world > 1:
            self.rank = int(getattr(process_group, "get_group", lambda: process_group)().rank())
        self._cycle = STRIPE * self.world if self.world > 1 else 1  # positions of which each rank holds as many
        self._begins, self._lengths = [0] * self.batch, [0] * self.batch
        kind = (self.batch, self.num_kv_heads, self.head_dim, self.window, self.pattern, self.dtype, self.device)
        self.signature = (*kind, self.world)  # of all that a call has to check once
        with torch.inference_mode(False):  # as in _take
            self._device_begins = torch.zeros(self.batch, dtype=torch.int32, device=self.device)
            self._device_lengths = torch.zeros_like(self._device_begins)
        self._evicts = self.window is not None or not self.pattern.dense
        longest = self.window or max((branch.segment for branch in self.pattern.branches), default=0)
        kept = self.max_length or 0
        self._take(min(kept, 2 * (longest + self.rollback)) if self._evicts else kept)

    # --- what it holds -------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions of each sequence so far, evicted ones among them."""
        return tuple(self._lengths)

    @property
    def begins(self) -> tuple[int, ...]:
        """First position of each sequence that is still held; 0 where nothing was evicted."""
        return tuple(self._begins)

    @property
    def capacity(self) -> int:
        """Consecutive positions of a sequence that there is memory for, over all ranks."""
        return int(self._k.shape[1]) * self.world

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on this rank."""
        return int(self._k.nbytes + self._v.nbytes)

    def rows(self, most: int | None = None) -> tuple[Tensor, Tensor]:
        """Return k and v of this rank, views (B, rows, Hkv, D) of its first ``most`` rows; None is all of them."""
        return (self._k, self._v) if most is None else (self._k[:, :most], self._v[:, :most])

    @property
    def most_rows(self) -> int:
        """The most rows that a sequence has on this rank."""
        return max(map(self._row, self._begins, self._lengths))

    def held(self, sequence: int, end: int | None = None) -> int:
        """Return how many rows of this rank hold positions of a sequence before ``end``; None is its length."""
        return self._row(self._begins[sequence], self._lengths[sequence] if end is None else end)

    def runs(self, sequence: int, begin: int, end: int) -> Iterator[Run]:
        """Yield the positions of [begin, end) that this rank holds, and where."""
        first = self._begins[sequence]
        begin = max(begin, first)
        if self.world == 1:
            if begin < end:
                yield Run(begin, end, begin - first)
            return
        stripe = begin // self._cycle * self._cycle + self.rank * STRIPE
        while stripe < end:
            own = max(stripe, begin), min(stripe + STRIPE, end)
            if own[0] < own[1]:
                yield Run(*own, self._row(first, own[0]))
            stripe += self._cycle

    def alike(self, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield [first, end) of neighbouring sequences that begin, end and grow alike."""
        seen = list(zip(self._begins, self._lengths, counts, strict=True))
        first = 0
        for b in range(1, self.batch + 1):
            if b == self.batch or seen[b] != seen[first]:
                yield first, b
                first = b

    def held_on_device(self) -> Tensor:
        """Return the rows that hold each sequence on this rank, (B,) int32 on the device."""
        held = [self.held(b) for b in range(self.batch)]
        return torch.zeros_like(self._device_lengths).add_(_numbers(held, self._device_lengths))

    def device_rows(self, counts: Sequence[int] | None, queries: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return lengths, begins and counts for a kernel, (B,) int32 on the device; None where they are all plain."""
        begins = self._device_begins if self._evicts else None
        if counts is None or all(count == queries for count in counts):
            return self._device_lengths, begins, None
        return self._device_lengths, begins, torch.tensor(counts, dtype=torch.int32, device=self.device)

    # --- what changes it -----------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, counts: Sequence[int] | None = None) -> None:
        """Append k and v (B, S, Hkv, D) to every sequence, of sequence b the first ``counts[b]``; None is all S.

        Over several ranks each is given all of them and keeps its own. InputError where they do not fit.
        """
        counts = self.check_new(k, v, counts)
        new = k.shape[1]
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._append_captured(k, v, new, counts)
            return
        self._make_room(counts)
        for first, end in self.alike(counts):  # sequences of one length, one copy
            length = self._lengths[first]
            for run in self.runs(first, length, length + counts[first]):
                rows = slice(run.row, run.row + run.end - run.begin)
                there = slice(run.begin - length, run.end - length)
                self._k[first:end, rows].copy_(k[first:end, there])
                self._v[first:end, rows].copy_(v[first:end, there])
        self._count(counts)
        self._device_lengths.add_(_numbers(counts, self._device_lengths))

    def advance(self, positions: int = 1) -> None:
        """Count on the host what a replayed CUDA graph has appended to every sequence."""
        positions = integer("positions", positions)
        if max(self._lengths) - min(self._begins) + positions > self.capacity:
            raise InputError(
                f"advance({positions}): the cache has rows for {self.capacity} positions and sequences of up to "
                f"{max(self._lengths)}; a graph cannot take more memory, give max_length"
            )
        self._count([positions] * self.batch)

    def evict(self) -> None:
        """Drop now what no query at a position to come can see, nor one that ``rollback`` allows."""
        self._move([self._first_needed(b) for b in range(self.batch)])

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget the positions of every sequence from its length on: what was proposed and not accepted."""
        if is_integer(lengths):
            lengths = [lengths] * self.batch  # type: ignore[list-item]
        wanted = self._integers("lengths", lengths)
        for b, length in enumerate(wanted):
            if not 0 <= length <= self._lengths[b]:
                raise InputError(
                    f"truncate: length {length} of sequence {b}, which has {plural(self._lengths[b], 'position')}; "
                    "give one from 0 to that"
                )
            if length and self._begins[b] > self._needed_at(length):
                raise InputError(
                    f"truncate: sequence {b} at length {length} needs position {self._needed_at(length)}, and those "
                    f"before {self._begins[b]} were evicted; give the cache a rollback of so many positions"
                )
        self._lengths = list(wanted)
        self._begins = [begin if length else 0 for begin, length in zip(self._begins, wanted, strict=True)]
        self._to_device()

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.truncate(0)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Make sequence b a copy of what sequence ``index[b]`` was: beams that go on from others.

        A tensor on the device is read back where sequences have lengths of their own.
        """
        if isinstance(index, Tensor):
            if index.shape != (self.batch,) or index.is_floating_point() or index.dtype is torch.bool:
                raise InputError(
                    f"index is a tensor of {index.dtype}, {tuple(index.shape)}; give {self.batch} integers, or a "
                    "tensor of them"
                )
            if index.is_meta or index.layout is not torch.strided:
                raise InputError("index is on meta or not dense; give a list of integers, or a tensor that holds some")
            there = index.to(self.device, torch.int64)
            alike = len(set(self._lengths)) == len(set(self._begins)) == 1
            unread = alike and index.device.type != "cpu"
            order = list(range(self.batch)) if unread else [int(b) for b in index.tolist()]
        else:
            order = self._integers("index", index)
            there = torch.tensor(order, device=self.device)
        if not all(0 <= b < self.batch for b in order):
            raise InputError(f"index is {order}; the cache has sequences 0 to {self.batch - 1}")
        held = self.most_rows
        for rows in (self._k, self._v):
            rows[:, :held] = rows[:, :held].index_select(0, there)
        self._lengths, self._begins = [self._lengths[b] for b in order], [self._begins[b] for b in order]
        self._to_device()

    # --- how -----------------------------------------------------------------------------------------------------

    def check_new(self, k: Tensor, v: Tensor, counts: Sequence[int] | None) -> list[int]:
        """Return the counts of new positions; InputError where k, v or they do not fit the cache."""
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise InputError(f"{name} is a {type(x).__name__}; it must be a tensor")
            if x.dim() != 4 or x.shape[0] != self.batch or x.shape[2:] != (self.num_kv_heads, self.head_dim):
                raise InputError(
                    f"{name} has shape {tuple(x.shape)}; the cache takes ({self.batch}, new positions, "
                    f"{self.num_kv_heads}, {self.head_dim})"
                )
            if x.dtype is not self.dtype:
                raise InputError(f"{name} is {x.dtype} and the cache {self.dtype}; convert it, or make the cache so")
            if x.device != self.device:
                raise InputError(f"{name} is on {x.device} and the cache on {self.device}; move it there")
            if x.requires_grad and torch.is_grad_enabled():
                raise InputError(f"{name} requires a gradient, which a cache has none of; call under torch.no_grad()")
        new = k.shape[1]
        if v.shape[1] != new:
            raise InputError(f"v has {plural(v.shape[1], 'position')} and k {new}; they must be equal")
        return self.check_counts(counts, new)

    def check_counts(self, counts: Sequence[int] | None, new: int) -> list[int]:
        """Return how many of ``new`` positions each sequence has; InputError where one has more, or less than none."""
        if counts is None:
            return [new] * self.batch
        made = self._integers("counts", counts)
        if not all(0 <= count <= new for count in made):
            raise InputError(f"counts is {made}; each must be from 0 to the {new} positions given")
        return made

    def check_held(self, counts: Sequence[int]) -> None:
        """Raise InputError where the cache does not hold the queries' positions, or no longer what they see."""
        for b, (count, begin, length) in enumerate(zip(counts, self._begins, self._lengths, strict=True)):
            if count > length - begin:
                raise InputError(
                    f"q has {count} positions of sequence {b}, of which the cache holds {length - begin}; append k and "
                    "v first, or call prefill()"
                )
            if begin and count and begin > self._needed_at(length - count):
                raise InputError(
                    f"q has {plural(count, 'position')} of sequence {b}, of which the first sees position "
                    f"{self._needed_at(length - count)}, and those before {begin} were evicted; decode before evict() "
                    "and before more is appended, or give the cache a rollback of so many positions"
                )

    def _integers(self, name: str, given: Any) -> list[int]:
        if not is_list(given) or len(given) != self.batch or not all(is_integer(x) for x in given):
            raise InputError(f"{name} is {given!r}; give a list of {plural(self.batch, 'integer')}, one for a sequence")
        return [int(x) for x in given]

    def _append_captured(self, k: Tensor, v: Tensor, new: int, counts: list[int]) -> None:
        """Append by what the device knows. The host counts with ``advance`` when the graph is replayed."""
        if counts != [new] * self.batch or self.world > 1:
            raise InputError("in a CUDA graph every sequence is given as many positions, and one rank holds all")
        if self.most_rows + new > self.capacity:
            raise InputError(
                f"the cache has rows for {self.capacity} positions, {new} more do not fit, and a CUDA graph cannot "
                "take more memory; give max_length, or call evict() before the capture"
            )
        sequence = torch.arange(self.batch, device=self.device)[:, None]
        row = (self._device_lengths - self._device_begins)[:, None] + torch.arange(new, device=self.device)
        self._k[sequence, row] = k
        self._v[sequence, row] = v
        self._device_lengths.add_(new)

    def _make_room(self, counts: Sequence[int]) -> None:
        """Evict, or take more memory, where new positions do not fit; InputError beyond ``max_length``."""
        ends = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        if self.max_length is not None and max(ends) > self.max_length:
            b = ends.index(max(ends))
            raise InputError(
                f"sequence {b} of the cache has {plural(self._lengths[b], 'position')}, and {counts[b]} more are over "
                f"its max_length, {self.max_length}; make a longer one, or truncate"
            )
        if self._needed(ends) <= self.capacity:
            return
        self.evict()
        needed = self._needed(ends)
        # A cache that evicts keeps a quarter free, or it would move all its rows at every position.
        if needed + (needed // 4 if self._evicts else 0) > self.capacity:
            grown = max(2 * self.capacity, needed + needed // 2)
            self._grow(grown if self.max_length is None else max(needed, min(grown, self.max_length)))

    def _needed(self, ends: Sequence[int]) -> int:
        """Return the consecutive positions that there must be memory for."""
        return max(end - begin for end, begin in zip(ends, self._begins, strict=True))

    def _grow(self, capacity: int) -> None:
        held, old = self.most_rows, (self._k, self._v)
        self._take(capacity)
        for there, here in zip((self._k, self._v), old, strict=True):
            there[:, :held] = here[:, :held]

    def _take(self, capacity: int) -> None:
        """Take memory for so many positions, in which the rows of a head lie together, as a query reads them."""
        rows = capacity if self.world == 1 else -(-capacity // self._cycle) * STRIPE
        shape = (2, self.batch, self.num_kv_heads, rows, self.head_dim)
        with torch.inference_mode(False):  # memory taken in that mode could not be written to outside of it
            self._k, self._v = torch.empty(shape, dtype=self.dtype, device=self.device).transpose(2, 3)

    def _first_needed(self, sequence: int) -> int:
        return self._needed_at(max(self._lengths[sequence] - self.rollback, 0))

    def _needed_at(self, length: int) -> int:
        """Return the first position that a query at ``length`` or later sees, at the start of a turn of the ranks."""
        if self.window is not None:
            first = max(0, length + 1 - self.window)
        elif self.pattern.dense:
            first = 0
        else:
            first = min(length // branch.segment * branch.segment for branch in self.pattern.branches)
        return first // self._cycle * self._cycle

    def _move(self, begins: Sequence[int]) -> None:
        """Have each sequence begin at a later position, its rows moved to the front."""
        begins = [max(begin, old) for begin, old in zip(begins, self._begins, strict=True)]
        if begins == self._begins:
            return
        for b, begin in enumerate(begins):
            dropped, held = self.held(b, begin), self.held(b)
            if dropped:
                for rows in (self._k, self._v):
                    rows[b, : held - dropped] = rows[b, dropped:held].clone()
        self._begins = list(begins)
        self._to_device()

    def _row(self, begin: int, position: int) -> int:
        """Return how many positions of [begin, position) this rank holds; ``begin`` is at the start of a turn."""
        if self.world == 1:
            return position - begin
        turns, rest = divmod(position - begin, self._cycle)
        return turns * STRIPE + min(max(rest - self.rank * STRIPE, 0), STRIPE)

    def _count(self, counts: Sequence[int]) -> None:
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]

    def _to_device(self) -> None:
        for numbers, values in ((self._device_lengths, self._lengths), (self._device_begins, self._begins)):
            numbers.zero_().add_(_numbers(values, numbers))

    def __repr__(self) -> str:
        lengths = self._lengths if len(set(self._lengths)) > 1 else self._lengths[:1]
        of_ranks = f", rank {self.rank} of {self.world}" * (self.world > 1)
        limits = f", window={self.window}" * (self.window is not None)
        return (
            f"KVCache(batch={self.batch}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"{DTYPE_NAMES[self.dtype]}, {self.device}, {self.pattern}{limits}, "
            f"lengths={', '.join(map(str, lengths))}, capacity={self.capacity}{of_ranks})"
        )


def _numbers(values: Sequence[int], like: Tensor) -> Tensor | int:
    """Return one number where all are equal, which needs no copy to the device; else a tensor."""
    return values[0] if len(set(values)) == 1 else torch.tensor(values, dtype=like.dtype, device=like.device)
