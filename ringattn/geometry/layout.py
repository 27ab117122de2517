"""Layouts of a sequence over ranks: which positions each holds, and conversion to shards and back.

- *contiguous*: rank i holds the i-th stretch of ``ceil(total / world)`` positions, as ``torch.chunk`` and DTensor cut.
  Segments that divide a stretch stay on one rank.
- *zigzag*: the sequence is cut in ``2 * world`` pieces that differ by one position at most, and rank i holds pieces i
  and ``2 * world - 1 - i``. Under a causal mask every rank then has the same work.

Everything follows from (layout, total length, world), so no rank needs to ask another.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.errors import InputError
from ringattn.tunable_rules import LAYOUTS
from ringattn.wording import plural
from ringattn.workload import Pattern


class Span(NamedTuple):
    """Positions begin <= p < end."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


# What one rank holds: ascending spans that do not touch. They lie one after the other in the rank's tensors.
Shard = tuple[Span, ...]


def resolve_layout(
    asked: str,
    pattern: Pattern,
    causal: bool,
    measured: Sequence[str] = (),
    *,
    exchanged: bool = False,
    windowed: bool = False,
) -> str:
    """Return the layout that ``asked`` stands for; ``measured`` are the layouts of a profile's plans for the module.

    ``"auto"`` is the one that most of those plans are for. Without any it is zigzag for causal dense attention, and
    else contiguous, so that segments stay on one rank. Where heads are ``exchanged`` every rank has all positions of
    some heads and so the same work whatever the layout; contiguous rows then arrive in order: 0.87 times the ideal's
    time on 4 H100s with 8192 positions each, where zigzag's took 0.90. ``windowed`` work is as even in a ring.
    """
    if asked == "auto":
        counts = Counter(layout for layout in measured if layout)
        if counts:
            return max(sorted(counts), key=lambda layout: counts[layout])
        return "zigzag" if causal and pattern.dense and not (exchanged or windowed) else "contiguous"
    if asked not in LAYOUTS:
        raise InputError(f"layout is {asked!r}; use 'auto' or one of {', '.join(LAYOUTS)}")
    return asked


def shards_of(layout: str, total: int, world: int) -> tuple[Shard, ...]:
    """Return what each rank holds of ``total`` positions; InputError where a rank would hold nothing."""
    if reason := no_shard_reason(layout, total, world):
        raise InputError(f"total_length is {total}: {reason}")
    if layout == "contiguous":
        step = -(-total // world)
        return tuple((Span(i * step, min((i + 1) * step, total)),) for i in range(world))
    edges = [i * total // (2 * world) for i in range(2 * world + 1)]
    pieces = [Span(*ends) for ends in itertools.pairwise(edges)]
    return tuple(joined((pieces[i], pieces[2 * world - 1 - i])) for i in range(world))


def no_shard_reason(layout: str, total: int, world: int) -> str:
    """Return why a rank would hold nothing of ``total`` positions, with the remedy; empty where each holds some."""
    least = _least(layout, total, world)
    if total >= least:
        return ""
    # Contiguous stretches of one position less fill up before the last rank is reached with these.
    below = (-(-total // world) - 1) * world if layout == "contiguous" else 0
    lengths = f"{below} or {least} positions" if below else plural(least, "position")
    others = [f"layout={other!r}, which holds {total}" for other in LAYOUTS if _least(other, total, world) <= total]
    return (
        f"{layout} layout over {world} ranks would leave a rank nothing of {plural(total, 'position')}; "
        f"use {', '.join([lengths, *others])}, or fewer ranks"
    )


def _least(layout: str, total: int, world: int) -> int:
    """Return the fewest positions, of those cut as ``total`` are, of which every rank holds some."""
    return 2 * world if layout == "zigzag" else -(-total // world) * (world - 1) + 1


def joined(spans: Sequence[Span]) -> Shard:
    """Return the spans in ascending order, those that touch made one."""
    whole: list[Span] = []
    for span in sorted(spans):
        if whole and whole[-1].end == span.begin:
            whole[-1] = Span(whole[-1].begin, span.end)
        else:
            whole.append(span)
    return tuple(whole)


def grouped(shards: Sequence[Shard], degree: int) -> tuple[Shard, ...]:
    """Return what each ``degree`` consecutive ranks hold together."""
    return tuple(
        joined([span for shard in shards[first : first + degree] for span in shard])
        for first in range(0, len(shards), degree)
    )


def length_of(shard: Shard) -> int:
    return sum(span.length for span in shard)


def rows_within(inner: Span, shard: Shard) -> int:
    """Return where a span that lies inside ``shard`` begins among the rows of whoever holds the shard."""
    row = 0
    for span in shard:
        if span.begin <= inner.begin and inner.end <= span.end:
            return row + inner.begin - span.begin
        row += span.length
    raise AssertionError(f"{inner} is not inside {shard}")


def positions(shard: Shard, device: torch.device | str | None = None) -> Tensor:
    """Return the global positions (S,) int64 of a rank's rows, for labels and rotary embeddings."""
    return torch.cat([torch.arange(span.begin, span.end, device=device) for span in shard])


def check_own(name: str, x: object) -> None:
    """Raise InputError where ``x`` is a DTensor: it stands for the rows of all ranks, whose messages are not ours."""
    # Asked of the type, as torch.compile does not see it on x; importing the class would take every program 1 s.
    if hasattr(type(x), "to_local"):
        raise InputError(f"{name} is a DTensor; pass the local tensor, {name}.to_local()")


def check_dim(x: Tensor, dim: int) -> None:
    """Raise InputError where ``x`` is no dense tensor of this rank with such a dimension."""
    check_own("x", x)
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        raise InputError(f"x is {f'a {x.layout} tensor' if isinstance(x, Tensor) else repr(x)}; give a dense tensor")
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"dim is {dim}; the tensor has {plural(x.ndim, 'dimension')}, {tuple(x.shape)}")


def shard(x: Tensor, spans: Shard, dim: int = 1) -> Tensor:
    """Return the rows of ``x``, whole along ``dim``, that a shard holds; a view where it is one span."""
    parts = [x.narrow(dim, span.begin, span.length) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def assemble(parts: Sequence[Tensor], shards: Sequence[Shard], dim: int = 1) -> Tensor:
    """Return the whole of the shards of all ranks, given in their order: the inverse of ``shard``."""
    pieces: list[tuple[Span, Tensor]] = []
    for part, shard in zip(parts, shards, strict=True):
        pieces += zip(shard, torch.split(part, [span.length for span in shard], dim), strict=True)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda item: item[0])], dim)
