"""Dropout in training: against float64 with the weights that a call kept, replayed by seeds and checkpoints.

The oracle is in support/ringattn/dropped.py; torch's own math kernel, which takes a mask, is a second one.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
from typing import Any

import pytest
import torch
from dropped import exact_of, kept_by, seeded, seen_by
from hypothesis import given
from hypothesis import strategies as st
from oracle import ALL_LAYOUTS, DENSE, Case, cpu, pattern_of
from torch.utils.checkpoint import checkpoint

from ringattn import RingAttention
from ringattn.errors import InputError, PlanError
from ringattn.planning import module_setup
from ringattn.planning.plan import rejection_reasons
from ringattn.workload import BranchTunables, Tunables

P = 0.3
CASES = {
    "full": Case(23, 4, 4, 8, 2),
    "causal, grouped": Case(23, 6, 2, 8, 2, causal=True),
    "full, grouped": Case(17, 6, 2, 8, 2),
    "window": Case(40, 2, 2, 8, 1, causal=True, window=6),
    "softcap": Case(17, 2, 1, 8, 2, causal=True, softcap=2.0),
    "wide values": Case(17, 2, 2, 4, 2, head_dim_v=8),
    "heads first": Case(17, 2, 2, 8, 2, layout="heads_first", scale=0.7),
    "last strided": Case(17, 2, 2, 8, 2, layout="last_strided", causal=True),
    "one position": Case(1, 2, 2, 8, 3, causal=True),
}
U = {torch.float64: 1e-14, torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
CASE = CASES["causal, grouped"]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(module_setup, "_said", set())
    caplog.set_level(logging.WARNING, "ringattn")
    return caplog


@pytest.mark.parametrize("dtype", list(U), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_float64_result_of_the_weights_that_are_kept(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    module = case.module(dropout=P)
    q, k, v = case.inputs(dtype)
    dout = case.dout(dtype)
    kept = kept_by(module, case, q, k)
    out = seeded(lambda: module(q, k, v))
    expected = exact_of(case, q, k, v, dout, kept, P)
    found = (out, *torch.autograd.grad(out, (q, k, v), dout))
    for x, exact in zip(found, (expected.out, expected.dq, expected.dk, expected.dv), strict=True):
        assert x.dtype is dtype
        assert (x.double() - exact).norm() <= U[dtype] * (exact.norm() + 1.0)


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_kernel_gives_the_same_for_the_mask(causal: bool) -> None:
    case = Case(19, 6, 2, 8, 2, causal=causal)
    module = case.module(dropout=P)
    q, k, v = case.inputs()
    kept = kept_by(module, case, q, k)
    theirs, _ = torch.ops.aten._scaled_dot_product_attention_math(
        *(x.transpose(1, 2) for x in (q, k, v)), None, P, causal, kept, enable_gqa=True
    )
    torch.testing.assert_close(seeded(lambda: module(q, k, v)), theirs.transpose(1, 2), rtol=1e-13, atol=1e-13)


def bound_of_share(p: float, count: int) -> float:
    """Distance from 1 - p that the share of ``count`` kept weights exceeds with probability below 1e-14 (Bernstein)."""
    log = math.log(2e14)
    return (log / 3 + math.sqrt((log / 3) ** 2 + 2 * count * p * (1 - p) * log)) / count


@given(p=st.floats(0.0, 0.999, exclude_min=True), seed=st.integers(0, 2**63 - 1), causal=st.booleans())
def test_the_share_of_dropped_weights_is_p(p: float, seed: int, causal: bool) -> None:
    """Of all weights, and of those that are in the same place in heads or batch elements: they draw their own."""
    case = Case(32, 6, 2, 32, 3, causal=causal)
    module = case.module(dropout=p)
    q, k, _ = case.inputs()
    kept = kept_by(module, case, q, k, seed)[..., seen_by(case)].flatten(0, 1)
    assert abs(float(kept.double().mean()) - (1 - p)) <= bound_of_share(p, kept.numel())
    for one, other in itertools.pairwise(kept):
        both = (one & other).double().mean()
        square = (1 - p) ** 2
        assert abs(float(both) - square) <= bound_of_share(1 - square, one.numel())


def test_rows_and_heads_have_weights_of_their_own_dropped() -> None:
    case = Case(64, 8, 8, 64, 4)
    module = case.module(dropout=P)
    q, k, _ = case.inputs()
    kept = kept_by(module, case, q, k)
    assert len(torch.unique(kept.flatten(0, 2), dim=0)) == 4 * 8 * 64


def test_the_expectation_is_the_result_without_dropout() -> None:
    case = Case(12, 2, 2, 8, 1, causal=True)
    module, (q, k, v) = case.module(dropout=P), case.inputs()
    torch.manual_seed(0)
    with torch.no_grad():
        draws = torch.stack([module(q, k, v) for _ in range(1500)])
        exact = module.eval()(q, k, v)
    deviation = draws.std(0) / len(draws) ** 0.5
    off = (draws.mean(0) - exact).abs()
    assert bool((off <= 7.5 * deviation + 1e-12).all())  # beyond once in 1e13, for each of 192
    assert float(off.norm() / exact.norm()) < 0.03
    assert bool((deviation[:, 1:] > 0).all())


def test_without_it_every_bit_is_as_ever_and_no_random_number_is_drawn() -> None:
    q, k, v = CASE.inputs(torch.float32)
    plain = CASE.module()(q, k, v)
    state = torch.get_rng_state()
    assert torch.equal(CASE.module(dropout=0.0)(q, k, v), plain)
    assert torch.equal(CASE.module(dropout=P).eval()(q, k, v), plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_warm_up_leaves_the_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    for train in (True, False):
        CASE.module(dropout=P).warmup([8, 9], torch.float32, train=train)
    assert torch.equal(torch.get_rng_state(), state)


def test_calls_draw_anew_and_a_seed_draws_again() -> None:
    module, (q, k, v) = CASE.module(dropout=P), CASE.inputs()
    one, other = module(q, k, v), module(q, k, v)
    assert not torch.equal(one, other)
    assert torch.equal(seeded(lambda: module(q, k, v)), seeded(lambda: module(q, k, v)))
    assert torch.equal(seeded(lambda: module(q, k, v)), seeded(lambda: copy.deepcopy(module)(q, k, v)))


def test_gradients_of_two_calls_in_flight_are_of_their_own_masks() -> None:
    module, (q, k, v) = CASE.module(dropout=P), CASE.inputs()
    dout = CASE.dout()
    alone = [torch.autograd.grad(seeded(lambda: module(q, k, v), seed), (q, k, v), dout) for seed in (1, 2)]
    first, second = (seeded(lambda seed=seed: module(q, k, v), seed) for seed in (1, 2))
    for expected, out in ((alone[1], second), (alone[0], first)):
        for x, y in zip(expected, torch.autograd.grad(out, (q, k, v), dout), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_those_of_finite_differences(mode: str) -> None:
    case = Case(6, 4, 2, 3, 1, causal=True)
    module = case.module(dropout=P, checkpoint=mode)
    assert torch.autograd.gradcheck(lambda *inputs: seeded(lambda: module(*inputs)), case.inputs())


def test_a_forward_that_runs_again_drops_the_same_and_disturbs_no_random_number() -> None:
    """Of the plan's own checkpoint, after other draws."""
    q, k, v = CASE.inputs()
    dout = CASE.dout()
    results = []
    for mode in ("selective", "full"):
        module = CASE.module(dropout=P, checkpoint=mode)
        out = seeded(lambda module=module: module(q, k, v))
        torch.rand(5)
        state = torch.get_rng_state()
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
        assert torch.equal(torch.get_rng_state(), state)
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_drops_the_same(reentrant: bool) -> None:
    """Its first forward is without gradients where it is reentrant: the same kernel must run."""
    module, (q, k, v) = CASE.module(dropout=P), CASE.inputs(torch.float32)
    dout = CASE.dout(torch.float32)
    plain = seeded(lambda: module(q, k, v))
    again = seeded(lambda: checkpoint(module, q, k, v, use_reentrant=reentrant))
    torch.rand(5)
    assert torch.equal(plain, again)
    grads = torch.autograd.grad(plain, (q, k, v), dout)
    again.backward(dout)
    assert all(torch.equal(x, y.grad) for x, y in zip(grads, (q, k, v), strict=True))


