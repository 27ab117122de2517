"""Wraps the kernels that torch ships, called at the aten level because only there do they give and take the LSE.

The CUDA three (FlashAttention 2, cuDNN, CUTLASS "efficient") return a natural-log float32 LSE and their backwards
accept a merged out and LSE: relative gradient error about 3e-3 against float64 in bf16 on an H100.

The forward ops of flash and flash-cpu have a derivative in torch: the same backward op on what was saved, which makes
dout contiguous. So autograd may take them as they are. Not the others: cudnn's backward keys its plan on the strides of
q, k and v and is silently wrong for another layout of dout; efficient's has no grouped queries.

Legend: N blocks, M rows, H query heads, K key/value heads, D head dimension; kernels that want heads first get a
transposed view, never a copy.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import math as kernels_math
from .contract import (
    FEATURE_WORDS,
    BlockKernel,
    BoundDropout,
    BoundKernel,
    BoundVarlen,
    DropoutBackward,
    DropoutForward,
    DropoutState,
    Grads,
    KernelConfig,
    KernelNeed,
    Sequences,
)
from .grid_limits import (
    FLASH_2_MAX_ELEMENTS,
    MAX_GRID,
    cutlass_empty_rows,
    flash_2_elements,
    flash_2_empty_rows,
    in_parts,
    without_empty_rows,
)
from .window_blocks import in_window_blocks

_aten: Any = torch.ops.aten


def _expand_heads(x_NMKD: Tensor, heads: int) -> Tensor:
    """Copy each key/value head for its query heads, for kernels without grouped-query support."""
    n, m, kv_heads, d = x_NMKD.shape
    if kv_heads == heads:
        return x_NMKD
    return x_NMKD[:, :, :, None].expand(n, m, kv_heads, heads // kv_heads, d).reshape(n, m, heads, d)


def _sum_heads(grad_NMHD: Tensor, kv_heads: int) -> Tensor:
    n, m, heads, d = grad_NMHD.shape
    if kv_heads == heads:
        return grad_NMHD
    wide = torch.float32 if grad_NMHD.dtype in (torch.float16, torch.bfloat16) else grad_NMHD.dtype
    return grad_NMHD.view(n, m, kv_heads, heads // kv_heads, d).sum(3, dtype=wide).to(grad_NMHD.dtype)


def _heads_first(*tensors_NMHD: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors_NMHD]


@functools.cache
def _random_state(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the philox state of dropout: never read without it, but it must be a tensor."""
    return torch.zeros(numbers, dtype=dtype, device=device)


# --- flash-cpu ---------------------------------------------------------------------------------------------------


def _flash_cpu(config: KernelConfig) -> BoundKernel:
    """Bind torch's kernel for CPUs; math computes again the rows where its out and LSE are both 0.

    It gives these where every logit is -inf, and where one is NaN and the keys are few; other rows can have them, too.
    """
    if config.window:  # it has none: two calls a tile, where math takes 10 times as long (4096 rows, a window of 1024)
        whole = replace(config, window=0)
        return in_window_blocks(_flash_cpu(whole), _flash_cpu(replace(whole, causal=False)), config.window)
    forward_op = _aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    causal, scale = config.causal, config.scale

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        if q.shape[1] == 1 and not causal and groups_as_rows(q.dtype, q.shape[2] // k.shape[2], k.shape[1]):
            grouped = torch.unflatten(q[:, 0], 1, (k.shape[2], -1))
            out, lse = forward_op(grouped, *_heads_first(k, v), 0.0, False, scale=scale)
            out, lse = out.flatten(1, 2).unsqueeze(1), lse.flatten(1, 2).unsqueeze(2)
        else:
            out, lse = forward_op(*_heads_first(q, k, v), 0.0, causal, scale=scale)
            out = out.transpose(1, 2)
        # 2 us where a call of 64 rows and 8 heads takes 226, and 15 where one of 2048 and 16 takes 224,000
        if type(lse) is Tensor and int(torch.count_nonzero(lse)) != lse.numel():  # a FakeTensor has no values
            return _decided_by_math(q, k, v, out, lse, causal, scale)
        return out, lse

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /) -> Grads:
        dq, dk, dv = backward_op(*_heads_first(dout, q, k, v, out), without_empty_rows(lse), 0.0, causal, scale=scale)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return BoundKernel(forward, backward, lambda shape: forward)


