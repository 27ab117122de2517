"""Gathers rows, merges partial results and sums partial gradients between kernels, in torch operations.

Runs on any device and dtype; ``merge_triton`` fuses the same steps on GPUs. Both work on a window of positions and
never build a mask or an index list.

Merging is exact: with ``L_b`` the log-sum-exp of partial b and ``m`` the largest, ``s = sum_b exp(L_b - m)``,
``O = sum_b exp(L_b - m) / s O_b`` and ``L = m + log(s)`` (FlashAttention, arXiv:2205.14135, section 3.1). The weights
sum to 1 whatever the size of L; ``exp(L_b - L)`` does not: in float32 L is off by 0.03 at 4e5. An LSE of -inf has
weight 0.

Legend: B batch, S length, H query heads, Hkv key/value heads, D head dim; of a call: N segments times batch, M rows,
J heads of a run, G = H / Hkv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.geometry.calls import Geometry, PlacedCall, Window
from ringattn.geometry.pattern import StridedView

from .workspace import Lease


class Partial(NamedTuple):
    """Result of a forward kernel for one call: out (N, M, J * G, D) and lse (N, J * G, M)."""

    placed: PlacedCall
    out: Tensor
    lse: Tensor


class GradPartial(NamedTuple):
    """One gradient of one call: (N, M, heads, D), heads being J * G for dq and J for dk and dv."""

    placed: PlacedCall
    grad: Tensor


class GradJob(NamedTuple):
    """Parts of a gradient in the order of the window's calls, and the (B, S, heads, D) tensor for their sum."""

    partials: Sequence[GradPartial]
    target: Tensor


def as_view(x: Tensor, view: StridedView) -> Tensor:
    """Return the rows of x that ``view`` reaches, in place."""
    return x.as_strided(view.size, view.stride, x.storage_offset() + view.offset)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of LSEs and sums: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _run_slices(placed: PlacedCall, group: int) -> list[slice]:
    """Return the heads of each run within the call's own (side by side) heads."""
    slices, begin = [], 0
    for run in placed.call.runs:
        slices.append(slice(begin * group, (begin + run.count) * group))
        begin += run.count
    return slices


def _unfolded(x_NMHD: Tensor, placed: PlacedCall, heads: slice, group: int) -> Tensor:
    """View (N, M, heads, D) of one run as (batch, segment, M, J, G, D)."""
    call = placed.call
    return x_NMHD[:, :, heads].view(call.batch, call.segments, call.rows, -1, group, x_NMHD.shape[-1])


def _unfolded_lse(lse_NHM: Tensor, placed: PlacedCall, heads: slice, group: int) -> Tensor:
    """View (N, heads, M) of one run as (batch, segment, M, J, G)."""
    call = placed.call
    return lse_NHM[:, heads].view(call.batch, call.segments, -1, group, call.rows).movedim(4, 2)


def _raise_peak(peak: Tensor, part: Tensor) -> None:
    peak.copy_(torch.maximum(peak, part))


def _add_weight(total: Tensor, part: Tensor, peak: Tensor) -> None:
    total.add_(torch.exp(part - peak))


def _add_weighted(total: Tensor, out: Tensor, part: Tensor, peak: Tensor, weights: Tensor) -> None:
    total.add_(out * (torch.exp(part - peak) / weights).unsqueeze(-1))


def _add(total: Tensor, grad: Tensor) -> None:
    total.add_(grad)


