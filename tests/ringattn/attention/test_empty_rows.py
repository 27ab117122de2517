"""Rows whose logits are all -inf, on every kernel of this machine: out 0, lse -inf, no gradient, nothing to a merge."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from oracle import DENSE, Case, Results, assert_equal_to, exact, found, pattern_of
from torch import Tensor

from ringattn.hardware.facts import detect
from ringattn.kernels.registry import KERNELS, KernelConfig, KernelNeed

CPU_KERNELS = [("flash-cpu", torch.float32), ("math", torch.float32), ("math", torch.float64)]
CPU_KERNELS += [("flash-cpu", torch.bfloat16), ("math", torch.bfloat16), ("flash-cpu", torch.float16)]
HUGE = 1e30  # its square is no float32, so the logit is -inf though q and k are finite
DENSE_CASE = Case(9, 4, 2, 8, 2, DENSE)


def positive(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with q > 0, so that a key of -inf has a logit of -inf."""
    q, k, v = (x.detach() for x in case.inputs(torch.float64))
    return q.abs().add(0.1).to(dtype), k.to(dtype), v.to(dtype)


CASES = {
    "every key": (DENSE_CASE, slice(None)),
    "the first keys": (replace(DENSE_CASE, causal=True), slice(0, 4)),
    "the last keys": (replace(DENSE_CASE, causal=True), slice(5, None)),
    "long": (Case(1100, 2, 2, 8, 1, DENSE, causal=True), slice(0, 700)),
    "one branch of two": (Case(4, 2, 1, 8, 1, pattern_of([2, 4], [1, 1])), slice(0, 2)),
    "both branches": (Case(8, 2, 2, 8, 1, pattern_of([2, 4], [1, 1])), slice(0, 4)),
    "dilated": (Case(24, 4, 2, 8, 2, pattern_of([4, 8, 16], [1, 2, 4]), causal=True), slice(3, 14)),
}


@pytest.mark.parametrize(("kernel", "dtype"), CPU_KERNELS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_keys_of_minus_infinity_are_no_keys(name: str, kernel: str, dtype: torch.dtype) -> None:
    case, where = CASES[name]
    q, k, v = positive(case, dtype)
    k[:, where] = -math.inf
    out, lse = case.module(backend=kernel, dtype=dtype)(q, k, v, return_lse=True)
    expected = exact(case, q, k, v, case.dout())
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 2e-2)
    assert torch.equal(lse.isneginf(), expected.lse.isneginf())
    assert expected.lse.isneginf().any() or name in ("the last keys", "one branch of two")
    there = ~lse.isneginf()
    torch.testing.assert_close(lse[there].double(), expected.lse[there], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=tolerance)
    assert (out.transpose(1, 2)[~there] == 0).all()


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
@pytest.mark.parametrize("kernel", ["flash-cpu", "math"])
@pytest.mark.parametrize("name", CASES)
def test_logits_that_overflow_have_no_gradient(name: str, kernel: str, checkpoint: str) -> None:
    """Finite q and k with a product beyond float32; the float64 result is that of keys of -inf."""
    case, where = CASES[name]
    q, k, v = positive(case, torch.float32)
    q[..., 0], k[..., 0] = HUGE, 0.0
    masked = k.clone()
    k[:, where, :, 0] = -HUGE
    masked[:, where, :, 0] = -math.inf
    dout = case.dout(torch.float32)
    expected = exact(case, q, masked, v, dout)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    # The logits that remain leave the huge column out, but what is summed over it does not.
    results = found(case.module(backend=kernel, checkpoint=checkpoint), *inputs, dout)
    assert_equal_to(_without_the_column(results), _without_the_column(expected), 1e-4)


def _without_the_column(results: Results) -> Results:
    dq, dk = results.dq[..., 1:], results.dk[..., 1:]
    return results._replace(dq=dq, dk=dk)


@pytest.mark.parametrize("name", CASES)
def test_math_has_the_gradients_of_keys_of_minus_infinity_too(name: str) -> None:
    case, where = CASES[name]
    q, k, v = positive(case, torch.float64)
    k[:, where] = -math.inf
    inputs = [x.requires_grad_() for x in (q, k, v)]
    results = found(case.module(backend="math"), *inputs, case.dout())
    assert_equal_to(results, exact(case, *inputs, case.dout()))
    assert (results.dk[:, where] == 0).all()