def groups_as_rows(dtype: torch.dtype, group: int, keys: int) -> bool:
    """Tell whether flash-cpu is faster where one query's heads of a group are given as rows of one head.

    It reads each key once then, and not once a query head: 32/8 heads of 128 over 4096 keys take 1.7 ms in place of
    5.0. In 16 bits that pays from many keys on: 0.2 ms either way with 512, 1.7 and 2.1 with 4096.
    """
    return group > 1 and (dtype.itemsize > 2 or group * keys >= 16384)


def _decided_by_math(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``, with those of math in the rows where both are 0."""
    empty_NHM = (lse == 0) & (out == 0).all(-1).transpose(1, 2)
    if not empty_NHM.any():
        return out, lse
    with torch.no_grad():
        exact_out, exact_lse = kernels_math.forward(q, k, v, causal, scale)
    return torch.where(empty_NHM.transpose(1, 2)[..., None], exact_out, out), torch.where(empty_NHM, exact_lse, lse)


def _flash_cpu_reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = []
    if need.vendor != "cpu":
        reasons.append("runs on CPUs only")
    if need.dtype not in ("fp32", "fp16", "bf16"):
        reasons.append(f"no {need.dtype}; it has fp32, fp16 and bf16")
    return tuple(reasons)


# --- math --------------------------------------------------------------------------------------------------------


def _math_fixed(config: KernelConfig) -> dict[str, Any]:
    return {"causal": config.causal, "scale": config.scale, "window": config.window, "softcap": config.softcap}


def _math(config: KernelConfig) -> BoundKernel:
    fixed = _math_fixed(config)
    return BoundKernel(
        functools.partial(kernels_math.forward, **fixed), functools.partial(kernels_math.backward, **fixed)
    )


def _math_varlen(config: KernelConfig) -> BoundVarlen:
    fixed = _math_fixed(config)
    return BoundVarlen(
        functools.partial(kernels_math.varlen_forward, **fixed),
        functools.partial(kernels_math.varlen_backward, **fixed),
    )


def _math_dropout(config: KernelConfig) -> BoundDropout:
    """Bind math with factors from a seed that torch's random numbers on the CPU give, whatever the device."""
    fixed, dropout = _math_fixed(config), config.dropout

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor, DropoutState]:
        seed = torch.randint(2**62, (), device="cpu")
        factors = kernels_math.drawn_factors(seed, dropout, q.device)
        return *kernels_math.forward(q, k, v, **fixed, factors=factors), (seed,)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: DropoutState = (), /
    ) -> Grads:
        factors = kernels_math.drawn_factors(state[0], dropout, q.device) if state else None
        return kernels_math.backward(dout, q, k, v, out, lse, **fixed, factors=factors)

    return BoundDropout(forward, backward)


def _math_reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = []
    if need.dtype == "tf32":
        reasons.append("its matrix products take TF32 only from torch's global flag, which stays untouched")
    return tuple(reasons)


# --- CUDA --------------------------------------------------------------------------------------------------------


def _flash_window(config: KernelConfig) -> dict[str, int]:
    """Return the keywords of a sliding window, of which FlashAttention counts the keys before a row's own."""
    return {"window_size_left": config.window - 1, "window_size_right": 0} if config.window else {}


def _flash(config: KernelConfig) -> BoundKernel:
    forward_op = _aten._flash_attention_forward.default
    causal, fixed = config.causal, {"scale": config.scale, **_flash_window(config)}

    def attend(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        result = forward_op(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, **fixed)
        return result[0], result[1]

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v)
        return out, flash_2_empty_rows(lse)

    return BoundKernel(forward, _flash_backward(config), lambda shape: attend)


def _flash_backward(config: KernelConfig) -> DropoutBackward:
    backward_op = _aten._flash_attention_backward.default
    causal, p, fixed = config.causal, config.dropout, {"scale": config.scale, **_flash_window(config)}

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: DropoutState = (), /
    ) -> Grads:
        state = state or (_random_state(2, torch.uint64, q.device),) * 2
        rows, keys = q.shape[1], k.shape[1]
        grads = backward_op(dout, q, k, v, out, lse, None, None, rows, keys, p, causal, *state, **fixed)
        return grads[0], grads[1], grads[2]

    return backward


def _flash_dropout(config: KernelConfig) -> BoundDropout:
    """Bind FlashAttention 2 with dropout, whose probability it rounds to 1/256 and whose factor it does not."""
    forward_op = _aten._flash_attention_forward.default
    causal, p, fixed = config.causal, config.dropout, {"scale": config.scale, **_flash_window(config)}

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor, DropoutState]:
        out, lse, *state, _ = forward_op(q, k, v, None, None, q.shape[1], k.shape[1], p, causal, False, **fixed)
        return out, flash_2_empty_rows(lse), tuple(state)

    return BoundDropout(forward, _flash_backward(config))


