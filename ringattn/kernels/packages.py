"""Wraps attention packages that are not part of torch: FlashAttention 2, 3 and 4, and xFormers.

Each row has pure reasons (architecture, dtype, head dimension, published faults with their source) and a ``load_*``
that imports its package once, when a plan is built, checks that the functions take what is passed to them, and
binds them. A package that is absent, broken or of another release is a KernelLoadError of one line.

All take (N, M, H, D) tensors whose last stride is 1 and whose other strides are free (FlashAttention 4: multiples of
16 bytes, or it copies). Causal blocks are square: these packages align a mask bottom-right, torch top-left.

Legend: N blocks, M rows, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringattn.errors import KernelLoadError
from ringattn.profile.locations import cache_folder, home_folder

from .aten import cuda_reasons, far_rows_faults, flash_2_backward_faults, flash_2_reads_out_of_bounds
from .compile_cache import can_keep
from .contract import (
    BlockKernel,
    BoundDropout,
    BoundKernel,
    BoundVarlen,
    DropoutState,
    Grads,
    KernelConfig,
    KernelNeed,
    Params,
    Sequences,
)
from .grid_limits import MAX_GRID, cutlass_empty_rows, flash_2_empty_rows, in_parts, without_empty_rows
from .recorded_launch import RecordedLaunch

# --- loading -----------------------------------------------------------------------------------------------------


def _refusal(kernel: str, fault: object, remedy: str) -> KernelLoadError:
    return KernelLoadError(kernel, " ".join(str(fault).split()) or type(fault).__name__, remedy)


def _import(kernel: str, module: str, remedy: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as fault:  # an extension built for another torch can fail at import with anything
        raise _refusal(kernel, f"import {module}: {type(fault).__name__}: {fault}", remedy) from fault


def _function(kernel: str, module: Any, name: str, positional: int, keywords: Iterable[str], remedy: str) -> Any:
    """Return ``module.name`` if it accepts that call: these names are private and have changed before."""
    function = getattr(module, name, None)
    if function is None:
        raise _refusal(kernel, f"{module.__name__} has no {name}", remedy)
    plain = getattr(function, "_init_fn", function)  # a torch.library custom op keeps its function there
    try:
        inspect.signature(plain).bind(*(None,) * positional, **dict.fromkeys(keywords))
    except TypeError as fault:
        raise _refusal(kernel, f"{module.__name__}.{name}: {fault}", remedy) from fault
    return function


def _no_more_params(kernel: str, config: KernelConfig, known: Iterable[str] = ()) -> None:
    unknown = sorted(set(config.params) - set(known))
    if unknown:
        raise _refusal(kernel, f"unknown parameter {', '.join(unknown)}", f"It takes {', '.join(known) or 'none'}")


def _contiguous_lse(lse_NHM: Tensor) -> Tensor:
    """Return the LSE contiguous: the C++ kernels take its address and check neither strides nor dtype."""
    assert lse_NHM.dtype is torch.float32
    return lse_NHM.contiguous()


def _unit_last(x: Tensor) -> Tensor:
    """Return dout with a last stride of 1: it may arrive expanded (from ``out.sum()``)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_grads(q: Tensor, k: Tensor, v: Tensor) -> Grads:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# --- FlashAttention 2 ---------------------------------------------------------------------------------------------

_FLASH_2_REMEDY = "Install flash-attn >= 2.8 built for this torch"


def _flash_2_window(config: KernelConfig) -> tuple[int, int]:
    """Return how many keys a row sees before and after its own; -1 is all."""
    return (config.window - 1, 0) if config.window else (-1, -1)


def _flash_attn_2_extension(config: KernelConfig) -> Any:
    """Return the extension of flash-attn; PlanError where it is not there, or has not the functions of 2.7.1."""
    name = "flash-attn-2"
    _no_more_params(name, config)
    module = _import(name, "flash_attn.flash_attn_interface", _FLASH_2_REMEDY)
    extension = getattr(module, "flash_attn_gpu", None)  # so called since 2.7.1, with these arguments
    if extension is None:
        raise _refusal(name, "flash_attn.flash_attn_interface has no flash_attn_gpu", _FLASH_2_REMEDY)
    return extension


