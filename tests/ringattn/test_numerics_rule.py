"""Every CPU kernel in every dtype keeps the rule of accuracy (see ``oracle``), whatever the shape and the pattern."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DENSE, Case, absolute_norms, assert_within_rule, cases, exact, found, pattern_of, tunables_for

PAIRS = [("flash-cpu", "flash-cpu"), ("math", "math"), ("flash-cpu", "math"), ("math", "flash-cpu")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
some = settings(max_examples=max(10, settings.default.max_examples // 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@some
@given(cases(longest=40))
def test_small_shapes(dtype: torch.dtype, case: Case) -> None:
    # The rule counts roundings of products and sums; those of logits of 10 and more weigh more than that in exp.
    case = replace(case, scale=None)
    for forward, backward in PAIRS:
        assert_within_rule(case, forward, backward, dtype)


LONG = [
    Case(300, 4, 2, 16, 2, DENSE, causal=True),
    Case(300, 4, 2, 16, 2, pattern_of([64, 128, 256], [1, 2, 4]), causal=True),
    Case(257, 4, 4, 32, 1, pattern_of([32, 64, 128, 256, 512], [1, 2, 4, 8, 16], "blocked"), causal=False),
    Case(200, 2, 1, 8, 1, pattern_of([200] * 8, [1] * 8), causal=True),  # eight equal parts to add
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("forward", "backward"), PAIRS)
@pytest.mark.parametrize("case", LONG, ids=lambda case: f"S{case.length}-{case.pattern}")
def test_longer_shapes(case: Case, forward: str, backward: str, dtype: torch.dtype) -> None:
    assert_within_rule(case, forward, backward, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@some
@given(st.data())
def test_a_wider_compute_dtype_costs_the_rounding_of_inputs_and_results_alone(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(cases(longest=40))
    tunables = data.draw(tunables_for(case, "fp32", ("math", "flash-cpu")))
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    q, k, v = case.inputs(dtype)
    dout = case.dout(dtype)
    results = found(case.running(tunables, name), q, k, v, dout)
    expected = exact(case, q, k, v, dout)
    norms = absolute_norms(case, q, k, v, dout)
    roundoff = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert results.lse.dtype is torch.float32
    for field in ("out", "dq", "dk", "dv"):
        x, x64 = getattr(results, field), getattr(expected, field)
        assert x.dtype is dtype
        # one rounding of the result, and one of the out that the backward starts from
        assert (x.double() - x64).norm() <= 2 * roundoff * norms[field] + 1e-6


def test_the_rule_catches_a_wrong_result_even_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    import oracle

    case = Case(64, 2, 2, 16, pattern=pattern_of([16, 64], [1, 2]))
    found_rightly = oracle.found
    for field, factor in (("out", 1.1), ("dq", 1.5), ("dk", 0.5), ("dv", 1.1)):

        def wrong(*arguments: object, field: str = field, factor: float = factor) -> oracle.Results:
            results = found_rightly(*arguments)  # type: ignore[arg-type]
            if arguments[0].plan.shape.pattern.dense:  # type: ignore[attr-defined]
                return results
            return results._replace(**{field: getattr(results, field) * factor})

        monkeypatch.setattr(oracle, "found", wrong)
        with pytest.raises(AssertionError, match=field):
            assert_within_rule(case, "math", "math", torch.bfloat16)


def test_the_rule_catches_a_coarse_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    import oracle

    case = Case(64, 2, 2, 16, pattern=pattern_of([16, 64], [1, 2]))
    found_rightly = oracle.found

    def coarse(*arguments: object) -> oracle.Results:
        results = found_rightly(*arguments)  # type: ignore[arg-type]
        if arguments[0].plan.shape.pattern.dense:  # type: ignore[attr-defined]
            return results
        return results._replace(lse=results.lse.bfloat16().float())  # as some ring implementations do

    monkeypatch.setattr(
        oracle, "found", lambda *a: coarse(*a) if not a[0].plan.shape.pattern.dense else found_rightly(*a)
    )
    with pytest.raises(AssertionError, match="lse"):
        assert_within_rule(case, "flash-cpu", "flash-cpu", torch.bfloat16)


def test_absolute_norms_bound_the_results_themselves() -> None:
    case = Case(20, 4, 2, 4, 2, pattern_of([8, 20], [2, 1]), causal=True)
    q, k, v = case.inputs()
    norms = absolute_norms(case, q, k, v, case.dout())
    expected = exact(case, q, k, v, case.dout())
    for field, norm in norms.items():
        assert math.isfinite(norm)
        assert getattr(expected, field).norm() <= norm
    alike = replace(case, scale=0.5)  # the default scale of head_dim 4, written out
    assert absolute_norms(alike, q, k, v, case.dout()) == norms