def _flash_varlen(config: KernelConfig) -> BoundVarlen:
    """Bind the entry that ``torch.nn.attention.varlen.varlen_attn`` runs, with the LSE both ways."""
    forward_op = _aten._flash_attention_forward.default
    backward_op = _aten._flash_attention_backward.default
    causal, fixed = config.causal, {"scale": config.scale, **_flash_window(config)}

    def forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, /) -> tuple[Tensor, Tensor]:
        cu_seqlens, longest = sequences.cu_seqlens, sequences.longest
        result = forward_op(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal, False, **fixed
        )  # fmt: skip
        return result[0], flash_2_empty_rows(result[1])

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, /
    ) -> Grads:
        state = _random_state(2, torch.uint64, q.device)
        cu_seqlens, longest = sequences.cu_seqlens, sequences.longest
        grads = backward_op(
            dout, q, k, v, out, lse, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal, state, state, **fixed
        )
        return grads[0], grads[1], grads[2]

    return BoundVarlen(forward, backward)


def _cudnn(config: KernelConfig) -> BoundKernel:
    """Bind cuDNN's kernel, and others for two shapes that ragged tails can have.

    It lacks blocks of one row, and in the backward of full blocks of 64 rows beyond a multiple of 128 dq can be NaN
    (see ``_cudnn_reasons``). Math and FlashAttention 2, where it has the head dimension, run those; a plan whose *main*
    blocks have such a shape is refused. One query over several keys, which newer ones have, is an entry of its own.
    """
    one_row, odd_tail, whole_backward = _math(config), _flash(config), _cudnn_backward(config)
    forward_op = _aten._scaled_dot_product_cudnn_attention.default
    causal, scale = config.causal, config.scale

    def several_rows(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        result = forward_op(*_heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale)
        lse = result[1]
        return result[0].transpose(1, 2), lse.view(lse.shape[:3])

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        return one_row.forward(q, k, v) if q.shape[1] == 1 else several_rows(q, k, v)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /) -> Grads:
        rows = q.shape[1]
        if rows == 1:
            return one_row.backward(dout, q, k, v, out, lse)
        if not causal and rows % 128 == 64:
            apart = _flash_2_head_dim_is_unsafe(q.shape[3]) or v.shape[3] != q.shape[3]
            tail = one_row if apart else odd_tail
            return tail.backward(dout, q, k, v, out, lse)
        return whole_backward(dout, q, k, v, out, lse)

    return BoundKernel(forward, backward, one_query=several_rows)


def _cudnn_backward(config: KernelConfig) -> DropoutBackward:
    backward_op = _aten._scaled_dot_product_cudnn_attention_backward.default
    causal, p, scale = config.causal, config.dropout, config.scale

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: DropoutState = (), /
    ) -> Grads:
        state = state or (_random_state(1, torch.int64, q.device),) * 2
        heads, lse = _heads_first(dout, q, k, v, out), without_empty_rows(lse)
        rows, keys = q.shape[1], k.shape[1]
        dq, dk, dv = backward_op(
            *heads, lse.unsqueeze(-1), *state, None, None, None, rows, keys, p, causal, scale=scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return backward


def _cudnn_dropout(config: KernelConfig) -> BoundDropout:
    forward_op = _aten._scaled_dot_product_cudnn_attention.default
    causal, p, scale = config.causal, config.dropout, config.scale

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor, DropoutState]:
        result = forward_op(*_heads_first(q, k, v), None, True, p, causal, False, scale=scale)
        lse = result[1]
        return result[0].transpose(1, 2), lse.view(lse.shape[:3]), (result[6], result[7])

    return BoundDropout(forward, _cudnn_backward(config))


def _efficient_forward(config: KernelConfig) -> DropoutForward:
    forward_op = _aten._scaled_dot_product_efficient_attention.default
    causal, p, scale = config.causal, config.dropout, config.scale

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor, DropoutState]:
        rows, heads = q.shape[1], q.shape[2]
        k, v = _expand_heads(k, heads), _expand_heads(v, heads)
        out, lse, seed, offset = forward_op(*_heads_first(q, k, v), None, True, p, causal, scale=scale)
        lse = lse[:, :, :rows]  # it pads the rows of its LSE to a multiple of 32
        return out.transpose(1, 2), cutlass_empty_rows(lse, q, k, scale), (seed, offset)

    return forward


