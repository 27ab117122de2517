"""Sliding windows, softcap and a head dimension of v, on one device: against float64, both ways, and who refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import (
    ALL_LAYOUTS,
    UNIT_ROUNDOFF,
    Case,
    Results,
    absolute_norms,
    assert_equal_to,
    cases,
    exact,
    found,
)

from ringattn import RingAttention, Workload, detect
from ringattn.errors import InputError, PlanError
from ringattn.kernels.registry import KERNELS
from ringattn.planning.plan import kernel_need, kernel_reasons

WINDOWED = Case(37, heads=4, kv_heads=2, causal=True, window=9)


@st.composite
def scored_cases(draw: st.DrawFn) -> Case:
    """Dense cases with any of the three."""
    case = draw(cases())
    windowed = draw(st.booleans())
    return replace(
        case,
        pattern=type(case.pattern)(),
        causal=case.causal or windowed,
        window=draw(st.integers(1, case.length + 2)) if windowed else None,
        softcap=draw(st.sampled_from((None, 0.5, 3.0, 50.0))),
        head_dim_v=draw(st.sampled_from((None, 1, 4, 7))),
    )


@given(case=scored_cases())
def test_results_and_gradients_are_those_of_float64(case: Case) -> None:
    inputs, dout = case.inputs(), case.dout()
    assert_equal_to(found(case.module(), *inputs, dout), exact(case, *inputs, dout))


@given(case=scored_cases(), scale=st.sampled_from((1e-3, 1.0, 1e3)))
def test_the_gradient_of_lse_is_that_of_float64(case: Case, scale: float) -> None:
    q, k, v = case.inputs()
    out, lse = case.module()(q, k, v, return_lse=True)
    dlse = torch.randn(lse.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * scale
    grads = torch.autograd.grad((out, lse), (q, k, v), (case.dout(), dlse))
    from ringattn.reference import dilated_attention_reference

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    options = {"window": case.window, "softcap": case.softcap}
    out64, lse64 = dilated_attention_reference(*leaves, case.pattern, case.causal, case.scale, **options)
    expected = torch.autograd.grad((out64, lse64), leaves, (case.dout(), dlse))
    for name, grad, grad64 in zip("qkv", grads, expected, strict=True):
        assert (grad - grad64).abs().max() <= 1e-10 * max(1.0, scale), name


@pytest.mark.parametrize("window", [1, 2, 9, 36])
def test_a_window_moves_with_the_positions(window: int) -> None:
    """Of a longer sequence, positions far enough from its start have the results of its end alone."""
    case = replace(WINDOWED, window=window)
    q, k, v = case.inputs()
    whole = case.module()(q, k, v)
    cut = min(12, 37 - window)
    part = case.module()(q[:, cut:], k[:, cut:], v[:, cut:])
    torch.testing.assert_close(part[:, window - 1 :], whole[:, cut + window - 1 :], rtol=0, atol=1e-12)


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    module = replace(WINDOWED, window=40).module()
    assert module.plan_for(40, "fp32", train=True).workload.window == 0
    assert module.plan_for(41, "fp32", train=True).workload.window == 40
    q, k, v = WINDOWED.inputs()
    assert torch.equal(module(q, k, v), replace(WINDOWED, window=None).module()(q, k, v))


@pytest.mark.parametrize("length", [300, 1000])
@pytest.mark.parametrize("window", [3, 130, 299])
def test_blocks_of_math_under_a_window(length: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through the rows in blocks, of which each meets the keys that it sees."""
    from ringattn.kernels import math as kernels_math

    monkeypatch.setattr(kernels_math, "_MAX_SCORES", 2**14)
    case = Case(length, causal=True, window=window, head_dim=3)
    inputs, dout = case.inputs(), case.dout()
    assert_equal_to(found(case.module(), *inputs, dout), exact(case, *inputs, dout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    length=st.integers(2, 60), window=st.integers(1, 59), kv_heads=st.integers(1, 2), batch=st.integers(1, 2),
    layout=st.sampled_from(ALL_LAYOUTS),
)  # fmt: skip
def test_a_kernel_without_windows_has_them_in_blocks(
    dtype: torch.dtype, length: int, window: int, kv_heads: int, batch: int, layout: str
) -> None:
    window = min(window, length - 1)
    case = Case(length, 2 * kv_heads, kv_heads, 8, batch, causal=True, window=window, layout=layout)
    module = case.module(backend="flash-cpu", dtype=dtype)
    assert module.plan_for(length, dtype, train=True, batch=batch).tunables.kernels == {"flash-cpu"}
    inputs, dout = case.inputs(dtype), case.dout(dtype)
    results, expected = found(module, *inputs, dout), exact(case, *inputs, dout)
    norms = absolute_norms(case, *inputs, dout)
    for name, norm in norms.items():
        x, x64 = getattr(results, name), getattr(expected, name)
        assert x.dtype is dtype
        assert (x.double() - x64).norm() <= 8 * UNIT_ROUNDOFF[dtype] * norm, name
    assert (results.lse.double() - expected.lse).abs().max() <= (2e-2 if dtype is torch.bfloat16 else 1e-5)


@given(rows=st.integers(1, 50), window=st.integers(1, 60))
def test_window_blocks_show_each_key_of_the_window_once(rows: int, window: int) -> None:
    from ringattn.kernels.window_blocks import _parts

    shown = torch.zeros(rows, rows, dtype=torch.int64)
    for part in _parts(rows, window):
        block = torch.ones(part.rows, part.keys, dtype=torch.int64)
        block = block.tril() if part.kind == "causal" else block.triu() if part.kind == "reverse" else block
        for tile in range(part.tiles):
            q, k = part.q_begin + tile * window, part.k_begin + tile * window
            shown[q : q + part.rows, k : k + part.keys] += block
    assert torch.equal(shown, torch.ones(rows, rows).tril().triu(1 - window).long())


def test_math_makes_no_scores_that_a_window_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.kernels import math as kernels_math

    made: list[int] = []
    scores = kernels_math._scores
    monkeypatch.setattr(
        kernels_math, "_scores", lambda *arguments: made.append((found := scores(*arguments)).numel()) or found
    )
    q = torch.randn(1, 4096, 1, 4)
    RingAttention(1, 4, causal=True, window=128, profile=None, device="cpu")(q, q, q)
    assert sum(made) <= 4096 * 256


@pytest.mark.parametrize("options", [{"window": 9}, {"softcap": 2.0}, {"window": 5, "softcap": 1.0}])
def test_documents_have_windows_and_caps_of_their_own(options: dict[str, Any]) -> None:
    case = replace(WINDOWED, **{"window": None, **options})
    q, k, v = case.inputs()
    bounds = [0, 3, 20, 37]
    out = case.module()(q, k, v, cu_seqlens=bounds)
    for begin, end in pairwise(bounds):
        part = exact(case, *(x[:, begin:end] for x in (q, k, v, case.dout())))
        torch.testing.assert_close(out[:, begin:end].detach(), part.out, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{"window": 9}, {"softcap": 2.0}, {"window": 5, "softcap": 1.0}])