def load_flash_attn_2(config: KernelConfig) -> BoundKernel:
    """Bind FlashAttention 2's extension module: the package's own functions are custom ops, which cost host time."""
    extension = _flash_attn_2_extension(config)
    fwd, bwd = extension.fwd, extension.bwd
    causal, scale, deterministic = config.causal, config.scale, config.deterministic
    left, right, softcap = *_flash_2_window(config), config.softcap

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        # out, alibi slopes, dropout, scale, causal, window left and right, softcap, return softmax, generator
        result = fwd(q, k, v, None, None, 0.0, scale, causal, left, right, softcap, False, None)
        return result[0], flash_2_empty_rows(result[1])

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /, grads: Grads | None = None
    ) -> Grads:
        dq, dk, dv = grads or _empty_grads(q, k, v)
        bwd(
            *(_unit_last(dout), q, k, v, out, _contiguous_lse(lse), dq, dk, dv, None),
            *(0.0, scale, causal, left, right, softcap, deterministic, None, None),
        )
        return dq, dk, dv

    return in_parts(BoundKernel(forward, backward), flash_2_backward=True)


def load_flash_attn_2_dropout(config: KernelConfig) -> BoundDropout:
    """Bind FlashAttention 2 with dropout; of the probability see torch's own."""
    extension = _flash_attn_2_extension(config)
    fwd, bwd = extension.fwd, extension.bwd
    causal, scale, deterministic, p = config.causal, config.scale, config.deterministic, config.dropout
    left, right = _flash_2_window(config)

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor, DropoutState]:
        out, lse, _, rng_state = fwd(q, k, v, None, None, p, scale, causal, left, right, 0.0, False, None)
        return out, flash_2_empty_rows(lse), (rng_state,)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: DropoutState = (), /
    ) -> Grads:
        (rng_state,) = state or (None,)
        dq, dk, dv = _empty_grads(q, k, v)
        bwd(
            *(_unit_last(dout), q, k, v, out, _contiguous_lse(lse), dq, dk, dv, None),
            *(p if state else 0.0, scale, causal, left, right, 0.0, deterministic, None, rng_state),
        )
        return dq, dk, dv

    return BoundDropout(forward, backward)


def load_flash_attn_2_varlen(config: KernelConfig) -> BoundVarlen:
    extension = _flash_attn_2_extension(config)
    fwd, bwd = extension.varlen_fwd, extension.varlen_bwd
    causal, scale, deterministic = config.causal, config.scale, config.deterministic
    left, right, softcap = *_flash_2_window(config), config.softcap

    def forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, /) -> tuple[Tensor, Tensor]:
        cu_seqlens, longest = sequences.cu_seqlens, sequences.longest
        # out, bounds, used keys, left padding, block table, alibi slopes, longest
        # dropout, scale, zero tensors, causal, window left and right, softcap, return softmax, generator
        result = fwd(
            *(q, k, v, None, cu_seqlens, cu_seqlens, None, None, None, None, longest, longest),
            *(0.0, scale, False, causal, left, right, softcap, False, None),
        )
        return result[0], flash_2_empty_rows(result[1])

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, /
    ) -> Grads:
        cu_seqlens, longest = sequences.cu_seqlens, sequences.longest
        dq, dk, dv = _empty_grads(q, k, v)
        bwd(
            *(_unit_last(dout), q, k, v, out, _contiguous_lse(lse), dq, dk, dv, cu_seqlens, cu_seqlens, None),
            *(longest, longest, 0.0, scale, False, causal, left, right, softcap, deterministic, None, None),
        )
        return dq, dk, dv

    return BoundVarlen(forward, backward)


def flash_attn_2_reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = _reasons(need, 80) + far_rows_faults(need)
    if need.backward:
        reasons += flash_2_backward_faults(need)
    if need.dropout and need.softcap:
        reasons.append("no dropout with a softcap")
    if need.dropout and need.head_dim > 192 and need.sm not in (80, 90):
        reasons.append(f"its backward has no head_dim above 192 with dropout on {need.arch}")
    return tuple(reasons)


# --- FlashAttention 3 ---------------------------------------------------------------------------------------------

_FLASH_3_REMEDY = "Build FlashAttention 3 (hopper/ of the flash-attention repository) at 3.0.0 or newer"


