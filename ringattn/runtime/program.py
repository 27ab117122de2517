"""Runs a plan: which rows go to which kernel, and what becomes of the results. Everything was chosen before.

Legend: B batch, S length, H query heads, Hkv key/value heads, G = H / Hkv, D head dim; of a call: N segments times
batch elements, M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.dtypes import TORCH_DTYPES
from ringattn.geometry.calls import PATTERN_CACHE, Geometry, LayoutKey, PlacedCall, Window
from ringattn.kernels.contract import BoundKernel, Differentiable, KernelConfig, not_differentiable
from ringattn.kernels.registry import KERNELS
from ringattn.planning.plan import Plan
from ringattn.workload import Tunables

from .merge import GradJob, GradPartial, Ops, Partial, Source, TorchOps, accumulator_dtype, as_view
from .workspace import Lease

# Gathered q, k, v of the copied calls, in call order: what checkpoint "none" keeps for the backward.
Kept = list[Tensor]

# q, k and v, or their gradients
Triple = tuple[Tensor, Tensor, Tensor]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]

# Which of dq, dk and dv somebody asked for.
Wanted = tuple[bool, bool, bool]
ALL: Wanted = (True, True, True)


class BackwardRows(NamedTuple):
    """What the backward of a call reads: rows of q, k, v, dout and out (N, M, heads, D), and lse (N, heads, M)."""

    inputs: Triple
    dout: Tensor
    out: Tensor
    lse: Tensor


# Of the calls that other ranks have a part in: takes the rows of each and begins, gives back what waits for the
# results. In between this rank does what it can do alone.
TravelForward = Callable[[list[Triple]], Callable[[], list[tuple[Tensor, Tensor]]]]
TravelBackward = Callable[[list[BackwardRows]], Callable[[], list[Triple]]]


class Program:
    """A plan with its kernels loaded; stateless between calls, so one serves any number of threads."""

    def __init__(self, plan: Plan, scale: float, travelling: frozenset[int] = frozenset()) -> None:
        """``travelling`` branches are not computed here: ``forward`` and ``backward`` are given who does."""
        assert scale > 0, "kernels mask before they scale"
        tunables = plan.tunables
        self.plan = plan
        self._travelling = travelling
        self.dtype = TORCH_DTYPES[tunables.dtype]
        self.checkpoint = tunables.checkpoint
        self._pattern = plan.workload.pattern
        self._dense = self._pattern.dense
        self._gathers = tuple(branch.gather for branch in tunables.branches)
        self._window = tunables.window_tokens
        self._geometry_of = PATTERN_CACHE.get if tunables.pattern_cache else PATTERN_CACHE.build
        self._pool = (tunables.pool_threshold_mib, tunables.pool_strategy)
        self._ops = _ops(plan)
        forward = [_bind(plan, tunables, branch.forward, scale) for branch in tunables.branches]
        backward = [_bind(plan, tunables, branch.backward, scale) for branch in tunables.branches if branch.backward]
        self._forward = [kernel.forward for kernel in forward]
        self._backward = [kernel.backward for kernel in backward]
        self._strided = [KERNELS[b.backward].strided_backward for b in tunables.branches if b.backward]
        self._writer = _writer(plan, travelling) if backward else None
        # The forward, for inputs in the compute dtype, of a plan that autograd needs no help with
        self.differentiable: Differentiable = backward[0].differentiable if _is_one_op(plan) else not_differentiable

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None) -> tuple[Tensor, Tensor]:
        """``forward`` for inputs of any dtype: computed in the plan's dtype, out in the input dtype."""
        if q.dtype is self.dtype:
            return self.forward(q, k, v, kept)
        out, lse = self.forward(q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), kept)
        return out.to(q.dtype), lse

    def gradients(
        self,
        dout: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Sequence[Tensor] = (),
        wanted: Wanted = ALL,
        dlse: Tensor | None = None,
    ) -> Grads:
        """``backward`` for tensors of any dtype and layout; gradients in the input dtype, None where not wanted.

        dout and dlse are None where out, or lse, has no gradient, but not both.
        """
        out, lse = out.contiguous(), lse.contiguous()
        narrow, wide = q.dtype, self.dtype
        if narrow is not wide:
            q, k, v, out = q.to(wide), k.to(wide), v.to(wide), out.to(wide)
        if dlse is None:
            assert dout is not None
            grads = self.backward(dout.contiguous().to(wide), q, k, v, out, lse, kept, wanted)
            return as_wanted(grads, narrow, wanted)
        dq, dk = self._lse_gradients(dlse, q, k, v, lse, wanted)
        if dout is None:
            return as_wanted((dq, dk, torch.zeros_like(v)), narrow, wanted)
        of_out = self.backward(dout.contiguous().to(wide), q, k, v, out, lse, kept, wanted)
        return as_wanted((dq.add_(of_out[0]), dk.add_(of_out[1]), of_out[2]), narrow, wanted)

    def _lse_gradients(
        self, dlse_BHS: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, wanted: Wanted
    ) -> tuple[Tensor, Tensor]:
        """dq and dk of the LSE alone, in float32 (float64 for float64): one backward more, exact on every kernel.

        The flash backward is ds = p * (dout . v - dout . out). With values of one in the first column and zeros in the
        others, dlse in the first column of dout, and an out of 0 that is p * dlse, which is the gradient of the LSE.
        dlse is divided by a power of two, since that of a mean is below what float16 holds, and of a scaled loss above.
        """
        dlse_BHS = dlse_BHS.masked_fill(lse == -torch.inf, 0.0)
        unit = torch.ldexp(dlse_BHS.new_ones(()), torch.frexp(dlse_BHS.abs().amax()).exponent)
        dout, values = q.new_zeros(q.shape), v.new_zeros(v.shape)
        dout[..., 0] = (dlse_BHS / unit).transpose(1, 2)
        values[..., 0] = 1.0
        dq, dk, _ = self.backward(dout, q, k, values, torch.zeros_like(dout), lse, (), (wanted[0], wanted[1], False))
        return dq.to(unit.dtype) * unit, dk.to(unit.dtype) * unit

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None, travel: TravelForward | None = None
    ) -> tuple[Tensor, Tensor]:
        """out (B, S, H, D) in the compute dtype and lse (B, H, S); ``kept`` receives gathered rows if given.

        q, k, v: (B, S, H or Hkv, D) in the compute dtype, any strides with the last 1.
        """
        if self._dense:
            return self._forward[0](q, k, v)
        geometry = self._geometry(q, k, v)
        if geometry.direct:
            return self._direct(geometry, q, k, v)
        batch, length, heads, _ = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(batch, heads, length, dtype=accumulator_dtype(q.dtype), device=q.device)
        for window in geometry.windows:
            self._forward_window(geometry, window, (q, k, v), out, lse, kept, travel)
        return out, lse

    def _forward_window(
        self,
        geometry: Geometry,
        window: Window,
        inputs: Triple,
        out: Tensor,
        lse: Tensor,
        kept: Kept | None,
        travel: TravelForward | None,
    ) -> None:
        """All branches over one window, merged; its workspace ends with it."""
        q, k, v = inputs
        group = q.shape[2] // k.shape[2]
        lease = Lease(q.device, *self._pool)
        here, away = self._here_and_away(window)
        finish = travel([self._rows(geometry, placed, q, k, v, group, lease) for placed in away]) if travel else None
        partials = []
        for placed in here:
            rows = self._rows(geometry, placed, q, k, v, group, lease if kept is None else _unpooled(q.device))
            if kept is not None and placed.call.copied:
                kept.extend(rows)
            partials.append(Partial(placed, *self._forward[placed.branch](*rows)))
        if finish is not None:
            partials += [Partial(placed, *result) for placed, result in zip(away, finish(), strict=True)]
            partials.sort(key=lambda partial: partial.placed.index)
        self._ops.merge(geometry, window, partials, out, lse, group, lease)
        lease.close()

    def _here_and_away(self, window: Window) -> tuple[Sequence[PlacedCall], Sequence[PlacedCall]]:
        """The calls of this rank alone, and those that others have a part in."""
        if not self._travelling:
            return window.calls, ()
        away = [placed for placed in window.calls if placed.branch in self._travelling]
        return [placed for placed in window.calls if placed.branch not in self._travelling], away

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Sequence[Tensor] = (),
        wanted: Wanted = ALL,
        travel: TravelBackward | None = None,
    ) -> Triple:
        """dq, dk, dv in the compute dtype, every partial against the merged out and lse.

        Shapes as in ``forward``; dout and out (B, S, H, D) contiguous, lse (B, H, S) contiguous. Kernels compute all
        three; where one is not wanted nothing is summed, and any tensor may stand in its place.
        """
        if self._dense:
            return self._backward[0](dout, q, k, v, out, lse)
        geometry = self._geometry(q, k, v)
        if geometry.direct:
            return self._direct_backward(geometry, dout, q, k, v, out, lse)
        made = ALL if self._writer is not None else wanted  # who writes in place writes all three
        grads = (
            _empty_like(q) if made[0] else q,
            _empty_like(k) if made[1] else k,
            _empty_like(v) if made[2] else v,
        )
        rows_kept = iter(kept) if kept else None
        for window in geometry.windows:
            self._backward_window(geometry, window, (q, k, v), (dout, out, lse), grads, wanted, rows_kept, travel)
        return grads

    def _backward_window(
        self,
        geometry: Geometry,
        window: Window,
        inputs: Triple,
        results: Triple,
        grads: Triple,
        wanted: Wanted,
        kept: Iterator[Tensor] | None,
        travel: TravelBackward | None,
    ) -> None:
        """The gradients of all branches over one window, summed into ``grads``; its workspace ends with it.

        ``results`` are dout, out and lse; ``kept`` gives the rows that the forward kept, if it kept any.
        """
        q, k, v = inputs
        group = q.shape[2] // k.shape[2]
        lease = Lease(q.device, *self._pool)
        here, away = self._here_and_away(window)
        finish = None
        if travel is not None:
            reads = [_in_place_of(geometry, placed, inputs) for placed in away]
            finish = travel(
                [
                    self._backward_rows(geometry, p, inputs, read, *results, lease)
                    for p, read in zip(away, reads, strict=True)
                ]
            )
        found: list[tuple[PlacedCall, Triple]] = []
        for placed in here:
            read = _in_place_of(geometry, placed, inputs)
            if kept is not None and placed.call.copied:
                read = next(kept), next(kept), next(kept)
            rows = self._backward_rows(geometry, placed, inputs, read, *results, lease)
            backward = self._backward[placed.branch]
            if placed.branch == self._writer:
                in_place = self._rows(geometry, placed, *grads, group, lease)
                parts = backward(rows.dout, *rows.inputs, rows.out, rows.lse, grads=in_place)
            else:
                parts = backward(rows.dout, *rows.inputs, rows.out, rows.lse)
            found.append((placed, parts))
        if finish is not None:
            found += zip(away, finish(), strict=True)
            found.sort(key=lambda pair: pair[0].index)
        partials = [[GradPartial(placed, parts[number]) for placed, parts in found] for number in range(3)]
        if self._writer is None or len(self._backward) > 1:  # else its one branch has written every position already
            every = zip(partials, grads, (group, 1, 1), strict=True)
            jobs = [GradJob(*job) for job, want in zip(every, wanted, strict=True) if want]
            self._ops.scatter_sum(geometry, window, jobs, lease)
        lease.close()

    def _geometry(self, q: Tensor, k: Tensor, v: Tensor) -> Geometry:
        batch, length, heads, _ = q.shape
        folds = all(x.stride(0) == length * x.stride(1) for x in (q, k, v))
        return self._geometry_of(
            LayoutKey(self._pattern, self._gathers, self._window, batch, length, heads, k.shape[2], folds)
        )

    def _rows(
        self, geometry: Geometry, placed: PlacedCall, q: Tensor, k: Tensor, v: Tensor, group: int, lease: Lease
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the kernel of a call reads: its rows in place, or gathered."""
        if placed.call.copied:
            gathered = self._ops.gather(geometry, placed, (Source(q, group), Source(k, 1), Source(v, 1)), lease)
            return gathered[0], gathered[1], gathered[2]
        rows = _in_place_of(geometry, placed, (q, k, v))
        assert rows is not None
        return rows

    def _backward_rows(
        self,
        geometry: Geometry,
        placed: PlacedCall,
        inputs: Triple,
        rows: Triple | None,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        lease: Lease,
    ) -> BackwardRows:
        """What the backward of a call reads; ``rows`` are q, k, v, or None where they are still to be gathered.

        Whatever must be gathered is gathered in one step.
        """
        group = inputs[0].shape[2] // inputs[1].shape[2]
        results = self._results_in_place(geometry, placed, dout, out, group)
        sources = [] if results else [Source(dout, group), Source(out, group)]
        if rows is None:
            sources += [Source(x, heads) for x, heads in zip(inputs, (group, 1, 1), strict=True)]
        gathered, lse_rows = self._ops.gather_backward(geometry, placed, sources, lse, group, lease)
        dout_rows, out_rows = results or (gathered[0], gathered[1])
        return BackwardRows(rows or (gathered[-3], gathered[-2], gathered[-1]), dout_rows, out_rows, lse_rows)

    def _results_in_place(
        self, geometry: Geometry, placed: PlacedCall, dout: Tensor, out: Tensor, group: int
    ) -> tuple[Tensor, Tensor] | None:
        """The query rows of dout and out where they lie; None where the call's backward wants them gathered.

        Contiguous unless the kernel reads any layout: cudnn's plan cache keys on the strides of q, k and v alone, and
        the efficient kernel assumes rows of out to be H * D apart, so another layout is silently wrong there.
        """
        call = placed.call
        if not call.copied and (self._strided[placed.branch] or call.rate == 1):
            dout_rows, out_rows = _in_place(geometry, placed, dout, group), _in_place(geometry, placed, out, group)
            if self._strided[placed.branch] or (dout_rows.is_contiguous() and out_rows.is_contiguous()):
                return dout_rows, out_rows
        return None

    def _direct(self, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """One call over everything, segments as a batch: its result needs no merge."""
        placed = geometry.windows[0].calls[0]
        group = q.shape[2] // k.shape[2]
        rows = self._rows(geometry, placed, q, k, v, group, _unpooled(q.device))
        out, lse = self._forward[0](*rows)
        batch, length, heads, _ = q.shape
        lse_BHS = lse.view(batch, -1, heads, placed.call.rows).transpose(1, 2).reshape(batch, heads, length)
        return out.reshape(q.shape), lse_BHS

    def _direct_backward(
        self, geometry: Geometry, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        placed = geometry.windows[0].calls[0]
        call = placed.call
        group = q.shape[2] // k.shape[2]
        lease = _unpooled(q.device)
        rows = self._rows(geometry, placed, q, k, v, group, lease)
        results = self._results_in_place(geometry, placed, dout, out, group)
        if results is None:
            sources = (Source(dout, group), Source(out, group))
            dout_rows, out_rows = self._ops.gather(geometry, placed, sources, lease)
        else:
            dout_rows, out_rows = results
        lse_rows = lse.view(*lse.shape[:2], call.segments, call.length).transpose(1, 2).flatten(0, 1).contiguous()
        dq, dk, dv = self._backward[0](dout_rows, *rows, out_rows, lse_rows)
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def as_wanted(grads: Triple, dtype: torch.dtype, wanted: Wanted) -> Grads:
    """dq, dk and dv in the dtype of the inputs, None where nobody asked."""
    dq, dk, dv = grads
    if wanted == ALL and dq.dtype is dk.dtype is dv.dtype is dtype:  # else a microsecond each, for nothing
        return grads
    made = [grad.to(dtype) if want else None for grad, want in zip(grads, wanted, strict=True)]
    return made[0], made[1], made[2]


def _empty_like(x: Tensor) -> Tensor:
    """Contiguous, whatever the strides of x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _in_place(geometry: Geometry, placed: PlacedCall, x: Tensor, group: int) -> Tensor:
    (view,) = geometry.views(placed, group, x.stride(), x.shape[-1], folded=True)
    return as_view(x, view)


def _in_place_of(geometry: Geometry, placed: PlacedCall, inputs: Triple) -> Triple | None:
    """The rows of q, k and v where they lie, or None for a call that copies."""
    if placed.call.copied:
        return None
    q, k, v = inputs
    group = q.shape[2] // k.shape[2]
    return _in_place(geometry, placed, q, group), _in_place(geometry, placed, k, 1), _in_place(geometry, placed, v, 1)


def _unpooled(device: torch.device) -> Lease:
    """Memory that outlives the call: gathered rows that are kept, results that are returned."""
    return Lease(device, None, "shape")


def _writer(plan: Plan, travelling: frozenset[int]) -> int | None:
    """The branch whose backward writes straight into the final gradients, to which the others are added.

    It must show every position (rate 1) and only one may; the fused sum reads each element before it writes it, the
    one in torch operations starts from zeros instead.
    """
    branches = plan.workload.pattern.branches
    for number, (branch, chosen) in enumerate(zip(branches, plan.tunables.branches, strict=False)):
        here = number not in travelling
        if here and plan.fused and branch.rate == 1 and KERNELS[chosen.backward].writes_grads:
            return number
    return None


def _is_one_op(plan: Plan) -> bool:
    """Whether to train is one kernel forth and back on the tensors themselves, which keeps what autograd would."""
    tunables, workload = plan.tunables, plan.workload
    one_kernel = all(branch.forward == branch.backward for branch in tunables.branches)
    return workload.pattern.dense and workload.world == 1 and one_kernel and tunables.checkpoint == "selective"


def _bind(plan: Plan, tunables: Tunables, name: str, scale: float) -> BoundKernel:
    config = KernelConfig(
        causal=plan.workload.causal,
        scale=scale,
        deterministic=plan.conditions.deterministic,
        params=tunables.params_of(name),
        dtype=tunables.dtype,
    )
    return KERNELS[name].load(config)


def _ops(plan: Plan) -> Ops:
    if not plan.fused:
        return TorchOps(compiled=plan.tunables.compile)
    from .merge_triton import TritonOps  # needs triton, which a machine without a GPU need not have

    def block(step: str) -> int | None:
        value = plan.tunables.params_of(step).get("block")
        assert value is None or isinstance(value, int)
        return value

    return TritonOps(merge_block=block("merge"), sum_block=block("sum"), gather_block=block("gather"))
