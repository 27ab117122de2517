"""Runs the lanes of a ring: rows travel while kernels work on what has arrived.

Forward: every lane keeps one partial result (out in float32, float64 for float64, and lse) that the blocks of each
hop are merged into. Backward: every block against the *final* out and LSE; keys and values travel again, and the
gradients of received keys go home while the next block is computed.

Legend: N segments times batch, M rows of a lane, J its key/value heads, G = H / Hkv; B, S, H, D as everywhere. Keys
and values travel as one (N, rows, 2J, D) message: heads of K, then heads of V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

from .block_kernel import Backward, Forward
from .comm import NOTHING, Comm, CommError, Message, Pending
from .lane_rows import add_rows, gather_lse, gather_rows, merge_rows, set_rows
from .merge import accumulator_dtype
from .program import BackwardRows, Program, Triple
from .ring_schedules import Hop, Lane, Rectangle, RingGeometry, Transfer

Result = TypeVar("Result")
Rows = TypeVar("Rows")
SomeLane = TypeVar("SomeLane", bound="_Lane")


class DrainedError(Exception):
    """A step failed, and every message of the call was exchanged all the same; ``error`` is what to raise."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Failsafe:
    """Runs steps until one fails; from then on none runs, so that what must still be sent can be sent.

    A rank that stopped in the middle of an exchange would leave the others waiting.
    """

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._error: Exception | None = None
        self._report = report

    def run(self, step: Callable[..., Result], *args: object) -> Result | None:
        return None if self._error is not None else self.attempt(step, *args)

    def attempt(self, step: Callable[..., Result], *args: object) -> Result | None:
        """Runs a step that itself sends and receives, also after a failure; a lost peer ends it all the same."""
        try:
            return step(*args)
        except CommError:
            raise
        except Exception as error:  # noqa: BLE001  raised again by ``close``, after the last message
            self.fail(error.error if isinstance(error, DrainedError) else error)
            return None

    def fail(self, error: Exception) -> None:
        """What runs beside these steps failed."""
        if self._error is None:
            self._error = error
            self._report(error)

    def close(self) -> None:
        if self._error is not None:
            raise DrainedError(self._error) from self._error


@dataclass(frozen=True, slots=True)
class BranchKernels:
    """The kernels of one branch for the block on the diagonal and for full blocks; no backward for inference."""

    diagonal_forward: Forward
    full_forward: Forward
    diagonal_backward: Backward | None
    full_backward: Backward | None


@dataclass(frozen=True, slots=True)
class RingSetting:
    """What is the same for every shape: how to reach the others and what to compute with.

    ``rank_of`` gives the group's rank of a ring member. Keys and values travel in the ``wire`` dtype, their gradients
    in ``grad_wire``; blocks are computed in ``dtype``. ``local`` runs the branches that stay on this rank; where it
    ``joins``, it also gathers the rows of the lanes and merges what becomes of them, all in one step.
    ``whole``: every position and head is a row of exactly one lane, so results are written and not merged; false where
    no row here is one, as where a segment is shorter than its rate.
    ``merge`` is ``lane_rows.merge_block``, or what does the same on a GPU.
    """

    comm: Comm
    rank_of: tuple[int, ...]
    kernels: tuple[BranchKernels, ...]
    local: Program | None
    joins: bool
    dtype: torch.dtype
    wire: torch.dtype
    grad_wire: torch.dtype
    whole: bool
    merge: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    report: Callable[[BaseException], None]

    @property
    def program(self) -> Program:
        assert self.local is not None, "lanes join a program"
        return self.local