def test_it_is_of_training_mode_and_not_of_gradients() -> None:
    module, (q, k, v) = CASE.module(dropout=P), CASE.inputs(torch.float32)
    with torch.no_grad():
        without = seeded(lambda: module(q, k, v))
    assert torch.equal(without, seeded(lambda: module(q, k, v)))
    assert not torch.equal(without, module.eval()(q, k, v))


def test_sinks_take_their_share_before_weights_are_dropped() -> None:
    module, (q, k, v) = CASE.module(dropout=P), CASE.inputs()
    dout, sinks = CASE.dout(), torch.randn(CASE.heads, dtype=torch.float64, requires_grad=True)
    kept = kept_by(lambda *x: module(*x, sinks=sinks), CASE, q, k)
    for mode in ("selective", "full"):
        module = CASE.module(dropout=P, checkpoint=mode)
        leaf = sinks.detach().double().requires_grad_()
        out = seeded(lambda module=module, leaf=leaf: module(q, k, v, sinks=leaf))
        expected = exact_of(CASE, q, k, v, dout, kept, P, sinks)
        found = (out, *torch.autograd.grad(out, (q, k, v, leaf), dout))
        for x, exact in zip(found, (expected.out, expected.dq, expected.dk, expected.dv), strict=False):
            torch.testing.assert_close(x, exact, rtol=1e-12, atol=1e-12)

        def of(value: torch.Tensor) -> torch.Tensor:
            return exact_of(CASE, q, k, v, dout, kept, P, value).out

        for head in range(CASE.heads):
            step = torch.zeros_like(sinks).index_fill(0, torch.tensor([head]), 1e-6)
            slope = ((of(sinks.detach() + step) - of(sinks.detach() - step)) * dout).sum() / 2e-6
            torch.testing.assert_close(found[4][head], slope, rtol=1e-6, atol=1e-8)


