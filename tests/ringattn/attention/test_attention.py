"""What a call of ``RingAttention`` gives: float64 against the oracle over invented shapes, then what a call means."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    ALL_LAYOUTS,
    DENSE,
    Case,
    assert_equal_to,
    cases,
    cpu,
    exact,
    found,
    laid_out,
    pattern_of,
    times_seen,
    tunables_for,
)
from torch import Tensor

from ringattn import Pattern, RingAttention
from ringattn.geometry.pattern import heads_without_rows
from ringattn.planning import module_setup
from ringattn.planning.table import PlanTable
from ringattn.reference import dilated_attention_reference

thorough = settings(max_examples=4 * settings.default.max_examples)
KERNELS_BY_DTYPE = [("math", torch.float64), ("math", torch.float32), ("flash-cpu", torch.float32)]


# --- float64 is exact --------------------------------------------------------------------------------------------


@thorough
@given(st.data())
def test_out_lse_and_gradients_are_exact_whatever_the_plan(data: st.DataObject) -> None:
    case = data.draw(cases())
    module = case.running(data.draw(tunables_for(case)))
    q, k, v = case.inputs()
    assert_equal_to(found(module, q, k, v, case.dout()), exact(case, q, k, v, case.dout()))


@given(st.data())
def test_inference_is_exact_whatever_the_plan(data: st.DataObject) -> None:
    case = data.draw(cases())
    module = case.running(data.draw(tunables_for(case, train=False)), mode="infer")
    q, k, v = (x.detach() for x in case.inputs())
    out, lse = module(q, k, v, return_lse=True)
    expected, expected_lse = dilated_attention_reference(q, k, v, case.pattern, case.causal, case.scale)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-10)


@given(cases())
def test_the_plan_without_a_profile_is_exact(case: Case) -> None:
    q, k, v = case.inputs()
    assert_equal_to(found(case.module(), q, k, v, case.dout()), exact(case, q, k, v, case.dout()))


ODD_CASES = {
    "one of everything": Case(1, 1, 1, 1),
    "one position, dilated": Case(1, 4, 2, 3, pattern=pattern_of([4], [2])),
    "one head": Case(33, 1, 1, 8, pattern=pattern_of([8, 16], [2, 4]), causal=True),
    "head_dim 1 in odd layouts": Case(20, 2, 2, 1, 2, pattern_of([8], [2]), layout="backwards_axes"),
    "rate beyond everything": Case(12, 4, 4, 4, pattern=pattern_of([6, 12], [1000, 1]), causal=True),
    "the largest rate and segment": Case(12, 4, 4, 4, pattern=pattern_of([1 << 40, 12], [1 << 40, 1]), causal=True),
    "no position selected by the higher heads": Case(6, 5, 5, 2, pattern=pattern_of([2], [5])),
    "rate above the segment": Case(15, 3, 3, 4, pattern=pattern_of([4, 5], [7, 6])),
    "segments of one": Case(9, 2, 2, 4, pattern=pattern_of([1], [1]), causal=True),
    "segments of one, dilated": Case(9, 4, 2, 4, pattern=pattern_of([1, 1], [2, 1]), causal=True),
    "tail shorter than the offset": Case(34, 4, 4, 4, pattern=pattern_of([16], [4]), causal=True),
    "segment beyond the sequence": Case(7, 4, 2, 4, 2, pattern_of([4096, 512], [1, 3]), causal=True),
    "twelve branches": Case(40, 6, 3, 4, 2, pattern_of([2, 3, 4, 5, 7, 8, 9, 11, 16, 20, 40, 64], [1, 2, 3] * 4)),
    "identical branches": Case(24, 2, 2, 4, pattern=pattern_of([8, 8, 8], [2, 2, 2]), causal=True),
    "identical dense branches": Case(24, 2, 2, 4, pattern=pattern_of([24, 24], [1, 1]), causal=True),
    "many queries to one key head": Case(19, 12, 1, 4, pattern=pattern_of([8], [3])),
    "tiny scale": Case(13, pattern=pattern_of([8, 13], [2, 1]), scale=1e-3, causal=True),
    "long enough for several row blocks": Case(700, 1, 1, 2, pattern=pattern_of([700, 64], [1, 2]), causal=True),
}


@pytest.mark.parametrize("name", ODD_CASES)
def test_odd_shapes(name: str) -> None:
    case = ODD_CASES[name]
    q, k, v = case.inputs()
    assert_equal_to(found(case.module(), q, k, v, case.dout()), exact(case, q, k, v, case.dout()))


@pytest.mark.parametrize("backend", ["math", "flash-cpu"])
@pytest.mark.parametrize("name", ODD_CASES)
def test_odd_shapes_in_float32(name: str, backend: str) -> None:
    case = ODD_CASES[name]
    q, k, v = case.inputs(torch.float32)
    dout = case.dout(torch.float32)
    assert_equal_to(found(case.module(backend=backend), q, k, v, dout), exact(case, q, k, v, dout), 2e-5)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("pattern", [DENSE, pattern_of([8], [1]), pattern_of([8, 5], [2, 3])], ids=str)
def test_layouts_in_float32(layout: str, pattern: Pattern) -> None:
    case = Case(21, 4, 2, 5, 2, pattern, causal=True, layout=layout)
    q, k, v = case.inputs(torch.float32)
    dout = case.dout(torch.float32)
    assert_equal_to(found(case.module(backend="flash-cpu"), q, k, v, dout), exact(case, q, k, v, dout), 2e-5)


def test_each_input_may_have_a_layout_of_its_own() -> None:
    case = Case(12, 4, 2, 4, 2, pattern_of([4, 6], [2, 1]))
    q, k, v = case.inputs()
    q, k = (laid_out(x.detach(), layout).requires_grad_() for x, layout in ((q, "last_strided"), (k, "heads_first")))
    assert_equal_to(found(case.module(), q, k, v, case.dout()), exact(case, q, k, v, case.dout()))


def test_expanded_inputs_share_memory_between_heads_and_batches() -> None:
    case = Case(11, 4, 4, 4, 3, pattern_of([4, 11], [2, 1]), causal=True)
    q, k, v = case.inputs()
    k = k.detach()[:, :, :1].expand(-1, -1, 4, -1).requires_grad_()
    v = v.detach()[:1].expand(3, -1, -1, -1).requires_grad_()
    assert_equal_to(found(case.module(), q, k, v, case.dout()), exact(case, q, k, v, case.dout()))


def test_one_tensor_for_queries_keys_and_values() -> None:
    case = Case(10, pattern=pattern_of([4, 8], [2, 1]))
    x = case.inputs()[0]
    (grad,) = torch.autograd.grad(case.module()(x, x, x), x, case.dout())
    leaf = x.detach().clone().requires_grad_()
    out, _ = dilated_attention_reference(leaf, leaf, leaf, case.pattern, False)
    torch.testing.assert_close(grad, torch.autograd.grad(out, leaf, case.dout())[0], rtol=0, atol=1e-12)


def test_modules_that_differ_in_head_dim_alone_share_no_views() -> None:
    # both read tensors of one stride, and geometries are kept for the whole process
    wide, narrow = (Case(16, head_dim=d, pattern=pattern_of([8, 16], [1, 2])) for d in (8, 5))
    inputs = wide.inputs()
    wide.module()(*inputs)
    q, k, v = (x.detach()[..., :5].requires_grad_() for x in inputs)
    assert_equal_to(found(narrow.module(), q, k, v, narrow.dout()), exact(narrow, q, k, v, narrow.dout()))


# --- which positions matter --------------------------------------------------------------------------------------


@st.composite
def perturbations(draw: st.DrawFn) -> tuple[Case, str, int, int, int]:
    """A case, k or v, and the batch element, position and head at which it changes."""
    case = draw(cases(layouts=("plain",), longest=24))
    which = draw(st.sampled_from(("k", "v")))
    where = (draw(st.integers(0, n - 1)) for n in (case.batch, case.length, case.kv_heads))
    return case, which, *where  # type: ignore[return-value]


@pytest.mark.parametrize(("backend", "dtype"), KERNELS_BY_DTYPE)
@given(perturbations())
def test_only_the_queries_that_see_a_key_depend_on_it(
    backend: str, dtype: torch.dtype, perturbed: tuple[Case, str, int, int, int]
) -> None:
    case, which, batch, position, head = perturbed
    module = case.module(backend=backend)
    q, k, v = (x.detach() for x in case.inputs(dtype))
    before, lse_before = module(q, k, v, return_lse=True)
    exact_before = exact(case, q, k, v, case.dout())
    {"k": k, "v": v}[which][batch, position, head] += 3.0
    after, lse_after = module(q, k, v, return_lse=True)
    exact_after = exact(case, q, k, v, case.dout())

    group = case.heads // case.kv_heads
    sees = torch.zeros(case.batch, case.heads, case.length, dtype=torch.bool)
    heads = slice(head * group, (head + 1) * group)
    sees[batch, heads] = times_seen(case)[heads, :, position] > 0
    sees_BSH = sees.transpose(1, 2)
    assert torch.equal(before[~sees_BSH], after[~sees_BSH])  # bit for bit
    assert torch.equal(lse_before[~sees], lse_after[~sees])
    # Where the exact result moves by more than float32 rounds, so does this one.
    moved = (exact_before.out - exact_after.out).abs().amax(-1) > 1e-4
    assert (before != after).any(-1)[moved].all()
    assert not (moved & ~sees_BSH).any()
    lse_moved = (exact_before.lse - exact_after.lse).abs() > 1e-4
    assert (lse_before != lse_after)[lse_moved].all()
    assert bool(lse_moved.any()) <= (which == "k")


@pytest.mark.parametrize(("backend", "dtype"), KERNELS_BY_DTYPE)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_those_who_see_it_and_no_other_segment(
    backend: str, dtype: torch.dtype, value: float
) -> None:
    case = Case(32, 2, 2, 4, pattern=pattern_of([8, 16], [1, 4]), causal=True)
    module = case.module(backend=backend)
    for name in ("k", "v"):
        inputs = {n: x.detach() for n, x in zip("qkv", case.inputs(dtype), strict=True)}
        clean = module(**inputs)
        inputs[name][0, 5, 0] = value
        out = module(**inputs)
        sees = times_seen(case)[0, :, 5] > 0
        assert not out[0, sees, 0].isfinite().all(-1).any()
        assert torch.equal(out[0, 16:], clean[0, 16:])  # beyond both segments of position 5
        assert torch.equal(out[0, :, 1], clean[0, :, 1])
        # nobody sees position 1 of head 0 through the dilated branch alone
        dilated = replace(case, pattern=pattern_of([16], [4])).module(backend=backend)
        inputs = {n: x.detach() for n, x in zip("qkv", case.inputs(dtype), strict=True)}
        inputs[name][0, 1, 0] = value
        assert dilated(**inputs).isfinite().all()


@pytest.mark.parametrize(("backend", "dtype"), KERNELS_BY_DTYPE)
@pytest.mark.parametrize("pattern", [DENSE, pattern_of([4, 16], [1, 2])], ids=str)
def test_extreme_logits(backend: str, dtype: torch.dtype, pattern: Pattern) -> None:
    case = Case(32, 2, 2, 4, pattern=pattern, causal=True, scale=1e4)
    q, k, v = case.inputs(dtype)
    results, expected = (
        f(case.module(backend=backend) if f is found else case, q, k, v, case.dout(dtype)) for f in (found, exact)
    )
    assert all(x.isfinite().all() for x in (results.out, results.dq, results.dk, results.dv))
    # logits of 1e4 are rounded by 1e-3 in float32, and the weights of merged results with them
    relative = 1e-12 if dtype is torch.float64 else 2e-6
    torch.testing.assert_close(results.lse.double(), expected.lse, rtol=relative, atol=0.01)
    assert results.out.abs().max() <= v.abs().max() * 1.01
    if dtype is torch.float64:
        torch.testing.assert_close(results.out, expected.out, rtol=0, atol=1e-8)


def test_a_branch_whose_weight_underflows_leaves_no_trace() -> None:
    case = Case(8, 1, 1, 1, pattern=pattern_of([2, 8], [1, 8]), scale=1.0)
    q = torch.ones(1, 8, 1, 1, dtype=torch.float64)
    k = torch.full((1, 8, 1, 1), -5000.0, dtype=torch.float64)
    k[0, 1] = 5000.0
    v = torch.arange(8.0, dtype=torch.float64).view(1, 8, 1, 1)
    out, lse = case.module()(q, k, v, return_lse=True)
    torch.testing.assert_close(out[0, :2].flatten(), torch.ones(2, dtype=torch.float64))
    assert lse[0, 0, 0].item() == pytest.approx(5000.0)
    assert not out.isnan().any()


# --- what a call gives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", [DENSE, pattern_of([8], [1]), pattern_of([4, 8], [3, 2])], ids=str)
@pytest.mark.parametrize("backend", [None, "math"])
def test_the_lse_is_a_natural_logarithm_in_float32(dtype: torch.dtype, pattern: Pattern, backend: str | None) -> None:
    case = Case(10, 4, 2, 8, 2, pattern)
    q, k, v = case.inputs(dtype)
    module = case.module(backend=backend)
    out, lse = module(q, k, v, return_lse=True)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert lse.shape == (2, 4, 10)
    assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert out.requires_grad
    assert lse.requires_grad
    expected = exact(case, q, k, v, case.dout()).lse
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=2e-2)
    assert torch.equal(module(q, k, v), out)  # the same with and without it


@pytest.mark.parametrize("pattern", [DENSE, pattern_of([4, 8], [2, 1])], ids=str)
def test_without_gradients_there_is_no_graph(pattern: Pattern) -> None:
    case = Case(12, pattern=pattern)
    q, k, v = case.inputs()
    module = case.module()
    expected = module(q, k, v)
    with torch.no_grad():
        out = module(q, k, v)
    assert not out.requires_grad
    with torch.inference_mode():
        inferred = module(q, k, v)
    assert inferred.is_inference()
    frozen = module(q.detach(), k.detach(), v.detach())
    assert frozen.grad_fn is None
    for x in (out, inferred, frozen):
        assert torch.equal(x, expected)


def test_train_means_that_gradients_are_wanted_not_the_mode_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    plan_at = PlanTable.plan_at

    def noting(table: PlanTable, seq_len: int, dtype: str, train: bool, *rest: int) -> Any:
        asked.append(train)
        return plan_at(table, seq_len, dtype, train, *rest)

    monkeypatch.setattr(PlanTable, "plan_at", noting)
    q, k, v = Case(8).inputs()
    frozen = [x.detach() for x in (q, k, v)]
    Case(8).module().eval()(q, k, v)
    Case(8).module().eval()(frozen[0], frozen[1], v)
    Case(8).module().train()(*frozen)
    with torch.no_grad():
        Case(8).module()(q, k, v)
    assert asked == [True, True, False, False]


def test_the_module_is_stateless() -> None:
    module = Case(8).module()
    assert not module.state_dict()
    assert not list(module.parameters())
    assert not list(module.buffers())
    first, second = Case(8, seed=1), Case(8, seed=2)
    alone = module(*second.inputs())
    module(*first.inputs())
    assert torch.equal(module(*second.inputs()), alone)


# --- autocast ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [DENSE, pattern_of([8, 16], [2, 1])], ids=str)
@pytest.mark.parametrize("backend", ["math", "flash-cpu"])
def test_autocast_computes_in_its_own_dtype_and_gives_back_the_inputs(pattern: Pattern, backend: str) -> None:
    case = Case(24, 4, 2, 8, pattern=pattern, causal=True)
    module = case.module(backend=backend)
    q, k, v = case.inputs(torch.float32)
    dout = case.dout(torch.float32)
    narrow = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = found(module, *narrow, dout.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = module(q, k, v, return_lse=True)
    assert out.dtype is torch.float32
    assert torch.equal(out, expected.out.float())
    assert torch.equal(lse, expected.lse)
    for backward_under_autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=backward_under_autocast):
            grads = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for grad, narrow_grad in zip(grads, expected[2:], strict=True):
            assert grad.dtype is torch.float32
            assert torch.equal(grad, narrow_grad.float())


def test_each_autocast_dtype_has_its_own_plan() -> None:
    case = Case(16, head_dim=8)
    module = case.module(backend="math")
    q, k, v = (x.detach() for x in case.inputs(torch.float32))
    outs = {}
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            outs[dtype] = module(q, k, v)
        assert torch.equal(outs[dtype], module(q.to(dtype), k.to(dtype), v.to(dtype)).float())
    assert torch.equal(module(q, k, v), case.module(backend="math")(q, k, v))  # and without autocast, as before it
    assert not torch.equal(outs[torch.bfloat16], outs[torch.float16])


@pytest.mark.parametrize("backend", ["math", "flash-cpu"])
def test_an_explicit_dtype_wins_over_autocast(backend: str) -> None:
    case = Case(16, head_dim=8, pattern=pattern_of([8, 16], [2, 1]))
    module = case.module(backend=backend, dtype=torch.float32)
    q, k, v = case.inputs(torch.float32)
    dout = case.dout(torch.float32)
    expected = found(module, q, k, v, dout)
    with torch.autocast("cpu", torch.bfloat16):
        results = found(module, q, k, v, dout)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_autocast_leaves_float64_alone() -> None:
    case = Case(9, pattern=pattern_of([4, 9], [2, 1]))
    q, k, v = case.inputs()
    with torch.autocast("cpu", torch.bfloat16):
        results = found(case.module(), q, k, v, case.dout())
    assert_equal_to(results, exact(case, q, k, v, case.dout()))


def test_autocast_takes_inputs_of_several_dtypes() -> None:
    case = Case(9, head_dim=8)
    q, k, v = (x.detach() for x in case.inputs(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = case.module()(q, k.bfloat16(), v)
        assert torch.equal(mixed, case.module()(q, k, v))


# --- copies and threads ------------------------------------------------------------------------------------------


def copies(module: RingAttention) -> list[RingAttention]:
    return [copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))]  # noqa: S301


@pytest.mark.parametrize("backend", [None, "flash-cpu"])  # with flash-cpu the float64 rows are refusals
@pytest.mark.parametrize("used", [False, True])
def test_copies_and_pickles_are_modules_of_the_same_plans(backend: str | None, used: bool) -> None:
    case = Case(12, head_dim=8, pattern=pattern_of([4, 8], [2, 1]))
    module = case.module(backend=backend)
    inputs = case.inputs(torch.float32)
    expected = module(*inputs)
    if not used:
        module = case.module(backend=backend)
    for copied in copies(module):
        assert str(copied.plan) == str(module.plan)
        assert torch.equal(copied(*inputs), expected)
        assert torch.equal(torch.compile(copied, backend="eager", fullgraph=True)(*inputs), expected)


def test_a_copy_outlives_its_original() -> None:
    case = Case(12, head_dim=8)
    module = case.module()
    expected = module(*case.inputs(torch.float32))
    copied = torch.compile(copy.deepcopy(module), backend="eager", fullgraph=True)
    del module
    assert torch.equal(copied(*case.inputs(torch.float32)), expected)


def test_threads_share_a_module() -> None:
    shapes = [Case(n, 4, 2, 4, b, pattern_of([4, 8], [2, 1]), seed=n) for n in (7, 16, 23) for b in (1, 2)] * 4
    plan = data_plan()
    module = shapes[0].running(plan, mode="train", dtype="fp64")
    expected = {case: exact(case, *case.inputs(), case.dout()) for case in set(shapes)}

    def work(case: Case) -> None:
        for _ in range(5):
            q, k, v = case.inputs()
            assert_equal_to(found(module, q, k, v, case.dout()), expected[case])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, shapes))


def data_plan() -> Any:
    from ringattn.workload import BranchTunables, Tunables

    branches = (BranchTunables("math", "math", "copy"), BranchTunables("math", "math"))
    return Tunables("fp64", branches, pool_threshold_mib=0, pool_strategy="bucket")


# --- warming up, printing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
def test_a_warm_up_makes_the_first_calls(train: bool) -> None:
    module = Case(8, head_dim=8).module()
    state = torch.get_rng_state()
    took_ms = module.warmup([8, 16], dtype=torch.bfloat16, batch_size=2, train=train)
    assert list(took_ms) == [8, 16]
    assert all(ms > 0 for ms in took_ms.values())
    assert torch.equal(torch.get_rng_state(), state)
    assert len(module._runners) == 2  # a call of these shapes finds its runner
    q = torch.randn(2, 16, 2, 8, dtype=torch.bfloat16, requires_grad=train)
    module(q, q, q)
    assert len(module._runners) == 2


@pytest.mark.parametrize(
    ("case", "longest", "heads"),
    [
        (Case(8, 4, 4, pattern=pattern_of([2], [4])), None, "2, 3"),
        (Case(8, 4, 2, pattern=pattern_of([1, 1], [2, 4])), None, "2, 3"),
        (Case(8, 4, 4, pattern=pattern_of([1], [2], "blocked")), None, "2, 3"),
        (Case(2, 4, 4, pattern=pattern_of([8], [4])), 2, "2, 3"),
        (Case(8, 16, 16, pattern=pattern_of([4], [16])), None, "4, 5, 6, 7, 8, 9, 10, 11 and 4 more"),
    ],
)
def test_heads_that_select_nothing_are_named_once(
    case: Case, longest: int | None, heads: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_setup, "_said", set())
    for _ in range(2):
        module = case.module(max_seq_len=longest)
    messages = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "select" in r.getMessage()]
    assert messages == [
        f"{module.shape}: of {case.heads} heads no branch lets {heads} select a position, so their output is "
        "0; give a branch a dilation rate no larger than its segments and sequences are long"
    ]
    out, lse = module(*case.inputs(), return_lse=True)
    empty = lse.isneginf().all(2).all(0)
    assert [head for head in range(case.heads) if empty[head]] == list(
        heads_without_rows(case.pattern, case.heads, case.kv_heads, longest)
    )
    assert (out[:, :, empty] == 0).all()


@pytest.mark.parametrize("pattern", [DENSE, pattern_of([2, 4], [4, 4]), pattern_of([4], [4])], ids=str)
def test_heads_that_select_something_are_not(
    pattern: Pattern, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_setup, "_said", set())
    Case(8, 4, 4, pattern=pattern).module()
    assert not [r for r in caplog.records if "select" in r.getMessage()]


def test_remembered_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringattn.autograd.torch_compile.MOST_SHAPES", 4)
    module = Case(8).module()
    for length in range(1, 12):
        case = Case(length)
        torch.testing.assert_close(module(*case.inputs()), exact(case, *case.inputs(), case.dout()).out)
        assert len(module._runners) <= 4


def test_the_module_prints_what_it_is() -> None:
    module = Case(8, 4, 2, 16, pattern=pattern_of([4, 8], [1, 2]), causal=True).module()
    assert repr(module) == "RingAttention(heads=4, kv_heads=2, head_dim=16, [4,8]/[1,2], causal=True, device=cpu)"
    assert repr(Case(8).module()) == "RingAttention(heads=2, head_dim=4, dense, causal=False, device=cpu)"


def test_facts_are_those_of_the_machine() -> None:
    assert Case(8).module().plan.facts == cpu()


def test_tensors_saved_for_the_backward_are_not_the_callers_to_lose() -> None:
    case = Case(8, pattern=pattern_of([4], [2]))
    q, k, v = case.inputs()
    expected = exact(case, q, k, v, case.dout())
    out: Tensor = case.module()(q, k, v)
    doubled = out * 2  # out of place: nothing saved is touched
    grads = torch.autograd.grad(doubled, (q, k, v), case.dout() / 2)
    for grad, x64 in zip(grads, expected[2:], strict=True):
        torch.testing.assert_close(grad, x64, rtol=0, atol=1e-12)


def test_torchs_defaults_for_new_tensors_do_not_matter() -> None:
    case = Case(12, 4, 2, 4, 2, pattern_of([4, 12], [2, 1]), causal=True)
    q, k, v = case.inputs(torch.float32)
    dout = case.dout(torch.float32)
    expected = found(case.module(), q, k, v, dout)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            results = found(case.module(), q, k, v, dout)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
