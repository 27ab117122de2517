"""Describes where the rows of every branch lie by the plain integers that the fused kernels take.

Tensors reach a kernel as an address and two *words*, not as ``torch.Tensor`` and strides: in a tuple of arguments a
plain integer costs the host about 40 ns. A word is an odd integer with bit 62 set, so that Triton types it int64,
sees neither the value 1 nor a multiple of 16, and its value never selects another compiled kernel:

- *far*: the stride of the outermost axis (batch, or block of a call);
- *near*: the stride between rows, and that between heads;
- *heads*: the key/value heads ``first + j * step``, j < count, that a result holds from its own head ``begin`` on, and
  the batch element it starts at;
- *segments*: the segment it starts at, and how many of a batch element it holds.

A *slot* is one affine set of heads of one partial result. Which slots a length has depends on its ragged tails; the
lists are padded to what any tail of the pattern may need, so that all lengths share two compiled kernels: without and
with tails.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ringattn.geometry.calls import Geometry, LayoutKey, PlacedCall, Window
from ringattn.geometry.pattern import Call, HeadRun, branch_calls, head_runs
from ringattn.workload import Branch, HeadOffset

if TYPE_CHECKING:
    from torch import Tensor

Pick = Callable[[Sequence[int]], tuple[int, ...]]

HEAD_BITS = 12
BATCH_BITS = 20  # also of the step between heads, in the words of a gather
SEGMENT_BITS = 30  # also of offsets
FAR_BITS = 60
ROW_STRIDE_BITS = 26
HEAD_STRIDE_BITS = 34

# A kernel's grid has at most 65535 batch elements.
_MAX_BATCH = 65535


def word(*fields: tuple[int, int]) -> int:
    """Pack (value, bits) pairs into one integer, the first lowest."""
    packed, shift = 0, 1
    for value, bits in fields:
        assert 0 <= value < 1 << bits, f"{value} does not fit in {bits} bits"
        packed |= value << shift
        shift += bits
    assert shift <= 62
    return packed | 1 | 1 << 62


class Strides(NamedTuple):
    """Element strides between blocks (or batch elements), rows and heads; the rows themselves are contiguous."""

    far: int
    row: int
    head: int

    @classmethod
    def of(cls, x: Tensor) -> Strides:
        """Take the first three axes of x; the stride of an axis of one element says nothing and becomes 0."""
        return cls(*(stride if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)))

    @classmethod
    def of_lse(cls, lse_NHM: Tensor) -> Strides:
        far, head, row = cls.of(lse_NHM)
        return cls(far, row, head)

    def words(self) -> tuple[int, int]:
        return word((self.far, FAR_BITS)), word((self.row, ROW_STRIDE_BITS), (self.head, HEAD_STRIDE_BITS))


class Slot(NamedTuple):
    """Heads of the partial result of call number ``call`` of the window; None is padding that holds nothing."""

    call: int | None
    heads: int
    segments: int


class BranchSlots(NamedTuple):
    """Branch as the kernels take it, with its range of slots.

    A head's offset is ``kv_head // heads_per_offset``, or ``kv_head % rate`` where that is 0.
    """

    segment: int
    rate: int
    heads_per_offset: int
    step: int
    slot_begin: int
    slot_end: int


class SlotLayout(NamedTuple):
    """All slots of the batch elements [batch_begin, batch_end)."""

    batch_begin: int
    batch_end: int
    slots: tuple[Slot, ...]
    branches: tuple[BranchSlots, ...]


_PADDING = Slot(None, word((0, HEAD_BITS)), word((0, SEGMENT_BITS)))


def slot_layouts(key: LayoutKey, window: Window) -> tuple[SlotLayout, ...]:
    """Return one layout, or one per range of batch elements where calls were made per batch element."""
    edges = {0, key.batch, *range(0, key.batch, _MAX_BATCH)}
    for placed in window.calls:
        edges |= {placed.call.batch_start, placed.call.batch_start + placed.call.batch}
    cuts = sorted(edges)
    return tuple(_slot_layout(key, window, *ends) for ends in itertools.pairwise(cuts))


def _slot_layout(key: LayoutKey, window: Window, batch_begin: int, batch_end: int) -> SlotLayout:
    branches = key.pattern.resolved(key.seq_len)
    whole: list[list[Slot]] = [[] for _ in branches]
    short: list[list[Slot]] = [[] for _ in branches]
    for number, placed in enumerate(window.calls):
        call = placed.call
        if not call.batch_start <= batch_begin < call.batch_start + call.batch:
            continue
        segment = branches[placed.branch].segment
        kind = short if call.length < segment else whole
        first_segment = (call.start - window.begin) // segment
        kind[placed.branch] += _slots_of(number, call, first_segment, _step(key, branches[placed.branch]))
    ragged = any(short)
    slots: list[Slot] = []
    described = []
    for number, branch in enumerate(branches):
        most_whole, most_short = _most_slots(
            branch, key.kv_heads, key.heads // key.kv_heads, key.pattern.head_offset, key.gathers[number] == "copy"
        )
        own = [*_padded(whole[number], most_whole), *_padded(short[number], most_short if ragged else 0)]
        segment = min(branch.segment, 2**31 - 1)  # no position is beyond
        blocked = key.pattern.head_offset == "blocked"
        heads_per_offset = -(-key.kv_heads // branch.rate) if blocked else 0
        end = len(slots) + len(own)
        described.append(BranchSlots(segment, branch.rate, heads_per_offset, _step(key, branch), len(slots), end))
        slots += own
    return SlotLayout(batch_begin, batch_end, tuple(slots), tuple(described))


def _padded(slots: list[Slot], most: int) -> list[Slot]:
    return slots + [_PADDING] * (most - len(slots))


def _step(key: LayoutKey, branch: Branch) -> int:
    """Return the step between the heads of a run; runs of another step are single heads, where any step will do."""
    return head_runs(key.kv_heads, branch.rate, key.pattern.head_offset)[0].step


def _slots_of(number: int, call: Call, first_segment: int, step: int) -> list[Slot]:
    segments = word((first_segment, SEGMENT_BITS), (call.segments, SEGMENT_BITS))
    return [
        Slot(number, heads_word(run.first, run.count, begin, call.batch_start), segments)
        for run, begin in _joined(call.runs, step)
    ]


def heads_word(first: int, count: int, begin: int, last: int) -> int:
    """Pack heads; ``last`` is the batch element of a slot, or the step of a gathered run."""
    return word((first, HEAD_BITS), (count, HEAD_BITS), (begin, HEAD_BITS), (last, BATCH_BITS))


def _joined(runs: Sequence[HeadRun], step: int) -> Iterable[tuple[HeadRun, int]]:
    """Return runs side by side in a call and their first head there, neighbours that continue one another as one."""
    joined: list[tuple[HeadRun, int]] = []
    begin = 0
    for run in runs:
        assert run.count == 1 or run.step == step
        if joined and joined[-1][0].first + joined[-1][0].count * step == run.first:
            before, at = joined.pop()
            joined.append((HeadRun(before.first, step, before.count + run.count, 0, 0), at))
        else:
            joined.append((run, begin))
        begin += run.count
    return joined


@functools.lru_cache(maxsize=1024)
def _most_slots(branch: Branch, kv_heads: int, group: int, rule: HeadOffset, copy: bool) -> tuple[int, int]:
    """Count the slots of the whole segments of a branch, and the most that any shorter segment has."""
    step = head_runs(kv_heads, branch.rate, rule)[0].step

    def count(length: int) -> int:
        calls = branch_calls(
            branch, begin=0, end=length, batch=1, batch_folds=True, kv_heads=kv_heads, group=group, rule=rule, copy=copy
        )
        return sum(len(_slots_of(0, call, 0, step)) for call in calls)

    # The number of rows a head selects changes with length mod rate; two rates cover "none" and "one more".
    return count(branch.segment), max(map(count, range(1, min(branch.segment, 2 * branch.rate + 1))), default=0)


def pick(layout: SlotLayout, padding: Sequence[int], begins: Sequence[int]) -> Pick:
    """Return a function that picks the addresses of every job of every slot out of a list.

    ``begins`` is where the calls of a job begin there.
    """
    indices = [
        at if slot.call is None else begin + slot.call
        for slot in layout.slots
        for at, begin in zip(padding, begins, strict=True)
    ]
    if len(indices) == 1:
        (index,) = indices
        return lambda addresses: (addresses[index],)
    return operator.itemgetter(*indices)


def stride_words(layout: SlotLayout, jobs: Sequence[Sequence[Strides]]) -> tuple[int, ...]:
    """Return (far, near) of every job of every slot."""
    nothing = Strides(0, 0, 0)
    return tuple(
        part
        for slot in layout.slots
        for strides in jobs
        for part in (nothing if slot.call is None else strides[slot.call]).words()
    )


def slot_words(layout: SlotLayout) -> tuple[int, ...]:
    return tuple(part for slot in layout.slots for part in (slot.heads, slot.segments))


def run_words(geometry: Geometry, placed: PlacedCall) -> tuple[int, ...]:
    """Return the runs of a call, padded to as many as any copied call of the branch has."""
    key, call = geometry.key, placed.call
    words: list[int] = []
    begin = 0
    for run in call.runs:
        words.append(heads_word(run.first, run.count, begin, run.step))
        words.append(word((run.offset, SEGMENT_BITS), (run.offset_step, SEGMENT_BITS)))
        begin += run.count
    if call.copied:
        most = 2 * len(head_runs(key.kv_heads, call.rate, key.pattern.head_offset))
        words += [heads_word(0, 0, 0, 0), word((0, SEGMENT_BITS))] * ((most - len(words)) // 2)
    return tuple(words)