def load_flash_attn_3(config: KernelConfig) -> BoundKernel:
    name = "flash-attn-3"
    _no_more_params(name, config)
    module = _import(name, "flash_attn_interface", _FLASH_3_REMEDY)
    forward_keywords = {"softmax_scale": config.scale, "causal": config.causal}
    backward_keywords = {"softmax_scale": config.scale, "is_causal": config.causal}
    into = ("dq", "dk", "dv")
    fwd = _function(name, module, "_flash_attn_forward", 3, forward_keywords, _FLASH_3_REMEDY)
    bwd = _function(name, module, "_flash_attn_backward", 6, (*into, *backward_keywords), _FLASH_3_REMEDY)

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        result = fwd(q, k, v, **forward_keywords)
        return result[0], result[1]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /, grads: Grads | None = None
    ) -> Grads:
        dq, dk, dv = grads or _empty_grads(q, k, v)  # it returns none of them
        bwd(dout, q, k, v, out, _contiguous_lse(lse), dq=dq, dk=dk, dv=dv, **backward_keywords)
        return dq, dk, dv

    return BoundKernel(forward, backward)


def flash_attn_3_reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = _reasons(need, 90)
    if need.vendor == "nvidia" and need.sm > 90:
        reasons.append(f"is built for sm_90, this is {need.arch}")
    if need.backward and need.deterministic:
        reasons.append("builds of 2025 drop its deterministic flag silently (Dao-AILab/flash-attention#1766)")
    return tuple(reasons)


# --- FlashAttention 4 ---------------------------------------------------------------------------------------------

_FLASH_4_REMEDY = "Install flash-attn-4 >= 4.0.0b36 (flash-attn-4[cu13] with CUDA 13)"
_PACKAGE_CHOICE = "package"

# Forward tiles on sm_90 worth searching by padded head dimension: query rows x key rows, then whether P stays in
# registers ("rs") and whether the warp groups overlap ("overlap"). Each fits the register file and the shared
# memory of a Hopper SM; the package's own choice comes first. Its backward takes its tiles from nowhere else.
_SM90_TILES: dict[int, tuple[str, ...]] = {
    64: ("192x112-rs-overlap", "128x192-rs-overlap", "128x176-rs-overlap", "128x128-rs-overlap", "192x128-overlap"),
    96: ("192x128-overlap", "192x96-overlap", "128x128-overlap", "128x192-rs-overlap", "128x176-rs-overlap"),
    128: ("128x176-rs-overlap", "128x160-rs-overlap", "128x144-rs-overlap", "192x80-rs-overlap", "128x128-overlap"),
    192: ("128x96-rs-overlap", "128x80-rs-overlap"),
    256: ("128x64-rs-overlap", "128x80-rs"),
}


def _tile_keywords(value: object) -> dict[str, object]:
    """Return ``_flash_attn_fwd``'s arguments for a tile such as "128x176-rs-overlap"; none for the package's choice."""
    if value == _PACKAGE_CHOICE:
        return {}
    if value not in {tile for tiles in _SM90_TILES.values() for tile in tiles}:
        raise _refusal("flash-attn-4", f"forward_tile is {value!r}", "Use 'package' or a tile of the search space")
    size, *flags = str(value).split("-")
    query_rows, key_rows = map(int, size.split("x"))
    return {"tile_mn": (query_rows, key_rows), "mma_pv_is_rs": "rs" in flags, "intra_wg_overlap": "overlap" in flags}


