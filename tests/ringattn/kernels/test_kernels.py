"""The kernels that torch ships: what the table says of each, and what those for the CPU compute.

A block here is (N, M, H, D): N segments, M rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import DENSE, Case, cpu, exact, pattern_of
from torch import Tensor

from ringattn.kernels import math as kernels_math
from ringattn.kernels.contract import BoundKernel, KernelConfig, KernelNeed
from ringattn.kernels.registry import KERNELS
from ringattn.planning.validation.accuracy_check import hold, make_case
from ringattn.runtime.merge import accumulator_dtype
from ringattn.workload import BranchTunables, Tunables

ON_CPU = ["math", "flash-cpu"]
BOTH = [("math", torch.float64), ("math", torch.float32), ("flash-cpu", torch.float32)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def bound(name: str, causal: bool = False, scale: float = 0.5) -> BoundKernel:
    return KERNELS[name].load(KernelConfig(causal, scale))


def blocks(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout of a dense case; its batch elements are the blocks."""
    q, k, v = (x.detach() for x in case.inputs(dtype))
    return q, k, v, case.dout(dtype)


def check(name: str, case: Case, dtype: torch.dtype) -> None:
    q, k, v, dout = blocks(case, dtype)
    kernel = bound(name, case.causal)
    out, lse = kernel.forward(q, k, v)
    grads = kernel.backward(dout, q, k, v, out.contiguous(), lse.contiguous())
    expected = exact(replace(case, scale=0.5), q, k, v, dout)
    assert lse.dtype is accumulator_dtype(dtype)
    for x, x64, like in zip((out, lse, *grads), expected, (q, lse, q, k, v), strict=True):
        assert x.shape == like.shape
        torch.testing.assert_close(x.double(), x64, rtol=0, atol=TOLERANCE[dtype])
        assert x.dtype is like.dtype


@pytest.mark.parametrize(("name", "dtype"), BOTH)
@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from((1, 2, 7, 16)),
    st.booleans(),
    st.sampled_from(("plain", "heads_first", "every_second", "wide_rows", "packed")),
)
def test_a_kernel_computes_attention_and_its_gradients(
    name: str,
    dtype: torch.dtype,
    blocks: int,
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    causal: bool,
    layout: str,
) -> None:
    check(name, Case(rows, kv_heads * group, kv_heads, head_dim, blocks, DENSE, causal, layout=layout), dtype)


@pytest.mark.parametrize(("name", "dtype"), BOTH)
@pytest.mark.parametrize("causal", [False, True])
def test_long_blocks(name: str, dtype: torch.dtype, causal: bool) -> None:
    check(name, Case(1100, 2, 1, 4, causal=causal), dtype)  # beyond flash-cpu's tiles of 512 keys


@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_a_strided_view_gives_the_same_bits_as_its_copy(name: str, dtype: torch.dtype) -> None:
    x = [torch.randn(1, 64, 4, 8, generator=torch.Generator().manual_seed(s), dtype=dtype) for s in range(3)]
    dilated = [tensor[:, 1::4, 1::2] for tensor in x]
    kernel = bound(name, causal=True)
    in_place, copied = kernel.forward(*dilated), kernel.forward(*(tensor.contiguous() for tensor in dilated))
    assert all(torch.equal(one, other) for one, other in zip(in_place, copied, strict=True))
    out, lse = (tensor.contiguous() for tensor in in_place)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=dtype)
    in_place_grads = kernel.backward(dout, *dilated, out, lse)
    copied_grads = kernel.backward(dout, *(tensor.contiguous() for tensor in dilated), out, lse)
    assert all(torch.equal(one, other) for one, other in zip(in_place_grads, copied_grads, strict=True))


