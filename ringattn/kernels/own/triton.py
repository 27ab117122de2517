"""Runs our own kernel, "triton": FlashAttention-2 for what no library kernel here takes.

That is float32 by TF32 as an argument instead of torch's global flag, any head dimension up to 256, grouped heads
without expanding k and v or summing over heads, any strides in and out, and a deterministic backward. ``triton_device``
holds the device side and is imported when a plan with this kernel is built; ``triton_tiles`` the shapes of its tiles.

Legend: N blocks, M rows, H query heads, K key/value heads, D head dimension; a *pair* is one (block, head) pair.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.errors import KernelLoadError
from ringattn.hardware.facts import gpu_of
from ringattn.kernels.compile_cache import prepare_triton
from ringattn.kernels.contract import BlockKernel, BoundKernel, Grads, KernelConfig, KernelNeed, Params

from .triton_tiles import LOWEST_SM, SMALLEST_BLOCK, Step, Tile, parse, tiles

_DTYPES = ("bf16", "fp16", "fp32", "tf32")
_MAX_HEAD_DIM = 256
_MAX_PROGRAMS = 2**31 - 1  # CUDA's limit of the first grid dimension
_MAX_ROW_STRIDE = 2**24  # 127 rows of it and a head dimension fit in 31 bits
_STEPS: tuple[Step, ...] = ("forward", "dq", "dkdv")


class _Layout(NamedTuple):
    """Strides of N, M and H of several tensors in units of ``align`` elements (16 bytes where all allow it)."""

    strides: list[int]
    align: int
    wide: bool

    @classmethod
    def of(cls, *tensors: Tensor) -> _Layout:
        align = 16 // tensors[0].element_size()
        strides = [stride for x in tensors for stride in x.stride()[:3]]
        if any(stride % align for stride in strides):
            align = 1
        return cls([stride // align for stride in strides], align, max(strides[1::3]) > _MAX_ROW_STRIDE)


class _Compiled:
    """Compilation of one step: its tile, its constants, and from the first launch on the compiled kernel."""

    def __init__(self, kernel: Any, tile: Tile, constants: dict[str, object]) -> None:
        self.tile = tile
        self._kernel = kernel
        self._constants = constants
        self._values = tuple(constants.values())
        self._ready: Any = None

    def launch(self, programs: int, tensors: Sequence[Tensor], scalars: Sequence[float]) -> None:
        """Launch on the current device, where the tensors are.

        Triton looks at every argument to find the compiled kernel, which takes longer than the launch. Here that
        depends on nothing but whether all tensors start at a multiple of 16 bytes, so one that does is kept.
        """
        aligned = not functools.reduce(operator.or_, [x.data_ptr() for x in tensors]) % 16
        if self._ready is not None and aligned:
            self._ready[programs, 1, 1](*tensors, *scalars, *self._values)
            return
        options = {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "enable_fp_fusion": False}
        compiled = self._kernel[programs, 1, 1](*tensors, *scalars, **self._constants, **options)
        if aligned:
            self._ready = compiled


class _Launcher:
    """Kernels with causality and scale fixed; tiles that nobody chose follow from dtype, head dimension and GPU."""

    def __init__(self, device_side: Any, config: KernelConfig, chosen: dict[Step, Tile]) -> None:
        self._device_side = device_side
        self._chosen = chosen
        self._causal = config.causal
        self._scale = config.scale
        self._window, self._softcap = config.window, config.softcap
        self._tf32 = config.dtype == "tf32"
        self._compiled: dict[tuple[object, ...], _Compiled] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        n, rows, heads, head_dim = q.shape
        keys, kv_heads = k.shape[1], k.shape[2]
        group, pairs = heads // kv_heads, n * heads
        out = torch.empty((n, rows, heads, head_dim), dtype=q.dtype, device=q.device)
        lse = torch.empty((n, heads, rows), dtype=torch.float32, device=q.device)
        layout = _Layout.of(q, k, v, out)
        step = self._step("forward", q, layout)
        row_tiles = -(-rows // step.tile.block_m)
        magnitude = abs(self._scale) or 2.0**-126  # masked scores times 0 would be no number
        sizes = (rows, keys, heads, group, row_tiles, pairs, _section(q, keys, pairs, group), self._window)
        scale, cap_scale = self._scales(magnitude)
        scales = (scale, scale * math.log2(math.e), cap_scale)
        with _current(q.device):
            step.launch(row_tiles * pairs, (q, k, v, out, lse), (*layout.strides[:9], *sizes, *scales))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /, grads: Grads | None = None
    ) -> Grads:
        assert lse.is_contiguous()
        n, rows, heads, _ = q.shape
        keys, kv_heads = k.shape[1], k.shape[2]
        group, pairs, kv_pairs = heads // kv_heads, n * heads, n * kv_heads
        dq, dk, dv = grads or (_empty_like(q), _empty_like(k), _empty_like(v))
        if dout.stride(3) != 1:  # the gradient of out.sum() is one number, expanded
            dout = dout.contiguous()
        delta = torch.empty_like(lse)
        scales = self._scales(self._scale)
        with _current(q.device):
            layout = _Layout.of(dout, q, k, v, out, dq)
            step = self._step("dq", q, layout)
            row_tiles = -(-rows // step.tile.block_m)
            sizes = (rows, keys, heads, group, row_tiles, pairs, _section(q, keys, pairs, group), self._window)
            tensors = (dout, q, k, v, out, lse, dq, delta)
            step.launch(row_tiles * pairs, tensors, (*layout.strides, *sizes, *scales))

            layout = _Layout.of(dout, q, k, v, dk, dv)
            step = self._step("dkdv", q, layout)
            key_tiles = -(-keys // step.tile.block_n)
            section = _section(q, rows * group, kv_pairs, 1)
            sizes = (rows, keys, heads, group, key_tiles, kv_pairs, section, self._window)
            tensors = (dout, q, k, v, lse, delta, dk, dv)
            step.launch(key_tiles * kv_pairs, tensors, (*layout.strides, *sizes, *scales))
        return dq, dk, dv

    def _scales(self, scale: float) -> tuple[float, float]:
        """Return what scores are scaled by, and what raw ones are before tanh makes scores of them."""
        return (self._softcap, scale / self._softcap) if self._softcap else (scale, 0.0)

    def _step(self, step: Step, q: Tensor, layout: _Layout) -> _Compiled:
        key = (step, q.dtype, q.shape[3], q.device, layout.align, layout.wide)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._prepare(step, q, layout)
        return compiled

    def _prepare(self, step: Step, q: Tensor, layout: _Layout) -> _Compiled:
        head_dim, device = q.shape[3], q.device
        dtype = "tf32" if self._tf32 else "fp32" if q.dtype is torch.float32 else "fp16"
        tile = self._chosen.get(step) or tiles(step, gpu_of(device).sm, dtype, head_dim)[0]
        constants: dict[str, object] = {
            "CAUSAL": self._causal,
            **({"NEGATE": self._scale < 0} if step == "forward" else {}),
            "HEAD_DIM": head_dim,
            "BLOCK_D": max(SMALLEST_BLOCK, 1 << (head_dim - 1).bit_length()),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "ALIGN": layout.align,
            "WIDE": layout.wide,
            "PRECISION": "tf32" if self._tf32 else tile.precision or "ieee",
            "ROUND": self._tf32 and device.type == "cuda",
            "WINDOW": self._window > 0,
            "CAP": self._softcap > 0,
        }
        return _Compiled(getattr(self._device_side, f"{step}_kernel"), tile, constants)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device current where it is not: Triton launches on the current one."""
    if device.index is None or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _section(q: Tensor, streamed_rows: int, pairs: int, pairs_per_stream: int) -> int:
    """Return the number of pairs that run side by side: those whose two streamed tensors fill half of the L2 cache."""
    stream_bytes = 2 * streamed_rows * q.shape[3] * q.element_size()
    streams = gpu_of(q.device).l2_bytes // (2 * max(1, stream_bytes))
    return max(1, min(pairs, max(1, streams) * pairs_per_stream))