def _keep_compiled_kernels() -> None:
    """Turn the package's disk cache on: it is off by default, in a shared /tmp, and read at its first import.

    It stays off for a user who has no folder to keep it in: without a home, or with a read-only one.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = cache_folder(os.environ, home_folder()) / "flash-attn-4"
    if not (configured.is_absolute() or home_folder().is_dir()) or not can_keep(folder):
        return
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


def load_flash_attn_4(config: KernelConfig) -> BoundKernel:
    """Bind FlashAttention 4 below its autograd function. Kernels are compiled at first use, 2 to 3 s each.

    They are kept on disk in the user's cache folder, unless the package's own variables say otherwise.
    """
    name = "flash-attn-4"
    forward_keywords, backward_keywords = _flash_4_keywords(config)
    into = ("dq", "dk", "dv")
    _keep_compiled_kernels()
    module = _import(name, "flash_attn.cute.interface", _FLASH_4_REMEDY)
    fwd = _function(name, module, "_flash_attn_fwd", 3, forward_keywords, _FLASH_4_REMEDY)
    bwd = _function(name, module, "_flash_attn_bwd", 6, (*into, *backward_keywords), _FLASH_4_REMEDY)

    launch_forward = RecordedLaunch(fwd, module, forward_keywords, results=2)
    launch_backward = RecordedLaunch(bwd, module, backward_keywords, results=3)

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        out, lse = launch_forward(q, k, v)
        return out, lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /, grads: Grads | None = None
    ) -> Grads:
        # It checks neither strides nor alignment of the gradients it is given, and assumes both.
        assert grads is None or all(_aligned_to_16_bytes(x) for x in grads)
        named = None if grads is None else dict(zip(into, grads, strict=True))
        dq, dk, dv = launch_backward(q, k, v, out, dout, lse, into=named)
        return dq, dk, dv

    return BoundKernel(forward, backward)


def load_flash_attn_4_varlen(config: KernelConfig) -> BoundVarlen:
    name = "flash-attn-4"
    forward_keywords, backward_keywords = _flash_4_keywords(config)
    _keep_compiled_kernels()
    module = _import(name, "flash_attn.cute.interface", _FLASH_4_REMEDY)
    packed = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    fwd = _function(name, module, "_flash_attn_fwd", 3, (*packed, *forward_keywords), _FLASH_4_REMEDY)
    bwd = _function(name, module, "_flash_attn_bwd", 6, (*packed, *backward_keywords), _FLASH_4_REMEDY)

    def where(sequences: Sequences) -> dict[str, object]:
        bounds, longest = sequences.cu_seqlens, sequences.longest
        return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, /) -> tuple[Tensor, Tensor]:
        result = fwd(q, k, v, **where(sequences), **forward_keywords)
        return result[0], result[1]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, /
    ) -> Grads:
        dq, dk, dv = bwd(q, k, v, out, dout, lse, **where(sequences), **backward_keywords)[:3]
        return dq, dk, dv

    return BoundVarlen(forward, backward)


def _flash_4_keywords(config: KernelConfig) -> tuple[dict[str, object], dict[str, object]]:
    """Return what every call of the forward is told, and of the backward."""
    _no_more_params("flash-attn-4", config, ("forward_tile", "pack_gqa"))
    forward: dict[str, object] = {"softmax_scale": config.scale, "causal": config.causal, "return_lse": True}
    forward |= _tile_keywords(config.params.get("forward_tile", _PACKAGE_CHOICE))
    if "pack_gqa" in config.params:
        forward["pack_gqa"] = bool(config.params["pack_gqa"])
    backward: dict[str, object] = {"softmax_scale": config.scale, "causal": config.causal}
    backward["deterministic"] = config.deterministic
    both: dict[str, object] = {"softcap": config.softcap} if config.softcap else {}
    if config.window:
        both |= {"window_size_left": config.window - 1, "window_size_right": 0}
    return forward | both, backward | both


def _aligned_to_16_bytes(x: Tensor) -> bool:
    step = 16 // x.element_size()
    strides_fit = all(s > 0 and s % step == 0 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
    return x.stride(-1) == 1 and strides_fit and x.data_ptr() % 16 == 0


_FLASH_4_UNEVEN = (4, 0, 0, 1, 36)  # 4.0.0b36, the newest with the fault


def _pads_unevenly(need: KernelNeed) -> bool:
    """Tell whether the sm_90 backward pads the head dimension to less than its accumulators have.

    Its kernel rounds up to a multiple of 16 ("hdim_multiple_of = 64 if dKV_swapAB else 16" in flash_bwd_sm90.py);
    interface.py, which allocates the accumulators of dq, and of dk and dv of grouped heads, and has them read back, to
    one of 32.
    Up to 128; above, dKV_swapAB is set and both round to 64. An H200 gave dq off by 0.4 to 1.3 at 8, 16, 40, 48, 72
    and 80 with more than one tile of rows, and right results at 24, 32, 56, 64, 96, 128, 192 and 256. A newer release,
    unlike one of unknown version, is left to the accuracy check.
    """
    version = need.release("flash_attn.cute")
    if version is not None and version > _FLASH_4_UNEVEN:
        return False
    return need.head_dim <= 128 and -(-need.head_dim // 16) % 2 == 1


def _flash_4_arch_reasons(need: KernelNeed) -> list[str]:
    reasons = []
    generation = need.sm // 10
    if generation > 12:
        reasons.append(f"runs on sm_80 to sm_12x, this is {need.arch}")
    if need.sm == 90 and need.backward and _pads_unevenly(need):
        reasons.append(
            f"head_dim {need.head_dim}: dq is wrong on {need.arch} up to 4.0.0b36, and dk and dv with grouped heads "
            "(Dao-AILab/flash-attention#2896)"
        )
    if generation == 8 and need.backward:
        reasons.append("its backward needs sm_90 or newer (Dao-AILab/flash-attention#2808)")
    if need.sm in (86, 89) and need.head_dim > 192:
        reasons.append(
            f"head_dim {need.head_dim} overflows shared memory on {need.arch} (Dao-AILab/flash-attention#2750)"
        )
    if generation in (10, 11) and 128 < need.head_dim < 256:
        reasons.append(f"head_dim {need.head_dim}; on {need.arch} it has up to 128, and 256")
    if generation == 12 and need.head_dim > 128:
        reasons.append(f"head_dim {need.head_dim}; the 99 KiB of shared memory on {need.arch} hold up to 128")
    if generation == 12 and need.backward and need.deterministic:
        reasons.append(f"its backward is not deterministic on {need.arch}")
    return reasons + _flash_4_feature_reasons(need)


def _flash_4_feature_reasons(need: KernelNeed) -> list[str]:
    """Return what 4.0.0b36 lacks of what is asked beyond causality: by interface.py's asserts, and as measured."""
    reasons = []
    generation = need.sm // 10
    if need.softcap and need.backward and generation == 12:
        reasons.append(f"no softcap in its backward on {need.arch}")
    if need.softcap and generation in (10, 11) and need.head_dim == 256:
        reasons.append(f"no softcap of head_dim 256 on {need.arch}")
    sizes = need.head_dim, need.head_dim_v or need.head_dim
    if sizes[0] == sizes[1] or sizes == (192, 128):
        return reasons
    # An H200 failed the accuracy tests of (64, 128) and (128, 64), forward and backward, in bf16 and fp16, and passed
    # those of (192, 128).
    if generation == 9:
        reasons.append(f"head_dim {sizes[0]} with head_dim_v {sizes[1]}; on {need.arch} it has 192 with 128 alone")
    elif generation in (10, 11) and max(sizes) > 128:
        reasons.append(
            f"head_dim {sizes[0]} with head_dim_v {sizes[1]}; on {need.arch} it has up to 128, and 192 with 128"
        )
    return reasons