@pytest.mark.parametrize("kernel", ["flash-cpu", "math"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("others", ["finite", "-inf"])
@pytest.mark.parametrize("length", [5, 40, 600])
def test_a_logit_of_infinity_or_nan_makes_the_row_nan(
    length: int, others: str, value: float, causal: bool, kernel: str
) -> None:
    case = Case(length, 2, 1, 8, 1, DENSE, causal=causal)
    q, k, v = positive(case, torch.float32)
    if others == "-inf":
        k[:] = -math.inf
    k[:, 3] = value
    out, lse = case.module(backend=kernel)(q, k, v, return_lse=True)
    seen = torch.arange(length) >= (3 if causal else 0)
    assert out[:, seen].isnan().all()
    assert not lse[..., seen].isfinite().any()
    assert not lse[..., seen].isneginf().any()
    expected = exact(case, q, k, v, case.dout())
    torch.testing.assert_close(out[:, ~seen].double(), expected.out[:, ~seen], rtol=0, atol=1e-5)
    torch.testing.assert_close(lse[..., ~seen].double(), expected.lse[..., ~seen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["flash-cpu", "math"])
@pytest.mark.parametrize("zero", ["k", "k and v"])
def test_a_true_lse_of_zero_stays(kernel: str, zero: str) -> None:
    """The first row of zero keys: one logit of 0, and out is 0 where v is 0, too."""
    case = Case(6, 2, 2, 8, 1, pattern_of([6, 3], [1, 1]), causal=True)
    q, k, v = positive(case, torch.float32)
    k[:] = 0
    if zero == "k and v":
        v[:, :3] = 0
    out, lse = case.module(backend=kernel)(q, k, v, return_lse=True)
    expected = exact(case, q, k, v, case.dout())
    assert lse[0, 0, 0] == pytest.approx(math.log(2))  # once a branch
    torch.testing.assert_close(lse.double(), expected.lse, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=1e-6)


# --- the contract of a block kernel, on whatever device it runs ----------------------------------------------------


def check_contract(kernel: str, dtype: torch.dtype, device: str, causal: bool, **params: str) -> None:
    """Every row empty, the first 200 of 320 keys, and none, of three blocks; the backward against lse of all."""
    generator = torch.Generator().manual_seed(0)
    blocks, rows, heads, head_dim = 3, 320, 2, 64
    q, k, v, dout = (
        torch.randn(blocks, rows, heads, head_dim, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    q[..., 0] = 1.0
    k[..., 0] = 0.0
    k[0, :, :, 0] = -math.inf
    k[1, :200, :, 0] = -math.inf
    q, k, v, dout = (x.to(device, dtype) for x in (q, k, v, dout))
    case = Case(rows, heads, heads, head_dim, blocks, DENSE, causal=causal, scale=0.125)
    expected = exact(case, *(x.cpu() for x in (q, k, v, dout)))
    flash_2 = kernel in ("flash", "flash-attn-2") or (kernel == "xformers" and not params)
    if (flash_2 and not causal) or (kernel == "efficient" and dtype is torch.float32):
        check_nothing_is_made_up(kernel, causal, (q, k, v), expected)
        return
    bound = KERNELS[kernel].load(KernelConfig(causal=causal, scale=0.125, params=params))
    out, lse = bound.forward(q, k, v)
    assert torch.equal(lse.cpu().isneginf(), expected.lse.isneginf()), "lse is -inf elsewhere"
    empty = lse.isneginf()
    assert empty[0].all()
    assert (out.transpose(1, 2)[empty] == 0).all()
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 2e-2
    torch.testing.assert_close(out.cpu().double(), expected.out, rtol=tolerance, atol=tolerance)
    there = ~expected.lse.isneginf()
    torch.testing.assert_close(lse.cpu().double()[there], expected.lse[there], rtol=1e-3, atol=1e-3)
    # 0 * inf is NaN in dq, so the backward is asked of keys that are merely far away: rows that are empty in what is
    # merged have an lse of -inf there, which no logit is larger than.
    far = k.clone()
    far[k.isinf()] = torch.finfo(dtype).min / 256  # the least itself is rounded to infinity where fp32 is split in TF32
    against = lse.contiguous()
    dq, dk, dv = bound.backward(dout, q, far, v, out.contiguous(), against)
    for name, x, x64 in (("dq", dq, expected.dq), ("dk", dk, expected.dk), ("dv", dv, expected.dv)):
        x = x.cpu().double()
        assert x.isfinite().all(), name
        torch.testing.assert_close(x, x64, rtol=0, atol=5 * tolerance, msg=lambda text, name=name: f"{name}: {text}")


def check_nothing_is_made_up(kernel: str, causal: bool, inputs: tuple[Tensor, ...], expected: Results) -> None:
    """Of kernels that say NaN of some rows beside infinite keys: a number is the right one, and NaN is in out."""
    out, lse = KERNELS[kernel].load(KernelConfig(causal=causal, scale=0.125)).forward(*inputs)
    out, lse = out.cpu().double().transpose(1, 2), lse.cpu().double()
    right = ~out.isnan().any(-1)
    assert right[2].all()
    assert torch.equal(lse.isneginf()[right], expected.lse.isneginf()[right])
    torch.testing.assert_close(out[right], expected.out.transpose(1, 2)[right], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kernel", "dtype"), CPU_KERNELS, ids=str)
def test_the_contract_on_a_cpu(kernel: str, dtype: torch.dtype, causal: bool) -> None:
    if dtype is torch.float16:
        pytest.skip("-65504 is no far key")
    check_contract(kernel, dtype, "cpu", causal)


GPU_KERNELS = ["cudnn", "flash", "efficient", "flash-attn-2", "flash-attn-3", "flash-attn-4", "xformers", "triton"]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_the_contract_on_a_gpu(kernel: str, dtype: torch.dtype, causal: bool) -> None:
    facts = detect("cuda")
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    need = KernelNeed("nvidia", facts.arch, name, 64, 2, 2, 320, 3, causal, backward=True)
    if reasons := KERNELS[kernel].unsupported_reasons(need, facts):
        pytest.skip("; ".join(reasons))
    check_contract(kernel, dtype, "cuda", causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_the_contract_of_the_other_operator_of_xformers(causal: bool) -> None:
    pytest.importorskip("xformers")
    check_contract("xformers", torch.bfloat16, "cuda", causal, operator="cutlass")


@pytest.mark.gpu
def test_a_true_lse_of_zero_stays_on_a_gpu() -> None:
    """CUTLASS's kernel says 0 of an empty row: one that is not keeps its LSE."""
    q = torch.rand(1, 64, 2, 64, device="cuda") + 0.1
    k, v = torch.zeros_like(q), torch.zeros_like(q)
    _, lse = KERNELS["efficient"].load(KernelConfig(causal=True, scale=0.125)).forward(q, k, v)
    torch.testing.assert_close(lse[0, 0], torch.arange(1.0, 65.0, device="cuda").log(), rtol=0, atol=1e-5)
