"""Runs our kernel for a few queries over many keys, "split-kv": decoding in one launch or two.

The keys of a sequence are split among programs, until these fill the GPU, and a second launch merges what they found.
``split_kv_device`` holds the device side and is imported when a plan with this kernel is built.

Legend: B batch, Sq queries, S keys, H query heads, K key/value heads, G = H / K, D head dimension.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ringattn.hardware.facts import gpu_of
from ringattn.kernels.contract import BlockKernel, BoundKernel, CachedRows, KernelConfig, KernelNeed, Params
from ringattn.workload import Pattern

from .triton import _MAX_ROW_STRIDE, _Compiled, _current, _Layout, device_side, refusal, shared_reasons
from .triton_tiles import SMALLEST_BLOCK, Tile, parse

_LARGEST_TILE = 32  # query rows; more are further tiles, which read the keys again. 64 of 128 leave the registers
MOST_QUERIES = 16  # more are as well served by kernels for many
_UNBOUNDED = 2**30  # longer than any cache, and 32-bit sums of two such numbers still fit
_SLOTS_AT_A_TIME = (16, 64)  # of a merge: the loads of 64 rows of 128, 64 registers a thread, are waited for once
# Programs per multiprocessor that splits are made for: three of 142 registers and 72 KiB stay on a Hopper one.
_WAVES = (3, 2, 1, 6)
_MOST_TILE_BYTES = 64 * 1024  # of keys and values under way in one program


class _Branch(NamedTuple):
    """Constants of a branch: heads per offset are 0 for the interleaved rule; ``first`` is its first job."""

    segment: int
    rate: int
    per_offset: int
    first: int


class _Strides(NamedTuple):
    """Strides of N, M and H in units of ``align`` elements, and the elements between rows that lie farthest apart."""

    strides: list[int]
    align: int
    farthest: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> _Strides:
        strides, align, _ = _Layout.of(q, k, v)
        return cls(strides, align, max(k.stride(1), v.stride(1)))


@functools.lru_cache(maxsize=256)
def jobs_of(pattern: Pattern, queries: int, kv_heads: int) -> tuple[tuple[_Branch, ...], int]:
    """Return the branches and the number of jobs, segments in which consecutive queries may lie."""
    branches: list[_Branch] = []
    jobs = 0
    for branch in pattern.resolved(_UNBOUNDED):
        segment = min(branch.segment, _UNBOUNDED)
        per_offset = 0 if pattern.head_offset == "interleaved" else -(-kv_heads // branch.rate)
        branches.append(_Branch(segment, branch.rate, per_offset, jobs))
        jobs += 1 if pattern.dense else -(-(queries - 1) // segment) + 1
    return tuple(branches), jobs


class _Launcher:
    """Kernels with causality and scale fixed."""

    def __init__(self, device_side: Any, config: KernelConfig, tile: Tile | None, waves: int) -> None:
        assert config.scale > 0, "keys are masked before they are scaled"
        self._device_side = device_side
        self._tile, self._waves = tile, waves
        self._causal, self._scale = config.causal, config.scale
        self._tf32 = config.dtype == "tf32"
        self._compiled: dict[tuple[object, ...], _Compiled] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        return self.cached(q, k, v, CachedRows(Pattern(), k.shape[1]))

    def cached(self, q: Tensor, k: Tensor, v: Tensor, rows: CachedRows, /) -> tuple[Tensor, Tensor]:
        batch, queries, heads, head_dim = q.shape
        keys, kv_heads = k.shape[1], k.shape[2]
        group = heads // kv_heads
        out = torch.empty((batch, queries, heads, head_dim), dtype=q.dtype, device=q.device)
        lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
        branches, jobs = jobs_of(rows.pattern, queries, kv_heads)
        layout = _Strides.of(q, k, v)
        step = self._step(q, rows, branches, jobs, group, layout)
        row_tiles = -(-queries * group // step.tile.block_m)
        programs = batch * kv_heads * row_tiles * jobs
        splits = self._splits(q.device, programs, min(rows.most, rows.window or rows.most), step.tile.block_n)
        slots = splits * jobs
        found, found_lse = out, lse
        if slots > 1:
            found = torch.empty((batch, heads, queries, slots, head_dim), dtype=torch.float32, device=q.device)
            found_lse = torch.empty((batch, heads, queries, slots), dtype=torch.float32, device=q.device)
            step = self._step(q, rows, branches, jobs, group, layout, direct=False)
        sizes = (queries, keys, heads, group, row_tiles, splits, rows.window or _UNBOUNDED)
        scales = (self._scale, self._scale * math.log2(math.e))
        given = [q if x is None else x for x in (rows.lengths, rows.begins, rows.counts)]
        with _current(q.device):
            step.launch(
                programs * splits, (q, k, v, *given, found, found_lse), (*layout.strides, *sizes, *scales)
            )  # fmt: skip
            if slots > 1:
                tensors = (found, found_lse, out, lse)
                self._merge(q, slots).launch(batch * heads * queries, tensors, (queries, heads, slots))
        return out, lse

    def backward(self, *_: Any) -> NoReturn:
        raise AssertionError("split-kv has no backward, and no plan that needs one names it")

    def _splits(self, device: torch.device, programs: int, most: int, block_n: int) -> int:
        """Return the splits of each program's keys that fill the GPU, no more than there are tiles of keys."""
        wanted = self._waves * gpu_of(device).sm_count // programs
        return max(1, min(wanted, -(-most // block_n)))

    def _step(
        self,
        q: Tensor,
        rows: CachedRows,
        branches: tuple[_Branch, ...],
        jobs: int,
        group: int,
        layout: _Strides,
        direct: bool = True,
    ) -> _Compiled:
        queries = q.shape[1]
        block_m = min(max(SMALLEST_BLOCK, 1 << (queries * group - 1).bit_length()), _LARGEST_TILE)
        given = (rows.lengths is not None, rows.begins is not None, rows.counts is not None)
        key = (
            q.dtype, q.shape[3], q.device, branches, jobs, rows.pattern.dense, block_m, queries > 1, given, direct,
            layout.align, layout.farthest * max(branch.rate for branch in branches) > _MAX_ROW_STRIDE,
        )  # fmt: skip
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._prepare(q, key)
        return compiled

    def _prepare(self, q: Tensor, key: tuple[Any, ...]) -> _Compiled:
        _, head_dim, device, branches, jobs, dense, block_m, several, given, direct, align, wide = key
        dtype = "tf32" if self._tf32 else "fp32" if q.dtype is torch.float32 else "fp16"
        tile = (self._tile or tiles(dtype, head_dim)[0])._replace(block_m=block_m)
        constants: dict[str, object] = {
            "BRANCHES": tuple(map(tuple, branches)),
            "JOBS": jobs,
            "DENSE": dense,
            "CAUSAL": self._causal,
            "SEVERAL": several,
            **dict(zip(("LENGTHS", "BEGINS", "COUNTS"), given, strict=True)),
            "DIRECT": direct,
            "HEAD_DIM": head_dim,
            "BLOCK_D": _padded(head_dim),
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "ALIGN": align,
            "WIDE": wide,
            "PRECISION": "tf32" if self._tf32 else tile.precision or "ieee",
            "ROUND": self._tf32 and device.type == "cuda",
        }
        return _Compiled(self._device_side.split_kv_kernel, tile, constants)

    def _merge(self, q: Tensor, slots: int) -> _Compiled:
        at_a_time = next((n for n in _SLOTS_AT_A_TIME if slots <= n), _SLOTS_AT_A_TIME[-1])
        key = ("merge", q.dtype, q.shape[3], q.device, at_a_time)
        compiled = self._compiled.get(key)
        if compiled is None:
            head_dim = q.shape[3]
            constants: dict[str, object] = {"HEAD_DIM": head_dim, "BLOCK_D": _padded(head_dim), "BLOCK_S": at_a_time}
            kernel = self._device_side.merge_slots_kernel
            compiled = self._compiled[key] = _Compiled(kernel, Tile(1, at_a_time, 4, 1), constants)
        return compiled


def _padded(head_dim: int) -> int:
    return max(SMALLEST_BLOCK, 1 << (head_dim - 1).bit_length())


# --- the row -----------------------------------------------------------------------------------------------------


def tiles(dtype: str, head_dim: int) -> tuple[Tile, ...]:
    """Return the tiles worth trying, the default first: keys, warps and stages; rows are those that there are."""
    precision = "tf32x3" if dtype == "fp32" else ""
    key_bytes = 2 * _padded(head_dim) * (4 if dtype in ("fp32", "tf32") else 2)
    fits = [shape for shape in _SHAPES if shape[0] * (shape[2] - 1) * key_bytes <= _MOST_TILE_BYTES]
    return tuple(Tile(SMALLEST_BLOCK, *shape, precision) for shape in fits[:5])


# Keys, warps and stages, of which all but one hold keys that are under way.
_SHAPES = (
    (64, 4, 3), (64, 8, 3), (128, 4, 2), (32, 4, 4), (128, 8, 2), (64, 4, 2), (32, 4, 3), (32, 4, 2), (16, 4, 2)
)  # fmt: skip


def load(config: KernelConfig) -> BoundKernel:
    """Bind the kernel; KernelLoadError where triton is missing or broken, or a parameter is unknown or malformed."""
    unknown = sorted(set(config.params) - {"tile", "waves"})
    if unknown:
        raise _refusal(f"unknown parameter {unknown[0]}", "It takes tile, waves")
    chosen, waves = config.params.get("tile"), config.params.get("waves", _WAVES[0])
    tile = None if chosen is None else parse(str(chosen))
    if chosen is not None and tile is None:
        raise _refusal(f"tile is {chosen!r}", "Write it as in 16x64-w4-s3: query rows, keys, warps, stages")
    if not isinstance(waves, int) or isinstance(waves, bool) or waves < 1:
        raise _refusal(f"waves is {waves!r}", "It is how many programs a multiprocessor gets, an integer >= 1")
    launcher = _Launcher(device_side("split-kv", ".split_kv_device"), config, tile, waves)
    return BoundKernel(launcher.forward, launcher.backward, cached=launcher.cached)


_refusal = partial(refusal, "split-kv")


def reasons(need: KernelNeed) -> tuple[str, ...]:
    if need.vendor != "nvidia":
        return ("runs on NVIDIA GPUs only",)
    found = shared_reasons(need)
    if need.backward:
        found.append("no backward")
    if need.rows >= _UNBOUNDED:
        found.append(f"{need.rows} keys; its positions end at 2^30")
    if need.queries == 0:
        found.append("is for a few queries over a cache of keys")
    elif need.queries > MOST_QUERIES:
        found.append(f"{need.queries} queries; it is for a few over a cache of keys, up to {MOST_QUERIES}")
    return tuple(found)


def params(need: KernelNeed) -> Params:
    """Return tiles and how many programs a multiprocessor gets."""
    if reasons(need):
        return {}
    return {"tile": tuple(map(str, tiles(need.dtype, need.head_dim))), "waves": _WAVES}


KERNELS = (
    BlockKernel(
        "split-kv",
        "triton",
        reasons,
        load,
        params,
        "Install the triton of this torch",
        just_in_time=True,
        reads_caches=True,
    ),
)