@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_partial_gradients_against_the_merged_result_add_up(name: str, dtype: torch.dtype) -> None:
    """The ring step: keys in two halves, each half's backward given the merged out and lse."""
    case = Case(24, 4, 2, 8, 2, scale=0.5)
    q, k, v, dout = blocks(case, dtype)
    expected = exact(case, q, k, v, dout)
    kernel = bound(name)
    halves = [(k[:, :12], v[:, :12]), (k[:, 12:], v[:, 12:])]
    partials = [kernel.forward(q, *half) for half in halves]
    lse = torch.logaddexp(partials[0][1], partials[1][1])
    weights = [torch.exp(part - lse).transpose(1, 2)[..., None] for _, part in partials]
    out = sum(part_out * weight for (part_out, _), weight in zip(partials, weights, strict=True)).to(dtype)
    grads = [kernel.backward(dout, q, *half, out, lse) for half in halves]
    dq = grads[0][0] + grads[1][0]
    dk, dv = (torch.cat((grads[0][i], grads[1][i]), dim=1) for i in (1, 2))
    for x, x64 in zip((out, lse, dq, dk, dv), expected, strict=True):
        torch.testing.assert_close(x.double(), x64, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_a_float32_lse(name: str, dtype: torch.dtype) -> None:
    q, k, v, dout = blocks(Case(33, 4, 2, 8), dtype)
    kernel = bound(name, causal=True)
    out, lse = kernel.forward(q, k, v)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    expected = exact(Case(33, 4, 2, 8, causal=True, scale=0.5), q, k, v, dout)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=0, atol=1e-4)  # far finer than the dtype's own digits
    assert all(x.dtype is dtype for x in kernel.backward(dout, q, k, v, out.contiguous(), lse))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("limit", [1, 50, 400])
def test_math_works_block_by_block_of_rows(monkeypatch: pytest.MonkeyPatch, causal: bool, limit: int) -> None:
    monkeypatch.setattr(kernels_math, "_MAX_SCORES", limit)
    heights = []
    scores = kernels_math._scores

    def noting(q: Tensor, *arguments: Any) -> Tensor:
        made = scores(q, *arguments)
        heights.append(made.shape[-2])
        assert made.numel() <= max(limit, 2 * 4 * 17)  # one row of every head at least
        return made

    monkeypatch.setattr(kernels_math, "_scores", noting)
    check("math", Case(17, 4, 2, 3, 2, DENSE, causal), torch.float64)
    # forward and backward; in the forward of full blocks the two heads of a group are rows of one
    assert sum(heights) == (2 if causal else 3) * 17
    assert max(heights) < 17


# --- the table -----------------------------------------------------------------------------------------------------

HERE = KernelNeed(
    vendor="cpu",
    arch="x86_64",
    dtype="fp32",
    head_dim=64,
    heads=8,
    kv_heads=8,
    rows=1024,
    blocks=1,
    causal=True,
    backward=True,
)
HOPPER = replace(HERE, vendor="nvidia", arch="sm_90", dtype="bf16")


def test_the_names() -> None:
    assert list(KERNELS)[:5] == ["cudnn", "flash", "efficient", "flash-cpu", "math"]
    assert all(kernel.name == name for name, kernel in KERNELS.items())


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
def test_a_gpu_kernel_does_not_run_on_a_cpu(name: str) -> None:
    assert KERNELS[name].unsupported_reasons(HERE, cpu()) == ("runs on NVIDIA GPUs only",)


