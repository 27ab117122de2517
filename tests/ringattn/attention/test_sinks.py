"""Attention sinks: in the softmax's denominator once, whatever patterns, kernels and ranks there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import ALL_LAYOUTS, Case, cases, pattern_of, tunables_for
from torch import Tensor

from ringattn.errors import InputError
from ringattn.reference import dilated_attention_reference

DILATED = Case(37, 4, 2, 4, 2, pattern_of([8, 24], [1, 3]), causal=True)


def sinks_of(case: Case, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed + 2)
    return torch.randn(case.heads, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def exact_with(case: Case, sinks: Tensor, dout: Tensor, dlse: Tensor | None, *inputs: Tensor) -> list[Tensor]:
    """out, lse, dq, dk, dv and the gradient of the sinks, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (*inputs, sinks)]
    out, lse = dilated_attention_reference(
        *leaves[:3], case.pattern, case.causal, case.scale, window=case.window, softcap=case.softcap, sinks_H=leaves[3]
    )
    of = (out,) if dlse is None else (out, lse)
    given = (dout.double(),) if dlse is None else (dout.double(), dlse.double())
    return [out.detach(), lse.detach(), *torch.autograd.grad(of, leaves, given)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-10) -> None:
    for number, (x, x64) in enumerate(zip(found, expected, strict=True)):
        assert x.shape == x64.shape, number
        difference = torch.where(x.double() == x64, 0.0, x.double() - x64).abs().max().item()
        assert difference <= tolerance * max(1.0, x64.masked_fill(x64.isinf(), 0).abs().max().item()), number


@given(st.data())
def test_results_and_gradients_are_those_of_float64(data: st.DataObject) -> None:
    """Of any plan: checkpoints, windows of a pattern, copies."""
    case = data.draw(cases(ALL_LAYOUTS))
    module = case.running(data.draw(tunables_for(case)))
    inputs, dout, sinks = case.inputs(), case.dout(), sinks_of(case)
    out, lse = module(*inputs, return_lse=True, sinks=sinks)
    grads = torch.autograd.grad(out, (*inputs, sinks), dout)
    assert_close([out.detach(), lse.detach(), *grads], exact_with(case, sinks, dout, None, *inputs))


def test_calls_that_take_none_give_them_by_their_lse() -> None:
    """As docs/concepts/attention.md says of cross, prefill and decode."""
    case = Case(37, 4, 2, 4, 2, causal=True)
    module, (q, k, v), sinks = case.module(), case.inputs(), sinks_of(case)
    with torch.no_grad():
        expected = module(q, k, v, sinks=sinks)
        cache = module.kv_cache(case.batch, dtype=q.dtype)
        for out, lse in (module.cross(q, k, v, return_lse=True), module.prefill(q, k, v, cache, return_lse=True)):
            found = out * torch.sigmoid(lse - sinks[:, None]).transpose(1, 2)[..., None]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 1.0}, {"head_dim_v": 7}])
