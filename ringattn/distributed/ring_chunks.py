"""One chunk of a ring during one call: what it computes, and what it sends and receives at each hop.

Forward: a chunk keeps one partial result (out in float32, float64 for float64, and lse) that the blocks of each hop are
merged into. Backward: every block against the *final* out and LSE; keys and values travel again, and the gradients of
received keys go home while the next block is computed.

Legend: N segments times batch, M rows of a chunk, J its key/value heads, G = H / Hkv; D as everywhere. Keys and values
travel as one (N, rows, 2J, D) message: heads of K, then heads of V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringattn.geometry.ring_schedules import Chunk, Hop, Rectangle, Transfer
from ringattn.kernels.contract import Backward, BoundKernel, Forward, Grads
from ringattn.runtime.executor import Triple
from ringattn.runtime.merge import accumulator_dtype
from ringattn.runtime.program import BackwardRows, Program

from .chunk_rows import gather_rows
from .comm import Comm, Message


@dataclass(frozen=True, slots=True)
class BranchKernels:
    """The kernels of one branch for the block on the diagonal, full ones and the far edge of a sliding window.

    No backward for inference.
    """

    diagonal_forward: Forward
    full_forward: Forward
    diagonal_backward: Backward | None
    full_backward: Backward | None
    edge_forward: Forward
    edge_backward: Backward | None


def in_reverse(kernel: BoundKernel) -> BoundKernel:
    """Return a causal kernel for blocks of which row i sees keys j >= i instead."""

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward(q.flip(1), k.flip(1), v.flip(1))
        return out.flip(1), lse.flip(2)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /) -> Grads:
        dout, q, k, v, out = (x.flip(1) for x in (dout, q, k, v, out))
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse.flip(2))
        return dq.flip(1), dk.flip(1), dv.flip(1)

    return BoundKernel(forward, backward)


@dataclass(frozen=True, slots=True)
class RingSetting:
    """Settings that are the same for every shape: how to reach the others and what to compute with.

    ``rank_of`` gives the group's rank of a ring member. Keys and values travel in the ``wire`` dtype, their gradients
    in ``grad_wire``; blocks are computed in ``dtype``. ``local`` runs the branches that stay on this rank; where it
    ``joins``, it also gathers the rows of the chunks and merges what becomes of them, all in one step.
    ``whole``: every position and head is a row of exactly one chunk, so results are written and not merged; false where
    no row here is one, as where a segment is shorter than its rate.
    ``merge`` is ``chunk_rows.merge_block``, or what does the same on a GPU.
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

    @property
    def program(self) -> Program:
        assert self.local is not None, "chunks join a program"
        return self.local


@dataclass(slots=True)
class Batch:
    """The messages of one step of all chunks."""

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)


