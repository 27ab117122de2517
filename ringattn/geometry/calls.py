"""Lays out the calls of every branch for one exact shape, and the strided views that reach their rows.

All of it is numbers, computed once per (batch, length) and memory layout and kept in one bounded cache: nothing
here lives on a device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringattn.workload import Pattern

from .pattern import Call, StridedView, branch_calls, run_view, window_bounds


class LayoutKey(NamedTuple):
    """Key of a geometry: everything that the calls of a shape depend on."""

    pattern: Pattern
    gathers: tuple[str, ...]
    window: int | None
    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    batch_folds: bool


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """Call with the branch it belongs to and its index among all calls of the shape."""

    index: int
    branch: int
    call: Call


@dataclass(frozen=True, slots=True)
class Window:
    """Positions [begin, end) whose branches are merged together, with the calls over them."""

    begin: int
    end: int
    calls: tuple[PlacedCall, ...]


ViewKey = tuple[int, int, tuple[int, ...], int | None, bool]


@dataclass(slots=True)
class Geometry:
    """Windows of one shape, with the views and the launches of fused steps worked out for them so far."""

    key: LayoutKey
    windows: tuple[Window, ...]
    direct: bool  # one in-place call covers every position: its result is the result
    fused: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # merge_triton's own
    _views: dict[ViewKey, tuple[StridedView, ...]] = field(default_factory=dict)

    def group(self, heads: int) -> int:
        """Return how many of a tensor's ``heads`` belong to a key/value head: G for q, out and lse, 1 for k and v."""
        return heads // self.key.kv_heads

    def views(
        self, placed: PlacedCall, group: int, strides: Sequence[int], head_dim: int | None, *, folded: bool
    ) -> tuple[StridedView, ...]:
        """Return one view per run of the call into a tensor with these strides; see ``pattern.run_view``."""
        key = (placed.index, group, tuple(strides), head_dim, folded)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = tuple(
                run_view(placed.call, run, group, strides, head_dim, folded=folded) for run in placed.call.runs
            )
        return views


def build_geometry(key: LayoutKey) -> Geometry:
    """Return the calls of every branch, window by window. Pure."""
    windows: list[Window] = []
    index = 0
    for begin, end in window_bounds(key.seq_len, key.window):
        placed: list[PlacedCall] = []
        for number, branch in enumerate(key.pattern.resolved(key.seq_len)):
            for call in branch_calls(
                branch,
                begin=begin,
                end=end,
                batch=key.batch,
                batch_folds=key.batch_folds and (begin, end) == (0, key.seq_len),
                kv_heads=key.kv_heads,
                group=key.heads // key.kv_heads,
                rule=key.pattern.head_offset,
                copy=key.gathers[number] == "copy",
            ):
                placed.append(PlacedCall(index, number, call))
                index += 1
        windows.append(Window(begin, end, tuple(placed)))
    return Geometry(key, tuple(windows), _is_direct(key, windows))


def _is_direct(key: LayoutKey, windows: list[Window]) -> bool:
    if len(windows) != 1 or len(windows[0].calls) != 1 or len(key.pattern.resolved(key.seq_len)) != 1:
        return False
    call = windows[0].calls[0].call
    return not call.copied and call.rate == 1 and call.segments * call.length == key.seq_len


# The geometries used last, shared by every module of the process.
cached_geometry = functools.lru_cache(maxsize=256)(build_geometry)