def test_autocast_narrows_it_as_ever() -> None:
    module, (q, k, v) = CASE.module(dropout=P), CASE.inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = seeded(lambda: module(q, k, v))
    narrow = seeded(lambda: module(*(x.detach().bfloat16() for x in (q, k, v))))
    assert torch.equal(out.bfloat16(), narrow)
    assert out.dtype is torch.float32


def test_it_breaks_a_compiled_graph_and_gives_the_same() -> None:
    module, (q, k, v) = CASE.module(dropout=P), CASE.inputs(torch.float32)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return module(q * 2.0, k, v) * 3.0

    compiled = torch.compile(step, backend="aot_eager")
    plain, traced = seeded(lambda: step(q, k, v)), seeded(lambda: compiled(q, k, v))
    torch.testing.assert_close(plain, traced, rtol=1e-6, atol=1e-6)
    for x, y in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (plain, traced)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@st.composite
def combined(draw: st.DrawFn) -> Case:
    """A dense case with any of what may be asked for together."""
    causal, kv_heads, group = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length = draw(st.integers(1, 20))
    return Case(
        length, kv_heads * group, kv_heads, 4, draw(st.integers(1, 2)),
        causal=causal,
        scale=draw(st.sampled_from([None, 0.3])),
        layout=draw(st.sampled_from(ALL_LAYOUTS)),
        window=draw(st.none() | st.integers(1, 24)) if causal else None,
        softcap=draw(st.none() | st.floats(0.5, 5.0)),
        head_dim_v=draw(st.sampled_from([None, 2, 6])),
    )  # fmt: skip


@given(
    case=combined(),
    p=st.floats(0.01, 0.99),
    sinks=st.booleans(),
    mode=st.sampled_from(["selective", "full"]),
    seed=st.integers(0, 99),
)
def test_every_shape_probability_and_combination(case: Case, p: float, sinks: bool, mode: str, seed: int) -> None:
    """Windows, softcaps, sinks, groups, other widths of values, layouts and checkpoints together."""
    module, (q, k, v) = case.module(dropout=p, checkpoint=mode), case.inputs()
    column = torch.linspace(-1, 1, case.heads, dtype=torch.float64) if sinks else None
    attend = functools.partial(module, sinks=column)
    kept, dout = kept_by(attend, case, q, k, seed), case.dout()
    assert not bool((kept & ~seen_by(case)).any())
    out = seeded(lambda: attend(q, k, v), seed)
    expected = exact_of(case, q, k, v, dout, kept, p, column)
    for x, exact in zip(
        (out, *torch.autograd.grad(out, (q, k, v), dout)),
        (expected.out, expected.dq, expected.dk, expected.dv),
        strict=True,
    ):
        torch.testing.assert_close(x, exact, rtol=1e-9, atol=1e-11)


# --- what is refused ---------------------------------------------------------------------------------------------

REFUSED: list[tuple[Case, dict[str, Any], dict[str, Any], type[Exception], str]] = [
    (Case(8, pattern=pattern_of([4, 8], [1, 2])), {}, {}, PlanError, "on one device, not over branches; set it to 0"),
    (Case(8), {}, {"return_lse": True}, InputError, "without return_lse: lse is of all weights"),
    (Case(8), {}, {"cu_seqlens": [0, 4, 8]}, InputError, "not of cu_seqlens or lengths; set it to 0.0"),
    (Case(8), {}, {"lengths": [4]}, InputError, "not of cu_seqlens or lengths; set it to 0.0, or call eval"),
    (Case(8), {"backend": "flash-cpu"}, {}, PlanError, "flash-cpu: no dropout; .*math.* have it"),
]


