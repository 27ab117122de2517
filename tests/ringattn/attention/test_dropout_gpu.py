"""Dropout on a GPU: every kernel that has it drops what its backward is told, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dropped import exact_of, kept_by, seeded
from oracle import NAMES, Case
from torch.utils.checkpoint import checkpoint

from ringattn import RingAttention, detect
from ringattn.errors import PlanError
from ringattn.hardware.kernel_faults import Combination
from ringattn.kernels.registry import KERNELS
from ringattn.planning.validation.accuracy_check import check_all

pytestmark = pytest.mark.gpu

P = 0.25
CUDA = torch.device("cuda", 0)
ABLE = [name for name in KERNELS if "dropout" in KERNELS[name].features]
SHAPES = {
    "causal, grouped": Case(333, 4, 2, 64, 2, causal=True),
    "full": Case(300, 4, 4, 128, 2),
    "window": Case(333, 4, 2, 64, 1, causal=True, window=77),
    "softcap": Case(200, 4, 2, 64, 1, causal=True, softcap=2.0),
    "wide values": Case(200, 4, 4, 64, 1, causal=True, head_dim_v=128),
    "heads first": Case(200, 4, 4, 64, 2, layout="heads_first"),
}
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def module_of(case: Case, name: str | None, dtype: torch.dtype, **options: object) -> RingAttention:
    try:
        module = case.module(dropout=P, backend=name, device=CUDA, **options)
        module.plan.plan_at(case.length, NAMES[dtype], True, case.batch, dropout=P).runnable()
    except PlanError as error:
        pytest.skip(str(error))
    return module


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize("name", ABLE)
def test_every_kernel_is_the_float64_result_of_what_it_kept(name: str, dtype: torch.dtype, shape: str) -> None:
    case = SHAPES[shape]
    module = module_of(case, name, dtype)
    q, k, v = case.inputs(dtype, device="cuda")
    dout = case.dout(dtype, "cuda")
    kept = kept_by(module, case, q, k)
    out = seeded(lambda: module(q, k, v))
    expected = exact_of(case, q, k, v, dout, kept, P)
    found = (out, *torch.autograd.grad(out, (q, k, v), dout))
    for x, exact in zip(found, (expected.out, expected.dq, expected.dk, expected.dv), strict=True):
        assert (x.double() - exact).norm() <= (12 if dtype is not torch.float32 else 384) * UNIT[dtype] * exact.norm()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_kernel_passes_its_check(dtype: str) -> None:
    need_of = detect("cuda:0")
    asked = [
        Combination(name, 64, dtype, backward, causal, True, dropout=True)
        for name in ABLE
        for backward in (False, True)
        for causal in (False, True)
        if name == "math" or (not KERNELS[name].package or KERNELS[name].package in need_of.packages)
    ]
    asked = [a for a in asked if a.dtype != "fp32" or a.kernel in ("efficient", "math")]
    verdicts = check_all(asked, CUDA)
    assert [f"{a}: {verdict.reason}" for a, verdict in verdicts.items() if not verdict.passes] == []


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_checkpoints_drop_the_same(mode: str) -> None:
    case, dtype = SHAPES["causal, grouped"], torch.bfloat16
    q, k, v = case.inputs(dtype, device="cuda")
    dout = case.dout(dtype, "cuda")
    plain = seeded(lambda: case.module(dropout=P, device=CUDA)(q, k, v))
    module = module_of(case, None, dtype, checkpoint=mode)
    again = seeded(lambda: module(q, k, v))
    torch.rand(5, device="cuda")
    for x, y in zip(*(torch.autograd.grad(out, (q, k, v), dout) for out in (plain, again)), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    assert torch.equal(plain, again)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_drops_the_same(reentrant: bool) -> None:
    case, dtype = replace(SHAPES["full"], length=128), torch.bfloat16
    module = module_of(case, None, dtype)
    q, k, v = case.inputs(dtype, device="cuda")
    plain = seeded(lambda: module(q, k, v))
    again = seeded(lambda: checkpoint(module, q, k, v, use_reentrant=reentrant))
    assert torch.equal(plain, again)
    (dv,) = torch.autograd.grad(plain.sum(), v)
    again.sum().backward()
    torch.testing.assert_close(dv, v.grad, rtol=2e-2, atol=2e-2)


def test_a_captured_graph_draws_anew_at_every_replay() -> None:
    case, dtype = SHAPES["causal, grouped"], torch.bfloat16
    module = module_of(case, None, dtype)
    q, k, v = (x.detach() for x in case.inputs(dtype, device="cuda"))
    module(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(q, k, v)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.clone())
    assert not torch.equal(*results)
