"""Wraps the operators of xFormers; see ``shared`` for what all wrappers keep to."""

from __future__ import annotations

from torch import Tensor

from ringattn.kernels.aten.flash import flash_2_backward_faults, flash_2_reads_out_of_bounds
from ringattn.kernels.aten.shared import far_rows_faults
from ringattn.kernels.contract import BlockKernel, BoundKernel, Grads, KernelConfig, KernelNeed, Params
from ringattn.kernels.grid_limits import cutlass_empty_rows, flash_2_empty_rows, in_parts, without_empty_rows

from .shared import checked_function, contiguous_lse, import_package, no_more_params, package_reasons, refusal

_REMEDY = "Install xformers >= 0.0.35; beside flash-attn-4 it needs flash-attn 2 as well, or its import fails"
_OPERATORS = ("flash", "cutlass")


def load_xformers(config: KernelConfig) -> BoundKernel:
    """Bind xFormers' operators: torch's FlashAttention 2 ("flash", or the flash-attn package) or CUTLASS kernels."""
    name = "xformers"
    no_more_params(name, config, ("operator",))
    operator = config.params.get("operator", _OPERATORS[0])
    if operator not in _OPERATORS:
        raise refusal(name, f"operator is {operator!r}", f"Use one of {', '.join(_OPERATORS)}")
    fmha = import_package(name, "xformers.ops.fmha", _REMEDY)
    keywords = ("attn_bias", "scale", "op")
    fwd = checked_function(name, fmha, "memory_efficient_attention_forward_requires_grad", 3, keywords, _REMEDY)
    bwd = checked_function(name, fmha, "memory_efficient_attention_backward", 6, keywords, _REMEDY)
    ops = getattr(fmha, str(operator), None)
    if ops is None:
        raise refusal(name, f"xformers.ops.fmha has no operator {operator}", _REMEDY)
    bias = fmha.attn_bias.LowerTriangularMask() if config.causal else None
    if config.window:
        bias = fmha.attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(config.window)
    forward_op, backward_op, scale, cutlass = ops.FwOp, ops.BwOp, config.scale, operator == "cutlass"

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        out, lse = fwd(q, k, v, attn_bias=bias, scale=scale, op=forward_op)
        lse = lse[:, :, : q.shape[1]]  # CUTLASS pads its rows to a multiple of 32
        return out, cutlass_empty_rows(lse, q, k, scale) if cutlass else flash_2_empty_rows(lse)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /) -> Grads:
        # out is read as if its rows were H * D apart, as in aten's "efficient".
        lse = without_empty_rows(contiguous_lse(lse))
        result = bwd(dout, out.contiguous(), lse, q, k, v, attn_bias=bias, scale=scale, op=backward_op)
        return result[0], result[1], result[2]

    return in_parts(BoundKernel(forward, backward), flash_2_backward=True)


def xformers_reasons(need: KernelNeed) -> tuple[str, ...]:
    """Return what its first operator, FlashAttention 2, lacks; torch's "efficient" serves older cards and fp32."""
    reasons = package_reasons(need, 80) + far_rows_faults(need)
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
    return {"operator": _OPERATORS if both else _OPERATORS[:1]}


KERNEL = BlockKernel(
    "xformers",
    "xformers",
    xformers_reasons,
    load_xformers,
    xformers_params,
    _REMEDY,
    reads_out_of_bounds=flash_2_reads_out_of_bounds,
    features=frozenset({"window"}),
)
