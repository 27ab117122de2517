"""Describes the rows of q, k and v that one kernel call reads by plain numbers: no tensor, no mask, no index list.

A branch (w, r) selects, in every segment of w positions, the rows ``offset + i * r`` of a head. The offset
depends on the key/value head only, so a set of heads whose offsets grow linearly with the head is one affine
(strided) view of a ``(B, S, H, D)`` tensor. That set is a ``HeadRun``; a ``Call`` is a rectangle of equally
long segments and one or more runs, which is what a kernel is launched on: in place when it is a single
foldable run (gather ``view``), or after its runs were copied side by side (gather ``copy``).

Legend: B batch, S length, H query heads, Hkv key/value heads, G = H / Hkv, D head dimension, N segments of a
call times its batch elements, M rows per segment, J key/value heads of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringattn.workload import Branch, HeadOffset, Pattern


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Key/value heads ``first + j * step`` whose offsets are ``offset + j * offset_step``, for j < count."""

    first: int
    step: int
    count: int
    offset: int
    offset_step: int

    def folds(self, group: int) -> bool:
        """Tell whether (J, G) query heads lie evenly in memory, so that they are one head axis of a view."""
        return self.count == 1 or group == 1 or (self.step == 1 and self.offset_step == 0)


@dataclass(frozen=True, slots=True)
class Call:
    """Kernel call over ``segments`` segments of ``length`` positions from ``start``, ``rows`` selected rows in each."""

    batch_start: int
    batch: int
    start: int
    segments: int
    length: int
    rate: int
    rows: int
    runs: tuple[HeadRun, ...]
    copied: bool

    @property
    def kv_heads(self) -> int:
        return sum(run.count for run in self.runs)


