"""A plan over several ranks, loaded for one shape: the counterpart of ``Program`` where a group holds the sequence.

Ranks form a grid: ``degree`` consecutive ones exchange heads, and the ranks with equal heads form a ring. The plain
ring and the all-gather have degree 1, Ulysses has as many as there are ranks.

Legend: B batch, S local length, T length of the rows of an exchange, H query heads, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from ringattn.dtypes import TORCH_DTYPES
from ringattn.geometry.calls import LayoutKey, build_geometry
from ringattn.geometry.documents import Document
from ringattn.geometry.layout import Shard, grouped, length_of
from ringattn.geometry.pattern import Call, HeadRun
from ringattn.geometry.ring_geometry import HeadRange, RingGeometry, documents_geometry, ring_geometry
from ringattn.kernels.contract import BoundKernel
from ringattn.planning.fused_steps import FUSED_STEPS
from ringattn.planning.plan import Plan
from ringattn.runtime.executor import ALL, Executor, Grads, Kept, Triple, Wanted, as_wanted
from ringattn.runtime.loading import bind
from ringattn.runtime.merge import accumulator_dtype
from ringattn.runtime.program import Program
from ringattn.runtime.ranges import name_methods, named
from ringattn.workload import BranchTunables

from .chunk_rows import merge_of
from .comm import Comm, Pending
from .head_exchange import HeadExchange
from .peer_errors import sequence_number
from .ranges import name_messages, with_named_messages
from .ring import Ring
from .ring_chunks import BranchKernels, RingSetting, in_reverse
from .symmetric_exchange import BufferPool, SymmetricExchange
from .watchdog import Watchdog

Result = TypeVar("Result")


class RingProgram(Executor):
    """Executor of ``plan`` for sequences of which rank i holds ``shards[i]``, at one batch size."""

    def __init__(
        self,
        plan: Plan,
        scale: float,
        comm: Comm,
        shards: tuple[Shard, ...],
        batch: int,
        watchdog: Watchdog,
        module: int = 0,
        calls: Callable[[], int] = lambda: 0,
        pool: Callable[[], BufferPool] | None = None,
        *,
        ranges: bool = False,
    ) -> None:
        """Load ``plan``; ``module`` is its number among those of the group, ``calls`` how many of its calls were begun.

        ``pool`` gives the blocks of a symmetric exchange; ``ranges`` names the steps for profilers. A plan for
        documents runs them by ``over``.
        """
        tunables, workload = plan.tunables, plan.workload
        comm = with_named_messages(comm) if ranges else comm
        self.plan = plan
        self.dtype = TORCH_DTYPES[tunables.dtype]
        self._watchdog, self._comm, self._module, self._calls = watchdog, comm, module, calls
        self._degree = tunables.exchange_degree(comm.size)
        self._groups = max(1, tunables.head_groups) if self._degree > 1 else 1
        self._exchanges_heads = self._degree > 1
        self._pool_of, self._scale, self._ranges = pool, scale, ranges
        names = [f"branch {n}" if ranges else "" for n in range(len(tunables.branches))]
        self._kernels = tuple(
            _kernels(plan, branch, scale, name) for name, branch in zip(names, tunables.branches, strict=True)
        )
        input_dtype = TORCH_DTYPES[workload.dtype]
        self._wire = input_dtype if input_dtype.itemsize <= self.dtype.itemsize else self.dtype
        if not workload.packed:
            self._lay_out(shards, batch)

    def over(self, documents: tuple[Document, ...], shards: tuple[Shard, ...], padded: bool) -> Self:
        """Return the program, its kernels shared, for documents of which rank i holds what lies in ``shards[i]``.

        ``padded``: some positions are in no document.
        """
        made = copy.copy(self)
        made._lay_out(shards, 1, documents, padded)
        return made

    def _lay_out(
        self,
        shards: tuple[Shard, ...],
        batch: int,
        documents: tuple[Document, ...] | None = None,
        padded: bool = False,
    ) -> None:
        """Set the exchange of heads and the rings for what each rank holds."""
        plan, comm, degree, groups = self.plan, self._comm, self._degree, self._groups
        tunables, workload = plan.tunables, plan.workload
        ring_place, place = divmod(comm.rank, degree)
        members = tuple(range(ring_place * degree, (ring_place + 1) * degree))
        if tunables.exchange == "symmetric":
            assert self._pool_of is not None
            self._exchange: HeadExchange = SymmetricExchange(comm, members, shards, groups, self._pool_of)
        else:
            self._exchange = HeadExchange(comm, members, shards[members[0] : members[-1] + 1], groups)
        if self._ranges:
            name_messages(self._exchange, "scatter_heads", "gather_heads")
        own_heads = workload.kv_heads // degree // groups
        transport = tunables.transport, tunables.transport_groups, workload.window
        self._rings = []
        for group in range(groups):
            heads = HeadRange((place * groups + group) * own_heads, own_heads, workload.kv_heads)
            pattern, parts = (workload.pattern, workload.causal), grouped(shards, degree)
            if documents is not None:
                geometry = documents_geometry(*pattern, documents, parts, ring_place, heads, *transport)
                joining = None
            else:
                geometry = ring_geometry(*pattern, parts, ring_place, batch, heads, *transport)
                own = length_of(shards[comm.rank])
                joining = _joining_program(plan, geometry, self._scale, own, batch, self._ranges)
            setting = RingSetting(
                comm=comm,
                rank_of=tuple(range(place, comm.size, degree)),
                kernels=self._kernels,
                local=joining or _local_program(plan, geometry.local, self._scale, self._ranges),
                joins=joining is not None,
                dtype=self.dtype,
                wire=self._wire,
                grad_wire=self.dtype if tunables.grad_wire == "compute" else self._wire,
                whole=len(self._kernels) == 1
                and not padded
                and bool(geometry.chunks)
                and all(call.rate == 1 for chunk in geometry.chunks for call in chunk.calls),
                merge=named("merge", merge_of(plan)) if self._ranges else merge_of(plan),
            )
            ring = Ring(setting, geometry)
            if self._ranges:
                name_methods(
                    ring, _gather="gather", _gather_backward="gather", _assemble="merge", _assemble_grads="sum"
                )
            self._rings.append(ring)

    def of_this_call(self) -> RingProgram:
        program, call = copy.copy(self), self._calls()
        program._calls = lambda: call
        return program

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None) -> tuple[Tensor, Tensor]:
        forward = self._ulysses_forward if self._exchanges_heads else self._ring_forward
        out, lse = self._in_step(lambda: forward(q, k, v, kept), backward=False)
        return out.to(q.dtype), lse

    def gradients(
        self, dout: Tensor | None, saved: Sequence[Tensor], wanted: Wanted = ALL, dlse: Tensor | None = None
    ) -> Grads:
        """Return dq, dk, dv of this rank's rows.

        All three are computed and travel whatever is wanted: what one rank has frozen another may have not. For the
        same reason lse has no gradient here: it takes a second backward, which all ranks would have to make.
        """
        q, k, v, out, lse, *kept = saved
        assert dout is not None
        assert dlse is None, "refused before the first message"
        dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
        if self._exchanges_heads:
            grads = self._in_step(lambda: self._ulysses_backward(dout, q, k, v, out, lse, kept), backward=True)
        else:
            grads = self._in_step(lambda: self._rings[0].backward(dout, q, k, v, out, lse), backward=True)
        return as_wanted(grads, q.dtype, wanted)

    @property
    def workspace_bytes(self) -> int:
        return self._exchange.workspace_bytes

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one does not begin its backward, for ``error``."""
        self._watchdog.report(error)

    def _in_step(self, call: Callable[[], Result], *, backward: bool) -> Result:
        """Run a call once all ranks are in it; errors here abort the group, and those of others raise PeerError."""
        number = sequence_number(self._module, self._calls(), backward=backward)
        with self._watchdog.reporting():
            self._watchdog.compare_order(self._comm, number)
            result = call()
        self._watchdog.check()
        return result

    def _ring_forward(self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None) -> tuple[Tensor, Tensor]:
        return self._rings[0].forward(q, k, v)

    # -- all-to-all over heads --

    def _ulysses_forward(self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None) -> tuple[Tensor, Tensor]:
        exchange = self._exchange
        batch, length, heads, _ = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((batch, heads, 1, length), dtype=accumulator_dtype(self.dtype), device=q.device)
        lse = lse.permute(0, 3, 1, 2)
        exchange.start_call()
        arriving = _Prefetch(
            lambda group: exchange.scatter_heads((q, k, v), group, self._wire), len(self._rings), exchange.PREFETCHED
        )
        returning = _InFlight(len(self._rings), exchange.IN_FLIGHT)
        for group, ring in enumerate(self._rings):
            pending, inputs = arriving.next()
            pending.wait()
            if kept is not None:
                kept += exchange.keep(inputs)
            out_here, lse_here = ring.forward(*inputs)
            out_here = out_here.to(self._wire)
            pending.release()
            if kept is not None:
                kept += [out_here, lse_here]
            lse_rows = lse_here.transpose(1, 2).unsqueeze(3)
            returning.make_room()
            returning.add(exchange.gather_heads(out_here, out, group))
            returning.add(exchange.gather_heads(lse_rows, lse, group))
        returning.wait()
        return out, lse.squeeze(3).transpose(1, 2)

    def _ulysses_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Sequence[Tensor]
    ) -> Triple:
        exchange = self._exchange
        targets: list[Tensor] = []  # made when the first results go home: the kernels' workspace is gone by then
        lse_rows = lse.transpose(1, 2).unsqueeze(3)

        def start(group: int) -> tuple[list[Pending], list[Tensor]]:
            if kept:
                pending, (dout_here,) = exchange.scatter_heads((dout,), group, self._wire)
                return [pending], [dout_here, *kept[5 * group : 5 * group + 5]]
            pending, (dout_here, *inputs, out_here) = exchange.scatter_heads((dout, q, k, v, out), group, self._wire)
            pending_lse, (lse_here,) = exchange.scatter_heads((lse_rows,), group, lse.dtype)
            return [pending, pending_lse], [dout_here, *inputs, out_here, lse_here]

        exchange.start_call()
        arriving = _Prefetch(start, len(self._rings), exchange.PREFETCHED)
        returning = _InFlight(len(self._rings), exchange.IN_FLIGHT)
        for group, ring in enumerate(self._rings):
            pendings, (dout_here, q_here, k_here, v_here, out_here, lse_here) = arriving.next()
            for pending in pendings:
                pending.wait()
            if not kept:
                lse_here = lse_here.squeeze(3).transpose(1, 2)
            rows = dout_here.contiguous(), q_here, k_here, v_here, out_here.contiguous(), lse_here.contiguous()
            grads = ring.backward(*rows)
            del rows, dout_here, q_here, k_here, v_here, out_here, lse_here
            for pending in pendings:
                pending.release()
            results = list(grads)
            del grads
            for number, x in enumerate((q, k, v)):
                returning.make_room()
                if group == 0:
                    targets.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
                returning.add(exchange.gather_heads(results.pop(0).to(self._wire), targets[number], group))
        returning.wait()
        return targets[0], targets[1], targets[2]


