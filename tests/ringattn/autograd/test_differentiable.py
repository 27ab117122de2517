"""Plans that are one operator of torch with a derivative: autograd runs them alone, and all that is promised holds.

Here that is flash-cpu; of FlashAttention 2 the graph alone, on tensors without data. Everything else goes through the
autograd Function, whose gradients test_gradients.py has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from oracle import ALL_LAYOUTS, Case, Results, assert_equal_to, exact, laid_out, pattern_of
from recorder import saved_tensors
from torch import Tensor

from ringattn import RingAttention
from ringattn.kernels.contract import KernelConfig
from ringattn.kernels.registry import KERNELS
from ringattn.planning.plan import Plan
from ringattn.runtime.program import Program
from ringattn.workload import BranchTunables, Tunables

CASE = Case(17, 4, 2, 8, 2, causal=True)
FLASH = Tunables("fp32", (BranchTunables("flash-cpu", "flash-cpu"),))
FUNCTION, OPERATOR = "_AttendBackward", "ScaledDotProductFlashAttentionForCpuBackward0"
REFUSAL = r"^derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"
SHAPE = (2, 8, 4, 64)


def nodes(out: Tensor) -> set[str]:
    """The names of all nodes of the graph behind ``out``."""
    names, ahead = set(), [out.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None:
            names.add(type(node).__name__)
            ahead += [behind for behind, _ in node.next_functions]
    return names


def found(module: RingAttention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    """Gradients of out alone, without an lse: with one it is the function's."""
    out = module(q, k, v)
    with torch.no_grad():
        again, lse = module(q, k, v, return_lse=True)
    assert torch.equal(again, out)
    return Results(out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout))


def flash(case: Case = CASE, **arguments: Any) -> RingAttention:
    return case.module(backend="flash-cpu", **arguments)


# --- which plans -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["plain", "heads_first", "last_strided"])
def test_a_dense_plan_of_one_operator_needs_no_function(dtype: torch.dtype, layout: str) -> None:
    case = replace(CASE, layout=layout)
    behind = nodes(flash(case, dtype=dtype)(*case.inputs(dtype)))
    assert OPERATOR in behind
    assert FUNCTION not in behind


def test_neither_under_autocast() -> None:
    module = CASE.running(replace(FLASH, dtype="bf16"), "bf16")  # many CPUs compute bf16 in fp32 unless told otherwise
    with torch.autocast("cpu", torch.bfloat16):
        behind = nodes(module(*CASE.inputs(torch.float32)))
    assert OPERATOR in behind
    assert FUNCTION not in behind


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        (CASE, {"backend": "math"}),
        (CASE, {"backend": ("flash-cpu", "math")}),
        (CASE, {"backend": ("math", "flash-cpu")}),
        (CASE, {"backend": "flash-cpu", "checkpoint": "full"}),
        (replace(CASE, pattern=pattern_of([8], [1])), {"backend": "flash-cpu"}),
        (replace(CASE, pattern=pattern_of([64], [1])), {"backend": "flash-cpu"}),
        (replace(CASE, pattern=pattern_of([8, 16], [1, 2])), {"backend": "flash-cpu"}),
    ],
    ids=str,
)
def test_what_torch_cannot_do_alone_is_the_functions(case: Case, arguments: dict[str, Any]) -> None:
    behind = nodes(case.module(**arguments)(*case.inputs(torch.float32)))
    assert FUNCTION in behind
    assert OPERATOR not in behind


def test_what_is_converted_is_the_functions() -> None:
    """Autograd would keep q, k, v and out in the wider dtype."""
    assert nodes(flash(dtype=torch.float32)(*CASE.inputs(torch.bfloat16))) >= {FUNCTION}


