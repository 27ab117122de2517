"""Runs a plan: gives rows to kernels and makes one result of theirs. Everything was chosen before.

Legend: B batch, S length, H query heads, Hkv key/value heads, D head dim; of a call: N segments times batch elements,
M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ringattn.dtypes import TORCH_DTYPES
from ringattn.geometry.calls import Geometry, LayoutKey, PlacedCall, Window, build_geometry, cached_geometry
from ringattn.kernels.contract import WritingBackward, not_differentiable
from ringattn.kernels.registry import KERNELS
from ringattn.kernels.torch_entry import Attend, torch_entry
from ringattn.planning.plan import Plan

from .executor import ALL, Executor, Grads, Kept, Triple, Wanted, as_wanted
from .loading import bind, is_one_op, load_ops, may_be_torchs, writing_branch
from .merge import GradJob, GradPartial, Partial, accumulator_dtype, as_view
from .workspace import Lease


class BackwardRows(NamedTuple):
    """Inputs of a call's backward: rows of q, k, v, dout and out (N, M, heads, D), and lse (N, heads, M)."""

    inputs: Triple
    dout: Tensor
    out: Tensor
    lse: Tensor


# Starts the calls that other ranks have a part in on their rows, and returns a function that waits for the results. In
# between this rank runs its own.
TravelForward = Callable[[list[Triple]], Callable[[], list[tuple[Tensor, Tensor]]]]
TravelBackward = Callable[[list[BackwardRows]], Callable[[], list[Triple]]]