# --- the row -----------------------------------------------------------------------------------------------------


def load(config: KernelConfig) -> BoundKernel:
    """Bind the kernels; KernelLoadError where triton is missing or broken, or a parameter is unknown or malformed."""
    chosen: dict[Step, Tile] = {}
    known = {f"{step}_tile": step for step in _STEPS}
    for name, value in config.params.items():
        if name not in known:
            raise _refusal(f"unknown parameter {name}", f"It takes {', '.join(known)}")
        tile = parse(str(value))
        if tile is None:
            raise _refusal(f"{name} is {value!r}", "Write a tile as in 128x64-w8-s2: query rows, keys, warps, stages")
        chosen[known[name]] = tile
    launcher = _Launcher(device_side("triton", ".triton_device"), config, chosen)
    return BoundKernel(launcher.forward, launcher.backward)


def device_side(kernel: str, module: str) -> ModuleType:
    """Return the module with the device side of ``kernel``; KernelLoadError where triton is missing or broken."""
    prepare_triton()
    try:
        return importlib.import_module(module, __package__)
    except Exception as fault:  # an extension built for another Python or driver can fail at import with anything
        reason = f"import triton: {type(fault).__name__}: {fault}"
        raise refusal(kernel, reason, "Install the triton of this torch") from fault


def refusal(kernel: str, reason: str, remedy: str) -> KernelLoadError:
    """Return the error of a kernel that cannot be bound, in one line."""
    return KernelLoadError(kernel, " ".join(reason.split()), remedy)


_refusal = partial(refusal, "triton")


def shared_reasons(need: KernelNeed) -> list[str]:
    """Return why none of our Triton kernels can serve ``need`` on its device and in its dtype and head dimension."""
    found = []
    if need.sm < LOWEST_SM:
        found.append(f"needs sm_{LOWEST_SM} or newer, this is {need.arch}")
    if need.dtype not in _DTYPES:
        found.append(f"no {need.dtype}; it has {', '.join(_DTYPES)}")
    if need.head_dim > _MAX_HEAD_DIM:
        found.append(f"head_dim {need.head_dim}; its tiles hold up to {_MAX_HEAD_DIM}")
    return found


def reasons(need: KernelNeed) -> tuple[str, ...]:
    if need.vendor != "nvidia":
        return ("runs on NVIDIA GPUs only",)
    found = shared_reasons(need)
    programs = need.blocks * need.heads * -(-need.rows // SMALLEST_BLOCK)
    if programs > _MAX_PROGRAMS:
        found.append(f"its launch grid ends at {_MAX_PROGRAMS} programs and this call may need {programs}")
    return tuple(found)


def params(need: KernelNeed) -> Params:
    """Return tiles of one direction: query rows x keys, warps, stages, and for float32 the kind of its products."""
    if reasons(need):
        return {}
    steps: Sequence[Step] = ("dq", "dkdv") if need.backward else ("forward",)
    return {f"{step}_tile": _texts(tiles(step, need.sm, need.dtype, need.head_dim)) for step in steps}


def _texts(found: Iterable[Tile]) -> tuple[str, ...]:
    return tuple(map(str, found))


KERNELS = (
    BlockKernel(
        "triton",
        "triton",
        reasons,
        load,
        params,
        "Install the triton of this torch",
        strided_backward=True,
        writes_grads=True,
        just_in_time=True,
        features=frozenset({"window", "softcap"}),
    ),
)
