"""Runs the lanes of a ring: rows travel while kernels work on what has arrived, and one result is made of all lanes.

Legend: B batch, S local length, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ringattn.geometry.ring_schedules import Lane, RingGeometry
from ringattn.runtime.merge import accumulator_dtype
from ringattn.runtime.program import BackwardRows, Triple

from .chunk_rows import add_rows, gather_lse, gather_rows, lse_of_all, merge_rows, set_rows
from .comm import NOTHING, Comm, Pending
from .ring_chunks import BackwardLane, Batch, ForwardLane, RingSetting, RunningLane, own_copy

Result = TypeVar("Result")
Rows = TypeVar("Rows")
SomeLane = TypeVar("SomeLane", bound="RunningLane")


class Ring:
    """Attention of local q, k, v (B, S, H or Hkv, D) over the rows that all members of a ring hold."""

    def __init__(self, setting: RingSetting, geometry: RingGeometry) -> None:
        self._setting, self._geometry = setting, geometry

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out (B, S, H, D) in the compute dtype and lse (B, H, S); q, k and v of any dtype."""
        setting = self._setting
        inputs = _converted((q, k, v), setting.dtype)
        if setting.joins:
            travel = self._travel(ForwardLane, lambda lane: (lane.out.to(setting.dtype), lane.lse))
            return setting.program.forward(*inputs, travel=travel)
        lanes = [ForwardLane(setting, lane, _rows_of(lane, inputs), (k, v)) for lane in self._geometry.lanes]
        finish = self._start(lanes)
        local = setting.local.forward(*inputs) if setting.local is not None else None
        finish()
        return self._assemble(inputs[0], lanes, local)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Triple:
        """dq, dk, dv of this rank's rows in the compute dtype; dout, out and lse are final, and contiguous."""
        setting = self._setting
        inputs = _converted((q, k, v), setting.dtype)
        dout, out = dout.to(setting.dtype), out.to(setting.dtype)
        if setting.joins:
            travel = self._travel(BackwardLane, lambda lane: _converted(lane.grads, setting.dtype))
            return setting.program.backward(dout, *inputs, out, lse, travel=travel)
        lanes = [
            BackwardLane(setting, lane, _backward_rows_of(lane, inputs, dout, out, lse), (k, v))
            for lane in self._geometry.lanes
        ]
        finish = self._start(lanes)
        local = setting.local.backward(dout, *inputs, out, lse) if setting.local is not None else None
        finish()
        return self._assemble_grads(inputs, lanes, local)

    def _start(self, lanes: Sequence[RunningLane]) -> Callable[[], None]:
        """Start the exchanges of a call and compute the diagonal; the result waits for and computes everything else."""
        comm, steps = self._setting.comm, self._geometry.steps
        first = _start_step(comm, 1, lanes)
        for lane in lanes:
            lane.diagonal()

        def finish() -> None:
            pending = first
            for step in range(1, steps + 1):
                pending.wait()
                pending = _start_step(comm, step + 1, lanes, grads_of=step - 1)
                for lane in lanes:
                    lane.work(step)
            pending.wait()
            _start_step(comm, None, lanes, grads_of=steps).wait()

        return finish

    def _travel(
        self,
        lane_of: Callable[[RingSetting, Lane, Rows], SomeLane],
        result: Callable[[SomeLane], Result],
    ) -> Callable[[list[Rows]], Callable[[], list[Result]]]:
        """Return what ``Program`` starts with the rows of every lane, and finishes for each lane's result."""

        def travel(rows: list[Rows]) -> Callable[[], list[Result]]:
            lanes = [lane_of(self._setting, lane, of) for lane, of in zip(self._geometry.lanes, rows, strict=True)]
            wait = self._start(lanes)

            def finish() -> list[Result]:
                wait()
                return [result(lane) for lane in lanes]

            return finish

        return travel

    def _assemble(
        self, q: Tensor, lanes: Sequence[ForwardLane], local: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        setting = self._setting
        batch, length, heads, _ = q.shape
        wide = accumulator_dtype(setting.dtype)
        if not lanes and local is not None:
            return local
        if setting.whole and len(lanes) == 1:
            return lanes[0].out.to(setting.dtype).reshape(q.shape), lse_of_all(lanes[0].lane, lanes[0].lse)
        if setting.whole:
            out = torch.empty(q.shape, dtype=setting.dtype, device=q.device)
            lse = torch.empty(batch, heads, length, dtype=wide, device=q.device)
            for lane in lanes:
                set_rows(lane.lane, lane.group, out, lse, lane.out, lane.lse)
            return out, lse
        if local is None:
            out = torch.zeros(q.shape, dtype=wide, device=q.device)
            lse = torch.full((batch, heads, length), -torch.inf, dtype=wide, device=q.device)
        else:
            out, lse = own_copy(local[0], wide), own_copy(local[1], wide)
        for lane in lanes:
            merge_rows(lane.lane, lane.group, out, lse, lane.out, lane.lse)
        return out.to(setting.dtype), lse

    def _assemble_grads(self, inputs: Triple, lanes: Sequence[BackwardLane], local: Triple | None) -> Triple:
        setting = self._setting
        wide = accumulator_dtype(setting.dtype)
        if not lanes and local is not None:
            return local
        results = []
        for number, x in enumerate(inputs):
            if setting.whole and len(lanes) == 1:
                results.append(lanes[0].grads[number].to(setting.dtype).reshape(x.shape))
                continue
            if local is None:
                total = torch.zeros(x.shape, dtype=wide, device=x.device)
            else:
                total = own_copy(local[number], wide)
            for lane in lanes:
                add_rows(lane.lane, lane.group if number == 0 else 1, total, lane.grads[number])
            results.append(total.to(setting.dtype))
        return results[0], results[1], results[2]


def _start_step(comm: Comm, step: int | None, lanes: Sequence[RunningLane], grads_of: int | None = None) -> Pending:
    """Starts hop ``step`` of all lanes, and, in a backward, the gradients of hop ``grads_of`` on their way home."""
    batch = Batch()
    for lane in lanes:
        for hop in lane.lane.hops:
            if hop.step == step:
                lane.move_keys(hop, batch)
    for lane in lanes:
        for hop in lane.lane.hops:
            if hop.step == grads_of:
                lane.move_grads(hop, batch)
    if not batch.sends and not batch.receives:
        return NOTHING
    return comm.exchange(batch.sends, batch.receives, batch.after)


def _rows_of(lane: Lane, inputs: Triple) -> Triple:
    q, k, v = inputs
    return gather_rows(q, lane, _group_of(inputs)), gather_rows(k, lane, 1), gather_rows(v, lane, 1)


def _backward_rows_of(lane: Lane, inputs: Triple, dout: Tensor, out: Tensor, lse: Tensor) -> BackwardRows:
    group = _group_of(inputs)
    dout, out = gather_rows(dout, lane, group).contiguous(), gather_rows(out, lane, group).contiguous()
    return BackwardRows(_rows_of(lane, inputs), dout, out, gather_lse(lse, lane, group))


def _group_of(inputs: Triple) -> int:
    return inputs[0].shape[2] // inputs[1].shape[2]


def _converted(tensors: Triple, dtype: torch.dtype) -> Triple:
    q, k, v = tensors
    return q.to(dtype), k.to(dtype), v.to(dtype)