@pytest.mark.parametrize(
    ("tunables", "world", "alone"),
    [
        (FLASH, 1, True),
        (replace(FLASH, checkpoint="offload"), 1, False),
        (replace(FLASH, checkpoint="full"), 1, False),
        (FLASH, 2, False),
        (replace(FLASH, branches=(BranchTunables("flash-cpu"),)), 1, False),
    ],
    ids=str,
)
def test_a_program_decides_when_it_is_made(tunables: Tunables, world: int, alone: bool) -> None:
    workload = replace(CASE.workload("fp32"), world=world)
    program = Program(Plan(workload, tunables, fused=False), scale=1.0)
    assert (program.differentiable(SHAPE) is not None) is alone


def test_only_flash_may_be_left_to_autograd() -> None:
    """cudnn's backward is silently wrong for some layouts of dout; efficient's wants LSE and heads made for it."""
    config = KernelConfig(causal=True, scale=0.5, dtype="bf16")
    of_torch = [name for name, kernel in KERNELS.items() if not kernel.package]
    offering = [name for name in of_torch if KERNELS[name].load(config).differentiable(SHAPE) is not None]
    assert offering == ["flash", "flash-cpu"]


# --- results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_out_lse_and_gradients_are_those_of_the_reference(layout: str, kv_heads: int, causal: bool) -> None:
    case = replace(CASE, layout=layout, kv_heads=kv_heads, causal=causal)
    inputs, dout = case.inputs(torch.float32), case.dout(torch.float32)
    assert_equal_to(found(flash(case), *inputs, dout), exact(case, *inputs, dout), 1e-5)


def test_views_of_one_packed_tensor() -> None:
    case = replace(CASE, kv_heads=4)
    q, k, v = case.inputs(torch.float32)
    packed = torch.stack((q, k, v), 2).detach().requires_grad_()
    out = flash(case)(*packed.unbind(2))
    assert OPERATOR in nodes(out)
    (grad,) = torch.autograd.grad(out, packed, case.dout(torch.float32))
    expected = exact(case, q, k, v, case.dout())
    for mine, right in zip(grad.unbind(2), expected[2:], strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=1e-5)


DOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded number": lambda dout: dout.new_ones(()).expand(dout.shape),
    "expanded heads": lambda dout: dout[:, :, :1].expand(dout.shape),
    "expanded rows": lambda dout: dout[:, :1, :, :1].expand(dout.shape),
    **{layout: lambda dout, layout=layout: laid_out(dout, layout) for layout in ALL_LAYOUTS},  # type: ignore[misc]
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", DOUTS)
def test_the_gradient_of_out_may_have_any_strides(kind: str, dtype: torch.dtype) -> None:
    inputs, dout = CASE.inputs(dtype), DOUTS[kind](CASE.dout(dtype))
    module = flash(dtype=dtype)
    results = found(module, *inputs, dout)
    assert_equal_to(results, exact(CASE, *inputs, dout), 1e-5 if dtype is torch.float32 else 2e-2)
    plain = found(module, *inputs, dout.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(results, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_function_would_give_the_same(dtype: torch.dtype) -> None:
    """``checkpoint="full"`` runs the same kernels through it."""
    inputs, dout = CASE.inputs(dtype), CASE.dout(dtype)
    alone, helped = flash(dtype=dtype), flash(dtype=dtype, checkpoint="full")
    for x, y in zip(found(alone, *inputs, dout), found(helped, *inputs, dout), strict=True):
        assert x.dtype is y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("within", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backward", [False, True])
def test_autocast_narrows_no_step_inside(within: torch.dtype, backward: bool) -> None:
    q, k, v = CASE.inputs(torch.float32)
    dout = CASE.dout(torch.float32)
    narrow = [x.detach().to(within).requires_grad_() for x in (q, k, v)]
    by_argument = within is torch.float32  # which beats autocast
    module = flash(dtype=within) if by_argument else CASE.running_in_both_modes(replace(FLASH, dtype="bf16"), "bf16")
    expected = found(module, *narrow, dout.to(within))
    with torch.autocast("cpu", torch.bfloat16):
        out = module(q, k, v)
        _, lse = module(q, k, v, return_lse=True)
    assert OPERATOR in nodes(out)
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        grads = torch.autograd.grad(out, (q, k, v), dout)
    for x, y in zip((out, lse, *grads), expected, strict=True):
        assert x.dtype is torch.float32
        assert torch.equal(x, y.float())


# --- what autograd may ask, and what it is refused ---------------------------------------------------------------


@pytest.mark.parametrize("with_lse", [False, True])
def test_q_k_v_out_and_lse_are_kept(with_lse: bool) -> None:
    q, k, v = CASE.inputs(torch.float32)
    with saved_tensors() as saved:
        results = flash()(q, k, v, return_lse=with_lse)
    assert len(saved) == 5
    out, *lse = results if with_lse else (results,)
    assert {x.data_ptr() for x in saved} >= {x.data_ptr() for x in (q, k, v, out, *lse)}


def test_an_lse_that_is_asked_for_is_the_functions() -> None:
    """The operator's own has no gradient."""
    q, k, v = CASE.inputs(torch.float32)
    out, lse = flash()(q, k, v, return_lse=True)
    for x in (out, lse):
        assert FUNCTION in nodes(x)
        assert OPERATOR not in nodes(x)


@pytest.mark.parametrize("needed", [n for n in product((False, True), repeat=3) if any(n)])
def test_frozen_inputs_get_no_gradient(needed: tuple[bool, ...]) -> None:
    expected = exact(CASE, *CASE.inputs(torch.float32), CASE.dout())[2:]
    inputs = [x.detach().requires_grad_(need) for x, need in zip(CASE.inputs(torch.float32), needed, strict=True)]
    out = flash()(*inputs)
    assert OPERATOR in nodes(out)
    out.backward(CASE.dout(torch.float32))
    for x, need, x64 in zip(inputs, needed, expected, strict=True):
        if need:
            torch.testing.assert_close(x.grad.double(), x64, rtol=0, atol=1e-5)
        else:
            assert x.grad is None


@pytest.mark.parametrize("which", ["q", "k", "v", "out", "lse"])
def test_what_is_kept_may_not_be_changed_in_place(which: str) -> None:
    inputs = [x * 1 for x in CASE.inputs(torch.float32)]  # no leaves, which may not be changed at all
    results = flash()(*inputs, return_lse=which == "lse")
    out, lse = results if which == "lse" else (results, None)
    dict(zip("qkv", inputs, strict=True), out=out, lse=lse)[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_that_is_kept_gives_its_gradients_again() -> None:
    inputs, dout = CASE.inputs(torch.float32), CASE.dout(torch.float32)
    out = flash()(*inputs)
    first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    again = torch.autograd.grad(out, inputs, dout)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, dout)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("constant", [False, True])
def test_a_second_derivative_is_refused_where_it_is_asked_for(which: int, constant: bool) -> None:
    inputs = CASE.inputs(torch.float32)
    dout = CASE.dout(torch.float32).requires_grad_(not constant)
    grads = torch.autograd.grad(flash()(*inputs), inputs, dout, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSAL):
        grads[which].square().sum().backward()
    if not constant:
        with pytest.raises(RuntimeError, match=REFUSAL):
            torch.autograd.grad(grads[which].sum(), dout)


def test_of_flash_attention_2_too() -> None:
    """On tensors without data: its op has a derivative, lse none, and the derivative none."""
    q, k, v = (torch.empty(2, 8, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    forward = KERNELS["flash"].load(KernelConfig(causal=True, scale=0.5)).differentiable(q.shape)
    assert forward is not None
    out, lse = forward(*inputs)
    assert type(out.grad_fn).__name__ == "FlashAttentionBackward0"
    assert out.shape == q.shape
    assert not lse.requires_grad
    grads = torch.autograd.grad(out, inputs, torch.empty_like(out), create_graph=True)
    assert [grad.shape for grad in grads] == [x.shape for x in inputs]
    with pytest.raises(RuntimeError, match="derivative for aten::_flash_attention_backward is not implemented"):
        grads[0].sum().backward()
