"""Wraps FlashAttention 4, the package flash-attn-4; see ``shared`` for what all wrappers keep to."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from ringattn.kernels.compile_cache import can_keep
from ringattn.kernels.contract import (
    BlockKernel,
    BoundKernel,
    BoundVarlen,
    Grads,
    KernelConfig,
    KernelNeed,
    Params,
    Sequences,
)
from ringattn.profile.locations import cache_folder, home_folder

from .recorded_launch import RecordedLaunch
from .shared import checked_function, import_package, no_more_params, package_reasons, refusal

_REMEDY = "Install flash-attn-4 >= 4.0.0b36 (flash-attn-4[cu13] with CUDA 13)"
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
        raise refusal("flash-attn-4", f"forward_tile is {value!r}", "Use 'package' or a tile of the search space")
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
    forward_keywords, backward_keywords = _keywords(config)
    into = ("dq", "dk", "dv")
    _keep_compiled_kernels()
    module = import_package(name, "flash_attn.cute.interface", _REMEDY)
    fwd = checked_function(name, module, "_flash_attn_fwd", 3, forward_keywords, _REMEDY)
    bwd = checked_function(name, module, "_flash_attn_bwd", 6, (*into, *backward_keywords), _REMEDY)

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
    forward_keywords, backward_keywords = _keywords(config)
    _keep_compiled_kernels()
    module = import_package(name, "flash_attn.cute.interface", _REMEDY)
    packed = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    fwd = checked_function(name, module, "_flash_attn_fwd", 3, (*packed, *forward_keywords), _REMEDY)
    bwd = checked_function(name, module, "_flash_attn_bwd", 6, (*packed, *backward_keywords), _REMEDY)

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


def _keywords(config: KernelConfig) -> tuple[dict[str, object], dict[str, object]]:
    """Return what every call of the forward is told, and of the backward."""
    no_more_params("flash-attn-4", config, ("forward_tile", "pack_gqa"))
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


_UNEVEN = (4, 0, 0, 1, 36)  # 4.0.0b36, the newest with the fault


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
    if version is not None and version > _UNEVEN:
        return False
    return need.head_dim <= 128 and -(-need.head_dim // 16) % 2 == 1


def _arch_reasons(need: KernelNeed) -> list[str]:
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
    return reasons + _feature_reasons(need)


def _feature_reasons(need: KernelNeed) -> list[str]:
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
    reasons = package_reasons(need, 80)
    if need.vendor == "nvidia":
        reasons += _arch_reasons(need)
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


KERNEL = BlockKernel(
    "flash-attn-4",
    "flash_attn.cute",
    flash_attn_4_reasons,
    load_flash_attn_4,
    flash_attn_4_params,
    _REMEDY,
    load_varlen=load_flash_attn_4_varlen,
    strided_backward=True,
    writes_grads=True,
    just_in_time=True,
    features=frozenset({"window", "softcap", "head_dim_v"}),
)