def test_the_gradient_of_lse_reaches_the_sinks(options: dict[str, Any]) -> None:
    case = Case(37, 4, 2, 4, 2, causal=True, **options)
    inputs, dout, sinks = case.inputs(), case.dout(), sinks_of(case)
    out, lse = case.module()(*inputs, return_lse=True, sinks=sinks)
    dlse = torch.randn(lse.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    grads = torch.autograd.grad((out, lse), (*inputs, sinks), (dout, dlse))
    assert_close([out.detach(), lse.detach(), *grads], exact_with(case, sinks, dout, dlse, *inputs))
    (of_lse,) = torch.autograd.grad(case.module()(*inputs, return_lse=True, sinks=sinks)[1], sinks, dlse)
    assert_close([of_lse], [exact_with(case, sinks, torch.zeros_like(dout), dlse, *inputs)[5]])


def assert_traced(run: Any, case: Case) -> None:
    inputs, dout, sinks = case.inputs(), case.dout(), sinks_of(case)
    out, lse = run(*inputs, return_lse=True, sinks=sinks)
    grads = torch.autograd.grad(out, (*inputs, sinks), dout)
    assert_close([out.detach(), lse.detach(), *grads], exact_with(case, sinks, dout, None, *inputs))


@pytest.mark.parametrize("case", [DILATED, replace(DILATED, pattern=Case(1).pattern)], ids=["dilated", "dense"])
def test_compiled_calls_have_them(case: Case) -> None:
    assert_traced(torch.compile(case.module(), backend="aot_eager", fullgraph=True), case)


def test_a_call_without_is_not_that_with_zeros() -> None:
    """The runners of both are apart, in either order."""
    module, inputs = DILATED.module(), DILATED.inputs()
    zeros = torch.zeros(4, dtype=torch.float64)
    plain, sunk = module(*inputs), module(*inputs, sinks=zeros)
    assert torch.equal(module(*inputs), plain)
    assert torch.equal(module(*inputs, sinks=zeros), sunk)
    assert not torch.allclose(plain, sunk)
    none = torch.full((4,), -torch.inf, dtype=torch.float64)
    torch.testing.assert_close(module(*inputs, sinks=none), plain)


def test_frozen_inputs_and_inference() -> None:
    inputs, dout, sinks = DILATED.inputs(), DILATED.dout(), sinks_of(DILATED)
    frozen = [x.detach() for x in inputs]
    expected = exact_with(DILATED, sinks, dout, None, *inputs)
    (of_sinks,) = torch.autograd.grad(DILATED.module()(*frozen, sinks=sinks), sinks, dout)
    assert_close([of_sinks], [expected[5]])
    (of_k,) = torch.autograd.grad(
        DILATED.module()(frozen[0], inputs[1], frozen[2], sinks=sinks.detach()), inputs[1], dout
    )
    assert_close([of_k], [expected[3]])
    with torch.no_grad():
        out = DILATED.module()(*inputs, sinks=sinks)
    assert not out.requires_grad
    assert_close([out], [expected[0]])


def test_padding_stays_nothing() -> None:
    """Its lse is -inf, and a gradient of it none of the sinks'."""
    case = replace(DILATED, batch=1)
    inputs, sinks = case.inputs(), sinks_of(case)
    out, lse = case.module()(*inputs, return_lse=True, sinks=sinks, lengths=[20])
    assert not out[:, 20:].any()
    assert lse[:, :, 20:].isneginf().all()
    parts = [x[:, :20] for x in inputs]
    expected = exact_with(case, sinks, case.dout()[:, :20], torch.ones(1, 4, 20), *parts)
    torch.testing.assert_close(out[:, :20].detach(), expected[0])
    dlse = torch.ones_like(lse)
    (of_sinks,) = torch.autograd.grad((out, lse), sinks, (case.dout(), dlse))
    torch.testing.assert_close(of_sinks, expected[5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_and_autocast(dtype: torch.dtype) -> None:
    """Sinks keep their dtype, and so does their gradient."""
    inputs, dout = DILATED.inputs(dtype), DILATED.dout(dtype)
    sinks = sinks_of(DILATED, torch.float32)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 8e-3}[dtype]
    out, lse = DILATED.module()(*inputs, return_lse=True, sinks=sinks)
    grads = torch.autograd.grad(out, (*inputs, sinks), dout)
    assert out.dtype is dtype
    assert grads[3].dtype is torch.float32
    assert_close([out.detach(), lse.detach(), *grads], exact_with(DILATED, sinks, dout, None, *inputs), tolerance)
    if dtype is torch.bfloat16:
        wide = DILATED.inputs(torch.float32)
        with torch.autocast("cpu", dtype):
            cast = DILATED.module()(*wide, sinks=sinks)
        assert cast.dtype is torch.float32
        assert_close([cast.detach()], [exact_with(DILATED, sinks, dout, None, *wide)[0]], tolerance)


@pytest.mark.parametrize(
    ("sinks", "error"),
    [
        ([0.0] * 4, r"sinks is a list; it must be a tensor, one logit for each head, \(4,\)"),
        (torch.zeros(2), r"sinks is torch.float32 of shape \(2,\); it must be floating, one for each head, \(4,\)"),
        (torch.zeros(4, dtype=torch.int64), r"sinks is torch.int64 of shape"),
        (torch.zeros(4, device="meta"), r"sinks is on meta, the module's plans are for cpu"),
    ],
)
def test_what_makes_no_sense_is_refused(sinks: Any, error: str) -> None:
    with pytest.raises(InputError, match=f"^{error}"):
        DILATED.module()(*DILATED.inputs(), sinks=sinks)


def test_it_costs_one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.runtime.program import Program

    count = []
    backward = Program.backward
    monkeypatch.setattr(Program, "backward", lambda *a, **k: count.append(1) or backward(*a, **k))
    inputs = DILATED.inputs()
    DILATED.module()(*inputs, sinks=sinks_of(DILATED)).sum().backward()
    assert len(count) == 1