class TorchOps:
    """Steps between kernels as torch operations on strided views; ``compiled`` fuses each with torch.compile.

    Tensors are (B, S, heads, D), lse (B, H, S). Partial results come in the order of the window's calls.
    """

    def __init__(self, compiled: bool = False) -> None:
        def maybe(step: Callable[..., None]) -> Callable[..., None]:
            return torch.compile(step, dynamic=True) if compiled else step

        self._raise_peak = maybe(_raise_peak)
        self._add_weight = maybe(_add_weight)
        self._add_weighted = maybe(_add_weighted)
        self._add = maybe(_add)

    def gather(self, geometry: Geometry, placed: PlacedCall, sources: Sequence[Tensor], lease: Lease) -> list[Tensor]:
        """Copy the rows of a call side by side: one contiguous (N, M, heads, D) tensor per source."""
        call = placed.call
        gathered = []
        for x in sources:
            group, head_dim = geometry.group(x.shape[2]), x.shape[3]
            rows = lease.empty((call.batch * call.segments, call.rows, call.kv_heads * group, head_dim), x.dtype)
            views = geometry.views(placed, group, x.stride(), head_dim, folded=False)
            for view, heads in zip(views, _run_slices(placed, group), strict=True):
                _unfolded(rows, placed, heads, group).copy_(as_view(x, view))
            gathered.append(rows)
        return gathered

    def gather_backward(
        self, geometry: Geometry, placed: PlacedCall, sources: Sequence[Tensor], lse_BHS: Tensor, lease: Lease
    ) -> tuple[list[Tensor], Tensor]:
        """Run ``gather``, and copy the LSE of the call's query rows, contiguous (N, heads, M).

        There may be no sources; the first has the heads of the LSE.
        """
        call, group = placed.call, geometry.group(lse_BHS.shape[1])
        rows = lease.empty((call.batch * call.segments, call.kv_heads * group, call.rows), lse_BHS.dtype)
        lse_BSH = lse_BHS.transpose(1, 2)
        views = geometry.views(placed, group, lse_BSH.stride(), None, folded=False)
        for view, heads in zip(views, _run_slices(placed, group), strict=True):
            _unfolded_lse(rows, placed, heads, group).copy_(as_view(lse_BSH, view))
        return self.gather(geometry, placed, sources, lease) if sources else [], rows

    def merge(
        self, geometry: Geometry, window: Window, partials: Sequence[Partial], out: Tensor, lse: Tensor, lease: Lease
    ) -> None:
        """Write ``out`` and ``lse`` of the window; where no branch selects a position, 0 and -inf."""
        group, lse_BSH = geometry.group(lse.shape[1]), lse.transpose(1, 2)
        lse_of_window = lse_BSH[:, window.begin : window.end]
        lse_of_window.fill_(-torch.inf)
        weights_BSH = lease.empty(tuple(lse_of_window.shape), lse.dtype).zero_()
        runs = []
        for placed, out_rows, lse_rows in partials:
            views = geometry.views(placed, group, lse_BSH.stride(), None, folded=False)
            weight_views = geometry.views(placed, group, weights_BSH.stride(), None, folded=False)
            for number, heads in enumerate(_run_slices(placed, group)):
                peak, part = as_view(lse_BSH, views[number]), _unfolded_lse(lse_rows, placed, heads, group)
                weights = as_view(weights_BSH, _moved(weight_views[number], window.begin, weights_BSH))
                self._raise_peak(peak, part)
                runs.append((placed, number, peak, part, weights, _unfolded(out_rows, placed, heads, group)))
        lse_of_window.masked_fill_(lse_of_window == -torch.inf, 0.0)  # -inf - -inf is NaN
        for _, _, peak, part, weights, _ in runs:
            self._add_weight(weights, part, peak)
        log_weights_BSH = weights_BSH.log()
        weights_BSH.clamp_(min=1.0)  # the peak's own weight is 1: less is a position without a result

        with _Accumulator(out, window, lease) as total:
            for placed, number, peak, part, weights, rows in runs:
                self._add_weighted(total.rows(geometry, placed, number), rows, part, peak, weights)
        lse_of_window.add_(log_weights_BSH)

    def scatter_sum(self, geometry: Geometry, window: Window, jobs: Sequence[GradJob], lease: Lease) -> None:
        """Write the sums of partial gradients over the window; 0 where there is none."""
        for partials, target in jobs:
            group = geometry.group(target.shape[2])
            with _Accumulator(target, window, lease) as total:
                for placed, grad in partials:
                    for number, heads in enumerate(_run_slices(placed, group)):
                        self._add(total.rows(geometry, placed, number), _unfolded(grad, placed, heads, group))


def _moved(view: StridedView, begin: int, x: Tensor) -> StridedView:
    """Shift ``view`` of a whole sequence to x (B, positions, ...), whose first position is ``begin``."""
    return StridedView(view.size, view.stride, view.offset - begin * x.stride(1))


class _Accumulator:
    """Zeroed window of a (B, S, heads, D) tensor, in its own memory if that is wide enough, else in float32."""

    def __init__(self, target_BSHD: Tensor, window: Window, lease: Lease) -> None:
        self._target = target_BSHD[:, window.begin : window.end]
        wide = accumulator_dtype(target_BSHD.dtype)
        if target_BSHD.dtype == wide:
            self._sums, self._begin = target_BSHD, 0
            self._target.zero_()
        else:
            self._sums, self._begin = lease.empty(tuple(self._target.shape), wide).zero_(), window.begin

    def __enter__(self) -> _Accumulator:
        return self

    def rows(self, geometry: Geometry, placed: PlacedCall, run: int) -> Tensor:
        group, head_dim = geometry.group(self._sums.shape[2]), self._sums.shape[3]
        view = geometry.views(placed, group, self._sums.stride(), head_dim, folded=False)[run]
        return as_view(self._sums, _moved(view, self._begin, self._sums))

    def __exit__(self, *error: object) -> None:
        if error[0] is None and self._sums.dtype != self._target.dtype:
            self._target.copy_(self._sums)
