"""Faults put into the code that runs over ranks, one at a time: a piece of a function's text, and what stands there."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from oracle import DENSE, Case, pattern_of
from random_cases import Rows, Trial, rows_of
from ring_cases import RingCase

from ringattn.distributed import chunk_rows, head_exchange, ring, ring_chunks

_MODULES = {"chunk_rows": chunk_rows, "ring_chunks": ring_chunks, "ring": ring, "head_exchange": head_exchange}


def _trial(*ring: Any, **more: Any) -> Trial:
    return Trial(RingCase(*ring, **more), world=WORLD)


WORLD = 4
WHOLE, SEVERAL, STAYING = (
    pattern_of([3], [1]),
    pattern_of([5, 7, 33], [2, 1, 5], "blocked"),
    pattern_of([4, 20, 48], [1, 2, 3]),
)
CASES = {
    # The last rank holds whole segments of 3; those of the others cross.
    "whole": _trial(Case(39, 4, 2, 4, 2, WHOLE, True), "ring", "contiguous", ragged=True),
    "whole, groups": _trial(Case(39, 4, 2, 4, 1, WHOLE), "all-gather", "contiguous", head_groups=2, ragged=True),
    "several": _trial(Case(45, 4, 2, 4, 2, SEVERAL, True), "all-gather", "zigzag", head_groups=2, ragged=True),
    "staying": _trial(Case(47, 4, 2, 4, 2, STAYING, True), "ring", "contiguous", ragged=True),
    "dense": _trial(Case(45, 4, 2, 4, 2, DENSE, True), "ring", "zigzag", ragged=True),
    "dense, gathered": _trial(Case(45, 4, 2, 4, 2), "all-gather", "zigzag", ragged=True),
    "spread": _trial(
        Case(45, 16, 8, 4, 2, pattern_of([20, 45], [3, 1])), "ulysses", "zigzag", head_groups=2, ragged=True
    ),
    "spread, batch 1": _trial(Case(40, 8, 4, 4, 1, DENSE, True), "ulysses", "zigzag"),
    "spread, contiguous": _trial(Case(40, 8, 4, 4, 2, DENSE, True), "ulysses", "contiguous"),
    "grid": _trial(Case(48, 8, 4, 4, 2, pattern_of([9, 48], [1, 3]), True), "ulysses-ring", "contiguous", ulysses=2),
}


class Fault(NamedTuple):
    """In ``place``, "file.function" or "file.class.method", ``wrong`` stands instead of ``right``.

    Messages keep their sizes and nothing raises, so that only wrong numbers of ``case`` tell.
    """

    place: str
    right: str
    wrong: str
    case: str

    @property
    def function(self) -> Any:
        module, *names = self.place.split(".")
        found: Any = _MODULES[module]
        for name in names:
            found = getattr(found, name)
        return found


FAULTS = [
    # chunk_rows
    Fault(
        "chunk_rows.lse_of_all",
        ".transpose(1, 2).flatten(2)",
        ".reshape(lse.shape[0] // chunk.segments, lse.shape[1], -1)",
        "whole",
    ),
    Fault("chunk_rows.gather_lse", "return lse_BHS.contiguous()", "return lse_BHS.flip(1).contiguous()", "dense"),
    Fault(
        "chunk_rows.set_rows",
        "in _lse_pairs(lse_BHS, lse, chunk, group)",
        "in list(_lse_pairs(lse_BHS, lse, chunk, group))[:-1]",
        "whole",
    ),
    Fault("chunk_rows.set_rows", "there.copy_(here)\n    for", "there.copy_(here.flip(2))\n    for", "whole"),
    Fault("chunk_rows.add_rows", "there.add_(here)", "there.copy_(here)", "several"),
    Fault("chunk_rows.merge_block", "both = kept + added", "both = torch.maximum(kept, added)", "dense"),
    Fault("chunk_rows.merge_block", "torch.exp(part_lse - peak)", "torch.exp(total_lse - peak)", "dense"),
    Fault("chunk_rows.merge_block", "part.to(total.dtype)", "part.bfloat16().to(total.dtype)", "dense"),
    Fault("chunk_rows._in_place", "run.first * group, run.count", "0, run.count", "whole, groups"),
    Fault("chunk_rows._in_place", "narrow(1, call.start,", "narrow(1, 0,", "whole"),
    Fault("chunk_rows._lse_pairs", ".movedim(4, 2)", ".flip(4).movedim(4, 2)", "whole"),
    Fault("chunk_rows._parts", "head += run.count * group", "head += run.count", "grid"),
    Fault("chunk_rows._parts", "row += call.rows", "row += 0", "several"),
    # ring_chunks
    Fault("ring_chunks.ForwardChunk.work", "lse.transpose(1, 2))", "lse.transpose(1, 2).flip(1))", "dense"),
    Fault("ring_chunks.ForwardChunk.diagonal", "wide = accumulator_dtype(out.dtype)", "wide = torch.bfloat16", "dense"),
    Fault(
        "ring_chunks.RunningChunk.arrived",
        "rows[:, :, :heads], rows[:, :, heads:]",
        "rows[:, :, heads:], rows[:, :, :heads]",
        "dense",
    ),
    Fault(
        "ring_chunks.RunningChunk.move_keys",
        "transfer.begin : transfer.begin + transfer.rows]",
        "-transfer.rows:]",
        "dense",
    ),
    Fault(
        "ring_chunks.RunningChunk._receive_into", "target.copy_(part)", "target.copy_(part.flip(1))", "dense, gathered"
    ),
    Fault("ring_chunks.BackwardChunk._block", "add_(dq)", "add_(dq, alpha=2)", "dense"),
    Fault(
        "ring_chunks.BackwardChunk._block",
        "self.rows_lse[:, :, queries]",
        "self.rows_lse.roll(1, 2)[:, :, queries]",
        "dense",
    ),
    Fault("ring_chunks.BackwardChunk._block", "torch.cat((dk, dv), 2)", "torch.cat((dv, dk), 2)", "dense"),
    Fault(
        "ring_chunks.BackwardChunk._add_home",
        "slice(transfer.begin, transfer.begin + transfer.rows)",
        "slice(transfer.rows)",
        "dense, gathered",
    ),
    Fault(
        "ring_chunks.BackwardChunk._add_home", "self.grads[1][:, rows].add_", "self.grads[1][:, rows].copy_", "dense"
    ),
    Fault(
        "ring_chunks.BackwardChunk.move_grads",
        "transfer.at : transfer.at + transfer.rows]",
        ": transfer.rows]",
        "several",
    ),
    Fault("ring_chunks.BackwardChunk.diagonal", "accumulator_dtype(self.setting.dtype)", "torch.float16", "dense"),
    # ring
    Fault("ring.Ring._assemble", "-torch.inf", "0.0", "several"),
    Fault("ring.Ring._assemble", "own_copy(local[0], wide)", "torch.zeros_like(q, dtype=wide)", "staying"),
    Fault("ring.Ring._assemble_grads", "chunk.group if number == 0 else 1", "1", "several"),
    Fault("ring.Ring._assemble_grads", "total = own_copy(", "total = 2 * own_copy(", "staying"),
    Fault("ring.Ring._assemble_grads", "chunks[0].grads[number].to", "chunks[0].grads[min(number, 1)].to", "dense"),
    Fault("ring._backward_rows_of", "gather_rows(out, chunk, group)", "gather_rows(dout, chunk, group)", "dense"),
    Fault("ring._rows_of", "gather_rows(v, chunk, 1)", "gather_rows(k, chunk, 1)", "dense"),
    Fault("ring._converted", "v.to(dtype)", "v.bfloat16().to(dtype)", "dense"),
    Fault("ring.Ring._start", "grads_of=step - 1)", "grads_of=None)", "dense"),
    Fault("ring.Ring._start", "grads_of=steps)", "grads_of=None)", "dense"),
    # head_exchange
    Fault(
        "head_exchange.HeadExchange._by_member",
        "(len(self._members), self._groups, -1))[:, :, :, group]",
        "(self._groups, len(self._members), -1))[:, :, group]",
        "spread",
    ),
    Fault("head_exchange.HeadExchange._by_member", "[:, :, :, group]", "[:, :, :, 0]", "spread"),
    Fault("head_exchange.HeadExchange._in_order", "batch == 1 and self._ascending", "batch == 1", "spread, batch 1"),
    Fault(
        "head_exchange.HeadExchange._in_order",
        "batch == 1 and self._ascending",
        "self._ascending",
        "spread, contiguous",
    ),
    Fault("head_exchange.HeadExchange._pieces", "row += count", "row += 0", "spread"),
    Fault(
        "head_exchange.HeadExchange._pieces",
        "rows[:, begin : begin + count]",
        "rows.flip(1)[:, begin : begin + count]",
        "spread",
    ),
    Fault(
        "head_exchange.HeadExchange.scatter_heads", ".permute(2, 0, 1, 3, 4)", ".flip(2).permute(2, 0, 1, 3, 4)", "grid"
    ),
    Fault("head_exchange.HeadExchange.scatter_heads", "there.copy_(here) for", "here.copy_(there) for", "spread"),
    Fault("head_exchange.HeadExchange.gather_heads", "there.copy_(here)", "there.copy_(here.flip(1))", "spread"),
    Fault(
        "head_exchange.HeadExchange.gather_heads", "place.copy_(arriving)", "place.copy_(arriving.roll(1, 0))", "spread"
    ),
    Fault(
        "head_exchange.HeadExchange.gather_heads", "place.copy_(arriving)", "place.copy_(arriving.roll(1, 2))", "grid"
    ),
]


@contextmanager
def put_in(fault: Fault) -> Iterator[None]:
    """Whoever calls the function, by whatever name, runs the faulty one."""
    function: Callable[..., Any] = fault.function
    right = textwrap.dedent(inspect.getsource(function))
    assert right.count(fault.right) == 1, f"{fault.place} has changed"
    namespace: dict[str, Any] = {}
    code = compile(right.replace(fault.right, fault.wrong), fault.place, "exec", __future__.annotations.compiler_flag)
    exec(code, function.__globals__, namespace)  # noqa: S102
    kept, function.__code__ = function.__code__, namespace[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = kept


def rows_with(faults: Sequence[Fault]) -> list[Rows | str]:
    """This rank's rows of the case of each fault, with the fault in."""
    found = []
    for fault in faults:
        with put_in(fault):
            found += rows_of([CASES[fault.case]])
    return found
