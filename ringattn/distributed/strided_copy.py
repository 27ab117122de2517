"""A strided copy as 2D copies, which a copy engine does at once: equally wide and equally distant rows each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

# Rows are joined up to this width. Far wider ones are as fast, and a pitch is limited to 2 GiB.
_WIDEST_JOINED = 65536
_MOST_COPIES = 64  # each costs the host 14 us


class Copy2D(NamedTuple):
    """Copy of ``height`` rows of ``width`` bytes; offsets and pitches (from row to row) in bytes."""

    source_offset: int
    target_offset: int
    width: int
    height: int
    source_pitch: int
    target_pitch: int


@functools.lru_cache(maxsize=4096)
def copies_2d(
    shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...], itemsize: int
) -> tuple[Copy2D, ...]:
    """Return the copies of a tensor of ``shape`` and strides ``source`` to strides ``target``, all of them in elements.

    Both must be ``is_copyable``, with their dimensions in the same order.
    """
    dims = _joined(shape, source, target, itemsize)
    if not dims:
        return (Copy2D(0, 0, itemsize, 1, itemsize, itemsize),)
    (count, *strides), *outer = dims if dims[0][1] == dims[0][2] == 1 else [(1, 1, 1), *dims]
    assert strides == [1, 1]
    width = count * itemsize
    tallest = max(outer, default=(1, count, count))
    if outer:
        outer.remove(tallest)
    height, *pitches = tallest
    source_pitch, target_pitch = (pitch * itemsize for pitch in pitches)
    assert min(source_pitch, target_pitch) >= width, "rows overlap"
    found = []
    for place in itertools.product(*(range(size) for size, _, _ in outer)):
        from_begin, to_begin = (
            sum(at * dim[side] for at, dim in zip(place, outer, strict=True)) * itemsize for side in (1, 2)
        )
        found.append(Copy2D(from_begin, to_begin, width, height, source_pitch, target_pitch))
    return tuple(found)


def _joined(
    shape: Sequence[int], source: Sequence[int], target: Sequence[int], itemsize: int
) -> list[tuple[int, int, int]]:
    """Return (size, source stride, target stride) from the innermost dimension on, neighbours that are one joined."""
    dims = sorted((dim for dim in zip(shape, source, target, strict=True) if dim[0] > 1), key=lambda dim: dim[1:])
    found: list[tuple[int, int, int]] = []
    for size, there, here in dims:
        if found:
            inner, inner_there, inner_here = found[-1]
            follows = (there, here) == (inner_there * inner, inner_here * inner)
            if follows and (len(found) > 1 or inner * size * itemsize <= _WIDEST_JOINED):
                found[-1] = inner * size, inner_there, inner_here
                continue
        found.append((size, there, here))
    return found


def is_copyable(x: Tensor) -> bool:
    """Return whether a copy engine reads (B, S, heads, D) well where it lies.

    No two elements are one, a row's heads lie side by side (where D is 1 a head's rows), and it is few copies.
    """
    heads, head_dim = x.shape[2:]
    if head_dim > 1:
        wide = x.stride(3) == 1 and (heads == 1 or x.stride(2) == head_dim)
    else:
        wide = x.stride(1) == 1 or x.shape[1] == 1
    dims = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    apart = all(outer[0] >= inner[0] * inner[1] for inner, outer in itertools.pairwise(dims))
    return wide and apart and x.shape[0] <= _MOST_COPIES and all(stride > 0 for stride, _ in dims)