class Program(Executor):
    """Plan with its kernels loaded; stateless between calls, so one serves any number of threads."""

    def __init__(
        self, plan: Plan, scale: float, travelling: frozenset[int] = frozenset(), *, ranges: bool = False
    ) -> None:
        """Load the kernels of ``plan``; ``travelling`` branches are computed by callables that each call is given.

        ``ranges`` names the steps for profilers.
        """
        assert scale > 0, "kernels mask before they scale"
        tunables = plan.tunables
        self.plan = plan
        self._travelling = travelling
        self.dtype = TORCH_DTYPES[tunables.dtype]
        self._pattern, self._dense = plan.workload.pattern, plan.workload.pattern.dense
        self._gathers = tunables.gathers
        self._window = tunables.window_tokens
        self._geometry_of = cached_geometry if tunables.pattern_cache else build_geometry
        self._pool = (tunables.pool_threshold_mib, tunables.pool_strategy)
        self._ops = load_ops(plan, ranges=ranges)
        names = [f"branch {n}" if ranges else "" for n in range(len(tunables.branches))]
        named = tuple(zip(names, tunables.branches, strict=True))
        forward = [bind(plan, branch.forward, scale, range_of=name) for name, branch in named]
        backward = [bind(plan, branch.backward, scale, range_of=name) for name, branch in named if branch.backward]
        self._forward = [kernel.forward for kernel in forward]
        self._backward = [kernel.backward for kernel in backward]
        self._strided = [KERNELS[b.backward].strided_backward for b in tunables.branches if b.backward]
        self._writer = writing_branch(plan, travelling) if backward else None
        self.differentiable = backward[0].differentiable if is_one_op(plan) else not_differentiable
        self._scale = scale
        self._of_torch = tunables.branches[0].forward if may_be_torchs(plan) and not ranges else ""

    def torch_entry(self, q: Tensor, k: Tensor, v: Tensor) -> Attend | None:
        if not self._of_torch:
            return None
        workload = self.plan.workload
        return torch_entry(self._of_torch, workload.causal, self._scale, q, k, v, workload.train)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None) -> tuple[Tensor, Tensor]:
        if q.dtype is self.dtype:
            return self.forward(q, k, v, kept)
        out, lse = self.forward(q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), kept)
        return out.to(q.dtype), lse

    def direct(self, dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        # A step less in the place of the one that its caller adds; a subclass has its own ``attend``.
        return self.forward if type(self) is Program and dtype is self.dtype else self.attend

    def gradients(
        self, dout: Tensor | None, saved: Sequence[Tensor], wanted: Wanted = ALL, dlse: Tensor | None = None
    ) -> Grads:
        q, k, v, out, lse, *kept = saved
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
        """Return dq and dk of the LSE alone, float32 (float64 for float64): one backward more, exact on every kernel.

        The flash backward is ds = p * (dout . v - dout . out). With values of one in the first column and zeros in the
        others, dlse in the first column of dout, and an out of 0 that is p * dlse, which is the gradient of the LSE.
        dlse is divided by a power of two, since that of a mean is below what float16 holds, and of a scaled loss above.
        """
        dlse_BHS = dlse_BHS.masked_fill(lse == -torch.inf, 0.0)
        unit = torch.ldexp(dlse_BHS.new_ones(()), torch.frexp(dlse_BHS.abs().amax()).exponent)
        dout, values = q.new_zeros((*q.shape[:3], v.shape[3])), v.new_zeros(v.shape)
        dout[..., 0] = (dlse_BHS / unit).transpose(1, 2)
        values[..., 0] = 1.0
        dq, dk, _ = self.backward(dout, q, k, values, torch.zeros_like(dout), lse, (), (wanted[0], wanted[1], False))
        return dq.to(unit.dtype) * unit, dk.to(unit.dtype) * unit

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None, travel: TravelForward | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return out (B, S, H, D) in the compute dtype and lse (B, H, S); ``kept``, if given, receives gathered rows.

        q, k, v: (B, S, H or Hkv, D) in the compute dtype, any strides with the last 1.
        """
        if self._dense:
            return self._forward[0](q, k, v)
        geometry = self._geometry(q, k, v)
        if geometry.direct:
            return self._direct(geometry, (q, k, v))
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
        """Run all branches over one window and merge them into ``out`` and ``lse``; its workspace ends with it."""
        device = out.device
        lease = Lease(device, *self._pool)
        own, shared = self._own_and_shared(window)
        finish = travel([self._rows(geometry, placed, inputs, lease) for placed in shared]) if travel else None
        partials = []
        for placed in own:
            rows = self._rows(geometry, placed, inputs, lease if kept is None else _unpooled(device))
            if kept is not None and placed.call.copied:
                kept.extend(rows)
            partials.append(Partial(placed, *self._forward[placed.branch](*rows)))
        if finish is not None:
            partials += [Partial(placed, *result) for placed, result in zip(shared, finish(), strict=True)]
            partials.sort(key=lambda partial: partial.placed.index)
        self._ops.merge(geometry, window, partials, out, lse, lease)
        lease.close()

    def _own_and_shared(self, window: Window) -> tuple[Sequence[PlacedCall], Sequence[PlacedCall]]:
        """Return the calls of this rank alone, and those that others have a part in."""
        if not self._travelling:
            return window.calls, ()
        shared = [placed for placed in window.calls if placed.branch in self._travelling]
        return [placed for placed in window.calls if placed.branch not in self._travelling], shared

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Iterable[Tensor] = (),
        wanted: Wanted = ALL,
        travel: TravelBackward | None = None,
    ) -> Triple:
        """Return dq, dk, dv in the compute dtype, every partial against the merged out and lse.

        Shapes as in ``forward``; dout and out (B, S, H, D) contiguous, lse (B, H, S) contiguous. Kernels compute all
        three; where one is not wanted nothing is summed, and any tensor may stand in its place.
        """
        if self._dense:
            return self._backward[0](dout, q, k, v, out, lse)
        geometry, inputs, results = self._geometry(q, k, v), (q, k, v), (dout, out, lse)
        if geometry.direct:
            return self._direct_backward(geometry, inputs, results)
        made = ALL if self._writer is not None else wanted  # a kernel that writes in place writes all three
        dq, dk, dv = [_empty_like(x) if make else x for x, make in zip(inputs, made, strict=True)]
        grads = dq, dk, dv
        rows_kept = iter(kept) if kept else None
        for window in geometry.windows:
            self._backward_window(geometry, window, inputs, results, grads, wanted, rows_kept, travel)
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
        """Sum the gradients of all branches over one window into ``grads``; its workspace ends with it.

        ``results`` are dout, out and lse; ``kept`` gives the rows that the forward kept, if it kept any.
        """
        lease = Lease(grads[0].device, *self._pool)
        own, shared = self._own_and_shared(window)
        finish = None
        if travel is not None:
            finish = travel([self._backward_rows(geometry, placed, inputs, results, lease) for placed in shared])
        found: list[tuple[PlacedCall, Triple]] = []
        for placed in own:
            held = (next(kept), next(kept), next(kept)) if kept is not None and placed.call.copied else None
            rows = self._backward_rows(geometry, placed, inputs, results, lease, held)
            backward = self._backward[placed.branch]
            if placed.branch == self._writer:
                in_place, writing = self._rows(geometry, placed, grads, lease), cast(WritingBackward, backward)
                parts = writing(rows.dout, *rows.inputs, rows.out, rows.lse, grads=in_place)
            else:
                parts = backward(rows.dout, *rows.inputs, rows.out, rows.lse)
            found.append((placed, parts))
        if finish is not None:
            found += zip(shared, finish(), strict=True)
            found.sort(key=lambda pair: pair[0].index)
        if self._writer is None or len(self._backward) > 1:  # else its one branch has written every position already
            jobs = [
                GradJob([GradPartial(placed, parts[number]) for placed, parts in found], grads[number])
                for number in range(3)
                if wanted[number]
            ]
            self._ops.scatter_sum(geometry, window, jobs, lease)
        lease.close()

    def _geometry(self, q: Tensor, k: Tensor, v: Tensor) -> Geometry:
        batch, length, heads, _ = q.shape
        folds = all(x.stride(0) == length * x.stride(1) for x in (q, k, v))
        return self._geometry_of(
            LayoutKey(self._pattern, self._gathers, self._window, batch, length, heads, k.shape[2], folds)
        )

    def _rows(self, geometry: Geometry, placed: PlacedCall, inputs: Triple, lease: Lease) -> Triple:
        """Return the rows of q, k and v that a call reads, in place or gathered."""
        if placed.call.copied:
            q, k, v = self._ops.gather(geometry, placed, inputs, lease)
            return q, k, v
        return _in_place(geometry, placed, inputs)

    def _backward_rows(
        self,
        geometry: Geometry,
        placed: PlacedCall,
        inputs: Triple,
        results: Triple,
        lease: Lease,
        rows: Triple | None = None,
    ) -> BackwardRows:
        """Return what the backward of a call reads; whatever must be gathered is gathered in one step.

        ``rows`` are q, k, v where the forward kept them.
        """
        dout, out, lse = results
        if not placed.call.copied:
            rows = _in_place(geometry, placed, inputs)
        in_place = self._results_in_place(geometry, placed, dout, out)
        sources = [*(() if in_place else (dout, out)), *(inputs if rows is None else ())]
        gathered, lse_rows = self._ops.gather_backward(geometry, placed, sources, lse, lease)
        dout_rows, out_rows = in_place or (gathered[0], gathered[1])
        return BackwardRows(rows or (gathered[-3], gathered[-2], gathered[-1]), dout_rows, out_rows, lse_rows)

    def _results_in_place(
        self, geometry: Geometry, placed: PlacedCall, dout: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return the query rows of dout and out in place; None where the call's backward needs them gathered.

        Contiguous unless the kernel reads any layout: cudnn's plan cache keys on the strides of q, k and v alone, and
        the efficient kernel assumes rows of out to be H * D apart, so another layout is silently wrong there.
        """
        strided = self._strided[placed.branch]
        if placed.call.copied or not (strided or placed.call.rate == 1):
            return None
        dout_rows, out_rows = _view(geometry, placed, dout), _view(geometry, placed, out)
        return (dout_rows, out_rows) if strided or (dout_rows.is_contiguous() and out_rows.is_contiguous()) else None

    def _direct(self, geometry: Geometry, inputs: Triple) -> tuple[Tensor, Tensor]:
        """Run one call over everything, segments as a batch: its result needs no merge."""
        placed, q = geometry.windows[0].calls[0], inputs[0]
        out, lse = self._forward[0](*_in_place(geometry, placed, inputs))
        batch, length, heads, _ = q.shape
        lse_BHS = lse.view(batch, -1, heads, placed.call.rows).transpose(1, 2).reshape(batch, heads, length)
        return out.reshape(q.shape), lse_BHS

    def _direct_backward(self, geometry: Geometry, inputs: Triple, results: Triple) -> Triple:
        placed, (q, k, v) = geometry.windows[0].calls[0], inputs
        rows = self._backward_rows(geometry, placed, inputs, results, _unpooled(q.device))
        dq, dk, dv = self._backward[0](rows.dout, *rows.inputs, rows.out, rows.lse)
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _view(geometry: Geometry, placed: PlacedCall, x: Tensor) -> Tensor:
    """View the rows of a call in x (B, S, heads, D) as (N, M, heads of the call, D)."""
    (view,) = geometry.views(placed, geometry.group(x.shape[2]), x.stride(), x.shape[3], folded=True)
    return as_view(x, view)


def _in_place(geometry: Geometry, placed: PlacedCall, inputs: Triple) -> Triple:
    q, k, v = inputs
    return _view(geometry, placed, q), _view(geometry, placed, k), _view(geometry, placed, v)


def _unpooled(device: torch.device) -> Lease:
    """Return a lease of memory that may outlive the call: gathered rows that are kept."""
    return Lease(device, None, "shape")