@dataclass(frozen=True, slots=True)
class StridedView:
    """Arguments of ``torch.as_strided``, the offset relative to the tensor's own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def head_offset_of(kv_head: int, kv_heads: int, rate: int, rule: HeadOffset) -> int:
    """Return the first selected position of ``kv_head`` within a segment."""
    if rule == "interleaved":
        return kv_head % rate
    return kv_head // -(-kv_heads // rate)


def heads_without_rows(pattern: Pattern, heads: int, kv_heads: int, longest: int | None = None) -> tuple[int, ...]:
    """Return the query heads for which no branch selects a position in a sequence of up to ``longest`` positions."""
    group = heads // kv_heads

    def selects(kv_head: int, branch: Branch) -> bool:
        offset = head_offset_of(kv_head, kv_heads, branch.rate, pattern.head_offset)
        return offset < min(branch.segment, longest or branch.segment)

    empty = [h for h in range(kv_heads) if pattern.branches and not any(selects(h, b) for b in pattern.branches)]
    return tuple(head for h in empty for head in range(h * group, (h + 1) * group))


def selected_rows(length: int, rate: int, offset: int) -> int:
    """Return the number of ``length`` positions that a head with ``offset`` selects."""
    return max(0, -(-(length - offset) // rate))


def head_runs(kv_heads: int, rate: int, rule: HeadOffset) -> tuple[HeadRun, ...]:
    """Return all key/value heads as the fewest affine runs."""
    if rate == 1:
        return (HeadRun(0, 1, kv_heads, 0, 0),)
    if rule == "blocked":
        block = -(-kv_heads // rate)
        return tuple(
            HeadRun(first, 1, min(block, kv_heads - first), first // block, 0) for first in range(0, kv_heads, block)
        )
    # Interleaved heads are a grid of (head // rate, head % rate): its rows are runs of unequal offsets (one view
    # over head and position at once), its columns runs of one offset.
    along_rows = -(-kv_heads // rate)
    along_columns = min(rate, kv_heads)
    if along_rows <= along_columns:
        return tuple(HeadRun(first, 1, min(rate, kv_heads - first), 0, 1) for first in range(0, kv_heads, rate))
    return tuple(HeadRun(o, rate, -(-(kv_heads - o) // rate), o, 0) for o in range(along_columns))


def _split_by_rows(run: HeadRun, length: int, rate: int) -> list[tuple[int, HeadRun]]:
    """Cut the run where the number of selected rows changes, leaving out heads that select nothing."""
    parts: list[tuple[int, HeadRun]] = []
    for j in range(run.count):
        offset = run.offset + j * run.offset_step
        rows = selected_rows(length, rate, offset)
        if parts and parts[-1][0] == rows:
            last = parts[-1][1]
            parts[-1] = (rows, HeadRun(last.first, last.step, last.count + 1, last.offset, last.offset_step))
        else:
            parts.append((rows, HeadRun(run.first + j * run.step, run.step, 1, offset, run.offset_step)))
    return [(rows, part) for rows, part in parts if rows > 0]


def branch_calls(
    branch: Branch,
    *,
    begin: int,
    end: int,
    batch: int,
    batch_folds: bool,
    kv_heads: int,
    group: int,
    rule: HeadOffset,
    copy: bool,
) -> tuple[Call, ...]:
    """Return the calls of one branch over positions [begin, end), ``begin`` at a segment boundary.

    ``batch_folds`` says that consecutive batch elements lie as far apart as ``end - begin`` positions do, so that
    whole segments of all of them are one axis. Copied calls need no such luck.
    """
    length = min(branch.segment, end - begin)
    whole, tail = divmod(end - begin, length)
    pieces = [(begin, whole, length)] + ([(end - tail, 1, tail)] if tail else [])
    runs = head_runs(kv_heads, branch.rate, rule)
    calls: list[Call] = []
    for start, segments, piece_length in pieces:
        by_rows: dict[int, list[HeadRun]] = {}
        for run in runs:
            for rows, part in _split_by_rows(run, piece_length, branch.rate):
                by_rows.setdefault(rows, []).append(part)
        for rows, parts in by_rows.items():
            shape = (segments, piece_length, branch.rate, rows)
            if copy and branch.rate > 1:
                calls.append(Call(0, batch, start, *shape, tuple(parts), True))
                continue
            for part in parts:
                for run in _foldable(part, group):
                    calls.extend(_placed(batch, batch_folds and not tail, start, shape, run))
    return tuple(calls)


def _foldable(run: HeadRun, group: int) -> tuple[HeadRun, ...]:
    if run.folds(group):
        return (run,)
    return tuple(HeadRun(run.first + j * run.step, 1, 1, run.offset + j * run.offset_step, 0) for j in range(run.count))


def _placed(batch: int, batch_folds: bool, start: int, shape: tuple[int, int, int, int], run: HeadRun) -> list[Call]:
    """Return in-place calls of one run: one if (batch, segment) is one even axis, else one per entry of the shorter."""
    segments, length, rate, rows = shape
    if batch == 1 or segments == 1 or batch_folds:
        return [Call(0, batch, start, segments, length, rate, rows, (run,), False)]
    if batch <= segments:
        return [Call(b, 1, start, segments, length, rate, rows, (run,), False) for b in range(batch)]
    return [Call(0, batch, start + s * length, 1, length, rate, rows, (run,), False) for s in range(segments)]


def window_bounds(seq_len: int, window: int | None) -> tuple[tuple[int, int], ...]:
    """Return [begin, end) of consecutive windows; None is one window."""
    step = seq_len if window is None else min(window, seq_len)
    return tuple((begin, min(begin + step, seq_len)) for begin in range(0, seq_len, step))


def nests(pattern: Pattern, window: int) -> bool:
    """Tell whether no segment crosses a multiple of ``window``."""
    return all(window % branch.segment == 0 for branch in pattern.branches) and not pattern.dense


def run_view(
    call: Call, run: HeadRun, group: int, strides: Sequence[int], head_dim: int | None = None, *, folded: bool
) -> StridedView:
    """View the rows of ``run`` in a tensor with axes (B, S, H[, D]) and these element strides (D for ``head_dim``).

    Unfolded: axes (batch, segment, M, J, G[, D]), always possible. Folded: (N, M, J * G[, D]), for a call that
    ``branch_calls`` made for use in place. ``group`` is 1 for k and v.
    """
    stride_b, stride_s, stride_h, *stride_d = strides
    head_stride = run.step * group * stride_h + run.offset_step * stride_s
    offset = call.batch_start * stride_b + (call.start + run.offset) * stride_s + run.first * group * stride_h
    segment_stride, row_stride = call.length * stride_s, call.rate * stride_s
    size: tuple[int, ...]
    stride: tuple[int, ...]
    if folded:
        size = (call.batch * call.segments, call.rows, run.count * group)
        stride = (
            stride_b if call.segments == 1 else segment_stride,
            row_stride,
            head_stride if group == 1 else stride_h,
        )
        if run.count > 1 and group > 1:
            assert head_stride == group * stride_h, "a run that does not fold reached a kernel in place"
    else:
        size = (call.batch, call.segments, call.rows, run.count, group)
        stride = (stride_b, segment_stride, row_stride, head_stride, stride_h)
    if head_dim is None:
        return StridedView(size, stride, offset)
    return StridedView((*size, head_dim), (*stride, stride_d[0]), offset)
