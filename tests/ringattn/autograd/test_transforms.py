"""The module under torch.func: every transform gives the float64 gradients, of every pattern and kernel alike.

A dense plan of one operator of torch (test_differentiable.py) is mapped by torch itself, which hides that other plans
are not: so every case here runs on a plan of each kind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import DENSE, Case, Results, assert_equal_to, exact, found, pattern_of
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from ringattn import RingAttention
from ringattn.errors import InputError, RingAttentionError

CASES = [
    Case(12, 4, 2, 8, 2, DENSE, causal=True),
    Case(12, 4, 2, 8, 2, pattern_of([12], [1]), causal=True),
    Case(12, 4, 2, 8, 2, pattern_of([4, 12], [1, 2]), causal=True),
    Case(11, 4, 4, 4, 1, pattern_of([4, 8], [2, 3], "blocked"), layout="last_strided"),
]
CASE = CASES[2]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
# float32 on flash-cpu: the dense plan is one operator of torch there
KINDS = [(case, torch.float64, "math") for case in CASES] + [(case, torch.float32, "flash-cpu") for case in CASES]


def case_inputs(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.detach() for x in case.inputs(dtype)]


@pytest.mark.parametrize(("case", "dtype", "backend"), KINDS, ids=str)
def test_grad_and_vjp(case: Case, dtype: torch.dtype, backend: str) -> None:
    module = case.module(backend=backend)
    inputs, dout = case_inputs(case, dtype), case.dout(dtype)
    expected = exact(case, *inputs, dout)

    def weighted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        out, lse = module(q, k, v, return_lse=True)
        return (out * dout).sum(), (out, lse)

    grads, (out, lse) = grad(weighted, (0, 1, 2), has_aux=True)(*inputs)
    assert_equal_to(Results(out, lse, *grads), expected, TOLERANCE[dtype])
    (out, lse), pull = vjp(lambda *x: module(*x, return_lse=True), *inputs)
    assert_equal_to(Results(out, lse, *pull((dout, torch.zeros_like(lse)))), expected, TOLERANCE[dtype])


@pytest.mark.parametrize(("case", "dtype", "backend"), KINDS, ids=str)
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 4, 2), (0, None, None), (None, 3, 0)])
def test_vmap_is_a_loop(case: Case, dtype: torch.dtype, backend: str, in_dims: tuple[int | None, ...]) -> None:
    module = case.module(backend=backend)
    samples = [case_inputs(replace(case, seed=seed), dtype) for seed in range(3)]
    inputs = [
        samples[0][number] if dim is None else torch.stack([sample[number] for sample in samples], dim)
        for number, dim in enumerate(in_dims)
    ]
    dout = case.dout(dtype)

    def gradients(q: Tensor, k: Tensor, v: Tensor) -> Any:
        (out, lse), pull = vjp(lambda *x: module(*x, return_lse=True), q, k, v)
        return (out, lse, *pull((dout, torch.zeros_like(lse))))

    out, lse = vmap(lambda *x: module(*x, return_lse=True), in_dims)(*inputs)
    results = vmap(gradients, in_dims)(*inputs)
    for index in range(3):
        mine = [samples[0 if dim is None else index][number] for number, dim in enumerate(in_dims)]
        expected = exact(case, *mine, dout)
        found_here = Results(*(x[index] for x in results))
        assert_equal_to(found_here, expected, TOLERANCE[dtype])
        assert_equal_to(found_here._replace(out=out[index], lse=lse[index]), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_gradient_through_vmap(case: Case) -> None:
    """Of autograd and of torch.func, also for what is not mapped: its gradient is the sum over the samples."""
    module = case.module(backend="math")
    queries = torch.stack([case_inputs(replace(case, seed=seed))[0] for seed in range(3)])
    _, k, v = case_inputs(case)
    dout = case.dout()

    def total(queries: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (vmap(module, (0, None, None))(queries, k, v) * dout).sum()

    each = [exact(case, q, k, v, dout) for q in queries]
    expected = torch.stack([r.dq for r in each]), sum(r.dk for r in each), sum(r.dv for r in each)
    leaves = [x.clone().requires_grad_() for x in (queries, k, v)]
    for grads in (grad(total, (0, 1, 2))(queries, k, v), torch.autograd.grad(total(*leaves), leaves)):
        for mine, x64 in zip(grads, expected, strict=True):
            torch.testing.assert_close(mine, x64, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_a_jacobian(case: Case) -> None:
    case = replace(case, length=3, heads=2, kv_heads=1, head_dim=2, batch=1)
    module = case.module()
    q, k, v = case_inputs(case)
    jacobian = jacrev(lambda q: module(q, k, v))(q)
    one_by_one = torch.autograd.functional.jacobian(lambda q: module(q, k, v), q)
    torch.testing.assert_close(jacobian, one_by_one, rtol=0, atol=1e-12)


def test_nested_vmap() -> None:
    module = CASE.module()
    q, k, v = (torch.stack([x, 2 * x, 3 * x, 4 * x]).unflatten(0, (2, 2)) for x in case_inputs(CASE))
    out = vmap(vmap(module))(q, k, v)
    for i in range(2):
        for j in range(2):
            torch.testing.assert_close(out[i, j], module(q[i, j], k[i, j], v[i, j]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["math", "flash-cpu"])
def test_autocast(backend: str) -> None:
    module = CASE.module(backend=backend)
    q, k, v = CASE.inputs(torch.float32)
    dout = CASE.dout(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = found(module, q, k, v, dout)
        out, pull = vjp(module, *case_inputs(CASE, torch.float32))
    assert torch.equal(out, expected.out)
    assert all(torch.equal(x, y) for x, y in zip(pull(dout), expected[2:], strict=True))


def test_inside_a_compiled_function() -> None:
    module = CASE.module()
    q, k, v = (torch.stack([x, 2 * x]) for x in case_inputs(CASE))
    compiled = torch.compile(lambda *x: vmap(lambda *y: module(*y))(*x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), vmap(module)(q, k, v), rtol=0, atol=1e-12)


# --- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_second_derivatives_are_refused_in_one_line(case: Case) -> None:
    module = case.module(backend="math")
    q, k, v = case_inputs(case)

    def first(q: Tensor) -> Tensor:
        return grad(lambda q: module(q, k, v).square().sum())(q).sum()

    with pytest.raises(RingAttentionError, match=r"^a second derivative \(.*\) is not supported: [^\n]*$"):
        grad(first)(q)
    with pytest.raises(RingAttentionError, match=r"^forward-mode differentiation \(.*\) is not supported: [^\n]*$"):
        hessian(lambda q: module(q, k, v).sum())(q)


@pytest.mark.parametrize("backend", ["math", "flash-cpu"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_mode_is_refused_in_one_line(case: Case, backend: str) -> None:
    module = case.module(backend=backend)
    q, k, v = case_inputs(case, torch.float32)
    message = r"^forward-mode differentiation \(.*\) is not supported: use reverse mode, vjp or jacrev$"
    with pytest.raises(RingAttentionError, match=message):
        jvp(lambda q: module(q, k, v), (q,), (q,))
    with pytest.raises(RingAttentionError, match=message):
        jacfwd(lambda q: module(q, k, v))(q)


def test_samples_that_do_not_fit_are_named_as_they_are() -> None:
    q, k, v = (torch.stack([x, x]) for x in case_inputs(CASE))
    with pytest.raises(InputError, match=r"q has shape \(12, 4, 8\); it must be \(batch, sequence, heads, head_dim\)"):
        vmap(CASE.module())(q[:, 0], k, v)
    with pytest.raises(InputError, match="k has 11 positions and q 12"):
        vmap(CASE.module())(q, k[:, :, :-1], v)
    with pytest.raises(InputError, match=r"dropout is 0\.5 in training mode; .*not under torch\.export or torch\.func"):
        vmap(CASE.module(dropout=0.5))(q, k, v)
    with pytest.raises(InputError, match=r"checkpoint is 'full', but under torch\.compile and torch\.func"):
        grad(lambda q: RingAttention(4, 8, 2, profile=None, device="cpu", checkpoint="full")(q, k[0], v[0]).sum())(q[0])
