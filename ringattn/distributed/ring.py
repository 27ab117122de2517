"""Ring attention of one call: rows travel while kernels work on what has arrived; chunks are merged to one result.

Legend: B batch, S local length, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ringattn.geometry.ring_geometry import RingGeometry
from ringattn.geometry.ring_schedules import Chunk
from ringattn.runtime.executor import Triple
from ringattn.runtime.merge import accumulator_dtype
from ringattn.runtime.program import BackwardRows

from .chunk_rows import add_rows, gather_lse, gather_rows, lse_of_all, merge_rows, set_rows
from .comm import NOTHING, Comm, Pending
from .ring_chunks import BackwardChunk, Batch, ForwardChunk, RingSetting, RunningChunk, own_copy

Result = TypeVar("Result")
Rows = TypeVar("Rows")
SomeChunk = TypeVar("SomeChunk", bound="RunningChunk")


class Ring:
    """Attention of local q, k, v (B, S, H or Hkv, D) over the rows that all members of a ring hold."""

    def __init__(self, setting: RingSetting, geometry: RingGeometry) -> None:
        self._setting, self._geometry = setting, geometry

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out (B, S, H, D) in the compute dtype and lse (B, H, S); q, k and v of any dtype."""
        setting = self._setting
        inputs = _converted((q, k, v), setting.dtype)
        if setting.joins:
            travel = self._travel(ForwardChunk, lambda chunk: (chunk.out.to(setting.dtype), chunk.lse))
            return setting.program.forward(*inputs, travel=travel)
        chunks = [ForwardChunk(setting, chunk, self._gather(chunk, inputs), (k, v)) for chunk in self._geometry.chunks]
        finish = self._start(chunks)
        local = setting.local.forward(*inputs) if setting.local is not None else None
        finish()
        return self._assemble(inputs[0], chunks, local)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Triple:
        """Return dq, dk, dv of this rank's rows in the compute dtype; dout, out and lse are final, and contiguous."""
        setting = self._setting
        inputs = _converted((q, k, v), setting.dtype)
        dout, out = dout.to(setting.dtype), out.to(setting.dtype)
        if setting.joins:
            travel = self._travel(BackwardChunk, lambda chunk: _converted(chunk.grads, setting.dtype))
            return setting.program.backward(dout, *inputs, out, lse, travel=travel)
        chunks = [
            BackwardChunk(setting, chunk, self._gather_backward(chunk, inputs, dout, out, lse), (k, v))
            for chunk in self._geometry.chunks
        ]
        finish = self._start(chunks)
        local = setting.local.backward(dout, *inputs, out, lse) if setting.local is not None else None
        finish()
        return self._assemble_grads(inputs, chunks, local)

    def _start(self, chunks: Sequence[RunningChunk]) -> Callable[[], None]:
        """Start the exchanges of a call and compute the diagonal; the result waits for and computes everything else."""
        comm, steps = self._setting.comm, self._geometry.steps
        first = _start_step(comm, 1, chunks)
        for chunk in chunks:
            chunk.diagonal()

        def finish() -> None:
            pending = first
            for step in range(1, steps + 1):
                pending.wait()
                pending = _start_step(comm, step + 1, chunks, grads_of=step - 1)
                for chunk in chunks:
                    chunk.work(step)
            pending.wait()
            _start_step(comm, None, chunks, grads_of=steps).wait()

        return finish

    def _travel(
        self,
        chunk_of: Callable[[RingSetting, Chunk, Rows], SomeChunk],
        result: Callable[[SomeChunk], Result],
    ) -> Callable[[list[Rows]], Callable[[], list[Result]]]:
        """Return what ``Program`` starts with the rows of every chunk, and finishes for each chunk's result."""

        def travel(rows: list[Rows]) -> Callable[[], list[Result]]:
            chunks = [chunk_of(self._setting, chunk, of) for chunk, of in zip(self._geometry.chunks, rows, strict=True)]
            wait = self._start(chunks)

            def finish() -> list[Result]:
                wait()
                return [result(chunk) for chunk in chunks]

            return finish

        return travel

    def _gather(self, chunk: Chunk, inputs: Triple) -> Triple:
        return _rows_of(chunk, inputs)

    def _gather_backward(self, chunk: Chunk, inputs: Triple, dout: Tensor, out: Tensor, lse: Tensor) -> BackwardRows:
        return _backward_rows_of(chunk, inputs, dout, out, lse)

    def _assemble(
        self, q: Tensor, chunks: Sequence[ForwardChunk], local: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        setting = self._setting
        batch, length, heads, _ = q.shape
        wide = accumulator_dtype(setting.dtype)
        if not chunks and local is not None:
            return local
        if setting.whole and len(chunks) == 1:
            return chunks[0].out.to(setting.dtype).reshape(q.shape), lse_of_all(chunks[0].chunk, chunks[0].lse)
        if setting.whole:
            out = torch.empty(q.shape, dtype=setting.dtype, device=q.device)
            lse = torch.empty(batch, heads, length, dtype=wide, device=q.device)
            for chunk in chunks:
                set_rows(chunk.chunk, chunk.group, out, lse, chunk.out, chunk.lse)
            return out, lse
        if local is None:
            out = torch.zeros(q.shape, dtype=wide, device=q.device)
            lse = torch.full((batch, heads, length), -torch.inf, dtype=wide, device=q.device)
        else:
            out, lse = own_copy(local[0], wide), own_copy(local[1], wide)
        for chunk in chunks:
            merge_rows(chunk.chunk, chunk.group, out, lse, chunk.out, chunk.lse)
        return out.to(setting.dtype), lse

    def _assemble_grads(self, inputs: Triple, chunks: Sequence[BackwardChunk], local: Triple | None) -> Triple:
        setting = self._setting
        wide = accumulator_dtype(setting.dtype)
        if not chunks and local is not None:
            return local
        results = []
        for number, x in enumerate(inputs):
            if setting.whole and len(chunks) == 1:
                results.append(chunks[0].grads[number].to(setting.dtype).reshape(x.shape))
                continue
            if local is None:
                total = torch.zeros(x.shape, dtype=wide, device=x.device)
            else:
                total = own_copy(local[number], wide)
            for chunk in chunks:
                add_rows(chunk.chunk, chunk.group if number == 0 else 1, total, chunk.grads[number])
            results.append(total.to(setting.dtype))
        return results[0], results[1], results[2]


def _start_step(comm: Comm, step: int | None, chunks: Sequence[RunningChunk], grads_of: int | None = None) -> Pending:
    """Start hop ``step`` of all chunks, and, in a backward, the gradients of hop ``grads_of`` on their way home."""
    batch = Batch()
    for chunk in chunks:
        for hop in chunk.chunk.hops:
            if hop.step == step:
                chunk.move_keys(hop, batch)
    for chunk in chunks:
        for hop in chunk.chunk.hops:
            if hop.step == grads_of:
                chunk.move_grads(hop, batch)
    if not batch.sends and not batch.receives:
        return NOTHING
    return comm.exchange(batch.sends, batch.receives, batch.after)


def _rows_of(chunk: Chunk, inputs: Triple) -> Triple:
    q, k, v = inputs
    return gather_rows(q, chunk, _group_of(inputs)), gather_rows(k, chunk, 1), gather_rows(v, chunk, 1)


def _backward_rows_of(chunk: Chunk, inputs: Triple, dout: Tensor, out: Tensor, lse: Tensor) -> BackwardRows:
    group = _group_of(inputs)
    dout, out = gather_rows(dout, chunk, group).contiguous(), gather_rows(out, chunk, group).contiguous()
    return BackwardRows(_rows_of(chunk, inputs), dout, out, gather_lse(lse, chunk, group))


def _group_of(inputs: Triple) -> int:
    return inputs[0].shape[2] // inputs[1].shape[2]


def _converted(tensors: Triple, dtype: torch.dtype) -> Triple:
    q, k, v = tensors
    return q.to(dtype), k.to(dtype), v.to(dtype)
