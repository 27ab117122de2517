"""Decoding and cross attention on this machine's GPU, held against float64; CUDA graphs; no wait for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cross_oracle
import pytest
import torch
from oracle import DENSE, lists_of, pattern_of
from torch import Tensor

from ringattn import KVCache, Pattern, RingAttention
from ringattn.errors import InputError, PlanError
from ringattn.kernels.contract import CachedRows, KernelConfig
from ringattn.kernels.registry import KERNELS
from ringattn.planning.plan import kernel_needs

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 2e-5}
LONGNET = pattern_of([256, 1024, 4096], [1, 4, 16])
PATTERNS = {"dense": DENSE, "longnet": LONGNET, "blocked": pattern_of([100, 999], [2, 5], "blocked")}


def module(
    pattern: Pattern = DENSE, heads: int = 8, kv_heads: int = 2, head_dim: int = 64, **arguments: Any
) -> RingAttention:
    lists = {} if pattern.dense else lists_of(pattern)
    given: dict[str, Any] = {"causal": True, "profile": None}
    return RingAttention(heads, head_dim, kv_heads, **lists, **(given | arguments))


def inputs(
    batch: int, length: int, dtype: torch.dtype, heads: int = 8, kv_heads: int = 2, head_dim: int = 64
) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(length)
    return [
        torch.randn(batch, length, h, head_dim, generator=generator, device="cuda").to(dtype)
        for h in (heads, kv_heads, kv_heads)
    ]


def expected_rows(
    q: Tensor, k: Tensor, v: Tensor, length: int, pattern: Pattern, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of q (Sq, H, D), the last positions of ``length``, in float64."""
    positions = torch.arange(length - q.shape[0], length)
    seen = cross_oracle.counts(pattern, True, positions, torch.arange(length), q.shape[1], k.shape[1], window)
    out, lse = cross_oracle.attend(q[None], k[None, :length], v[None, :length], seen.to(q.device))
    return out[0], lse[0]


def assert_close(out: Tensor, lse: Tensor, out64: Tensor, lse64: Tensor) -> None:
    assert (out.double() - out64).norm() <= TOLERANCE[out.dtype] * out64.norm()
    assert torch.equal(lse.isneginf(), lse64.isneginf())
    finite = ~lse64.isneginf()
    assert (lse[finite] - lse64[finite]).abs().max() <= (1e-4 if out.dtype is torch.float32 else 5e-3)


def split_kv_module(pattern: Pattern = DENSE, **arguments: Any) -> RingAttention:
    try:
        made = module(pattern, backend="split-kv", **arguments)
        made.plan.decode_at(4096, "bf16", 1).runnable()
    except PlanError as refused:
        pytest.skip(str(refused))
    return made


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_step_is_attention(dtype: torch.dtype, pattern: str, queries: int, alike: bool) -> None:
    made = module(PATTERNS[pattern])
    q, k, v = inputs(3, 5000, dtype)
    counts = [3001] * 3 if alike else [5000, 1025, queries]
    cache = made.kv_cache(3, dtype=dtype)
    cache.append(k, v, counts)
    rows = torch.stack([q[b, n - queries : n] for b, n in enumerate(counts)])
    assert cache.begins == (0, 0, 0)
    out, lse = made.decode(rows, cache, return_lse=True)
    for b, n in enumerate(counts):
        assert_close(out[b], lse[b], *expected_rows(rows[b], k[b], v[b], n, PATTERNS[pattern]))


