"""Loads what a plan names: kernels bound to their parameters, and the steps between them. Pure but for imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ringattn.kernels.compile_cache import prepare_triton
from ringattn.kernels.contract import BoundDropout, BoundKernel, BoundVarlen, KernelConfig
from ringattn.kernels.registry import KERNELS
from ringattn.planning.plan import Plan

from .merge import TorchOps
from .ranges import name_methods, named

if TYPE_CHECKING:
    from ringattn.runtime.fused.merge_triton import TritonOps

Bound = TypeVar("Bound", BoundKernel, BoundVarlen, BoundDropout)


def writing_branch(plan: Plan, travelling: frozenset[int]) -> int | None:
    """Return the branch whose backward writes straight into the final gradients, to which the others are added.

    It must show every position (rate 1) and only one may; the fused sum reads each element before it writes it, the
    one in torch operations starts from zeros instead.
    """
    branches = plan.workload.pattern.branches
    for number, (branch, chosen) in enumerate(zip(branches, plan.tunables.branches, strict=False)):
        here = number not in travelling
        if here and plan.fused and branch.rate == 1 and KERNELS[chosen.backward].writes_grads:
            return number
    return None


def is_one_op(plan: Plan) -> bool:
    """Tell whether training runs one kernel both ways on the tensors themselves, keeping what autograd would."""
    tunables, workload = plan.tunables, plan.workload
    one_kernel = all(branch.forward == branch.backward for branch in tunables.branches)
    whole = workload.pattern.dense and workload.world == 1 and not (workload.packed or workload.dropout)
    return whole and one_kernel and tunables.keeps_inputs_and_results


def may_be_torchs(plan: Plan) -> bool:
    """Tell whether the plan is one call of one kernel, with nothing that torch's own function cannot be told."""
    tunables, workload = plan.tunables, plan.workload
    if not workload.pattern.dense or workload.world > 1 or workload.packed:
        return False
    if tunables.params or tunables.launch == "graph" or workload.window or workload.softcap or workload.dropout:
        return False
    return not workload.train or (is_one_op(plan) and not plan.conditions.deterministic)


def bind(
    plan: Plan, name: str, scale: float, *, full: bool = False, windowed: bool = True, range_of: str = ""
) -> BoundKernel:
    """Return a kernel with the parameters of the plan; without a mask where blocks are ``full``.

    Its sliding window, if it has one, is left out of causal blocks that are not ``windowed``.

    With named ranges around its calls if ``range_of`` says of what, and then autograd does not call it by itself.
    """
    kernel = KERNELS[name].load(_config(plan, name, scale, causal=plan.workload.causal and not full, windowed=windowed))
    return _in_ranges(kernel, name, range_of)


def _in_ranges(bound: Bound, name: str, range_of: str) -> Bound:
    """Return forward and backward alone, a named range around each; all that is bound where ``range_of`` is ""."""
    if not range_of:
        return bound
    forward = named(f"{range_of} {name} forward", bound.forward)
    return type(bound)(forward, named(f"{range_of} {name} backward", bound.backward))


def _config(plan: Plan, name: str, scale: float, *, causal: bool, windowed: bool = True) -> KernelConfig:
    return KernelConfig(
        causal,
        scale,
        plan.conditions.deterministic,
        plan.tunables.params_of(name),
        plan.tunables.dtype,
        window=plan.workload.window if causal and windowed else 0,
        softcap=plan.workload.softcap,
        dropout=plan.workload.dropout,
    )


def bind_varlen(plan: Plan, name: str, scale: float, range_of: str = "") -> BoundVarlen:
    """Return a kernel's entry for packed sequences with the parameters of the plan; ``range_of`` as in ``bind``."""
    load = KERNELS[name].load_varlen
    assert load is not None, "rejection_reasons refuses it"
    return _in_ranges(load(_config(plan, name, scale, causal=plan.workload.causal)), name, range_of)


def bind_dropout(plan: Plan, name: str, scale: float, range_of: str = "") -> BoundDropout:
    """Return a kernel with dropout and the parameters of the plan; ``range_of`` as in ``bind``."""
    load = KERNELS[name].load_dropout
    assert load is not None, "rejection_reasons refuses it"
    return _in_ranges(load(_config(plan, name, scale, causal=plan.workload.causal)), name, range_of)


def load_ops(plan: Plan, *, ranges: bool = False) -> TorchOps | TritonOps:
    """Return the steps between the kernels of a plan, with named ranges around them or without."""
    ops = _ops_of(plan)
    if ranges:
        name_methods(ops, gather="gather", gather_backward="gather", merge="merge", scatter_sum="sum")
    return ops


def _ops_of(plan: Plan) -> TorchOps | TritonOps:
    if not plan.fused:
        return TorchOps(compiled=plan.tunables.compile)
    prepare_triton()
    # needs triton, which a machine without a GPU need not have
    from ringattn.runtime.fused.merge_triton import TritonOps

    def block(step: str) -> int | None:
        value = plan.tunables.params_of(step).get("block")
        assert value is None or isinstance(value, int)
        return value

    return TritonOps(merge_block=block("merge"), sum_block=block("sum"), gather_block=block("gather"))