@pytest.mark.parametrize(("case", "options", "call", "kind", "message"), REFUSED)
def test_what_is_not_exact_is_refused_in_training_alone(
    case: Case, options: dict[str, Any], call: dict[str, Any], kind: type[Exception], message: str
) -> None:
    module, inputs = case.module(dropout=P, **options), case.inputs(torch.float32)
    with pytest.raises(kind, match=message) as error:
        module(*inputs, **call)
    assert "\n" not in str(error.value)
    module.eval()(*inputs, **call)


def test_what_cannot_train_is_said_where_it_is_made(said: pytest.LogCaptureFixture) -> None:
    """A first call in training mode was the first to say so, after a hint to probe what no probe measures."""
    Case(8, pattern=pattern_of([4, 8], [1, 2])).module(dropout=P, profile="auto")
    hint, refusal = (record.getMessage() for record in said.records)
    assert hint.endswith(
        "`ringtune probe --heads 2 --head-dim 4 --no-causal --segment-lengths 4,8 --dilation-rates 1,2 --mode infer` "
        "measures one for eval()"
    )
    assert refusal == (
        "[4,8]/[1,2] full H2 D4: dropout is 0.3, and this module refuses calls in training mode, since dropout is "
        "exact in one block of one kernel: in dense attention on one device, not over branches; set it to 0.0 to "
        "train; eval() ignores it"
    )


def test_a_dense_module_with_dropout_is_told_to_measure_its_eval_mode(said: pytest.LogCaptureFixture) -> None:
    """And in its first call of training mode, which no probe measures, which kernel serves that."""
    module = Case(8).module(dropout=P, profile="auto")
    (record,) = said.records
    assert record.getMessage().endswith("--no-causal --dense --mode infer` measures one for eval()")
    for length in (8, 300):
        module(*Case(length).inputs(torch.float32))
    (_, told) = said.records
    assert told.getMessage() == (
        "dense full H2 D4 fp32 train dropout=0.3: dropout is not probed; math serves, which draws it and makes every "
        "weight in memory"
    )
    said.clear()
    Case(8).module(dropout=P)(*Case(8).inputs(torch.float32))  # without a profile on purpose
    assert not said.records


def test_other_calls_and_transforms_are_refused() -> None:
    module, (q, k, v) = CASE.module(dropout=P), CASE.inputs(torch.float32)
    cache = module.kv_cache(2, dtype=torch.float32)
    for call in (
        lambda: module.cross(q, k, v),
        lambda: module.received(q, k, v),
        lambda: module.rows(q, k, v, [0]),
        lambda: torch.func.vmap(module)(*(x[None] for x in (q, k, v))),
        lambda: torch.func.grad(lambda q: module(q, k, v).sum())(q),
        lambda: torch.export.export(module, (q, k, v)),
    ):
        with pytest.raises(InputError, match=r"^dropout is 0\.3 in training mode; .*, or call eval\(\)$"):
            call()
    with torch.no_grad():
        module.prefill(q, k, v, cache)  # what is generated is never dropped


def test_a_graph_that_would_replay_its_random_numbers_is_refused() -> None:
    workload = CASE.module().shape.workload(23, "fp32", True, 2, dropout=P)
    tunables = Tunables("fp32", (BranchTunables("math", "math"),), launch="graph")
    assert any("replay the random numbers" in why for why in rejection_reasons(workload, tunables, cpu()))


def test_a_plan_says_so_and_a_workload_checks_it() -> None:
    module = CASE.module(dropout=P)
    for train in (True, False):
        plan = module.plan_for(23, "fp32", train, 2)
        assert "dropout=0.3" in str(plan)
        assert "dropout" not in str(module.eval().plan_for(23, "fp32", train, 2))
        module.train()
    assert plan.workload.not_probed == "dropout is not probed"
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match=r"^dropout .*must be in \[0, 1\)"):
            module.shape.workload(23, "fp32", True, dropout=wrong)
    with pytest.raises(InputError, match="which is of training"):
        module.shape.workload(23, "fp32", False, dropout=P)


def test_a_module_that_was_compiled_in_eval_mode_drops_when_it_trains() -> None:
    module, (q, k, v) = CASE.module(dropout=P).eval(), CASE.inputs(torch.float32)
    compiled = torch.compile(module, backend="aot_eager")
    exact = module(q, k, v)
    torch.testing.assert_close(compiled(q, k, v), exact)
    module.train()
    assert not torch.equal(compiled(q, k, v), exact)
    module.eval()
    torch.testing.assert_close(compiled(q, k, v), exact)
    assert isinstance(module, RingAttention)
    assert module.shape.pattern == DENSE
