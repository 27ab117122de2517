"""What a plan executes: how often kernels are called, on which rows, in whose memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import DENSE, Case, cases, found, pattern_of, tunables_for
from recorder import Record, record

from ringattn.geometry.calls import cached_geometry
from ringattn.workload import BranchTunables, Tunables


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Record:
    return record(monkeypatch)


def math_plan(*gathers: str, **changes: object) -> Tunables:
    return replace(Tunables("fp64", tuple(BranchTunables("math", "math", g) for g in gathers)), **changes)  # type: ignore[arg-type]


def test_dense_is_one_call_on_the_tensors_themselves(executed: Record) -> None:
    case = Case(20, 4, 2, 4, 3, layout="packed")
    before = cached_geometry.cache_info()
    q, k, v = case.inputs()
    found(case.module(), q, k, v, case.dout())
    assert [(call.direction, call.shape) for call in executed.calls] == [
        ("forward", (3, 20, 4, 4)),
        ("backward", (3, 20, 4, 4)),
    ]
    assert all(call.lies_in(q, k, v) for call in executed.calls)
    assert not executed.steps
    assert cached_geometry.cache_info() == before


@pytest.mark.parametrize(("segment", "shape"), [(5, (12, 5, 4, 4)), (20, (3, 20, 4, 4)), (64, (3, 20, 4, 4))])
def test_equal_segments_are_one_call_whose_result_is_the_result(
    executed: Record, segment: int, shape: tuple[int, ...]
) -> None:
    case = Case(20, 4, 2, 4, 3, pattern_of([segment], [1]))
    q, k, v = case.inputs()
    found(case.module(), q, k, v, case.dout())
    assert [call.shape for call in executed.calls] == [shape, shape]
    assert all(call.lies_in(q, k, v) for call in executed.calls)
    assert executed.steps["merge"] == executed.steps["scatter_sum"] == executed.steps["gather"] == 0


def test_a_view_reads_in_place_and_a_copy_gathers_once(executed: Record) -> None:
    case = Case(32, 4, 4, 4, 2, pattern_of([8, 16], [1, 2]))
    q, k, v = case.inputs()
    found(case.running(math_plan("view", "view")), q, k, v, case.dout())
    # branch 0: all segments of both batch elements; branch 1: one call for each of two offsets (heads 0, 2 and 1, 3)
    assert [call.shape for call in executed.calls] == [(8, 8, 4, 4), (4, 8, 2, 4), (4, 8, 2, 4)] * 2
    assert all(call.lies_in(q, k, v) for call in executed.calls)
    assert (executed.steps["gather"], executed.steps["merge"], executed.steps["scatter_sum"]) == (2, 1, 1)
    executed.clear()
    found(case.running(math_plan("view", "copy")), q, k, v, case.dout())
    assert [call.shape for call in executed.calls] == [(8, 8, 4, 4), (4, 8, 4, 4)] * 2
    assert [call.lies_in(q, k, v) for call in executed.calls] == [True, False] * 2
    gathered = executed.calls[1].tensors
    assert all(x.is_contiguous() for x in gathered)


def test_heads_of_consecutive_offsets_are_one_view(executed: Record) -> None:
    case = Case(32, 4, 4, 4, pattern=pattern_of([16], [4]))  # offsets 0, 1, 2, 3: one diagonal view
    q, k, v = case.inputs()
    case.running(math_plan("view"))(q, k, v)
    (call,) = executed.calls
    assert call.shape == (2, 4, 4, 4)
    assert call.lies_in(q, k, v)


def test_ragged_tails_are_calls_of_their_own(executed: Record) -> None:
    case = Case(37, 4, 4, 4, pattern=pattern_of([16], [4]))  # a tail of 5: head 0 selects two rows, the others one
    case.running(math_plan("copy"))(*case.inputs())
    assert [call.shape for call in executed.calls] == [(2, 4, 4, 4), (1, 2, 1, 4), (1, 1, 3, 4)]


def test_nothing_is_called_for_heads_that_select_nothing(executed: Record) -> None:
    case = Case(8, 4, 4, 4, pattern=pattern_of([2], [4]))  # heads 2 and 3 start beyond the segment
    case.running(math_plan("copy"))(*case.inputs())
    assert [call.shape for call in executed.calls] == [(4, 1, 2, 4)]


def test_windows_are_merged_one_after_the_other(executed: Record) -> None:
    case = Case(40, 2, 2, 4, pattern=pattern_of([4, 8], [1, 2]))
    q, k, v = case.inputs()
    whole = found(case.running(math_plan("view", "copy")), q, k, v, case.dout())
    assert executed.steps["merge"] == 1
    executed.clear()
    windowed = found(case.running(math_plan("view", "copy", window_tokens=16)), q, k, v, case.dout())
    assert executed.steps["merge"] == executed.steps["scatter_sum"] == 3
    assert [call.shape[0] for call in executed.calls if call.direction == "forward"] == [4, 2, 4, 2, 2, 1]
    for x, y in zip(whole, windowed, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_each_direction_and_branch_has_its_kernel(executed: Record) -> None:
    case = Case(32, 2, 2, 4, pattern=pattern_of([8, 16], [1, 2]))
    branches = (BranchTunables("math", "flash-cpu"), BranchTunables("flash-cpu", "math", "copy"))
    q, k, v = case.inputs(torch.float32)
    found(case.running(Tunables("fp32", branches), "fp32"), q, k, v, case.dout(torch.float32))
    assert [(call.name, call.direction) for call in executed.calls] == [
        ("math", "forward"),
        ("flash-cpu", "forward"),
        ("flash-cpu", "backward"),
        ("math", "backward"),
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_kernels_get_what_they_are_promised(executed: Record, data: st.DataObject) -> None:
    """Rows in one piece, LSE contiguous, dout and out contiguous for a kernel that does not read any layout."""
    case = data.draw(cases())
    tunables = data.draw(tunables_for(case, "fp32", ("math", "flash-cpu")))
    executed.clear()
    q, k, v = case.inputs(torch.float32)
    found(case.running(tunables, "fp32"), q, k, v, case.dout(torch.float32))
    assert executed.count("forward") == executed.count("backward") * (2 if tunables.checkpoint == "full" else 1)
    for call in executed.calls:
        q_rows, k_rows, v_rows = call.tensors[:3] if call.direction == "forward" else call.tensors[1:4]
        assert all(x.dtype is torch.float32 for x in call.tensors)
        assert all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in call.tensors)
        assert k_rows.shape == v_rows.shape
        assert q_rows.shape[1] == k_rows.shape[1] > 0
        assert q_rows.shape[2] % k_rows.shape[2] == 0
        if call.direction == "backward":
            dout, _, _, _, out, lse = call.tensors
            assert dout.shape == out.shape == q_rows.shape
            assert lse.shape == (q_rows.shape[0], q_rows.shape[2], q_rows.shape[1])
            assert all(x.is_contiguous() for x in (dout, out, lse))


def test_what_is_fixed_when_a_kernel_is_loaded(executed: Record) -> None:
    case = Case(8, pattern=pattern_of([4], [2]), causal=True, scale=0.25)
    case.module()(*(x.detach() for x in case.inputs()))
    assert [(name, config.causal, config.scale, config.params) for name, config in executed.configs] == [
        ("math", True, 0.25, {})
    ]


def test_kernels_are_loaded_once_a_plan_not_once_a_call(executed: Record) -> None:
    module = Case(8).module()
    for length in (8, 8, 9, 10):
        module(*(x.detach() for x in Case(length).inputs()))
    assert len(executed.configs) == 1
    assert executed.count("forward") == 4


@pytest.mark.parametrize("pattern", [DENSE, pattern_of([8, 16], [1, 2])], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wider_compute_dtype_reaches_the_kernels(executed: Record, pattern: object, dtype: torch.dtype) -> None:
    case = Case(32, 4, 2, 8, pattern=pattern, causal=True)  # type: ignore[arg-type]
    q, k, v = case.inputs(dtype)
    found(case.module(dtype=torch.float32), q, k, v, case.dout(dtype))
    assert {x.dtype for call in executed.calls for x in call.tensors} == {torch.float32}
