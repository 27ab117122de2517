"""A loss of out and lse: gradients against those of the float64 reference, on every kernel, plan and path."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import DENSE, UNIT_ROUNDOFF, Case, cases, pattern_of, tunables_for
from torch import Tensor

from ringattn import Pattern
from ringattn.errors import PlanError
from ringattn.reference import dilated_attention_reference
from ringattn.runtime.program import Program

MIXED = Case(40, 4, 2, 8, 2, pattern_of([8, 16, 32], [1, 2, 4]), causal=True)  # some positions are in no branch
SPARSE = replace(MIXED, pattern=pattern_of([8, 16], [2, 4]))
GROUPED = replace(MIXED, pattern=DENSE, causal=False)
PATTERNS = [GROUPED, replace(GROUPED, causal=True), MIXED, SPARSE, replace(SPARSE, causal=False)]
PATTERNS += [replace(GROUPED, pattern=pattern_of([8], [1]))]


def dlse_of(case: Case, dtype: torch.dtype = torch.float64, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed + 2)
    return torch.randn(case.batch, case.heads, case.length, generator=generator, dtype=torch.float64).to(dtype) * size


def wanted(case: Case, inputs: Any, dout: Tensor | None, dlse: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    out, lse = dilated_attention_reference(*leaves, case.pattern, case.causal, case.scale)
    outputs, grads = ([out, lse], [dout.double(), dlse.double()]) if dout is not None else ([lse], [dlse.double()])
    found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    return tuple(torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, found, strict=True))


def gradients(module: Callable[..., Any], inputs: Any, dout: Tensor | None, dlse: Tensor) -> tuple[Tensor, ...]:
    out, lse = module(*inputs, return_lse=True)
    outputs, grads = ([out, lse], [dout, dlse]) if dout is not None else ([lse], [dlse])
    return torch.autograd.grad(outputs, inputs, grads)


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    for name, x, x64 in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert x.isfinite().all(), name
        assert (x.double() - x64).norm() <= tolerance * (1e-30 + x64.norm()), name


@given(st.data())
def test_any_plan_in_float64(data: st.DataObject) -> None:
    case = data.draw(cases(longest=24))
    module = case.running(data.draw(tunables_for(case)))
    inputs, dlse = case.inputs(), dlse_of(case)
    dout = case.dout() if data.draw(st.booleans()) else None
    for x, x64 in zip(gradients(module, inputs, dout, dlse), wanted(case, inputs, dout, dlse), strict=True):
        torch.testing.assert_close(x, x64, rtol=0, atol=1e-10 * max(1.0, x64.abs().max().item()))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", ["flash-cpu", "math"])
@pytest.mark.parametrize("case", PATTERNS, ids=lambda case: f"{case.pattern}-{case.causal}")
def test_every_kernel(case: Case, kernel: str, dtype: torch.dtype, alone: bool) -> None:
    inputs, dout, dlse = case.inputs(dtype), None if alone else case.dout(dtype), dlse_of(case, torch.float32)
    expected = wanted(case, inputs, dout, dlse)
    found = gradients(case.module(backend=kernel, dtype=dtype), inputs, dout, dlse)
    assert [x.dtype for x in found] == [dtype] * 3
    assert_close(found, expected, 8 * UNIT_ROUNDOFF[dtype] if dtype is not torch.float32 else 2e-6)


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1e5, 0.0])
@pytest.mark.parametrize("kernel", ["flash-cpu", "math"])
def test_a_gradient_of_any_size_in_half_precision(kernel: str, size: float) -> None:
    """A mean's is below what float16 holds, that of a scaled loss above; the inputs' are neither here."""
    inputs, dlse = MIXED.inputs(torch.float16), dlse_of(MIXED, torch.float32, size)
    leaves = [x.detach().float().requires_grad_() for x in inputs]  # so that the gradients fit
    found = gradients(MIXED.module(backend=kernel, dtype=torch.float16), leaves, None, dlse)
    assert_close(found, wanted(MIXED, leaves, None, dlse), 1e-2)


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
@pytest.mark.parametrize("case", PATTERNS, ids=lambda case: f"{case.pattern}-{case.causal}")
def test_every_checkpoint(case: Case, checkpoint: str) -> None:
    inputs, dout, dlse = case.inputs(), case.dout(), dlse_of(case)
    found = gradients(case.module(checkpoint=checkpoint), inputs, dout, dlse)
    assert_close(found, wanted(case, inputs, dout, dlse), 1e-12)


@pytest.mark.parametrize("case", PATTERNS, ids=lambda case: f"{case.pattern}-{case.causal}")
def test_in_the_simplest_loss(case: Case) -> None:
    """``(out.sum() + lse.sum()).backward()``: what is -inf has a gradient of 1, and gives none."""
    inputs = case.inputs()
    out, lse = case.module()(*inputs, return_lse=True)
    (out.sum() + lse.sum()).backward()
    expected = wanted(case, inputs, torch.ones_like(out), torch.ones_like(lse))
    assert_close([x.grad for x in inputs], expected, 1e-12)
    grad = inputs[0].grad
    assert grad is not None
    assert lse.isneginf().any() == (case.pattern == SPARSE.pattern)
    assert (grad.transpose(1, 2)[lse.isneginf()] == 0).all()


def test_what_is_minus_infinity_has_no_gradient_whatever_it_is_given() -> None:
    inputs, dlse = SPARSE.inputs(), dlse_of(SPARSE)
    out, lse = SPARSE.module()(*inputs, return_lse=True)
    assert lse.isneginf().any()
    given = dlse.masked_fill(lse.isneginf(), math.nan)
    found = torch.autograd.grad((out, lse), inputs, (SPARSE.dout(), given))
    assert_close(found, wanted(SPARSE, inputs, SPARSE.dout(), dlse), 1e-12)


@pytest.mark.parametrize("kernel", ["flash-cpu", "math"])
def test_rows_whose_logits_are_minus_infinity_have_none_either(kernel: str) -> None:
    inputs = [x.detach() for x in GROUPED.inputs(torch.float32)]
    inputs[0][..., 0], inputs[1][..., 0] = 1.0, 0.0
    inputs[0][:, 7, :, 0], inputs[1][..., 0] = 1e30, -1e30  # overflows in row 7 alone
    inputs[0][:, :7, :, 0] = inputs[0][:, 8:, :, 0] = 0.0
    leaves = [x.requires_grad_() for x in inputs]
    out, lse = GROUPED.module(backend=kernel)(*leaves, return_lse=True)
    assert lse.isneginf().nonzero()[:, 2].unique().tolist() == [7]
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (GROUPED.dout(torch.float32), torch.ones_like(lse)))
    assert all(x.isfinite().all() for x in (dq[..., 1:], dk[..., 1:], dv))
    assert (dq[:, 7] == 0).all()


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_frozen_inputs(needed: tuple[bool, ...]) -> None:
    inputs = [x.detach().requires_grad_(need) for x, need in zip(MIXED.inputs(), needed, strict=True)]
    out, lse = MIXED.module()(*inputs, return_lse=True)
    ((out * MIXED.dout()).sum() + (lse * dlse_of(MIXED)).masked_fill(lse.isneginf(), 0).sum()).backward()
    expected = wanted(MIXED, inputs, MIXED.dout(), dlse_of(MIXED))
    for x, x64, need in zip(inputs, expected, needed, strict=True):
        assert (x.grad is not None) == need
        if need:
            torch.testing.assert_close(x.grad, x64, rtol=0, atol=1e-10)


def test_under_autocast() -> None:
    inputs, dlse = MIXED.inputs(torch.float32), dlse_of(MIXED, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(MIXED.module(), inputs, MIXED.dout(torch.float32), dlse)
    narrow = [x.detach().bfloat16() for x in inputs]
    assert_close(found, wanted(MIXED, narrow, MIXED.dout(), dlse), 2e-2)


@pytest.mark.parametrize("case", [GROUPED, MIXED], ids=lambda case: str(case.pattern))
@pytest.mark.parametrize("kernel", ["flash-cpu", "math"])
def test_under_torch_compile(kernel: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    module = case.module(backend=kernel)
    inputs, dout, dlse = case.inputs(torch.float32), case.dout(torch.float32), dlse_of(case, torch.float32)

    def loss(*inputs: Tensor, of_lse: bool = True) -> Tensor:
        out, lse = module(*inputs, return_lse=True)
        return (out * dout).sum() + ((lse * dlse).masked_fill(lse.isneginf(), 0).sum() if of_lse else 0.0)

    compiled_loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled_loss(*inputs), inputs)
    eager = torch.autograd.grad(loss(*inputs), inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, eager, strict=True))
    assert_close(found, wanted(case, inputs, dout, dlse), 2e-6)

    extra = []
    monkeypatch.setattr(Program, "_lse_gradients", lambda *arguments: extra.append(arguments))
    torch.autograd.grad(compiled_loss(*inputs, of_lse=False), inputs)
    assert not extra  # an lse that nothing depends on costs nothing


def test_a_second_derivative_is_refused() -> None:
    inputs = GROUPED.inputs()
    _, lse = GROUPED.module()(*inputs, return_lse=True)
    with pytest.raises(Exception, match="double backward"):
        torch.autograd.grad(lse.sum(), inputs, create_graph=True)


GPU_KERNELS = ["cudnn", "flash", "efficient", "flash-attn-2", "flash-attn-3", "flash-attn-4", "xformers", "triton"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", GPU_KERNELS)
@pytest.mark.parametrize("pattern", [DENSE, pattern_of([64, 256], [1, 4])], ids=str)
def test_every_kernel_on_a_gpu(pattern: Pattern, kernel: str, dtype: torch.dtype) -> None:
    case = Case(300, 4, 4 if kernel == "xformers" else 2, 64, 2, pattern, causal=True)
    try:
        module = case.module(backend=kernel, dtype=dtype, device="cuda")
        inputs, dout = case.inputs(dtype, device="cuda"), case.dout(dtype, "cuda")
        module.plan_for(case.length, dtype, train=True, batch=case.batch)
    except PlanError as refusal:
        pytest.skip(str(refusal))
    dlse = dlse_of(case, torch.float32, 1e-3 if dtype is torch.float16 else 1.0)  # its steps are 6e-8 at the least
    found = gradients(module, inputs, dout, dlse.cuda())
    expected = wanted(case, inputs_on_cpu(inputs), dout.cpu(), dlse)
    assert_close([x.cpu() for x in found], expected, 2e-5 if dtype is torch.float32 else 2e-2)
    alone = gradients(module, inputs, None, dlse.cuda())
    assert_close([x.cpu() for x in alone], wanted(case, inputs_on_cpu(inputs), None, dlse), 2e-2)


def inputs_on_cpu(inputs: Any) -> list[Tensor]:
    return [x.detach().cpu() for x in inputs]