@pytest.mark.parametrize(
    ("name", "need", "reasons"),
    [
        ("math", HERE, ()),
        ("math", HOPPER, ()),
        ("math", replace(HERE, dtype="fp64", head_dim=1000), ()),
        (
            "math",
            replace(HOPPER, dtype="tf32"),
            ("its matrix products take TF32 only from torch's global flag",),
        ),
        ("math", replace(HERE, dropout=True), ()),
        ("flash-cpu", HERE, ()),
        ("flash-cpu", replace(HERE, dtype="bf16"), ()),
        ("flash-cpu", replace(HERE, dtype="fp16", head_dim=1), ()),
        ("flash-cpu", replace(HERE, dtype="fp64"), ("no fp64; it has fp32, fp16 and bf16",)),
        ("flash-cpu", replace(HERE, dtype="tf32"), ("no tf32; it has fp32, fp16 and bf16",)),
        ("flash-cpu", HOPPER, ("runs on CPUs only",)),
        ("flash", HOPPER, ()),
        ("flash", replace(HOPPER, dtype="fp32"), ("no fp32; it has fp16, bf16",)),
        ("flash", replace(HOPPER, arch="sm_75"), ("needs sm_80 or newer, this is sm_75",)),
        ("flash", replace(HOPPER, head_dim=100), ("head_dim 100; it needs a multiple of 8 up to 256",)),
        ("flash", replace(HOPPER, head_dim=264, backward=False), ("head_dim 264; it needs a multiple of 8 up to 256",)),
        ("flash", replace(HOPPER, head_dim=160), ("its backward reads out of bounds at head_dim 160",)),
        ("flash", replace(HOPPER, head_dim=160, backward=False), ()),
        (
            "flash",
            replace(HOPPER, arch="sm_86", head_dim=224),
            ("its backward has no head_dim from 200 to 224 on sm_86",),
        ),
        ("flash", replace(HOPPER, arch="sm_86", head_dim=224, backward=False), ()),
        ("flash", replace(HOPPER, arch="sm_86", head_dim=256), ()),
        ("flash", replace(HOPPER, heads=64, rows=2**20), ("its backward's 32-bit offsets end at 2^31",)),
        ("flash", replace(HOPPER, heads=64, rows=2**20, backward=False), ()),
        ("flash", replace(HOPPER, blocks=4096, heads=64, rows=256), ()),  # run in parts
        ("flash", replace(HOPPER, blocks=65536, heads=1, rows=1), ()),
        ("flash", replace(HOPPER, dropout=True), ()),
        ("flash", replace(HOPPER, dropout=True, blocks=4096, heads=64, rows=256), ("its backward would run in parts",)),
        ("flash", replace(HOPPER, dropout=True, blocks=65536, heads=1, rows=1), ("65536 blocks run in parts",)),
        (
            "flash",
            replace(HOPPER, dropout=True, arch="sm_89", head_dim=256),
            ("its backward has no head_dim from 200 to 256 with dropout on sm_89",),
        ),
        ("cudnn", HOPPER, ()),
        ("cudnn", replace(HOPPER, dtype="fp64"), ("no fp64; it has fp16, bf16",)),
        ("cudnn", replace(HOPPER, arch="sm_70"), ("needs sm_80 or newer, this is sm_70",)),
        ("cudnn", replace(HOPPER, head_dim=192), ("head_dim 192; it needs a multiple of 8 up to 128",)),
        ("cudnn", replace(HOPPER, rows=1), ("one key row is not supported",)),
        ("cudnn", replace(HOPPER, deterministic=True), ("its backward is not deterministic",)),
        ("cudnn", replace(HOPPER, deterministic=True, backward=False), ()),
        ("cudnn", replace(HOPPER, causal=False, rows=192), ("dq can be NaN on sm_90 where 192 rows are 64 beyond",)),
        ("cudnn", replace(HOPPER, causal=False, rows=256), ()),
        ("cudnn", replace(HOPPER, causal=False, rows=192, backward=False), ()),
        ("cudnn", replace(HOPPER, dropout=True), ()),
        (
            "cudnn",
            replace(HOPPER, arch="sm_100", causal=False, rows=192, dropout=True),
            ("another kernel runs the backward of 192 rows",),
        ),
        ("efficient", HOPPER, ()),
        ("efficient", replace(HOPPER, dtype="fp32", head_dim=4), ()),
        ("efficient", replace(HOPPER, head_dim=4), ("head_dim 4; it needs a multiple of 8 up to 65536",)),
        ("efficient", replace(HOPPER, arch="sm_61", dtype="fp32"), ()),
        ("efficient", replace(HOPPER, arch="sm_61"), ("no bf16; it has fp16, fp32",)),
        ("efficient", replace(HOPPER, heads=65536), ("65536 heads; its launch grid ends at 65535",)),
    ],
)
def test_what_a_kernel_refuses(name: str, need: KernelNeed, reasons: tuple[str, ...]) -> None:
    found = KERNELS[name].unsupported_reasons(need, cpu())
    assert len(found) == len(reasons)
    assert all(text.startswith(start) for text, start in zip(found, reasons, strict=True))
    assert all("\n" not in text for text in found)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("arch", "cudnn", "widest"),
    [
        ("sm_90", "9.19.0", 256),
        ("sm_90", "9.10.0", 256),
        ("sm_90", "9.9.0", 128),
        ("sm_90", "8.9.7", 128),
        ("sm_90", "", 128),
        ("sm_80", "9.19.0", 128),
        ("sm_100", "9.19.0", 128),
        ("sm_120", "9.19.0", 128),
    ],
)
def test_cudnn_has_the_head_dimensions_of_its_version(arch: str, cudnn: str, widest: int, backward: bool) -> None:
    facts = replace(cpu(), software=(("cudnn", cudnn),))
    for head_dim in range(8, 265, 8):
        need = replace(HOPPER, arch=arch, head_dim=head_dim, backward=backward)
        assert bool(KERNELS["cudnn"].unsupported_reasons(need, facts)) == (head_dim > widest)