def test_other_queries_and_caches_follow_the_module(options: dict[str, Any]) -> None:
    case = replace(WINDOWED, **{"window": None, **options})
    module, (q, k, v) = case.module(), case.inputs()
    whole = exact(case, q, k, v, case.dout()).out
    last = module.cross(q[:, -7:], k, v)
    torch.testing.assert_close(last.detach(), whole[:, -7:], rtol=0, atol=1e-10)
    with torch.no_grad():
        cache = module.kv_cache(1, dtype=torch.float64)
        assert cache.window == case.window
        parts = [module.prefill(q[:, a:b], k[:, a:b], v[:, a:b], cache) for a, b in ((0, 11), (11, 36), (36, 37))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)


def test_queries_and_values_of_other_sizes_together() -> None:
    case = replace(WINDOWED, head_dim_v=7)
    module, (q, k, v) = case.module(), case.inputs()
    whole = exact(case, q, k, v, case.dout()).out
    torch.testing.assert_close(module.cross(q[:, -7:], k, v).detach(), whole[:, -7:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{"window": 9}, {"softcap": 2.0}, {"head_dim_v": 7}])
def test_maps_are_of_the_same_softmax(options: dict[str, Any]) -> None:
    case = replace(WINDOWED, **{"window": None, **options})
    module, (q, k, v) = case.module(), case.inputs()
    p = module.rows(q, k, v, range(37))
    torch.testing.assert_close(module.received(q, k, v), p.sum(2), rtol=0, atol=1e-10)
    grouped = torch.einsum("bhns,bshd->bnhd", p, v.detach().repeat_interleave(2, 2))
    torch.testing.assert_close(grouped, exact(case, q, k, v, case.dout()).out, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{"window": 9}, {"softcap": 2.0}, {"window": None, "head_dim_v": 7}])
