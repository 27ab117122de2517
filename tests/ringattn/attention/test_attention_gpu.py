"""The module on a GPU: every kernel keeps the rule of accuracy; nothing waits, leaks or mixes streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import DENSE, Case, Results, assert_within_rule, exact, found, laid_out, pattern_of, times_seen
from recorder import saved_tensors

from ringattn import Pattern, RingAttention, detect
from ringattn.errors import PlanError
from ringattn.kernels.registry import KERNELS
from ringattn.planning.plan import rejection_reasons
from ringattn.runtime.workspace import POOL
from ringattn.workload import BranchTunables, Tunables

pytestmark = pytest.mark.gpu

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ON_GPU = [name for name in KERNELS if name != "flash-cpu"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

SHAPES = [
    Case(333, 4, 2, 64, 2, DENSE, causal=True),
    Case(256, 4, 4, 64, 2, pattern_of([64], [1]), causal=True),
    Case(333, 4, 2, 64, 2, pattern_of([64, 128, 512], [1, 2, 4]), causal=True),
    Case(300, 8, 8, 32, 1, pattern_of([32, 96, 300], [1, 3, 8], "blocked"), causal=False),
    Case(301, 6, 1, 128, 2, pattern_of([100, 50], [2, 5]), causal=True),
    Case(640, 4, 4, 64, 1, pattern_of([128, 256], [4, 2]), causal=True, layout="heads_first"),
    Case(257, 4, 2, 64, 3, pattern_of([64, 256], [1, 16]), causal=True, layout="every_second"),
]


def plan(case: Case, forward: str, backward: str, dtype: torch.dtype, gather: str, **changes: Any) -> Tunables:
    branches = tuple(
        BranchTunables(forward, backward, gather if branch.rate > 1 else "view")
        for branch in case.pattern.resolved(case.length)
    )
    return replace(Tunables(NAMES[dtype], branches), **changes)


def running(case: Case, tunables: Tunables, dtype: torch.dtype) -> RingAttention:
    reasons = rejection_reasons(case.workload(NAMES[dtype]), tunables, detect("cuda"))
    if reasons:
        with pytest.raises(PlanError):
            case.running(tunables, NAMES[dtype], device="cuda")
        pytest.skip("; ".join(reasons))
    return case.running(tunables, NAMES[dtype], device="cuda")


def dense_runs(case: Case, name: str, dtype: torch.dtype) -> bool:
    dense = replace(case, pattern=DENSE)
    tunables = plan(dense, name, name, dtype, "view")
    return not rejection_reasons(dense.workload(NAMES[dtype]), tunables, detect("cuda"))


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"S{case.length}-{case.pattern}-{case.layout}")
@pytest.mark.parametrize("gather", ["view", "copy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ON_GPU)
def test_every_kernel_keeps_the_rule(name: str, dtype: torch.dtype, gather: str, case: Case) -> None:
    if gather == "copy" and not any(branch.rate > 1 for branch in case.pattern.branches):
        pytest.skip("nothing to gather")
    module = running(case, plan(case, name, name, dtype, gather), dtype)
    if not dense_runs(case, name, dtype):
        pytest.skip(f"{name} has no dense call of this shape to compare with")
    assert_within_rule(case, name, name, dtype, module, device="cuda")


MIXED = Case(384, 4, 2, 64, 2, pattern_of([64, 128], [1, 2]), causal=True)
PAIRS = [(one, other) for one in ("cudnn", "flash", "efficient", "math") for other in ("cudnn", "flash", "efficient")]


@pytest.mark.parametrize(("forward", "backward"), [pair for pair in PAIRS if pair[0] != pair[1]])
def test_the_two_directions_need_not_be_one_kernel(forward: str, backward: str) -> None:
    module = running(MIXED, plan(MIXED, forward, backward, torch.bfloat16, "copy"), torch.bfloat16)
    assert_within_rule(MIXED, forward, backward, torch.bfloat16, module, device="cuda")


@pytest.mark.parametrize(
    "changes",
    [
        {"window_tokens": 128},
        {"checkpoint": "none"},
        {"checkpoint": "full"},
        {"checkpoint": "offload"},
        {"pool_threshold_mib": 0, "pool_strategy": "bucket"},
        {"window_tokens": 128, "pool_threshold_mib": 0, "checkpoint": "none", "pattern_cache": False},
    ],
    ids=str,
)
def test_every_memory_policy_keeps_the_rule(changes: dict[str, Any]) -> None:
    module = running(MIXED, plan(MIXED, "flash", "flash", torch.bfloat16, "copy", **changes), torch.bfloat16)
    for _ in range(2):
        assert_within_rule(MIXED, "flash", "flash", torch.bfloat16, module, device="cuda")


@pytest.mark.parametrize("pattern", [DENSE, MIXED.pattern], ids=str)
def test_the_plan_without_a_profile(pattern: Pattern) -> None:
    case = replace(MIXED, pattern=pattern)
    for dtype in DTYPES:
        q, k, v = case.inputs(dtype, device="cuda")
        results = found(case.module(device="cuda"), q, k, v, case.dout(dtype, "cuda"))
        for name, x, x64 in zip(results._fields, results, exact(case, q, k, v, case.dout(dtype, "cuda")), strict=True):
            error = (x.double() - x64).norm() / x64.norm()
            assert error < (1e-5 if dtype is torch.float32 else 1e-2), (dtype, name)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("layout", ["plain", "packed", "heads_first"])
@pytest.mark.parametrize("of_dout", ["plain", "heads_first", "last_strided", "expanded"])
def test_flash_is_left_to_autograd_whatever_the_strides(layout: str, of_dout: str, kv_heads: int) -> None:
    case = replace(MIXED, pattern=DENSE, kv_heads=kv_heads, layout=layout)
    module = running(case, plan(case, "flash", "flash", torch.bfloat16, "view"), torch.bfloat16)
    inputs, dout = case.inputs(torch.bfloat16, device="cuda"), case.dout(torch.bfloat16, "cuda")
    dout = dout[:, :, :1, :1].expand(dout.shape) if of_dout == "expanded" else laid_out(dout, of_dout)
    out = module(*inputs)
    assert type(out.grad_fn).__name__ == "FlashAttentionBackward0"
    with torch.no_grad():
        _, lse = module(*inputs, return_lse=True)
    results = Results(out.detach(), lse, *torch.autograd.grad(out, inputs, dout, retain_graph=True))
    for name, x, x64 in zip(results._fields, results, exact(case, *inputs, dout), strict=True):
        assert (x.double() - x64).norm() / x64.norm() < 1e-2, name
    grads = torch.autograd.grad(out, inputs, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative for aten::_flash_attention_backward is not implemented"):
        grads[0].sum().backward()


def test_float64_is_exact() -> None:
    q, k, v = MIXED.inputs(device="cuda")
    dout = MIXED.dout(device="cuda")
    results = found(MIXED.module(device="cuda"), q, k, v, dout)
    for x, x64 in zip(results, exact(MIXED, q, k, v, dout), strict=True):
        torch.testing.assert_close(x, x64, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient", "math"])
@pytest.mark.parametrize("pattern", [DENSE, MIXED.pattern, pattern_of([128], [4])], ids=str)
def test_only_the_queries_that_see_a_key_depend_on_it(name: str, pattern: Pattern) -> None:
    case = replace(MIXED, pattern=pattern)
    module = running(case, plan(case, name, name, torch.bfloat16, "view"), torch.bfloat16)
    for which, position, head in (("k", 200, 0), ("v", 200, 1), ("k", 133, 1), ("v", 64, 0)):
        inputs = {n: x.detach() for n, x in zip("qkv", case.inputs(torch.bfloat16, device="cuda"), strict=True)}
        before = module(**inputs)
        inputs[which][1, position, head] += 3.0
        after = module(**inputs)
        sees = torch.zeros(2, case.length, 4, dtype=torch.bool, device="cuda")
        sees[1, :, 2 * head : 2 * head + 2] = times_seen(case)[2 * head : 2 * head + 2, :, position].T.cuda() > 0
        assert torch.equal(before[~sees], after[~sees])
        if which == "v" and sees.any():
            assert (before != after)[sees].any(-1).float().mean() > 0.9  # some weights are below a bf16 step


def test_tensors_elsewhere_are_named() -> None:
    inputs = [x.detach() for x in MIXED.inputs(torch.bfloat16)]
    with pytest.raises(ValueError, match="q is on cpu, the module's plans are for cuda:0"):
        MIXED.module(device="cuda")(*inputs)


def test_autocast() -> None:
    module = MIXED.module(device="cuda")
    q, k, v = MIXED.inputs(torch.float32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = module(q, k, v)
    assert out.dtype is torch.float32
    narrow = module(*(x.detach().bfloat16() for x in (q, k, v)))
    assert torch.equal(out, narrow.float())
    out.backward(MIXED.dout(torch.float32, "cuda"))
    assert q.grad is not None
    assert q.grad.dtype is torch.float32


def test_saved_tensors_are_those_of_the_call() -> None:
    q, k, v = MIXED.inputs(torch.bfloat16, device="cuda")
    with saved_tensors() as saved:
        out, lse = MIXED.module(device="cuda")(q, k, v, return_lse=True)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (q, k, v, out, lse)]


def test_a_call_leaves_its_results_alone_in_memory() -> None:
    case = replace(MIXED, length=8192)
    module = case.module(device="cuda")
    q, k, v = case.inputs(torch.bfloat16, device="cuda")
    module(q, k, v).sum().backward()
    q.grad = k.grad = v.grad = None
    before = torch.cuda.memory_allocated()
    out, lse = module(q, k, v, return_lse=True)
    assert torch.cuda.memory_allocated() - before <= (out.nbytes + lse.nbytes) * 1.01 + 4096
    del out, lse
    assert torch.cuda.memory_allocated() == before


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("pattern", [DENSE, MIXED.pattern, pattern_of([100, 384], [3, 7])], ids=str)
def test_no_call_waits_for_the_device(pattern: Pattern, no_waiting: None) -> None:
    case = replace(MIXED, pattern=pattern)
    torch.cuda.set_sync_debug_mode("default")
    module = case.module(device="cuda")
    q, k, v = case.inputs(torch.bfloat16, device="cuda")
    dout = case.dout(torch.bfloat16, "cuda")
    found(module, q, k, v, dout)
    torch.cuda.set_sync_debug_mode("error")
    found(module, q, k, v, dout)


@pytest.mark.parametrize("threshold", [None, 0])
def test_a_cuda_graph_replays_forward_and_backward(threshold: int | None) -> None:
    tunables = plan(MIXED, "flash", "flash", torch.bfloat16, "copy", pool_threshold_mib=threshold)
    module = running(MIXED, tunables, torch.bfloat16)
    q, k, v = MIXED.inputs(torch.bfloat16, device="cuda")
    dout = MIXED.dout(torch.bfloat16, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            found(module, q, k, v, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = found(module, q, k, v, dout)
    other = replace(MIXED, seed=9)
    with torch.no_grad():
        for x, y in zip((q, k, v), other.inputs(torch.bfloat16, device="cuda"), strict=True):
            x.copy_(y)
    dout.copy_(other.dout(torch.bfloat16, "cuda"))
    POOL.clear()
    graph.replay()
    for x, x64 in zip(results, exact(other, q, k, v, dout), strict=True):
        assert (x.double() - x64).norm() / x64.norm() < 1e-2


def test_streams_do_not_share_workspace_in_flight() -> None:
    tunables = plan(MIXED, "flash", "flash", torch.bfloat16, "copy", pool_threshold_mib=0)
    module = running(MIXED, tunables, torch.bfloat16)
    cases = [replace(MIXED, seed=seed) for seed in range(4)]
    inputs = [case.inputs(torch.bfloat16, device="cuda") for case in cases]
    expected = [module(*(x.detach() for x in q_k_v)) for q_k_v in inputs]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        outs = []
        for stream, q_k_v in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream), torch.no_grad():
                outs.append(module(*q_k_v))
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(outs, expected, strict=True))


def test_threads_share_a_module() -> None:
    module = MIXED.module(device="cuda")
    cases = [replace(MIXED, seed=seed, length=length) for seed in range(3) for length in (200, 384)]
    inputs = [case.inputs(torch.bfloat16, device="cuda") for case in cases]
    expected = [module(*(x.detach() for x in q_k_v)) for q_k_v in inputs]
    wrong: list[Case] = []

    def work(number: int) -> None:
        for _ in range(20):
            with torch.no_grad():
                if not torch.equal(module(*inputs[number]), expected[number]):
                    wrong.append(cases[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_under_torch_compile() -> None:
    module = MIXED.module(device="cuda")
    q, k, v = MIXED.inputs(torch.bfloat16, device="cuda")
    dout = MIXED.dout(torch.bfloat16, "cuda")
    results = found(torch.compile(module, backend="aot_eager", fullgraph=True), q, k, v, dout)  # type: ignore[arg-type]
    eager = found(module, q, k, v, dout)
    assert torch.equal(results.out, eager.out)
    for x, y in zip(results, eager, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
