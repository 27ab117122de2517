"""Gathers, merges and sums in one Triton launch each: the host side of ``fused_kernels``.

``TritonOps`` does what ``merge.TorchOps`` does, on NVIDIA GPUs and in float32, bfloat16 and float16. Everything that
depends on shapes and strides alone is worked out once and kept on the Geometry; a call collects addresses and
launches. Nothing here waits for the device, so all of it can be captured in a CUDA graph.

Legend: B batch, S length, H query heads, Hkv key/value heads, D head dim; of a call: N segments times batch, M rows,
G = H / Hkv.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.geometry.calls import Geometry, PlacedCall, Window
from ringattn.runtime.merge import GradJob, GradPartial, Partial, as_view
from ringattn.runtime.workspace import Lease

from . import fused_kernels
from .fused_layout import Pick, SlotLayout, Strides, pick, run_words, slot_layouts, slot_words, stride_words

_TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_INT32_END = 2**31
_WIDEST_ACCESS = 16  # bytes
# Merging 262,144 positions of LongNet took an H100 1.11 ms so, 1.17 with 4 warps, 1.26 with 128 bytes of a row side
# by side (by a thread per 16).
_WARPS, _ACCESS_BYTES = 8, 64
_LSE_ONLY_ROWS = 1024
# A program of merge or sum finds its rows once and handles up to four blocks of them, if there are programs enough.
_MOST_BLOCKS = 4
_ENOUGH_PROGRAMS = 1024
_LONGEST_BLOCK = 128
# Elements of a tile that four warps keep in flight: 8 16-byte loads a thread in 16-bit.
_TILE_ELEMENTS = {"merge": 4096, "sum": 4096, "gather": 8192}


class _Launch(NamedTuple):
    """One launch but for its addresses. ``picks`` order those for the kernel, ``bits`` are all strides in bytes, or-ed.

    ``ready`` keeps, by device, what launches the compiled kernel without Triton's look at every argument, which costs
    as much as the launch itself.
    """

    grid: tuple[int, int, int]
    picks: tuple[Pick, ...]
    words: tuple[Any, ...]
    scalars: tuple[int, ...]
    constants: dict[str, Any]
    bits: int
    ready: dict[int, Callable[..., None]]


class _Tiling(NamedTuple):
    """Positions a program handles at a time, the number of times, and the programs that cover a window."""

    block: int
    blocks: int
    programs: int
    aligned: bool


class TritonOps:
    """Steps between kernels, as in ``merge.TorchOps``, as one Triton kernel each.

    ``merge_block``, ``sum_block`` and ``gather_block`` are the positions (rows) that one program handles at a time,
    powers of two; None takes what suits the head dim.
    """

    def __init__(
        self, merge_block: int | None = None, sum_block: int | None = None, gather_block: int | None = None
    ) -> None:
        self._blocks = {"merge": merge_block, "sum": sum_block, "gather": gather_block}
        self._setting = (merge_block, sum_block, gather_block)

    def gather(self, geometry: Geometry, placed: PlacedCall, sources: Sequence[Tensor], lease: Lease) -> list[Tensor]:
        return self._gather(geometry, placed, sources, None, lease)[0]

    def gather_backward(
        self, geometry: Geometry, placed: PlacedCall, sources: Sequence[Tensor], lse_BHS: Tensor, lease: Lease
    ) -> tuple[list[Tensor], Tensor]:
        if not sources and placed.call.rate == 1 and len(placed.call.runs) == 1:
            lse_BSH = lse_BHS.transpose(1, 2)
            (view,) = geometry.views(placed, geometry.group(lse_BHS.shape[1]), lse_BSH.stride(), None, folded=True)
            lse_in_place = as_view(lse_BSH, view).transpose(1, 2)
            if lse_in_place.is_contiguous():
                return [], lse_in_place
        rows, lse_rows = self._gather(geometry, placed, sources, lse_BHS, lease)
        assert lse_rows is not None
        return rows, lse_rows

    def merge(
        self, geometry: Geometry, window: Window, partials: Sequence[Partial], out: Tensor, lse: Tensor, lease: Lease
    ) -> None:
        outs = [partial.out for partial in partials]
        lses = [partial.lse for partial in partials]
        key = (
            "merge", window.begin, self._setting, out.dtype, out.shape[3], out.stride(), lse.stride(),
            *[x.stride() for x in outs], *[x.stride() for x in lses],
        )  # fmt: skip
        launches = geometry.fused.get(key)
        if launches is None:
            _check(window, partials, outs, out.dtype)
            assert all(x.dtype is torch.float32 for x in lses), "every lse is float32 here"
            launches = geometry.fused[key] = self._plan_merge(geometry, window, outs, lses, out, lse)
        addresses = [x.data_ptr() for x in (out, lse, *outs, *lses)]
        for launch in launches:
            pick_outs, pick_lses = launch.picks
            out_strides, lse_strides, slots, target_strides = launch.words
            self._run(
                fused_kernels.merge_partials, launch, out, addresses, pick_outs(addresses), pick_lses(addresses),
                out_strides, lse_strides, slots, addresses[0], addresses[1], target_strides,
            )  # fmt: skip

    def _plan_merge(
        self,
        geometry: Geometry,
        window: Window,
        outs: Sequence[Tensor],
        lses: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
    ) -> tuple[_Launch, ...]:
        key = geometry.key
        out_strides, lse_strides = [Strides.of(x) for x in outs], [Strides.of_lse(x) for x in lses]
        target = Strides.of(out)
        constants = {"KV_HEADS": key.kv_heads, "GROUP": key.heads // key.kv_heads}

        def words(layout: SlotLayout) -> tuple[Any, ...]:
            strides = stride_words(layout, [out_strides]), stride_words(layout, [lse_strides])
            return *strides, slot_words(layout), (*target.words(), *Strides.of_lse(lse).words())

        def picks(layout: SlotLayout) -> tuple[Pick, ...]:
            return pick(layout, (0,), (2,)), pick(layout, (1,), (2 + len(outs),))

        rows, others = [target, *out_strides], lse_strides
        return self._launches("merge", geometry, window, key.heads, constants, out, rows, others, picks, words)

    def scatter_sum(self, geometry: Geometry, window: Window, jobs: Sequence[GradJob], lease: Lease) -> None:
        grads = [[partial.grad for partial in job.partials] for job in jobs]
        first = jobs[0].target
        key = (
            "sum", window.begin, self._setting, first.dtype, first.shape[3],
            *[(job.target.shape[2], job.target.stride(), *[x.stride() for x in own])
              for job, own in zip(jobs, grads, strict=True)],
        )  # fmt: skip
        launches = geometry.fused.get(key)
        if launches is None:
            for job, own in zip(jobs, grads, strict=True):
                _check(window, job.partials, own, first.dtype)
            launches = geometry.fused[key] = self._plan_sum(geometry, window, [job.target for job in jobs], grads)
        addresses = [job.target.data_ptr() for job in jobs]
        targets = tuple(addresses)
        for own in grads:
            addresses += [x.data_ptr() for x in own]
        for launch in launches:
            strides, slots, target_strides = launch.words
            self._run(
                fused_kernels.sum_partials, launch, first, addresses, launch.picks[0](addresses), strides, slots,
                targets, target_strides,
            )  # fmt: skip

    def _plan_sum(
        self, geometry: Geometry, window: Window, targets: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
    ) -> tuple[_Launch, ...]:
        strides = [[Strides.of(x) for x in own] for own in grads]
        of_targets = [Strides.of(x) for x in targets]
        begins = [len(targets) + number * len(window.calls) for number in range(len(targets))]
        heads = sum(x.shape[2] for x in targets)
        groups = tuple(geometry.group(x.shape[2]) for x in targets)
        constants = {"KV_HEADS": geometry.key.kv_heads, "GROUPS": groups, "HEADS": heads}

        def words(layout: SlotLayout) -> tuple[Any, ...]:
            return stride_words(layout, strides), slot_words(layout), sum((s.words() for s in of_targets), ())

        def picks(layout: SlotLayout) -> tuple[Pick, ...]:
            return (pick(layout, range(len(targets)), begins),)

        rows = [*of_targets, *[s for own in strides for s in own]]
        return self._launches("sum", geometry, window, heads, constants, targets[0], rows, (), picks, words)

    def _launches(
        self,
        step: str,
        geometry: Geometry,
        window: Window,
        heads: int,
        constants: dict[str, Any],
        target: Tensor,
        rows: Sequence[Strides],
        others: Sequence[Strides],
        picks: Callable[[SlotLayout], tuple[Pick, ...]],
        words: Callable[[SlotLayout], tuple[Any, ...]],
    ) -> tuple[_Launch, ...]:
        """Return the launches of merge or sum, one per layout of slots: programs handle positions of ``heads`` heads.

        ``rows`` are the strides of all tensors of rows, ``others`` those of LSEs.
        """
        kernel = {"merge": fused_kernels.merge_partials, "sum": fused_kernels.sum_partials}[step]
        head_dim = target.shape[3]
        tiling = self._tiling(step, geometry, window, head_dim, geometry.key.batch * heads)
        widest = max(s.row for s in (*rows, *others))
        constants |= {
            "HEAD_DIM": head_dim,
            "CHUNK": _chunk(head_dim, target.element_size()),
            "BLOCK": tiling.block,
            "ALIGNED": tiling.aligned,
            "NARROW": tiling.block * _MOST_BLOCKS * widest < _INT32_END,
            "DTYPE": _TL_DTYPES[target.dtype],
        }
        return tuple(
            _Launch(
                grid=(tiling.programs * heads, layout.batch_end - layout.batch_begin, 1),
                picks=picks(layout),
                words=words(layout),
                scalars=(window.begin, window.end, layout.batch_begin, tiling.blocks),
                constants=_in_order(kernel, {**constants, "BRANCHES": tuple(map(tuple, layout.branches))}),
                bits=_bits(rows, target),
                ready={},
            )
            for layout in slot_layouts(geometry.key, window)
        )

    def _gather(
        self, geometry: Geometry, placed: PlacedCall, sources: Sequence[Tensor], lse_BHS: Tensor | None, lease: Lease
    ) -> tuple[list[Tensor], Tensor | None]:
        """Gather rows of all sources, and of the lse if given, in one launch."""
        call = placed.call
        blocks = call.batch * call.segments
        rows = [
            lease.empty((blocks, call.rows, call.kv_heads * geometry.group(x.shape[2]), x.shape[3]), x.dtype)
            for x in sources
        ]
        of_lse = None if lse_BHS is None else lse_BHS.stride()
        some = sources[0] if sources else lse_BHS
        assert some is not None
        key = (
            "gather", placed.index, of_lse, self._setting, some.dtype, some.shape[-1],
            *[(x.stride(), x.shape[2]) for x in sources],
        )  # fmt: skip
        launch = geometry.fused.get(key)
        if launch is None:
            launch = geometry.fused[key] = self._plan_gather(geometry, placed, sources, lse_BHS)
        lse_rows, lse_address, lse_rows_address = None, 0, 0
        if lse_BHS is not None:
            heads = call.kv_heads * geometry.group(lse_BHS.shape[1])
            lse_rows = lease.empty((blocks, heads, call.rows), lse_BHS.dtype)
            lse_address, lse_rows_address = lse_BHS.data_ptr(), lse_rows.data_ptr()
        source_addresses = tuple([x.data_ptr() for x in sources])
        rows_addresses = tuple([x.data_ptr() for x in rows])
        strides, runs, lse_strides = launch.words
        self._run(
            fused_kernels.gather_rows, launch, some,
            (*source_addresses, *rows_addresses, lse_address, lse_rows_address), source_addresses, strides,
            rows_addresses, runs, lse_address, lse_strides, lse_rows_address,
        )  # fmt: skip
        return rows, lse_rows

    def _plan_gather(
        self, geometry: Geometry, placed: PlacedCall, sources: Sequence[Tensor], lse_BHS: Tensor | None
    ) -> _Launch:
        call = placed.call
        groups = tuple(geometry.group(x.shape[2]) for x in sources)
        if lse_BHS is not None:
            group = geometry.group(lse_BHS.shape[1])
            groups = groups or (group,)
            assert groups[0] == group, "the lse goes with the first source"
        strides = [Strides.of(x) for x in sources]
        of_lse = Strides(0, 0, 0) if lse_BHS is None else Strides.of_lse(lse_BHS)
        head_dim = sources[0].shape[3] if sources else 1
        block = self._block("gather", head_dim) if sources else _LSE_ONLY_ROWS
        row_blocks = triton.cdiv(call.rows, block)
        heads_per_kv = sum(groups)
        span = block * call.rate * max(s.row for s in (*strides, of_lse))
        dtype = sources[0].dtype if sources else torch.float32
        constants = {
            "GROUPS": groups,
            "HEADS_PER_KV": heads_per_kv,
            "WITH_ROWS": bool(sources),
            "WITH_LSE": lse_BHS is not None,
            "HEAD_DIM": head_dim,
            "CHUNK": _chunk(head_dim, dtype.itemsize),
            "BLOCK": block,
            "NARROW": span < _INT32_END,
            "DTYPE": _TL_DTYPES[dtype],
        }
        of_call = (call.start, call.batch_start, call.segments, call.length, call.rate, call.rows, call.kv_heads)
        return _Launch(
            grid=(call.batch * call.segments * row_blocks * call.kv_heads * heads_per_kv, 1, 1),
            picks=(),
            words=(sum((s.words() for s in strides), ()), run_words(geometry, placed), of_lse.words()),
            scalars=(*of_call, row_blocks),
            constants=_in_order(fused_kernels.gather_rows, constants),
            bits=_bits(strides, sources[0]) | head_dim * dtype.itemsize if sources else 0,
            ready={},
        )

    def _block(self, step: str, head_dim: int) -> int:
        chosen = self._blocks[step]
        return chosen or max(16, min(_LONGEST_BLOCK, _TILE_ELEMENTS[step] // triton.next_power_of_2(head_dim)))

    def _tiling(self, step: str, geometry: Geometry, window: Window, head_dim: int, pairs: int) -> _Tiling:
        """Return blocks that cross no segment's edge, or else are cut there; ``pairs`` counts (batch, head) pairs.

        A segment that reaches to the window's end has no edge. Blocks that are cut are found one by one, so they are
        twice as long: with Prov-GigaPath's segments an H200 sums 100,003 positions in 1.1 ms so, in 1.7 with the
        shorter ones, and in 4.6 with the 32 positions that divide its segments.
        """
        block, length = self._block(step, head_dim), window.end - window.begin
        resolved = geometry.key.pattern.resolved(geometry.key.seq_len)
        segments = [branch.segment for branch in resolved if branch.segment < length]
        aligned = all(segment % block == 0 for segment in segments)
        if aligned:
            blocks = math.gcd(_MOST_BLOCKS * block, *segments) // block
        else:
            blocks = _MOST_BLOCKS
            block = self._blocks[step] or min(2 * block, _LONGEST_BLOCK)
        while blocks > 1 and triton.cdiv(length, block * blocks) * pairs < _ENOUGH_PROGRAMS:
            blocks //= 2
        return _Tiling(block, blocks, triton.cdiv(length, block * blocks), aligned)

    def _run(self, kernel: Any, launch: _Launch, on: Tensor, addresses: Iterable[int], *args: Any) -> None:
        """Launch; what divides all ``addresses`` decides the width of an access, a constant of the kernel."""
        bits = functools.reduce(operator.or_, addresses, launch.bits | _WIDEST_ACCESS)
        align = bits & -bits
        device = on.device.index
        if device is None or device == torch.cuda.current_device():
            self._launch(kernel, launch, device, align, args)
            return
        with torch.cuda.device(device):
            self._launch(kernel, launch, device, align, args)

    def _launch(self, kernel: Any, launch: _Launch, device: int | None, align: int, args: tuple[Any, ...]) -> None:
        if device is not None and align == _WIDEST_ACCESS:
            ready = launch.ready.get(device)
            if ready is not None:
                ready(*args, *launch.scalars, *launch.constants.values())
                return
        constants = {**launch.constants, "ALIGN": align}
        options = {"num_warps": _WARPS, "enable_fp_fusion": True}
        compiled = kernel[launch.grid](*args, *launch.scalars, **constants, **options)
        if device is not None and align == _WIDEST_ACCESS:
            launch.ready[device] = compiled[launch.grid]


def _in_order(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Return the constants of a kernel in the order of its signature."""
    given = {**constants, "ALIGN": _WIDEST_ACCESS}
    return {name: given[name] for name in kernel.arg_names if name in given}


def _chunk(head_dim: int, element_bytes: int) -> int:
    """Return the columns per access: those of ``_ACCESS_BYTES``, or what divides the row.

    The fewer there are, the fewer threads repeat the arithmetic of a row. Rows that no 32 bytes divide are one chunk,
    wider than they are.
    """
    divides = min(head_dim & -head_dim, _ACCESS_BYTES // element_bytes)
    return divides if divides * element_bytes >= 32 else triton.next_power_of_2(head_dim)


def _check(
    window: Window, partials: Sequence[Partial] | Sequence[GradPartial], rows: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Assert what an address does not tell a kernel."""
    calls = [partial.placed.index for partial in partials]
    assert calls == [placed.index for placed in window.calls], "partial results come in the order of the window's calls"
    assert all(x.dtype is dtype for x in rows), f"partial results are {dtype} as the target is"
    assert all(x.stride(3) == 1 or x.shape[3] == 1 for x in rows), "rows of partial results are contiguous"


def _bits(strides: Sequence[Strides], like: Tensor) -> int:
    """Or all strides in bytes together: what divides the result divides each."""
    return functools.reduce(operator.or_, (stride for each in strides for stride in each)) * like.element_size()
