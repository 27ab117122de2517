"""Sliding windows, softcap, head_dim_v and sinks on a GPU: every kernel that has them keeps the rule of accuracy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from oracle import DENSE, Case, assert_within_rule, exact, found, pattern_of
from test_sinks import assert_close, exact_with, sinks_of

from ringattn import RingAttention, detect
from ringattn.kernels.registry import KERNELS
from ringattn.planning.plan import rejection_reasons
from ringattn.workload import BranchTunables, Tunables

pytestmark = pytest.mark.gpu

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHAPES = {
    "window": Case(333, 4, 2, 64, 2, DENSE, causal=True, window=77),
    "narrow window": Case(1000, 4, 4, 128, 1, DENSE, causal=True, window=5),
    "wide window": Case(1000, 4, 1, 64, 2, DENSE, causal=True, window=900, layout="heads_first"),
    "softcap": Case(333, 4, 2, 64, 2, DENSE, causal=True, softcap=2.0),
    "softcap, full": Case(300, 4, 4, 128, 1, DENSE, softcap=30.0),
    "softcap and window": Case(500, 4, 2, 64, 2, DENSE, causal=True, softcap=2.0, window=130),
    "wide values": Case(333, 4, 4, 64, 2, DENSE, causal=True, head_dim_v=128),
    "narrow values": Case(300, 4, 2, 128, 2, DENSE, head_dim_v=64),
    "deepseek": Case(300, 4, 4, 192, 1, DENSE, causal=True, head_dim_v=128),
}
ABLE = [name for name in KERNELS if KERNELS[name].features]


def module_of(case: Case, name: str, dtype: torch.dtype) -> RingAttention:
    tunables = Tunables(NAMES[dtype], (BranchTunables(name, name),))
    reasons = rejection_reasons(case.workload(NAMES[dtype]), tunables, detect("cuda"))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    return case.running(tunables, NAMES[dtype], device="cuda")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
@pytest.mark.parametrize("name", ABLE)
def test_every_kernel_keeps_the_rule(name: str, dtype: torch.dtype, shape: str) -> None:
    """And has no larger errors than rounding: one dense call of it is not the only measure."""
    case = SHAPES[shape]
    module = module_of(case, name, dtype)
    q, k, v = case.inputs(dtype, device="cuda")
    dout = case.dout(dtype, "cuda")
    results, expected = found(module, q, k, v, dout), exact(case, q, k, v, dout)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[dtype]
    for field in ("out", "dq", "dk", "dv"):
        x, x64 = getattr(results, field).double(), getattr(expected, field)
        assert x.shape == x64.shape
        assert (x - x64).norm() <= (8 if dtype is not torch.float32 else 256) * unit * x64.norm(), field
    assert (results.lse.double() - expected.lse).abs().max() <= (2e-3 if dtype is not torch.float32 else 2e-5)
    assert_within_rule(case, name, name, dtype, module, device="cuda")


@pytest.mark.parametrize("name", ["flash", "flash-attn-2", "flash-attn-4"])
@pytest.mark.parametrize("shape", ["window", "softcap", "softcap and window"])
def test_packed_documents(shape: str, name: str) -> None:
    case = replace(SHAPES[shape], batch=1, length=333)
    q, k, v = case.inputs(torch.bfloat16, device="cuda")
    tunables = Tunables("bf16", (BranchTunables(name, name),), packing="varlen")
    workload = replace(case.workload("bf16"), seq_len=200, batch=3, packed_tokens=333, window=case.window or 0)
    reasons = rejection_reasons(workload, tunables, detect("cuda"))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    module = case.module(device="cuda", backend=name)
    bounds = [0, 200, 203, 333]
    results = found(module, q, k, v, case.dout(torch.bfloat16, "cuda"), cu_seqlens=bounds)
    for begin, end in pairwise(bounds):
        part = exact(case, *(x[:, begin:end] for x in (q, k, v, case.dout(torch.bfloat16, "cuda"))))
        for field in ("out", "dq", "dk", "dv"):
            x, x64 = getattr(results, field)[:, begin:end].double(), getattr(part, field)
            assert (x - x64).norm() <= 2.0**-5 * x64.norm(), field


@pytest.mark.parametrize("options", [{}, {"window": 77}, {"softcap": 2.0}], ids=str)
def test_sinks(options: dict[str, float]) -> None:
    case = Case(333, 4, 2, 64, 2, DENSE, causal=True, **options)  # type: ignore[arg-type]
    inputs, dout = case.inputs(torch.bfloat16, device="cuda"), case.dout(torch.bfloat16, "cuda")
    sinks = sinks_of(case, torch.float32).detach().cuda().requires_grad_()
    out, lse = case.module(device="cuda")(*inputs, return_lse=True, sinks=sinks)
    grads = torch.autograd.grad(out, (*inputs, sinks), dout)
    expected = exact_with(case, sinks, dout, None, *inputs)
    assert_close([out.detach(), lse.detach(), *grads], expected, 3e-2)
    for x, x64 in zip((out, *grads), (expected[0], *expected[2:]), strict=True):
        assert (x.double() - x64).norm() <= 2.0**-5 * x64.norm()


@pytest.mark.parametrize("options", [{"window": 77}, {"softcap": 2.0}, {"head_dim_v": 32}], ids=str)
def test_the_gradient_of_lse(options: dict[str, float]) -> None:
    case = Case(200, 4, 2, 64, 2, DENSE, causal=True, **options)  # type: ignore[arg-type]
    q, k, v = case.inputs(torch.bfloat16, device="cuda")
    _, lse = case.module(device="cuda")(q, k, v, return_lse=True)
    dlse = torch.randn_like(lse)
    grads = torch.autograd.grad(lse, (q, k), dlse)
    sinks = torch.full((4,), -torch.inf, device="cuda")
    expected = exact_with(case, sinks, torch.zeros_like(case.dout(torch.bfloat16, "cuda")), dlse, q, k, v)
    for x, x64 in zip(grads, expected[2:4], strict=True):
        assert (x.double() - x64).norm() <= 2.0**-5 * x64.norm()


def test_a_window_makes_a_long_sequence_cheap_in_memory() -> None:
    """No mask and no square of scores: 65,536 positions under a window of 256."""
    module = RingAttention(2, 64, causal=True, window=256, profile=None, device="cuda")
    q, k, v = (torch.randn(1, 65536, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    module(q, k, v)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    module(q, k, v)
    assert torch.cuda.max_memory_allocated() - before <= 4 * q.nbytes


def test_sinks_of_a_plan_that_is_replayed() -> None:
    """A graph of the forward ends before the sinks, and that of a backward begins after them."""
    case = Case(256, 4, 4, 64, 1, pattern_of([64, 128], [1, 2]), causal=True)
    branches = (BranchTunables("flash", "flash"), BranchTunables("flash", "flash", "copy"))
    module = case.running(Tunables("bf16", branches, launch="graph"), "bf16", device="cuda")
    for seed in range(6):
        each = replace(case, seed=seed)
        inputs, dout = each.inputs(torch.bfloat16, device="cuda"), each.dout(torch.bfloat16, "cuda")
        sinks = sinks_of(each, torch.float32).detach().cuda().requires_grad_()
        out = module(*inputs, sinks=sinks)
        grads = torch.autograd.grad(out, (*inputs, sinks), dout)
        expected = exact_with(each, sinks, dout, None, *inputs)
        for x, x64 in zip((out, *grads), (expected[0], *expected[2:]), strict=True):
            assert (x.double() - x64).norm() <= 2.0**-5 * x64.norm()
