"""Runs the lanes of a ring: rows travel while kernels work on what has arrived, and one result is made of all lanes.

Legend: B batch, S local length, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

from ringattn.geometry.ring_schedules import Lane, RingGeometry
from ringattn.runtime.merge import accumulator_dtype
from ringattn.runtime.program import BackwardRows, Triple

from .chunk_rows import add_rows, gather_lse, gather_rows, lse_of_all, merge_rows, set_rows
from .comm import NOTHING, Comm, CommError, Pending
from .draining import DrainedError, Failsafe
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
        journey = _Journey(self._setting, self._geometry)
        return journey.made(
            lambda: self._forward(journey, q, k, v),
            lambda lane: ForwardLane(self._setting, lane, self._blank(lane, k)),
        )

    def _forward(self, journey: _Journey, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        setting = self._setting
        inputs = _converted((q, k, v), setting.dtype)
        if setting.joins:
            travel = self._travel(journey, ForwardLane, lambda lane: (lane.out.to(setting.dtype), lane.lse))
            return setting.program.forward(*inputs, travel=travel)
        lanes = [ForwardLane(setting, lane, _rows_of(lane, inputs), (k, v)) for lane in self._geometry.lanes]
        journey.start(lanes)
        local = journey.safe.run(setting.local.forward, *inputs) if setting.local is not None else None
        journey.finish()
        return self._assemble(inputs[0], lanes, local)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Triple:
        """dq, dk, dv of this rank's rows in the compute dtype; dout, out and lse are final, and contiguous."""
        journey = _Journey(self._setting, self._geometry)

        def blank(lane: Lane) -> BackwardLane:
            rows = self._blank(lane, k)
            return BackwardLane(self._setting, lane, BackwardRows(rows, *rows))

        return journey.made(lambda: self._backward(journey, dout, q, k, v, out, lse), blank)

    def _backward(
        self, journey: _Journey, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        setting = self._setting
        inputs = _converted((q, k, v), setting.dtype)
        dout, out = dout.to(setting.dtype), out.to(setting.dtype)
        if setting.joins:
            travel = self._travel(journey, BackwardLane, lambda lane: _converted(lane.summed(), setting.dtype))
            return setting.program.backward(dout, *inputs, out, lse, travel=travel)
        lanes = [
            BackwardLane(setting, lane, _backward_rows_of(lane, inputs, dout, out, lse), (k, v))
            for lane in self._geometry.lanes
        ]
        journey.start(lanes)
        local = journey.safe.run(setting.local.backward, dout, *inputs, out, lse) if setting.local is not None else None
        journey.finish()
        return self._assemble_grads(inputs, lanes, local)

    def _blank(self, lane: Lane, k: Tensor) -> Triple:
        """Rows that hold nothing and take no memory, where a rank could not gather its own."""
        shape = (k.shape[0] * lane.segments, lane.rows, lane.kv_heads, k.shape[3])
        rows = torch.zeros((), dtype=self._setting.wire, device=k.device).expand(shape)
        return rows, rows, rows

    def _travel(
        self,
        journey: _Journey,
        lane_of: Callable[[RingSetting, Lane, Rows], SomeLane],
        result: Callable[[SomeLane], Result],
    ) -> Callable[[list[Rows]], Callable[[], list[Result]]]:
        """What ``Program`` is given: begins the journey of the rows of every lane, then gives each lane's result."""

        def travel(rows: list[Rows]) -> Callable[[], list[Result]]:
            lanes = [lane_of(self._setting, lane, of) for lane, of in zip(self._geometry.lanes, rows, strict=True)]
            journey.start(lanes)

            def finish() -> list[Result]:
                journey.finish()
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
                results.append(lanes[0].summed()[number].to(setting.dtype).reshape(x.shape))
                continue
            if local is None:
                total = torch.zeros(x.shape, dtype=wide, device=x.device)
            else:
                total = own_copy(local[number], wide)
            for lane in lanes:
                add_rows(lane.lane, lane.group if number == 0 else 1, total, lane.summed()[number])
            results.append(total.to(setting.dtype))
        return results[0], results[1], results[2]


class _Journey:
    """The exchanges of one call: started, and finished after whatever this rank does alone in between."""

    def __init__(self, setting: RingSetting, geometry: RingGeometry) -> None:
        self.safe = Failsafe(setting.report)
        self._comm, self._geometry = setting.comm, geometry
        self._lanes: Sequence[RunningLane] = ()
        self._pending = NOTHING
        self._stage: Literal["ahead", "under way", "over", "lost"] = "ahead"

    def start(self, lanes: Sequence[RunningLane]) -> None:
        self._lanes, self._stage = lanes, "lost"  # unless every message is started
        self._pending = _start(self._comm, 1, lanes)
        self._stage = "under way"
        for lane in lanes:
            self.safe.run(lane.diagonal)

    def finish(self) -> None:
        """Everything arrived, and everything that hangs on it is computed; raises DrainedError if a step failed."""
        self._stage = "lost"
        steps = self._geometry.steps
        for step in range(1, steps + 1):
            self._pending.wait()
            self._pending = _start(self._comm, step + 1, self._lanes, grads_of=step - 1)
            for lane in self._lanes:
                self.safe.run(lane.work, step)
        self._pending.wait()
        _start(self._comm, None, self._lanes, grads_of=steps).wait()
        self._stage = "over"
        self.safe.close()

    def made(self, call: Callable[[], Result], blank: Callable[[Lane], RunningLane]) -> Result:
        """The result of a call that starts and finishes this journey.

        Where it fails before, in between or afterwards the journey is made all the same, with ``blank`` lanes if there
        are no others: DrainedError. What fails inside the exchanges themselves is raised as it is.
        """
        try:
            return call()
        except (CommError, DrainedError):
            raise
        except Exception as error:
            if self._stage == "lost":
                raise
            self.safe.fail(error)
            if self._stage == "ahead":
                self.start([blank(lane) for lane in self._geometry.lanes])
            if self._stage == "under way":
                self.finish()
            raise DrainedError(error) from error


def _start(comm: Comm, step: int | None, lanes: Sequence[RunningLane], grads_of: int | None = None) -> Pending:
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
