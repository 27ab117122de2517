"""What the optional packages compute on this machine's GPU, held against float64; absent ones are skipped."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.kernels.contract import BoundKernel, KernelConfig, KernelNeed
from ringattn.kernels.packages.flash_attn_2 import load_flash_attn_2
from ringattn.kernels.packages.flash_attn_3 import load_flash_attn_3
from ringattn.kernels.packages.flash_attn_4 import flash_attn_4_params, load_flash_attn_4
from ringattn.kernels.registry import KERNELS
from ringattn.reference import dilated_attention_reference
from ringattn.workload import Pattern

pytestmark = pytest.mark.gpu

TABLE = {name: KERNELS[name] for name in ("flash-attn-2", "flash-attn-3", "flash-attn-4", "xformers")}
WRITERS = {"flash-attn-2": load_flash_attn_2, "flash-attn-3": load_flash_attn_3, "flash-attn-4": load_flash_attn_4}
MODULES = {
    "flash-attn-2": "flash_attn.flash_attn_interface",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute.interface",
    "xformers": "xformers.ops.fmha",
}

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _this_gpu(head_dim: int, heads: int = 4, kv_heads: int = 4, causal: bool = True, dtype: str = "bf16") -> KernelNeed:
    major, minor = torch.cuda.get_device_capability()
    return KernelNeed("nvidia", f"sm_{major}{minor}", dtype, head_dim, heads, kv_heads, 2048, 2, causal, True)


def _random(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]


def _exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv in float64 from the definition."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lse = dilated_attention_reference(q, k, v, Pattern(), causal)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def _load(name: str, need: KernelNeed, **params: Any) -> BoundKernel:
    """The package's kernel on this machine, or a skip: absence and published limits are no failures here."""
    _skip_where_it_cannot_run(name, need)
    return TABLE[name].load(KernelConfig(need.causal, need.head_dim**-0.5, params=params))


def _skip_where_it_cannot_run(name: str, need: KernelNeed) -> None:
    reasons = TABLE[name].reasons(need)
    if reasons:
        pytest.skip("; ".join(reasons))
    try:
        present = importlib.util.find_spec(MODULES[name]) is not None
    except ImportError:
        present = False
    if not present:
        pytest.skip(f"{MODULES[name]} is not installed")