class RunningChunk:
    """One chunk during one call: its rows here, and the keys and values that its hops bring."""

    def __init__(
        self, setting: RingSetting, chunk: Chunk, rows: Triple, wired: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Take ``rows`` of q, k and v in the compute dtype; ``wired`` are this rank's k and v as they came."""
        self.setting, self.chunk = setting, chunk
        self.kernels = setting.kernels[chunk.branch]
        self.q, self.k, self.v = rows
        self.group = self.q.shape[2] // self.k.shape[2]
        self._brought: dict[int, Tensor] = {}  # by step: the keys and values that its hop brings
        self._own: Tensor | None = None  # what goes out from here
        if chunk.hops:
            narrow = (self.k, self.v)
            if wired is not None and wired[0].dtype is not self.k.dtype:
                narrow = gather_rows(wired[0], chunk, 1), gather_rows(wired[1], chunk, 1)
            self._own = torch.cat(narrow, 2).to(setting.wire)

    def move_keys(self, hop: Hop, batch: Batch) -> None:
        for transfer in hop.sends:
            rows = self._own if transfer.owner == self.chunk.me else self._brought[hop.step - 1]
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

    def move_grads(self, hop: Hop, batch: Batch) -> None:
        """Do nothing: only a backward has gradients to move."""

    def arrived(self, step: int) -> tuple[Tensor, Tensor]:
        """Return K and V that the hop of this step brought, in the compute dtype."""
        rows = self._brought[step].to(self.setting.dtype)
        heads = self.chunk.kv_heads
        return rows[:, :, :heads], rows[:, :, heads:]

    def rank(self, member: int) -> int:
        return self.setting.rank_of[self.chunk.members[member]]

    def _buffer(self, rows: int, dtype: torch.dtype) -> Tensor:
        blocks, _, heads, head_dim = self.k.shape
        return torch.empty((blocks, rows, 2 * heads, head_dim), dtype=dtype, device=self.k.device)

    def _receive_into(self, target: Tensor, transfer: Transfer, batch: Batch) -> None:
        """Receive in place where the rows are contiguous, else by way of a buffer."""
        if target.is_contiguous():
            batch.receives.append(Message(target, self.rank(transfer.peer)))
            return
        part = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        batch.receives.append(Message(part, self.rank(transfer.peer)))
        batch.after.append(lambda: target.copy_(part))


class ForwardChunk(RunningChunk):
    """Chunk of a forward: ``out`` (N, M, J * G, D), ``lse`` (N, J * G, M) are the merge of what was computed so far."""

    out: Tensor
    lse: Tensor

    def diagonal(self) -> None:
        out, lse = self.kernels.diagonal_forward(self.q, self.k, self.v)
        if any(hop.work for hop in self.chunk.hops):
            wide = accumulator_dtype(out.dtype)
            out, lse = own_copy(out, wide), own_copy(lse, lse.dtype)
        self.out, self.lse = out, lse

    def work(self, step: int) -> None:
        for hop in self.chunk.hops:
            if hop.step != step or not hop.work:
                continue
            k, v = self.arrived(step)
            for q_begin, q_end, k_begin, k_end, edge in hop.work:
                queries, keys = slice(q_begin, q_end), slice(k_begin, k_end)
                forward = self.kernels.edge_forward if edge else self.kernels.full_forward
                out, lse = forward(self.q[:, queries], k[:, keys], v[:, keys])
                total, total_lse = self.out[:, queries], self.lse[:, :, queries].transpose(1, 2)
                self.setting.merge(total, total_lse, out, lse.transpose(1, 2))


class BackwardChunk(RunningChunk):
    """Chunk of a backward: ``grads`` are the sums of what was computed and came home so far.

    dq is (N, M, J * G, D), dk and dv (N, M, J, D).
    """

    grads: Triple

    def __init__(
        self, setting: RingSetting, chunk: Chunk, rows: BackwardRows, wired: tuple[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__(setting, chunk, rows.inputs, wired)
        self.dout, self.rows_out, self.rows_lse = rows.dout, rows.out, rows.lse
        self._going: dict[int, Tensor] = {}  # by step: gradients of received keys, (N, rows, 2J, D)

    def diagonal(self) -> None:
        assert self.kernels.diagonal_backward is not None, "a plan for inference has no backward"
        inputs = self.dout, self.q, self.k, self.v, self.rows_out, self.rows_lse
        if self.chunk.hops:
            given = list(self.kernels.diagonal_backward(*inputs))
            self.grads = _own_copies(given, accumulator_dtype(self.setting.dtype))
        else:
            self.grads = self.kernels.diagonal_backward(*inputs)

    def work(self, step: int) -> None:
        for hop in self.chunk.hops:
            if hop.step == step and hop.work:
                k, v = self.arrived(step)
                parts = [self._block(rectangle, k, v) for rectangle in hop.work]
                self._going[step] = self._joined(hop, parts).to(self.setting.grad_wire)

    def _joined(self, hop: Hop, parts: list[Tensor]) -> Tensor:
        """Return the gradients of the keys of a hop, of which windowed queries may meet one in several blocks."""
        ends = [rectangle.k_end for rectangle in hop.work]
        if [rectangle.k_begin for rectangle in hop.work] == [0, *ends[:-1]]:
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        total = self._buffer(hop.rows, accumulator_dtype(self.setting.dtype)).zero_()
        for rectangle, part in zip(hop.work, parts, strict=True):
            total[:, rectangle.k_begin : rectangle.k_end].add_(part)
        return total

    def _block(self, rectangle: Rectangle, k: Tensor, v: Tensor) -> Tensor:
        """Add one block's dq; return its dk and dv side by side."""
        backward = self.kernels.edge_backward if rectangle.edge else self.kernels.full_backward
        assert backward is not None
        queries = slice(rectangle.q_begin, rectangle.q_end)
        keys = slice(rectangle.k_begin, rectangle.k_end)
        dq, dk, dv = backward(
            self.dout[:, queries].contiguous(),
            self.q[:, queries],
            k[:, keys],
            v[:, keys],
            self.rows_out[:, queries].contiguous(),
            self.rows_lse[:, :, queries].contiguous(),
        )
        self.grads[0][:, queries].add_(dq)
        return torch.cat((dk, dv), 2)

    def move_grads(self, hop: Hop, batch: Batch) -> None:
        going = self._going.pop(hop.step, None)
        for transfer in hop.gives:
            assert going is not None
            part = going[:, transfer.at : transfer.at + transfer.rows].contiguous()
            batch.sends.append(Message(part, self.rank(transfer.peer)))
        for transfer in hop.takes:
            part = self._buffer(transfer.rows, self.setting.grad_wire)
            batch.receives.append(Message(part, self.rank(transfer.peer)))
            batch.after.append(lambda part=part, transfer=transfer: self._add_home(part, transfer))  # type: ignore[misc]

    def _add_home(self, part: Tensor, transfer: Transfer) -> None:
        rows, heads = slice(transfer.begin, transfer.begin + transfer.rows), self.chunk.kv_heads
        self.grads[1][:, rows].add_(part[:, :, :heads])
        self.grads[2][:, rows].add_(part[:, :, heads:])


def own_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy, not shared with a kernel's result."""
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


def _own_copies(given: list[Tensor], dtype: torch.dtype) -> Triple:
    """Return copies of three tensors, each of which is let go before the next is copied."""
    q, k, v = (own_copy(given.pop(0), dtype) for _ in range(3))
    return q, k, v