def _efficient(config: KernelConfig) -> BoundKernel:
    whole = _efficient_forward(config)

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        out, lse, _ = whole(q, k, v)
        return out, lse

    return BoundKernel(forward, _efficient_backward(config))


def _efficient_dropout(config: KernelConfig) -> BoundDropout:
    return BoundDropout(_efficient_forward(config), _efficient_backward(config))


def _efficient_backward(config: KernelConfig) -> DropoutBackward:
    backward_op = _aten._scaled_dot_product_efficient_attention_backward.default
    causal, p, scale = config.causal, config.dropout, config.scale
    unused, wanted = (torch.zeros((), dtype=torch.int64),) * 2, [True, True, True, False]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: DropoutState = (), /
    ) -> Grads:
        rows, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
        padded = -(-rows // 32) * 32
        # The kernel reads out as if its rows were H * D apart, whatever its strides say. Of an out laid out by heads,
        # as math gives it, heads but the first took delta from uninitialised memory: dq and dk wrong by 0.15 to NaN.
        out, lse = out.contiguous(), without_empty_rows(lse)
        if padded != rows or not lse.is_contiguous():
            padded_lse = lse.new_full((*lse.shape[:2], padded), float("inf"))
            padded_lse[:, :, :rows] = lse
            lse = padded_lse
        k, v = _expand_heads(k, heads), _expand_heads(v, heads)
        *inputs, out = _heads_first(dout, q, k, v, out)
        dq, dk, dv, _ = backward_op(*inputs, None, out, lse, *(state or unused), p, wanted, causal, scale=scale)
        dk, dv = _sum_heads(dk.transpose(1, 2), kv_heads), _sum_heads(dv.transpose(1, 2), kv_heads)
        return dq.transpose(1, 2), dk, dv

    return backward


def cuda_reasons(
    need: KernelNeed, dtypes: tuple[str, ...], lowest_sm: int, head_dim_multiple: int, head_dim_max: int
) -> list[str]:
    """Return what a CUDA kernel with these limits lacks for ``need``."""
    reasons = []
    if need.vendor != "nvidia":
        return ["runs on NVIDIA GPUs only"]
    if need.sm < lowest_sm:
        reasons.append(f"needs sm_{lowest_sm} or newer, this is {need.arch}")
    if need.dtype not in dtypes:
        reasons.append(f"no {need.dtype}; it has {', '.join(dtypes)}")
    for name, size in (("head_dim", need.head_dim), ("head_dim_v", need.head_dim_v)):
        if size % head_dim_multiple or size > head_dim_max:
            reasons.append(f"{name} {size}; it needs a multiple of {head_dim_multiple} up to {head_dim_max}")
    if need.dropout and need.blocks > MAX_GRID:
        reasons.append(f"{need.blocks} blocks run in parts, and dropout is of one call")
    if need.heads > MAX_GRID:
        reasons.append(f"{need.heads} heads; its launch grid ends at {MAX_GRID} (pytorch/pytorch#142228)")
    return reasons


def far_rows_faults(need: KernelNeed) -> list[str]:
    """Return why rows lie too far apart for FlashAttention 2 and CUTLASS, whose offsets within 128 rows are 32 bits.

    On an H100 rows 2^24 elements apart end in an illegal address. cuDNN, flash-attn-4 and our own kernel read them.
    """
    if 128 * need.row_elements < 2**31:
        return []
    return [f"rows lie {need.row_elements} elements apart and its 32-bit offsets end within a tile; use gather copy"]


def _flash_2_head_dim_is_unsafe(head_dim: int) -> bool:
    """Tell whether FlashAttention 2's backward reads out of bounds at this head dimension."""
    return 128 < head_dim < 192


def flash_2_reads_out_of_bounds(need: KernelNeed) -> bool:
    return need.backward and _flash_2_head_dim_is_unsafe(need.head_dim)


def flash_2_backward_faults(need: KernelNeed) -> list[str]:
    """Return what is wrong with FlashAttention 2's backward, wherever it was compiled into."""
    reasons = []
    # More blocks run in parts; packed sequences are one call, with 128 rows more for each.
    rows = need.packed_rows + 128 * need.blocks if need.packed_rows else need.rows
    accumulated = flash_2_elements(1, rows, need.heads, need.head_dim)
    if accumulated > FLASH_2_MAX_ELEMENTS:
        reasons.append(
            f"its backward's 32-bit offsets end at 2^31 elements of dq and one call has {accumulated} "
            "(Dao-AILab/flash-attention#2260)"
        )
    if need.dropout and flash_2_elements(need.blocks, rows, need.heads, need.head_dim) > FLASH_2_MAX_ELEMENTS:
        reasons.append("its backward would run in parts, and dropout is of one call")
    if _flash_2_head_dim_is_unsafe(need.head_dim):
        reasons.append(f"its backward reads out of bounds at head_dim {need.head_dim} (pytorch/pytorch#173953)")
    return reasons


def _flash_reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = cuda_reasons(need, ("fp16", "bf16"), 80, 8, 256) + far_rows_faults(need)
    if need.backward:
        reasons += flash_2_backward_faults(need)
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 of torch's sdp_utils.cpp: 232 to 256 fit
        # in the shared memory of these cards where there is no dropout
        most = 256 if need.dropout else 224
        if 192 < need.head_dim <= most and need.sm in (86, 89, 120, 121):
            with_it = " with dropout" if need.dropout else ""
            reasons.append(f"its backward has no head_dim from 200 to {most}{with_it} on {need.arch}")
    return tuple(reasons)


_CUDNN_WIDE_HEADS = (9, 10, 0, 3, 0)


# One query over 64 to 65,536 keys, also of grouped heads and read in place, was right on an H200 with this version.
_CUDNN_ONE_QUERY = (9, 19)


def _cudnn_head_dim_max(need: KernelNeed) -> int:
    """Return the largest head dimension of cuDNN, as torch's dispatcher has it (check_cudnn_tensor_shapes).

    128 everywhere, and from cuDNN 9.10 on 256 on sm_90 in both directions (pytorch/pytorch#161210): with 9.19 the
    results of an H200 at 192 and 256 were right, 2 to 3e-3 off in bf16, grouped heads and ragged lengths too. Newer
    torch asks for more than 9.22.0 there, and takes sm_10x then; nobody has measured that.
    """
    version = need.release("cudnn")
    return 256 if need.sm == 90 and version is not None and version >= _CUDNN_WIDE_HEADS else 128


def _cudnn_reasons(need: KernelNeed) -> tuple[str, ...]:
    reasons = cuda_reasons(need, ("fp16", "bf16"), 80, 8, _cudnn_head_dim_max(need))
    if need.rows == 1:
        reasons.append("one key row is not supported")
    if need.queries == 1 and not (need.sm == 90 and (need.release("cudnn") or ()) >= _CUDNN_ONE_QUERY):
        reasons.append("one query row was measured on sm_90 alone, with cuDNN 9.19")
    if need.backward and need.deterministic:
        reasons.append("its backward is not deterministic, and torch cannot ask it to be")
    if need.dropout and not need.causal and need.rows % 128 == 64:
        reasons.append(f"another kernel runs the backward of {need.rows} rows, which are 64 beyond a multiple of 128")
    if need.backward and not need.causal and need.sm == 90 and need.rows % 128 == 64:
        reasons.append(
            f"dq can be NaN on sm_90 where {need.rows} rows are 64 beyond a multiple of 128 (pytorch/pytorch#196678)"
        )
    return tuple(reasons)


def _efficient_reasons(need: KernelNeed) -> tuple[str, ...]:
    dtypes = ("fp16", "bf16", "fp32") if need.sm >= 80 else ("fp16", "fp32")
    return tuple(cuda_reasons(need, dtypes, 50, 4 if need.dtype == "fp32" else 8, 65536) + far_rows_faults(need))


KERNELS = (
    BlockKernel(
        "cudnn",
        "",
        _cudnn_reasons,
        lambda config: in_parts(_cudnn(config)),
        load_dropout=_cudnn_dropout,
        features=frozenset({"head_dim_v", "dropout"}),
    ),
    BlockKernel(
        "flash",
        "",
        _flash_reasons,
        lambda config: in_parts(_flash(config), flash_2_backward=True),
        load_varlen=_flash_varlen,
        load_dropout=_flash_dropout,
        reads_out_of_bounds=flash_2_reads_out_of_bounds,
        features=frozenset({"window", "dropout"}),
    ),
    BlockKernel(
        "efficient",
        "",
        _efficient_reasons,
        lambda config: in_parts(_efficient(config)),
        load_dropout=_efficient_dropout,
        features=frozenset({"head_dim_v", "dropout"}),
    ),
    BlockKernel("flash-cpu", "", _flash_cpu_reasons, _flash_cpu, features=frozenset({"window"})),
    BlockKernel(
        "math",
        "",
        _math_reasons,
        _math,
        load_varlen=_math_varlen,
        load_dropout=_math_dropout,
        features=frozenset(FEATURE_WORDS),
    ),
)