def flash_attn_4_reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = _reasons(need, 80)
    if need.vendor == "nvidia":
        reasons += _flash_4_arch_reasons(need)
    return tuple(reasons)


def flash_attn_4_params(need: KernelNeed) -> Params:
    """Return forward tiles on sm_90 (nothing else there obeys), and packing of grouped heads."""
    params: dict[str, tuple[str, ...] | tuple[bool, ...]] = {}
    if need.sm == 90:
        padded = next((d for d in _SM90_TILES if need.head_dim <= d), None)
        if padded is not None:
            params["forward_tile"] = (_PACKAGE_CHOICE, *_SM90_TILES[padded])
    if need.heads != need.kv_heads and need.sm >= 90:
        params["pack_gqa"] = (True, False)
    return params


# --- xFormers -----------------------------------------------------------------------------------------------------

_XFORMERS_REMEDY = "Install xformers >= 0.0.35; beside flash-attn-4 it needs flash-attn 2 as well, or its import fails"
_XFORMERS_OPERATORS = ("flash", "cutlass")


def load_xformers(config: KernelConfig) -> BoundKernel:
    """Bind xFormers' operators: torch's FlashAttention 2 ("flash", or the flash-attn package) or CUTLASS kernels."""
    name = "xformers"
    _no_more_params(name, config, ("operator",))
    operator = config.params.get("operator", _XFORMERS_OPERATORS[0])
    if operator not in _XFORMERS_OPERATORS:
        raise _refusal(name, f"operator is {operator!r}", f"Use one of {', '.join(_XFORMERS_OPERATORS)}")
    fmha = _import(name, "xformers.ops.fmha", _XFORMERS_REMEDY)
    keywords = ("attn_bias", "scale", "op")
    fwd = _function(name, fmha, "memory_efficient_attention_forward_requires_grad", 3, keywords, _XFORMERS_REMEDY)
    bwd = _function(name, fmha, "memory_efficient_attention_backward", 6, keywords, _XFORMERS_REMEDY)
    ops = getattr(fmha, str(operator), None)
    if ops is None:
        raise _refusal(name, f"xformers.ops.fmha has no operator {operator}", _XFORMERS_REMEDY)
    bias = fmha.attn_bias.LowerTriangularMask() if config.causal else None
    if config.window:
        bias = fmha.attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(config.window)
    forward_op, backward_op, scale, cutlass = ops.FwOp, ops.BwOp, config.scale, operator == "cutlass"

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        out, lse = fwd(q, k, v, attn_bias=bias, scale=scale, op=forward_op)
        lse = lse[:, :, : q.shape[1]]  # CUTLASS pads its rows to a multiple of 32
        return out, cutlass_empty_rows(lse, q, k, scale) if cutlass else flash_2_empty_rows(lse)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /) -> Grads:
        # out is read as if its rows were H * D apart, as in kernels_aten's "efficient".
        lse = without_empty_rows(_contiguous_lse(lse))
        result = bwd(dout, out.contiguous(), lse, q, k, v, attn_bias=bias, scale=scale, op=backward_op)
        return result[0], result[1], result[2]

    return in_parts(BoundKernel(forward, backward), flash_2_backward=True)


