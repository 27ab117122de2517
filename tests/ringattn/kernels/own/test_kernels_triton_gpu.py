"""What our Triton kernel computes on this machine's GPU, held against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import laid_out
from torch import Tensor

from ringattn.kernels.contract import BoundKernel, KernelConfig, KernelNeed
from ringattn.kernels.own.triton import params, reasons
from ringattn.kernels.registry import KERNELS

pytestmark = pytest.mark.gpu

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
# Relative 2-norms of out and of the gradients: a few units of roundoff (2^-8, 2^-11, 2^-11, 2^-24).
BOUNDS = {"bf16": (6e-3, 1.2e-2), "fp16": (8e-4, 1.6e-3), "tf32": (8e-4, 1.6e-3), "fp32": (1e-6, 2e-6)}
HEAD_DIMS = (32, 40, 64, 80, 96, 100, 128, 192, 256)


def this_gpu(
    dtype: str, head_dim: int = 64, heads: int = 4, kv_heads: int = 2, causal: bool = True, backward: bool = True
) -> KernelNeed:
    major, minor = torch.cuda.get_device_capability()
    return KernelNeed("nvidia", f"sm_{major}{minor}", dtype, head_dim, heads, kv_heads, 333, 2, causal, backward)


def load(dtype: str, head_dim: int = 64, causal: bool = True, **chosen: Any) -> BoundKernel:
    why = reasons(this_gpu(dtype, head_dim))
    if why:
        pytest.skip("; ".join(why))
    pytest.importorskip("triton")
    return KERNELS["triton"].load(KernelConfig(causal, head_dim**-0.5, params=chosen, dtype=dtype))


def inputs(
    dtype: str, rows: int = 333, keys: int | None = None, heads: int = 4, kv_heads: int = 2, head_dim: int = 64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, heads), (keys or rows, kv_heads), (keys or rows, kv_heads), (rows, heads)]
    wide = [torch.randn(2, m, h, head_dim, generator=generator) for m, h in shapes]
    return [x.to("cuda", TORCH_DTYPES[dtype]) for x in wide]


def exact(tensors: list[Tensor], causal: bool, scale: float) -> tuple[Tensor, ...]:
    """out, lse, dq, dk and dv by float64 matrix products."""
    q, k, v, dout = (x.double() for x in tensors)
    kernel = KERNELS["math"].load(KernelConfig(causal, scale))
    out, lse = kernel.forward(q, k, v)
    return (out, lse, *kernel.backward(dout, q, k, v, out, lse))


def run(kernel: BoundKernel, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    q, k, v, dout = tensors
    out, lse = kernel.forward(q, k, v)
    return (out, lse, *kernel.backward(dout, q, k, v, out, lse))


def error(x: Tensor, x64: Tensor) -> float:
    return ((x.double() - x64).norm() / x64.norm()).item()


def check(dtype: str, kernel: BoundKernel, tensors: list[Tensor], causal: bool) -> None:
    results, expected = run(kernel, tensors), exact(tensors, causal, tensors[0].shape[3] ** -0.5)
    for name, x, x64 in zip(("out", "lse", "dq", "dk", "dv"), results, expected, strict=True):
        assert x.shape == x64.shape, name
        if name == "lse":
            slack = 1e-4 if dtype in ("bf16", "fp16") else 2e-3 if dtype == "tf32" else 2e-6
            assert x.dtype is torch.float32
            assert (x - x64).abs().max() <= slack * (1 + x64.abs().max())
        else:
            assert x.dtype is TORCH_DTYPES[dtype], name
            bound = BOUNDS[dtype][name != "out"]
            if tensors[1].shape[1] == 1 and name in ("dq", "dk"):  # of one key the two terms are equal: nothing is left
                bound *= tensors[3].double().norm().item() * tensors[2].double().norm().item()
                assert x.double().norm() <= bound
            else:
                assert error(x, x64) <= bound, f"{name}: error {error(x, x64):.2e}, allowed {bound:.2e}"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_and_head_dim_causal_with_grouped_heads(dtype: str, head_dim: int) -> None:
    check(dtype, load(dtype, head_dim), inputs(dtype, head_dim=head_dim), causal=True)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (16, 300), (300, 16), (333, 128), (128, 1000)])
def test_full_blocks_of_any_two_lengths(dtype: str, rows: int, keys: int) -> None:
    check(dtype, load(dtype, causal=False), inputs(dtype, rows, keys), causal=False)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 15, 64, 127, 128, 129, 1000])
def test_causal_blocks_of_any_length(dtype: str, rows: int) -> None:
    check(dtype, load(dtype), inputs(dtype, rows), causal=True)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("layout", ["heads_first", "sequence_first", "every_second", "packed", "wide_rows"])
def test_views_are_read_in_place(dtype: str, layout: str) -> None:
    tensors = [laid_out(x, layout) for x in inputs(dtype)]
    check(dtype, load(dtype), tensors, causal=True)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_gradients_are_written_where_they_are_wanted(dtype: str) -> None:
    q, k, v, dout = inputs(dtype)
    kernel = load(dtype)
    out, lse, *expected = run(kernel, [q, k, v, dout])
    given = [laid_out(torch.full_like(x, math.nan), "every_second") for x in (q, k, v)]
    returned = kernel.backward(dout, q, k, v, out, lse, grads=(given[0], given[1], given[2]))
    for grad, into, x in zip(returned, given, expected, strict=True):
        assert grad is into
        assert torch.equal(grad, x)
    assert all(bool(x._base[:, ::2].isnan().all()) for x in given if x._base is not None)  # the rows between


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_results_are_the_same_bits_every_time(dtype: str) -> None:
    tensors, kernel = inputs(dtype, rows=1000), load(dtype)
    first = run(kernel, tensors)
    assert all(torch.equal(x, y) for _ in range(5) for x, y in zip(run(kernel, tensors), first, strict=True))


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_two_halves_of_the_keys_against_the_merged_result_add_up(dtype: str) -> None:
    q, k, v, dout = inputs(dtype, keys=300)
    kernel = load(dtype, causal=False)
    halves = [(k[:, :110], v[:, :110]), (k[:, 110:], v[:, 110:])]
    parts = [kernel.forward(q, *half) for half in halves]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    weights = [torch.exp(part - lse).transpose(1, 2)[..., None] for _, part in parts]
    out = sum(part * weight for (part, _), weight in zip(parts, weights, strict=True)).to(q.dtype)
    grads = [kernel.backward(dout, q, *half, out, lse) for half in halves]
    results = (out, lse, grads[0][0] + grads[1][0], *(torch.cat((grads[0][i], grads[1][i]), 1) for i in (1, 2)))
    expected = exact([q, k, v, dout], False, q.shape[3] ** -0.5)
    for x, x64, bound in zip(results, expected, [BOUNDS[dtype][0], 2e-3, *[BOUNDS[dtype][1]] * 3], strict=True):
        assert error(x, x64) <= bound


def test_tf32_lies_between_float32_and_bfloat16_and_is_rounded() -> None:
    tensors = inputs("fp32", rows=1024)
    expected = exact(tensors, True, 64**-0.5)
    by_dtype = {dtype: run(load(dtype), tensors) for dtype in ("fp32", "tf32")}
    by_dtype["bf16"] = run(load("bf16"), [x.bfloat16() for x in tensors])
    for position in (0, 2, 3, 4):
        fp32, tf32, bf16 = (error(by_dtype[dtype][position], expected[position]) for dtype in ("fp32", "tf32", "bf16"))
        assert 20 * fp32 < tf32 < bf16 / 2
        # products of truncated numbers would be 4e-4 too small on average; rounded ones are right on average
        x, x64 = by_dtype["tf32"][position].double(), expected[position]
        assert abs(((x * x64).sum() / (x64 * x64).sum()).item() - 1) < 1e-4


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_tile_of_the_search_is_right(dtype: str, head_dim: int) -> None:
    load(dtype, head_dim)
    tensors = inputs(dtype, rows=200, head_dim=head_dim)
    for backward in (False, True):
        for step, values in params(this_gpu(dtype, head_dim, backward=backward)).items():
            for value in values:
                check(dtype, load(dtype, head_dim, **{step: value}), tensors, causal=True)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("size", [30.0, 1e3, 1e4])
def test_huge_logits_choose_one_key(dtype: str, size: float) -> None:
    q, k, v, dout = inputs(dtype)
    q, k = ((x * size).bfloat16().to(x.dtype) for x in (q, k))  # numbers that every compute dtype holds
    results, expected = run(load(dtype), [q, k, v, dout]), exact([q, k, v, dout], True, 64**-0.5)
    assert not any(x.isnan().any() or x.isinf().any() for x in results[:2])
    # two keys may be nearer than the rounding of a logit: such rows are rare
    wrong = (results[0].double() - expected[0]).abs().amax(-1) > 4 * BOUNDS[dtype][0] * expected[0].abs().max()
    assert wrong.double().mean() < 0.05
    assert (results[1] - expected[1]).abs().max() <= 4 * BOUNDS[dtype][0] * expected[1].abs().max()
    assert not any(x.isnan().any() for x in results[2:])


def test_a_row_of_minus_infinities_gives_0_and_minus_infinity() -> None:
    q, k, v, dout = inputs("fp32")
    q[:, 7], k[..., 0] = 0.0, -3e38
    q[:, 7, :, 0] = 1e3
    kernel = load("fp32", causal=False)
    out, lse = kernel.forward(q, k, v)
    assert bool((out[:, 7] == 0).all())
    assert bool(lse[:, :, 7].isneginf().all())
    dq, _, _ = kernel.backward(dout, q, k, v, out, lse)
    assert bool((dq[:, 7] == 0).all())


def _needs_memory(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


@pytest.mark.parametrize("axis", ["blocks", "heads", "rows"])
def test_offsets_beyond_32_bits(axis: str) -> None:
    """The last elements of q, k, v and dout lie more than 2^31 elements behind the first."""
    _needs_memory(12)
    sizes = inputs("bf16", rows=140, heads=2, kv_heads=2)
    far = {"blocks": (2**31 + 64, 128, 64), "heads": (64 * 140, 64, 2**31 + 1024), "rows": (64, 2**24 + 64, 128)}[axis]
    storage = torch.empty(2**31 + 2**28 if axis != "rows" else 2**31 + 2**29, dtype=torch.bfloat16, device="cuda")
    views = []
    for x in sizes:
        view = storage.as_strided(x.shape, (*far, 1), storage_offset=len(views) * 2**20)
        views.append(view.copy_(x))
    check("bf16", load("bf16"), views, causal=True)


def test_lengths_and_strides_share_one_compilation() -> None:
    kernel = load("bf16")
    compiled: list[str] = []
    with _counting(compiled):
        run(kernel, inputs("bf16", rows=100))
        first = len(compiled)
        for rows in (1, 16, 17, 128, 300):
            run(kernel, inputs("bf16", rows=rows, heads=6, kv_heads=3))
            run(kernel, [laid_out(x, "packed") for x in inputs("bf16", rows=rows)])
        assert len(compiled) == first


class _counting:  # noqa: N801 - reads as a verb
    """Names of the kernels compiled or loaded meanwhile."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        from triton import knobs

        self._knobs, self._usual = knobs.runtime, knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = lambda **event: self._names.append(str(event["repr"]))

    def __exit__(self, *error: object) -> None:
        self._knobs.jit_cache_hook = self._usual


def test_forward_and_backward_in_a_graph() -> None:
    tensors, kernel = inputs("bf16"), load("bf16")
    expected = run(kernel, tensors)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(kernel, tensors)
    for x in results:
        x.zero_()
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_tensors_of_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors, kernel = inputs("bf16"), load("bf16")
    on_second = run(kernel, [x.to("cuda:1") for x in tensors])
    assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(on_second, run(kernel, tensors), strict=True))


@pytest.mark.parametrize("make", [lambda q: q[:0], lambda q: q[:, :0]], ids=["no blocks", "no rows"])
def test_nothing_gives_nothing(make: Callable[[Tensor], Tensor]) -> None:
    tensors = [make(x) for x in inputs("bf16")]
    assert [x.numel() for x in run(load("bf16"), tensors)] == [0] * 5