def test_a_tail_that_cudnn_gets_wrong_runs_on_a_kernel_that_has_its_head_dimension() -> None:
    """FlashAttention 2's backward reads out of bounds between 128 and 192."""
    case = make_case(160, "fp32", causal=False, grouped=True, rows=192, device=torch.device("cpu"))
    kernel = KERNELS["cudnn"].load(KernelConfig(causal=False, scale=160**-0.5))
    assert hold(kernel, case, "fp32", backward=True).passes


def test_every_reason_is_given_at_once() -> None:
    need = replace(HOPPER, arch="sm_70", dtype="fp64", head_dim=257, blocks=65536, rows=1, dropout=True)
    assert len(KERNELS["flash"].unsupported_reasons(need, cpu())) == 5


def test_a_package_that_is_missing_is_a_reason_with_its_remedy() -> None:
    for name, kernel in KERNELS.items():
        if not kernel.package:
            continue
        facts = replace(cpu(), packages=())
        need = replace(HOPPER, arch="sm_90", head_dim=128, queries=int(kernel.reads_caches))
        need = replace(need, backward=need.backward and not kernel.reads_caches)
        (reason,) = kernel.unsupported_reasons(need, facts)
        assert reason.startswith(f"the package {kernel.package} is not installed"), name
        assert kernel.unsupported_reasons(need, replace(facts, packages=(kernel.package,))) == ()


def test_a_lower_compute_capability_is_a_number() -> None:
    assert (HOPPER.sm, HERE.sm, replace(HOPPER, arch="sm_120").sm) == (90, 0, 120)


def test_math_has_no_hidden_scale() -> None:
    # one key: out is its value, lse its logit times the scale
    q = torch.full((1, 1, 1, 2), 3.0)
    out, lse = bound("math", scale=0.25).forward(q, q, q)
    assert torch.equal(out, q)
    assert lse.item() == pytest.approx(18 * 0.25)
    assert math.isfinite(lse.item())


@pytest.mark.parametrize(
    ("gather", "calls"),
    [("copy", [((2, 4, 4, 8), (2, 4, 2, 8))]), ("view", [((2, 4, 2, 8), (2, 4, 1, 8))] * 2)],  # in place: each offset
)
def test_the_kernel_of_a_dilated_branch_is_called_on_rows_alone(gather: str, calls: list[Any]) -> None:
    # what the table serves: (N, M) of a branch (8, 2) over 16 positions is two segments of four rows
    shapes = []
    kernel = KERNELS["math"]

    def load(config: KernelConfig) -> BoundKernel:
        made = kernel.load(config)

        def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
            shapes.append((tuple(q.shape), tuple(k.shape)))
            return made.forward(q, k, v)

        return BoundKernel(forward, made.backward)

    case = Case(16, 4, 2, 8, pattern=pattern_of([8], [2]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "math", replace(kernel, load=load))  # type: ignore[arg-type]
        plan = Tunables("fp64", (BranchTunables("math", "", gather),))
        case.running(plan, mode="infer")(*(x.detach() for x in case.inputs()))
    assert shapes == calls