def _yardstick(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """The 2-norms of the formulas of out, dq, dk and dv on absolute values: what rounding is measured by."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    out, lse, *_ = _exact(q, k, v, dout, causal)
    scale, group = q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    wide_k, wide_v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    p = torch.exp(torch.einsum("nqhd,nkhd->nhqk", q, wide_k) * scale - lse[..., None])
    if causal:
        p = p.tril()
    dp = torch.einsum("nqhd,nkhd->nhqk", dout.abs(), wide_v.abs())
    delta = (dout * out).abs().sum(-1).transpose(1, 2)[..., None]
    ds = p * (dp + delta) * scale

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, group)).sum(3)

    return (
        torch.einsum("nhqk,nkhd->nqhd", p, wide_v.abs()).norm(),
        torch.einsum("nhqk,nkhd->nqhd", ds, wide_k.abs()).norm(),
        grouped(torch.einsum("nhqk,nqhd->nkhd", ds, q.abs())).norm(),
        grouped(torch.einsum("nhqk,nqhd->nkhd", p, dout.abs())).norm(),
    )


def _assert_accurate(
    out: Tensor, lse: Tensor, grads: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool
) -> None:
    exact_out, exact_lse, *exact_grads = _exact(q, k, v, dout, causal)
    assert lse.dtype is torch.float32
    assert (lse.double() - exact_lse).abs().max() <= 1e-3
    norms = _yardstick(q, k, v, dout, causal)
    names = ("out", "dq", "dk", "dv")
    for name, got, exact, norm in zip(names, (out, *grads), (exact_out, *exact_grads), norms, strict=True):
        assert got.dtype is q.dtype, name
        assert got.isfinite().all(), name
        assert (got.double() - exact).norm() <= 4 * UNIT[q.dtype] * norm, name


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "fp16"), *((head_dim, "bf16") for head_dim in (32, 64, 96, 128, 192, 256))]
)
@pytest.mark.parametrize("causal", [True, False])
def test_head_dimensions(name: str, head_dim: int, dtype: str, causal: bool) -> None:
    kernel = _load(name, _this_gpu(head_dim, causal=causal, dtype=dtype))
    q, k, v, dout = _random(*((2, 259, 4, head_dim),) * 4, dtype=DTYPES[dtype])
    out, lse = kernel.forward(q, k, v)
    grads = kernel.backward(dout, q, k, v, out, lse)
    _assert_accurate(out, lse, grads, q, k, v, dout, causal)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 127, 192, 1000])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 64), (2, 64), (1, 128), (2, 128), (2, 192), (2, 256)])
def test_ragged_lengths_and_grouped_heads(name: str, rows: int, kv_heads: int, head_dim: int) -> None:
    kernel = _load(name, _this_gpu(head_dim, heads=8, kv_heads=kv_heads))
    q, dout, k, v = _random(*((3, rows, 8, head_dim),) * 2, *((3, rows, kv_heads, head_dim),) * 2)
    out, lse = kernel.forward(q, k, v)
    grads = kernel.backward(dout, q, k, v, out, lse)
    _assert_accurate(out, lse, grads, q, k, v, dout, True)


@pytest.mark.parametrize("name", TABLE)
def test_strided_views(name: str) -> None:
    """Every fourth position of every fourth head, read in place; out, dout and LSE strided too."""
    kernel = _load(name, _this_gpu(128))
    whole = _random(*((2, 1200, 16, 128),) * 4)
    q, k, v, dout = (x[:, 1::4, 1::4] for x in whole)
    out, lse = kernel.forward(q, k, v)
    out_view = torch.empty_like(whole[0])[:, 1::4, 1::4].copy_(out)
    lse_view = torch.empty(2, 4, 1200, device=q.device)[:, :, 1::4].copy_(lse)
    grads = kernel.backward(dout, q, k, v, out_view, lse_view)
    _assert_accurate(out, lse, grads, q, k, v, dout, True)


@pytest.mark.parametrize("name", TABLE)
def test_an_expanded_gradient(name: str) -> None:
    kernel = _load(name, _this_gpu(64))
    q, k, v = _random(*((1, 200, 4, 64),) * 3)
    out, lse = kernel.forward(q, k, v)
    dout = torch.ones((), device=q.device, dtype=q.dtype).expand_as(out)  # what out.sum().backward() hands over
    grads = kernel.backward(dout, q, k, v, out, lse)
    _assert_accurate(out, lse, grads, q, k, v, dout, True)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gradients_are_written_in_place(name: str, kv_heads: int) -> None:
    need = _this_gpu(128, kv_heads=kv_heads)
    _skip_where_it_cannot_run(name, need)
    kernel = WRITERS[name](KernelConfig(causal=True, scale=128**-0.5))
    q, dout, k, v = _random(*((2, 300, 4, 128),) * 2, *((2, 300, kv_heads, 128),) * 2)
    out, lse = kernel.forward(q, k, v)
    whole = [torch.full((2, 600, *x.shape[2:]), math.nan, device=q.device, dtype=q.dtype) for x in (q, k, v)]
    into = (whole[0][:, 1::2], whole[1][:, 1::2], whole[2][:, 1::2])
    kernel.backward(dout, q, k, v, out, lse, grads=into)
    _assert_accurate(out, lse, into, q, k, v, dout, True)
    assert all(x[:, ::2].isnan().all() for x in whole)


@pytest.mark.parametrize("name", TABLE)
def test_backward_takes_a_merged_out_and_lse(name: str) -> None:
    """The keys in two blocks of unequal length: each backward sees the whole softmax, dq is the sum."""
    kernel = _load(name, _this_gpu(128, causal=False))
    q, k, v, dout = _random(*((2, 256, 4, 128),) * 4)
    cut = 96
    blocks = [(k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:])]
    parts = [kernel.forward(q, *block) for block in blocks]
    lse = torch.logsumexp(torch.stack([part[1] for part in parts]), 0)
    weights = [torch.exp(part[1] - lse).transpose(1, 2)[..., None] for part in parts]
    out = (weights[0] * parts[0][0].float() + weights[1] * parts[1][0].float()).to(q.dtype)
    grads = [kernel.backward(dout, q, *block, out, lse) for block in blocks]
    dq = (grads[0][0].float() + grads[1][0].float()).to(q.dtype)
    dk, dv = (torch.cat([grads[0][i], grads[1][i]], 1) for i in (1, 2))
    _assert_accurate(out, lse, (dq, dk, dv), q, k, v, dout, False)


@pytest.mark.parametrize("name", TABLE)
def test_very_negative_logits(name: str) -> None:
    """Every LSE below -88.7, where the zero padding of a key tile would overflow exp(0 - lse) if it entered it."""
    kernel = _load(name, _this_gpu(64, causal=False))
    q, k, v, dout = _random(*((1, 192, 4, 64),) * 4)
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, -960.0  # every logit about -120
    out, lse = kernel.forward(q, k, v)
    assert lse.max() < -88.7
    assert all(x.isfinite().all() for x in (out, *kernel.backward(dout, q, k, v, out, lse)))


@pytest.mark.parametrize("name", ["flash-attn-2", "flash-attn-4"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_deterministic_backward_repeats_bit_for_bit(name: str, kv_heads: int, head_dim: int) -> None:
    _skip_where_it_cannot_run(name, _this_gpu(head_dim, heads=8, kv_heads=kv_heads))
    kernel = TABLE[name].load(KernelConfig(causal=True, scale=head_dim**-0.5, deterministic=True))
    q, dout, k, v = _random(*((2, 2048, 8, head_dim),) * 2, *((2, 2048, kv_heads, head_dim),) * 2)
    out, lse = kernel.forward(q, k, v)
    first = kernel.backward(dout, q, k, v, out, lse)
    for _ in range(5):
        again = kernel.backward(dout, q, k, v, out, lse)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_every_forward_tile_agrees(head_dim: int, causal: bool) -> None:
    need = _this_gpu(head_dim, causal=causal)
    q, k, v, dout = _random(*((1, 700, 4, head_dim),) * 4)
    exact_out, exact_lse, *_ = _exact(q, k, v, dout, causal)
    for tile in flash_attn_4_params(need).get("forward_tile", ("package",)):
        out, lse = _load("flash-attn-4", need, forward_tile=tile).forward(q, k, v)
        assert (out.double() - exact_out).norm() <= 8e-3 * exact_out.norm(), tile
        assert (lse.double() - exact_lse).abs().max() <= 1e-3, tile


@pytest.mark.parametrize("name", TABLE)
def test_a_cuda_graph_replays_both_directions(name: str) -> None:
    kernel = _load(name, _this_gpu(128))
    q, k, v, dout = _random(*((1, 512, 4, 128),) * 4)

    def step() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        out, lse = kernel.forward(q, k, v)
        return out, lse, kernel.backward(dout, q, k, v, out, lse)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, grads = step()
    q.copy_(torch.randn_like(q))
    graph.replay()
    _assert_accurate(out, lse, grads, q, k, v, dout, True)