def test_compiled_and_mapped_calls_follow_the_module(options: dict[str, Any]) -> None:
    case = replace(WINDOWED, **options)
    inputs, dout = case.inputs(), case.dout()
    expected = exact(case, *inputs, dout)
    module = case.module()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    out, lse = compiled(*inputs, return_lse=True)
    grads = torch.autograd.grad(out, inputs, dout)
    assert_equal_to(Results(out.detach(), lse.detach(), *grads), expected)
    mapped = torch.func.vmap(module)(*(x[None] for x in inputs))
    torch.testing.assert_close(mapped[0].detach(), expected.out, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"window": 0}, "window is 0; it must be an integer >= 1"),
        ({"window": True}, "window is True"),
        ({"window": 2.0}, "window is 2.0"),
        (
            {"window": 4, "causal": False},
            "window is 4, which is for causal dense attention, and this is dense, not causal",
        ),
        (
            {"window": 4, "segment_lengths": [8], "dilation_rates": [1]},
            r"window is 4, which is for causal dense attention, and this is \[8\]/\[1\]",
        ),
        ({"softcap": 0}, "softcap is 0; it must be a finite number > 0, or None for no cap"),
        ({"softcap": -1.0}, "softcap is -1.0; it must be a finite number > 0"),
        ({"softcap": float("inf")}, "softcap is inf"),
        ({"softcap": "2"}, "softcap is '2'"),
        ({"softcap": True}, "softcap is True"),
        ({"head_dim_v": 0}, "head_dim_v is 0; it must be an integer >= 1"),
        (
            {"head_dim_v": 3, "segment_lengths": [8], "dilation_rates": [2]},
            r"head_dim_v is 3 and head_dim 4; \[8\]/\[2\] merges its branches: pad the smaller with zeros",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(InputError, match=f"^{error}"):
        RingAttention(2, 4, **{"causal": True, "profile": None, "device": "cpu", **options})


def test_calls_that_contradict_the_module_are_refused() -> None:
    module, (q, k, v) = WINDOWED.module(), WINDOWED.inputs()
    with pytest.raises(InputError, match=r"^window is 4 and the module's 9; leave it out"):
        module.cross(q, k, v, window=4)
    with pytest.raises(InputError, match=r"^window is 4 and the module's 9"):
        module.kv_cache(1, dtype=torch.float64, window=4)
    other = replace(WINDOWED, window=None).module().kv_cache(1, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(InputError, match=r"^the cache has window None and the module 9"):
        module.prefill(q, k, v, other)
    wide = replace(WINDOWED, head_dim_v=7).module()
    with pytest.raises(InputError, match=r"^v has shape .*head_dim_v 7"):
        wide(q, k, v)
    with pytest.raises(InputError, match=r"^head_dim_v is 7 and head_dim 4; a cache holds"):
        wide.kv_cache(1, dtype=torch.float64)
    v = replace(WINDOWED, head_dim_v=7).inputs()[2]
    with pytest.raises(InputError, match=r"^head_dim_v is 7 and head_dim 4; documents take one size"):
        wide(q, k, v, cu_seqlens=[0, 37])


@pytest.mark.parametrize(
    ("feature", "able"),
    [
        ({"window": 9}, {"flash", "flash-cpu", "math", "flash-attn-2", "flash-attn-4", "xformers", "triton"}),
        ({"softcap": 2.0}, {"math", "flash-attn-2", "flash-attn-4", "triton"}),
        ({"head_dim_v": 32}, {"cudnn", "efficient", "math", "flash-attn-4"}),
        ({"window": 9, "softcap": 2.0, "head_dim_v": 32}, {"math", "flash-attn-4"}),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_a_kernel_without_it_is_refused_with_those_that_have_it(
    feature: dict[str, Any], able: set[str], backward: bool
) -> None:
    workload = Workload("train", True, 512, 4, 64, "bf16", **feature)
    need = kernel_need(workload, 0, "bf16", arch="sm_90", vendor="nvidia", backward=backward)
    listed = ", ".join(name for name in KERNELS if name in able)
    facts = replace(
        detect("cpu"), packages=("flash_attn", "flash_attn_interface", "flash_attn.cute", "xformers", "triton")
    )
    for name in KERNELS:
        if name in ("flash-cpu", "split-kv"):  # for other devices, and for decoding
            continue
        reasons = kernel_reasons(name, need, facts)
        if name in able:
            of_sizes = name == "flash-attn-4" and "head_dim_v" in feature  # of which it has one pair on sm_90
            assert all("head_dim 64 with head_dim_v 32" in reason for reason in reasons), name
            assert len(reasons) == of_sizes, name
        else:
            assert len(reasons) == 1, reasons
            assert reasons[0].endswith(f"; {listed} have it"), reasons


def test_a_named_kernel_that_lacks_it_is_refused_at_init() -> None:
    with pytest.raises(PlanError, match=r"flash-cpu: no softcap; math, .* have it"):
        RingAttention(2, 4, causal=True, window=5, softcap=1.0, backend="flash-cpu", profile=None, device="cpu")