class _Prefetch(Generic[Result]):
    """Starts the exchanges of head groups ``ahead`` groups before they are needed."""

    def __init__(self, start: Callable[[int], Result], groups: int, ahead: int) -> None:
        self._start, self._groups, self._ahead, self._begun = start, groups, ahead, 0
        self._under_way: deque[Result] = deque()
        self._fill()

    def next(self) -> Result:
        first = self._under_way.popleft()
        self._fill()
        return first

    def _fill(self) -> None:
        while self._begun < self._groups and len(self._under_way) < self._ahead:
            self._under_way.append(self._start(self._begun))
            self._begun += 1


class _InFlight:
    """Results on their way home, a few messages at most: what has arrived makes room for the next one to be sent.

    Of several head groups the three gradients travel together while the next group is computed. Of a single one so
    many as the exchange says.
    """

    def __init__(self, groups: int, most: int) -> None:
        self._under_way: deque[Pending] = deque()
        self._most = 3 if groups > 1 else most

    def make_room(self) -> None:
        """Wait until another one may be added."""
        while len(self._under_way) >= self._most:
            self._under_way.popleft().wait()

    def add(self, pending: Pending) -> None:
        self._under_way.append(pending)

    def wait(self) -> None:
        while self._under_way:
            self._under_way.popleft().wait()