class Ring:
    """Attention of local q, k, v (B, S, H or Hkv, D) over the rows that all members of a ring hold."""

    def __init__(self, setting: RingSetting, geometry: RingGeometry) -> None:
        self._setting, self._geometry = setting, geometry

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out (B, S, H, D) in the compute dtype and lse (B, H, S); q, k and v of any dtype."""
        journey = _Journey(self._setting, self._geometry)
        return journey.made(
            lambda: self._forward(journey, q, k, v),
            lambda lane: _ForwardLane(self._setting, lane, self._blank(lane, k)),
        )

    def _forward(self, journey: _Journey, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        setting = self._setting
        inputs = _converted((q, k, v), setting.dtype)
        if setting.joins:
            travel = self._travel(journey, _ForwardLane, lambda lane: (lane.out.to(setting.dtype), lane.lse))
            return setting.program.forward(*inputs, travel=travel)
        lanes = [_ForwardLane(setting, lane, _rows_of(lane, inputs), (k, v)) for lane in self._geometry.lanes]
        journey.start(lanes)
        local = journey.safe.run(setting.local.forward, *inputs) if setting.local is not None else None
        journey.finish()
        return self._assemble(inputs[0], lanes, local)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Triple:
        """dq, dk, dv of this rank's rows in the compute dtype; dout, out and lse are final, and contiguous."""
        journey = _Journey(self._setting, self._geometry)

        def blank(lane: Lane) -> _BackwardLane:
            rows = self._blank(lane, k)
            return _BackwardLane(self._setting, lane, BackwardRows(rows, *rows))

        return journey.made(lambda: self._backward(journey, dout, q, k, v, out, lse), blank)

    def _backward(
        self, journey: _Journey, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        setting = self._setting
        inputs = _converted((q, k, v), setting.dtype)
        dout, out = dout.to(setting.dtype), out.to(setting.dtype)
        if setting.joins:
            travel = self._travel(journey, _BackwardLane, lambda lane: _converted(lane.summed(), setting.dtype))
            return setting.program.backward(dout, *inputs, out, lse, travel=travel)
        lanes = [
            _BackwardLane(setting, lane, _backward_rows_of(lane, inputs, dout, out, lse), (k, v))
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
        self, q: Tensor, lanes: Sequence[_ForwardLane], local: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        setting = self._setting
        batch, length, heads, _ = q.shape
        wide = accumulator_dtype(setting.dtype)
        if not lanes and local is not None:
            return local
        if setting.whole and len(lanes) == 1:
            return lanes[0].out.to(setting.dtype).reshape(q.shape), lanes[0].lse.reshape(batch, heads, length)
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
            out, lse = _own_copy(local[0], wide), _own_copy(local[1], wide)
        for lane in lanes:
            merge_rows(lane.lane, lane.group, out, lse, lane.out, lane.lse)
        return out.to(setting.dtype), lse

    def _assemble_grads(self, inputs: Triple, lanes: Sequence[_BackwardLane], local: Triple | None) -> Triple:
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
                total = _own_copy(local[number], wide)
            for lane in lanes:
                add_rows(lane.lane, lane.group if number == 0 else 1, total, lane.summed()[number])
            results.append(total.to(setting.dtype))
        return results[0], results[1], results[2]


class _Journey:
    """The exchanges of one call: started, and finished after whatever this rank does alone in between."""

    def __init__(self, setting: RingSetting, geometry: RingGeometry) -> None:
        self.safe = Failsafe(setting.report)
        self._comm, self._geometry = setting.comm, geometry
        self._lanes: Sequence[_Lane] = ()
        self._pending = NOTHING
        self._stage: Literal["ahead", "under way", "over", "lost"] = "ahead"

    def start(self, lanes: Sequence[_Lane]) -> None:
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

    def made(self, call: Callable[[], Result], blank: Callable[[Lane], _Lane]) -> Result:
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


def _own_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous and not shared with a kernel's result."""
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


def _own_copies(given: list[Tensor], dtype: torch.dtype) -> Triple:
    """Copies of three tensors, each of which is let go before the next is copied."""
    q, k, v = (_own_copy(given.pop(0), dtype) for _ in range(3))
    return q, k, v


@dataclass(slots=True)
class _Batch:
    """The messages of one step of all lanes."""

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)


def _start(comm: Comm, step: int | None, lanes: Sequence[_Lane], grads_of: int | None = None) -> Pending:
    """Starts hop ``step`` of all lanes, and, in a backward, the gradients of hop ``grads_of`` on their way home."""
    batch = _Batch()
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


class _Lane:
    """One lane during one call: its rows here, and the keys and values that its hops bring."""

    def __init__(
        self, setting: RingSetting, lane: Lane, rows: Triple, wired: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """``rows`` of q, k and v in the compute dtype; ``wired`` are this rank's k and v as they came, if given."""
        self.setting, self.lane = setting, lane
        self.kernels = setting.kernels[lane.branch]
        self.q, self.k, self.v = rows
        self.group = self.q.shape[2] // self.k.shape[2]
        self._brought: dict[int, Tensor] = {}  # by step: the keys and values that its hop brings
        self._own: Tensor | None = None  # what goes out from here
        if lane.hops:
            narrow = (self.k, self.v)
            if wired is not None and wired[0].dtype is not self.k.dtype:
                narrow = gather_rows(wired[0], lane, 1), gather_rows(wired[1], lane, 1)
            self._own = torch.cat(narrow, 2).to(setting.wire)

    def move_keys(self, hop: Hop, batch: _Batch) -> None:
        for transfer in hop.sends:
            rows = self._own if transfer.owner == self.lane.me else self._brought[hop.step - 1]
            assert rows is not None
            part = rows[:, transfer.begin : transfer.begin + transfer.rows].contiguous()
            batch.sends.append(Message(part, self.rank(transfer.peer)))
        self._own = None  # it goes out with the first hop alone, and the messages hold it until they are sent
        self._brought.pop(hop.step - 2, None)
        buffer = self._brought[hop.step] = self._buffer(hop.rows, self.setting.wire)
        for transfer in hop.receives:
            self._receive_into(buffer[:, transfer.at : transfer.at + transfer.rows], transfer, batch)

    def diagonal(self) -> None:
        raise NotImplementedError

    def work(self, step: int) -> None:
        raise NotImplementedError

    def move_grads(self, hop: Hop, batch: _Batch) -> None:
        """Only a backward has gradients to move."""

    def arrived(self, step: int) -> tuple[Tensor, Tensor]:
        """K and V that the hop of this step brought, in the compute dtype."""
        rows = self._brought[step].to(self.setting.dtype)
        heads = self.lane.kv_heads
        return rows[:, :, :heads], rows[:, :, heads:]

    def rank(self, member: int) -> int:
        return self.setting.rank_of[self.lane.members[member]]

    def _buffer(self, rows: int, dtype: torch.dtype) -> Tensor:
        blocks, _, heads, head_dim = self.k.shape
        return torch.empty((blocks, rows, 2 * heads, head_dim), dtype=dtype, device=self.k.device)

    def _receive_into(self, target: Tensor, transfer: Transfer, batch: _Batch) -> None:
        """In place where the rows are contiguous, else by way of a buffer."""
        if target.is_contiguous():
            batch.receives.append(Message(target, self.rank(transfer.peer)))
            return
        part = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        batch.receives.append(Message(part, self.rank(transfer.peer)))
        batch.after.append(lambda: target.copy_(part))


class _ForwardLane(_Lane):
    """``out`` (N, M, J * G, D) and ``lse`` (N, J * G, M): the merge of what was computed so far."""

    out: Tensor
    lse: Tensor

    def diagonal(self) -> None:
        out, lse = self.kernels.diagonal_forward(self.q, self.k, self.v)
        if any(hop.work for hop in self.lane.hops):
            wide = accumulator_dtype(out.dtype)
            out, lse = _own_copy(out, wide), _own_copy(lse, lse.dtype)
        self.out, self.lse = out, lse

    def work(self, step: int) -> None:
        for hop in self.lane.hops:
            if hop.step != step or not hop.work:
                continue
            k, v = self.arrived(step)
            for q_begin, q_end, k_begin, k_end in hop.work:
                queries, keys = slice(q_begin, q_end), slice(k_begin, k_end)
                out, lse = self.kernels.full_forward(self.q[:, queries], k[:, keys], v[:, keys])
                total, total_lse = self.out[:, queries], self.lse[:, :, queries].transpose(1, 2)
                self.setting.merge(total, total_lse, out, lse.transpose(1, 2))


class _BackwardLane(_Lane):
    """``grads``: dq (N, M, J * G, D), dk and dv (N, M, J, D), the sums of what was computed and came home so far."""

    grads: Triple | None = None  # None until the diagonal is done

    def __init__(
        self, setting: RingSetting, lane: Lane, rows: BackwardRows, wired: tuple[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__(setting, lane, rows.inputs, wired)
        self.dout, self.rows_out, self.rows_lse = rows.dout, rows.out, rows.lse
        self._going: dict[int, Tensor] = {}  # by step: gradients of received keys, (N, rows, 2J, D)

    def diagonal(self) -> None:
        assert self.kernels.diagonal_backward is not None, "a plan for inference has no backward"
        inputs = self.dout, self.q, self.k, self.v, self.rows_out, self.rows_lse
        if self.lane.hops:
            given = list(self.kernels.diagonal_backward(*inputs))
            self.grads = _own_copies(given, accumulator_dtype(self.setting.dtype))
        else:
            self.grads = self.kernels.diagonal_backward(*inputs)

    def work(self, step: int) -> None:
        for hop in self.lane.hops:
            if hop.step == step and hop.work:
                k, v = self.arrived(step)
                parts = [self._block(rectangle, k, v) for rectangle in hop.work]
                self._going[step] = parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _block(self, rectangle: Rectangle, k: Tensor, v: Tensor) -> Tensor:
        """One block: adds its dq, returns its dk and dv side by side in the dtype they travel in."""
        assert self.kernels.full_backward is not None
        assert self.grads is not None
        queries = slice(rectangle.q_begin, rectangle.q_end)
        keys = slice(rectangle.k_begin, rectangle.k_end)
        dq, dk, dv = self.kernels.full_backward(
            self.dout[:, queries].contiguous(),
            self.q[:, queries],
            k[:, keys],
            v[:, keys],
            self.rows_out[:, queries].contiguous(),
            self.rows_lse[:, :, queries].contiguous(),
        )
        self.grads[0][:, queries].add_(dq)
        return torch.cat((dk, dv), 2).to(self.setting.grad_wire)

    def move_grads(self, hop: Hop, batch: _Batch) -> None:
        going = self._going.pop(hop.step, None)
        if going is None and hop.gives:  # the block failed here: what is sent now will not be used
            going = self._buffer(sum(transfer.rows for transfer in hop.gives), self.setting.grad_wire)
        for transfer in hop.gives:
            assert going is not None
            part = going[:, transfer.at : transfer.at + transfer.rows].contiguous()
            batch.sends.append(Message(part, self.rank(transfer.peer)))
        for transfer in hop.takes:
            part = self._buffer(transfer.rows, self.setting.grad_wire)
            batch.receives.append(Message(part, self.rank(transfer.peer)))
            batch.after.append(lambda part=part, transfer=transfer: self._add_home(part, transfer))  # type: ignore[misc]

    def summed(self) -> Triple:
        assert self.grads is not None
        return self.grads

    def _add_home(self, part: Tensor, transfer: Transfer) -> None:
        if self.grads is None:  # the diagonal failed here
            return
        rows, heads = slice(transfer.begin, transfer.begin + transfer.rows), self.lane.kv_heads
        self.grads[1][:, rows].add_(part[:, :, :heads])
        self.grads[2][:, rows].add_(part[:, :, heads:])