def xformers_reasons(need: KernelNeed) -> tuple[str, ...]:
    """Return what its first operator, FlashAttention 2, lacks; torch's "efficient" serves older cards and fp32."""
    reasons = _reasons(need, 80) + far_rows_faults(need)
    if need.heads != need.kv_heads:
        reasons.append("its backward operators take no grouped heads")
    if need.backward and need.deterministic:
        reasons.append("its backward is not deterministic")
    if need.backward:
        reasons += flash_2_backward_faults(need)
    return tuple(reasons)


def xformers_params(need: KernelNeed) -> Params:
    newest_cutlass = 90  # CUDA_MAXIMUM_COMPUTE_CAPABILITY of fmha.cutlass, whose backward has no window
    both = need.sm <= newest_cutlass and not need.window
    return {"operator": _XFORMERS_OPERATORS if both else _XFORMERS_OPERATORS[:1]}


# --- the rows -----------------------------------------------------------------------------------------------------


def _reasons(need: KernelNeed, lowest_sm: int) -> list[str]:
    reasons = cuda_reasons(need, ("fp16", "bf16"), lowest_sm, 8, 256)
    if need.vendor == "nvidia" and need.blocks > MAX_GRID:
        reasons.append(f"{need.blocks} blocks; its launch grid ends at {MAX_GRID}")
    return reasons


# FlashAttention's own packages read any layout whose last stride is 1, and write gradients where they are told.
KERNELS = (
    BlockKernel(
        "flash-attn-2",
        "flash_attn",
        flash_attn_2_reasons,
        load_flash_attn_2,
        load_varlen=load_flash_attn_2_varlen,
        remedy=_FLASH_2_REMEDY,
        strided_backward=True,
        writes_grads=True,
        load_dropout=load_flash_attn_2_dropout,
        reads_out_of_bounds=flash_2_reads_out_of_bounds,
        features=frozenset({"window", "softcap", "dropout"}),
    ),
    BlockKernel(
        "flash-attn-3",
        "flash_attn_interface",
        flash_attn_3_reasons,
        load_flash_attn_3,
        remedy=_FLASH_3_REMEDY,
        strided_backward=True,
        writes_grads=True,
    ),
    BlockKernel(
        "flash-attn-4",
        "flash_attn.cute",
        flash_attn_4_reasons,
        load_flash_attn_4,
        flash_attn_4_params,
        _FLASH_4_REMEDY,
        load_varlen=load_flash_attn_4_varlen,
        strided_backward=True,
        writes_grads=True,
        just_in_time=True,
        features=frozenset({"window", "softcap", "head_dim_v"}),
    ),
    BlockKernel(
        "xformers",
        "xformers",
        xformers_reasons,
        load_xformers,
        xformers_params,
        _XFORMERS_REMEDY,
        reads_out_of_bounds=flash_2_reads_out_of_bounds,
        features=frozenset({"window"}),
    ),
)