def _kernels(plan: Plan, branch: BranchTunables, scale: float, range_of: str) -> BranchKernels:
    def bound(name: str, *, full: bool) -> BoundKernel:
        return bind(plan, name, scale, full=full, range_of=range_of)

    def edge(name: str) -> BoundKernel:
        """Return the kernel of a window's far edge, which is causal with both sides in reverse order."""
        return in_reverse(bind(plan, name, scale, windowed=False, range_of=range_of))

    forward, backward = branch.forward, branch.backward
    full = bound(forward, full=True).forward
    full_backward = bound(backward, full=True).backward if backward else None
    windowed = plan.workload.window > 0
    return BranchKernels(
        diagonal_forward=bound(forward, full=False).forward,
        full_forward=full,
        diagonal_backward=bound(backward, full=False).backward if backward else None,
        full_backward=full_backward,
        edge_forward=edge(forward).forward if windowed else full,
        edge_backward=edge(backward).backward if windowed and backward else full_backward,
    )


def _joining_program(
    plan: Plan, geometry: RingGeometry, scale: float, length: int, batch: int, ranges: bool
) -> Program | None:
    """Return all branches as a program on this rank's rows, where the chunks are calls of it; else None.

    Its fused steps then gather the rows of the chunks and merge their results with all others at once: apart, in
    float32, that cost 0.5 ms of 6.2 forward and 1 ms of 16 backward (LongNet to 131072 on 4 H100s). Chunks that
    Ulysses, zigzag or a shard that cuts a segment unevenly make are assembled apart.
    """
    workload, tunables = plan.workload, plan.tunables
    # Also those of which no row lies here: the program would take them for its own.
    travelling = frozenset(range(len(tunables.branches))).difference(geometry.local)
    few = len(travelling) == len(tunables.branches) == 1
    if few or not geometry.chunks or TORCH_DTYPES[workload.dtype] is not TORCH_DTYPES[tunables.dtype]:
        return None
    branches = tuple(
        replace(branch, gather="copy") if n in travelling else branch for n, branch in enumerate(tunables.branches)
    )
    joined = replace(tunables, branches=branches)
    for folds in (True, False):
        key = LayoutKey(workload.pattern, joined.gathers, None, batch, length, workload.heads, workload.kv_heads, folds)
        (window,) = build_geometry(key).windows
        away = [(placed.branch, [_plain(placed.call)]) for placed in window.calls if placed.branch in travelling]
        if away != [(chunk.branch, [_plain(call) for call in chunk.calls]) for chunk in geometry.chunks]:
            return None
    return Program(replace(plan, tunables=joined), scale, travelling, ranges=ranges)


def _plain(call: Call) -> Call:
    """Return the call with no steps between the heads of a run that has one head: equal for equal rows."""
    runs = (run if run.count > 1 else HeadRun(run.first, 1, 1, run.offset, 0) for run in call.runs)
    return replace(call, runs=tuple(runs))


def _local_program(plan: Plan, local: tuple[int, ...], scale: float, ranges: bool) -> Program | None:
    """Return the branches that stay on single ranks, as a program of their own on the rows of one."""
    if not local:
        return None
    pattern, tunables = plan.workload.pattern, plan.tunables
    some_pattern = replace(pattern, branches=tuple(pattern.branches[n] for n in local))
    names = {name for n in local for name in (tunables.branches[n].forward, tunables.branches[n].backward)}
    some = replace(
        tunables,
        branches=tuple(tunables.branches[n] for n in local),
        params=tuple(p for p in tunables.params if p[0].rpartition(".")[0] in names.union(FUSED_STEPS)),
    )
    here = replace(plan, workload=replace(plan.workload, pattern=some_pattern), tunables=some)
    return Program(here, scale, ranges=ranges)
