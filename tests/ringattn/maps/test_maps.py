"""Attention maps against the softmax built whole in float64, on one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from map_oracle import mask_of, received_of, softmax_of
from oracle import DENSE, Case, cases, pattern_of, tunables_for
from recorder import Allocations, Record, record
from torch import Tensor

from ringattn.errors import InputError, RingAttentionError
from ringattn.maps.received import received
from ringattn.runtime.executor import Executor, Grads
from ringattn.workload import BranchTunables, Tunables

DILATED = Case(40, 6, 2, 8, 2, pattern_of([8, 20, 40], [1, 2, 3]), causal=True)
GROUPED = Case(24, 10, 2, 2, 2, causal=True)  # five heads of a group in two columns: three backwards
BOTH = [Case(24, 4, 2, 8, 2, DENSE, causal=True), DILATED]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Record:
    return record(monkeypatch)


@given(st.data())
def test_received_and_rows_as_the_softmax(data: st.DataObject) -> None:
    case = data.draw(cases())
    module = case.running(data.draw(tunables_for(case)))
    q, k, v = case.inputs()
    p = softmax_of(case, q, k)
    queries = mask_of(case, data.draw(st.sampled_from(("all", "some", "each", "none"))))
    reduce: Any = data.draw(st.sampled_from(("sum", "mean")))
    found = module.received(q, k, v, reduce, queries)
    expected = received_of(p, queries, reduce)
    assert found.dtype is torch.float64
    assert not found.requires_grad
    assert (found - expected).abs().max() <= 1e-12
    lse = module(q, k, v, return_lse=True)[1].detach()
    assert (module.received(q, k, v, reduce, queries, lse=lse) - expected).abs().max() <= 1e-12
    positions = data.draw(st.lists(st.integers(0, case.length - 1), max_size=5))
    found = module.rows(q, k, v, positions)
    assert found.shape == (case.batch, case.heads, len(positions), case.length)
    assert torch.equal(found == 0, p[:, :, positions] == 0)
    assert bool(((found - p[:, :, positions]).abs() <= 1e-12).all())


def test_it_is_the_sum_of_the_rows() -> None:
    module, (q, k, v) = DILATED.module(), DILATED.inputs()
    every = module.rows(q, k, v, torch.arange(DILATED.length))
    assert (every.sum(2) - module.received(q, k, v)).abs().max() <= 1e-12


@pytest.mark.parametrize("case", BOTH, ids=["dense", "dilated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    """As accurate as dv, which is rounded to the dtype of v; rows are computed in float32."""
    q, k, v = case.inputs(dtype)
    p, mask = softmax_of(case, q, k), mask_of(case, "each")
    roundoff = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    for module in (case.module(), case.module(backend="math"), case.module(backend="flash-cpu")):
        found, expected = module.received(q, k, v, queries=mask), received_of(p, mask, "sum")
        assert found.dtype is torch.float32
        assert bool(((found - expected).abs() <= roundoff * (1 + expected)).all())
        found = module.rows(q, k, v, [0, 7, 23])
        assert found.dtype is torch.float32
        assert (found - p[:, :, [0, 7, 23]]).abs().max() < 1e-6


class _EveryQuerySeesEveryKey(Executor):
    """P of ones, as far as 69,632 queries of all ranks make dv; float16 ends at 65,504."""

    def gradients(self, dout: Tensor | None, *others: Any) -> Grads:
        assert dout is not None
        assert dout.dtype is torch.float16
        return None, None, dout * 69_632


def test_more_queries_than_float16_holds() -> None:
    q = torch.zeros(1, 3, 1, 2, dtype=torch.float16)
    lse = torch.zeros(1, 1, 3)
    found = received(_EveryQuerySeesEveryKey(), (q, q, q), 69_632, None, "sum", None, lse)
    assert found.tolist() == [[[69_632.0] * 3]]


@pytest.mark.parametrize("case", BOTH, ids=["dense", "dilated"])
@pytest.mark.parametrize("kernel", ["math", "flash-cpu"])
def test_keys_that_are_none(case: Case, kernel: str) -> None:
    """Keys of -inf receive nothing, and rows that see none but these are 0."""
    q, k, v = (x.detach().float() for x in case.inputs())
    q = q.abs() + 0.1  # so that logits are -inf and not +inf
    for where in (slice(0, 13), slice(5, None), slice(None)):
        k_here = k.clone()
        k_here[:, where] = -math.inf
        module, p = case.module(backend=kernel), softmax_of(case, q, k_here)
        for queries in (None, mask_of(case, "some")):
            found = module.received(q, k_here, v, queries=queries)
            torch.testing.assert_close(found.double(), received_of(p, queries, "sum"), rtol=1e-5, atol=1e-5)
        positions = [0, 4, 13, 20]
        torch.testing.assert_close(
            module.rows(q, k_here, v, positions).double(), p[:, :, positions], rtol=1e-5, atol=1e-6
        )


def test_large_logits() -> None:
    """A rounded lse of 4e5 is off by 0.03 in float32; a row is divided by its own sum."""
    case = BOTH[0]
    q, k, v = case.inputs(torch.float32, size=600.0)
    p = softmax_of(case, q, k)
    assert (case.module().rows(q, k, v, [23]).sum(-1) - 1).abs().max() < 1e-6
    assert (case.module().rows(q, k, v, [23]) - p[:, :, [23]]).abs().max() < 0.1  # of the logits' own rounding


@pytest.mark.parametrize(("case", "backwards"), [(BOTH[0], 1), (GROUPED, 3)], ids=["fits", "does not fit"])
def test_calls_of_kernels(case: Case, backwards: int, executed: Record) -> None:
    """One forward, none where the lse is given, and a backward for as many heads of a group as head_dim has."""
    module, (q, k, v) = case.module(backend="math"), case.inputs()
    lse = module(q, k, v, return_lse=True)[1].detach()
    executed.clear()
    module.received(q, k, v)
    assert (executed.count("forward"), executed.count("backward")) == (1, backwards)
    executed.clear()
    module.received(q, k, v, "mean", mask_of(case, "each"), lse)
    assert (executed.count("forward"), executed.count("backward")) == (0, backwards)
    executed.clear()
    module.rows(q, k, v, [1, 2])
    assert not executed.calls


def test_calls_of_kernels_in_a_pattern(executed: Record) -> None:
    """As many as a training step has, and nothing is summed for dq and dk."""
    module, (q, k, v) = DILATED.module(backend="math"), DILATED.inputs()
    out, lse = module(q, k, v, return_lse=True)
    out.sum().backward()
    step = executed.count("forward"), executed.count("backward")
    executed.clear()
    module.received(q, k, v)
    assert (executed.count("forward"), executed.count("backward")) == step
    executed.clear()
    module.received(q, k, v, lse=lse.detach())
    assert (executed.count("forward"), executed.count("backward")) == (0, step[1])


def test_memory_is_linear_in_the_length() -> None:
    """No tensor that is made has as many elements as 1/10 of the softmax."""
    case = Case(2048, 2, 1, 8, causal=True)
    module, (q, k, v) = case.module(backend="flash-cpu"), case.inputs(torch.float32)
    module.received(q, k, v)
    with Allocations() as made:
        module.received(q, k, v)
        module.rows(q, k, v, [5])
    assert max(made.sizes) < 4 * 2 * 2048 * 2048 / 10


def test_autocast_computes_in_its_dtype(executed: Record) -> None:
    case = BOTH[0]
    flash = Tunables("bf16", (BranchTunables("flash-cpu", "flash-cpu"),))
    module, (q, k, v) = case.running_in_both_modes(flash, "bf16"), case.inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, rows = module.received(q, k, v), module.rows(q, k, v, [3])
    assert {call.tensors[0].dtype for call in executed.calls} == {torch.bfloat16}
    narrow = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(found, module.received(*narrow))
    assert torch.equal(rows, module.rows(*narrow, [3]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reduce": "max"}, "reduce is 'max'; use one of sum, mean"),
        ({"queries": [True]}, "queries is a list; it must be a tensor"),
        ({"queries": torch.ones(24)}, "queries is torch.float32; it must be torch.bool"),
        ({"queries": torch.ones(23, dtype=torch.bool)}, "queries has shape (23,); it must be"),
        ({"lse": torch.zeros(2, 4, 24)}, "lse is torch.float32; it must be torch.float64"),
        ({"lse": torch.zeros(2, 24, 4, dtype=torch.float64)}, "lse has shape (2, 24, 4); it must be"),
        ({"total_length": 25}, "total_length is 25, but this rank holds all 24"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    module, (q, k, v) = BOTH[0].module(), BOTH[0].inputs()
    with pytest.raises(InputError) as caught:
        module.received(q, k, v, **given)
    assert message in str(caught.value)


@pytest.mark.parametrize("positions", [[24], [-1], [1.0], torch.ones(3), torch.ones(1, 1, dtype=torch.int64), [True]])
def test_positions_that_do_not_fit(positions: Any) -> None:
    module, (q, k, v) = BOTH[0].module(), BOTH[0].inputs()
    with pytest.raises(InputError, match="positions"):
        module.rows(q, k, v, positions)


def test_where_no_map_can_be_made() -> None:
    module, (q, k, v) = BOTH[0].module(), BOTH[0].inputs()
    with pytest.raises(InputError, match="q has shape"):
        module.received(q[..., :4], k, v)
    with pytest.raises(RingAttentionError, match="call it outside"):
        torch.func.vmap(lambda q: module.rows(q[None], k[:1], v[:1], [0]))(q)