@pytest.mark.parametrize("head_dim", [16, 40, 80, 128, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (32, 8), (16, 1)])
def test_head_dims_and_groups(heads: int, kv_heads: int, head_dim: int) -> None:
    made = module(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    q, k, v = inputs(2, 3001, torch.bfloat16, heads, kv_heads, head_dim)
    cache = made.kv_cache(2, 4096, dtype=torch.bfloat16)
    cache.append(k, v)
    for queries in (1, 2):
        out, lse = made.decode(q[:, -queries:], cache, return_lse=True)
        for b in range(2):
            assert_close(out[b], lse[b], *expected_rows(q[b, -queries:], k[b], v[b], 3001, DENSE))


@pytest.mark.parametrize("window", [1, 100, 1000])
def test_a_window(window: int) -> None:
    made = module()
    q, k, v = inputs(2, 3000, torch.bfloat16)
    cache = made.kv_cache(2, dtype=torch.bfloat16, window=window)
    begins = [*range(0, 2900, 725), *range(2900, 3000, 5)]
    for begin, end in zip(begins, [*begins[1:], 3000], strict=True):
        chunk = [x[:, begin:end] for x in (q, k, v)]
        out, lse = made.prefill(*chunk, cache, return_lse=True)
    assert_close(out[1], lse[1], *expected_rows(q[1, 2995:], k[1], v[1], 3000, DENSE, window))
    assert cache.capacity < 3000 or window == 1000


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.reads_caches])
def test_every_tile_of_a_kernel_is_right(name: str) -> None:
    made = split_kv_module(head_dim=128)
    q, k, v = inputs(1, 4000, torch.bfloat16, head_dim=128)
    plan = made.plan.decode_at(4096, "bf16", 1).runnable()
    (need,) = kernel_needs(plan.workload, plan.tunables, 0, made.plan.facts, backward=False, conditions=plan.conditions)
    offered = KERNELS[name].params(replace(need, queries=1))
    out64, lse64 = expected_rows(q[0, -1:], k[0], v[0], 4000, DENSE)
    for key, values in offered.items():
        for value in values:
            bound = KERNELS[name].load(KernelConfig(True, 128**-0.5, params={key: value}, dtype="bf16"))
            assert bound.cached is not None
            out, lse = bound.cached(q[:, -1:], k, v, CachedRows(DENSE, 4000))
            assert_close(out[0], lse[0], out64, lse64)


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_graph_appends_and_attends_while_sequences_grow(pattern: str, default: bool) -> None:
    made = module(PATTERNS[pattern]) if default else split_kv_module(PATTERNS[pattern])
    q, k, v = inputs(2, 600, torch.bfloat16)
    start = [500, 300]

    def begun() -> KVCache:
        cache = made.kv_cache(2, 1200, dtype=torch.bfloat16)
        cache.append(k[:, :500], v[:, :500], start)
        return cache

    one = [torch.zeros_like(x[:, :1]) for x in (q, k, v)]
    cache, eager = begun(), begun()
    made.prefill(*one, cache)
    cache.truncate(start)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = made.prefill(*one, cache, return_lse=True)
    assert cache.lengths == tuple(start), "a capture appends nothing"
    for step in range(20):
        new = [torch.stack([x[b, n + step : n + step + 1] for b, n in enumerate(start)]) for x in (q, k, v)]
        for x, filled in zip(one, new, strict=True):
            x.copy_(filled)
        graph.replay()
        cache.advance()
        expected, expected_lse = made.prefill(*new, eager, return_lse=True)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, expected_lse, atol=5e-3, rtol=5e-3)
    assert cache.lengths == eager.lengths
    assert cache.device_rows(None, 1)[0].tolist() == list(cache.lengths)


def test_a_step_waits_for_nothing() -> None:
    made = split_kv_module()
    q, k, v = inputs(2, 64, torch.bfloat16)
    cache = made.kv_cache(2, 128, dtype=torch.bfloat16)
    cache.append(k, v)
    made.prefill(q[:, :1], k[:, :1], v[:, :1], cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            made.prefill(q[:, :1], k[:, :1], v[:, :1], cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_takes_no_more_memory() -> None:
    made = split_kv_module()
    q, k, v = inputs(1, 8, torch.bfloat16)
    cache = made.kv_cache(1, 8, dtype=torch.bfloat16)
    made.prefill(q, k, v, cache)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(InputError, match="rows for 8 positions, 1 more do not fit"), torch.cuda.graph(graph):
        made.prefill(q[:, :1], k[:, :1], v[:, :1], cache)


@pytest.mark.parametrize("align", ["end", "start"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 700), (64, 700), (333, 1000), (700, 64), (500, 1)])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", [None, "cudnn", "flash", "efficient", "triton", "math"])
def test_cross_attention_of_every_kernel(
    backend: str | None, pattern: str, queries: int, keys: int, align: Any
) -> None:
    made = module(PATTERNS[pattern], backend=backend)
    q, k, v = inputs(2, 1000, torch.bfloat16)
    q, k, v = q[:, :queries].clone(), k[:, :keys].clone(), v[:, :keys].clone()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    try:
        out, lse = made.cross(*leaves, align=align, return_lse=True)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, leaves, dout)
    except PlanError as refused:
        assert backend is not None
        pytest.skip(str(refused))
    begin = keys - queries if align == "end" else 0
    positions = torch.arange(begin, begin + queries)
    seen = cross_oracle.counts(PATTERNS[pattern], True, positions, torch.arange(keys), 8, 2).to("cuda")
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    out64, lse64 = cross_oracle.attend(*exact_leaves, seen)
    assert_close(out, lse, out64, lse64)
    rounded = 2**-8 * float(dout.norm())  # of one key alone dq and dk are 0, a difference of two equal sums
    for grad, grad64 in zip(grads, torch.autograd.grad(out64, exact_leaves, dout.double()), strict=True):
        assert (grad.double() - grad64).norm() <= 2.5e-2 * max(float(grad64.norm()), rounded)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_generation_is_the_forward(pattern: str) -> None:
    made = module(PATTERNS[pattern])
    q, k, v = inputs(2, 1200, torch.bfloat16)
    with torch.no_grad():
        expected = made(q, k, v)
    cache = made.kv_cache(2, dtype=torch.bfloat16)
    begins = [*range(0, 1000, 250), *range(1000, 1200)]
    outs = [
        made.prefill(q[:, begin:end], k[:, begin:end], v[:, begin:end], cache)
        for begin, end in zip(begins, [*begins[1:], 1200], strict=True)
    ]
    out = torch.cat(outs, 1)  # type: ignore[arg-type]
    assert (out.double() - expected.double()).norm() <= 2e-2 * expected.double().norm()
