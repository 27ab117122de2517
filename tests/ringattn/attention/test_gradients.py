"""Gradients: which positions they depend on, what autograd may ask, and what it is refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from oracle import DENSE, Case, assert_equal_to, cases, exact, found, pattern_of, times_seen
from recorder import record
from torch import Tensor

from ringattn import Pattern, attention
from ringattn.errors import RingAttentionError
from ringattn.kernels.registry import KERNELS
from ringattn.reference import dilated_attention_reference
from ringattn.runtime.merge import TorchOps

PATTERNS = [DENSE, pattern_of([8], [1]), pattern_of([4, 8, 6], [1, 2, 3])]
KERNELS_BY_DTYPE = [("math", torch.float64), ("math", torch.float32), ("flash-cpu", torch.float32)]


def grads_of(case: Case, inputs: tuple[Tensor, ...], dout: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(case.module(**arguments)(*inputs), inputs, dout)


# --- which positions matter ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "dtype"), KERNELS_BY_DTYPE)
@given(st.data())
def test_a_query_changes_the_gradients_of_the_keys_it_sees_alone(
    backend: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(cases(layouts=("plain",), longest=24))
    batch, query, head = (data.draw(st.integers(0, n - 1)) for n in (case.batch, case.length, case.heads))
    inputs, dout = case.inputs(dtype), case.dout(dtype)
    before, exact_before = grads_of(case, inputs, dout, backend=backend), exact(case, *inputs, dout)
    dout[batch, query, head] += 3.0
    after, exact_after = grads_of(case, inputs, dout, backend=backend), exact(case, *inputs, dout)

    seen = times_seen(case)[head, query] > 0
    kv_head = head // (case.heads // case.kv_heads)
    touched_q = torch.zeros(case.batch, case.length, case.heads, dtype=torch.bool)
    touched_q[batch, query, head] = True
    touched_kv = torch.zeros(case.batch, case.length, case.kv_heads, dtype=torch.bool)
    touched_kv[batch, :, kv_head] = seen
    for grad, changed, touched in zip(before, after, (touched_q, touched_kv, touched_kv), strict=True):
        assert torch.equal(grad[~touched], changed[~touched])  # bit for bit
    moved = (exact_before.dv - exact_after.dv).abs().amax(-1) > 1e-4  # by more than float32 rounds
    assert (before[2] != after[2]).any(-1)[moved].all()


@pytest.mark.parametrize(("backend", "dtype"), KERNELS_BY_DTYPE)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_nobody_sees_changes_no_gradient(backend: str, dtype: torch.dtype, which: str) -> None:
    case = Case(30, 2, 2, 4, pattern=pattern_of([8, 12], [4, 4]), causal=True)
    inputs, dout = case.inputs(dtype), case.dout(dtype)
    before = grads_of(case, inputs, dout, backend=backend)
    unseen = (times_seen(case).sum(1) == 0).T  # (S, H)
    assert unseen.any()
    with torch.no_grad():
        inputs["qkv".index(which)][:, unseen] = 77.0
        dout[:, unseen] = -55.0
    after = grads_of(case, inputs, dout, backend=backend)
    for grad, changed in zip(before, after, strict=True):
        assert torch.equal(grad, changed)
        assert (grad[:, unseen] == 0).all()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_gradcheck(pattern: Pattern) -> None:
    case = Case(9, 2, 1, 2, 1, pattern, causal=True)
    assert torch.autograd.gradcheck(case.module(), case.inputs())


def test_merge_weights_are_no_constants_in_the_backward() -> None:
    # two branches of unequal weight: treating exp(L_b - L) as constant would leave dq and dk 10 % wrong
    case = Case(16, pattern=pattern_of([4, 16], [1, 4]), scale=2.0)
    q, k, v = case.inputs()
    assert_equal_to(found(case.module(), q, k, v, case.dout()), exact(case, q, k, v, case.dout()), 1e-12)


# --- frozen inputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [None, "full"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("needed", [n for n in product((False, True), repeat=3) if any(n)])
def test_frozen_inputs_get_no_gradient(pattern: Pattern, needed: tuple[bool, ...], checkpoint: str | None) -> None:
    case = Case(13, 4, 2, 4, 2, pattern, causal=True)
    expected = exact(case, *case.inputs(), case.dout())[2:]
    inputs = [x.detach().requires_grad_(need) for x, need in zip(case.inputs(), needed, strict=True)]
    case.module(checkpoint=checkpoint)(*inputs).backward(case.dout())
    for x, need, x64 in zip(inputs, needed, expected, strict=True):
        if need:
            torch.testing.assert_close(x.grad, x64, rtol=0, atol=1e-12)
        else:
            assert x.grad is None


def test_frozen_inputs_cost_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[list[tuple[int, ...]]] = []
    scatter_sum = TorchOps.scatter_sum

    def noting(ops: TorchOps, geometry: Any, window: Any, jobs: Any, lease: Any) -> None:
        summed.append([tuple(job.target.shape) for job in jobs])
        scatter_sum(ops, geometry, window, jobs, lease)

    monkeypatch.setattr(TorchOps, "scatter_sum", noting)
    case = Case(13, 4, 2, 4, pattern=pattern_of([4, 8], [1, 2]))
    q, k, v = case.inputs()
    module = case.module()
    module(q, k.detach(), v.detach()).sum().backward()
    module(q.detach(), k, v).sum().backward()
    assert summed == [[(1, 13, 4, 4)], [(1, 13, 2, 4), (1, 13, 2, 4)]]


# --- what autograd hands over ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["math", "flash-cpu"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("kind", ["sum", "mean over heads", "transposed", "every second", "double loss"])
def test_gradients_of_out_may_have_any_layout(pattern: Pattern, backend: str, kind: str) -> None:
    losses = {
        "sum": lambda out: out.sum(),  # an expanded number
        "mean over heads": lambda out: (out.mean(2) * torch.arange(4.0, dtype=out.dtype)).sum(),
        "transposed": lambda out: (out.transpose(1, 2).contiguous() ** 2).sum(),
        "every second": lambda out: (out[:, ::2] ** 2).sum(),
        "double loss": lambda out: (out.double() ** 2).sum(),
    }
    case = Case(17, 4, 2, 4, 2, pattern, causal=True)
    dtype = torch.float64 if backend == "math" else torch.float32
    inputs = case.inputs(dtype)
    grads = torch.autograd.grad(losses[kind](case.module(backend=backend)(*inputs)), inputs)
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    out, _ = dilated_attention_reference(*leaves, pattern, True)
    for grad, expected in zip(grads, torch.autograd.grad(losses[kind](out), leaves), strict=True):
        assert grad.dtype is dtype
        torch.testing.assert_close(grad.double(), expected, rtol=0, atol=1e-10 if dtype is torch.float64 else 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", [torch.float32, None])
def test_gradients_have_the_dtype_of_the_inputs(dtype: torch.dtype, compute: torch.dtype | None) -> None:
    case = Case(13, 4, 2, 8, pattern=pattern_of([4, 8], [2, 1]))
    q, k, v = case.inputs(dtype)
    results = found(case.module(dtype=compute), q, k, v, case.dout(dtype))
    assert {x.dtype for x in (results.out, results.dq, results.dk, results.dv)} == {dtype}


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_two_forwards_before_one_backward(pattern: Pattern) -> None:
    first, second = (Case(12, pattern=pattern, seed=seed) for seed in (1, 2))
    module = first.module()
    inputs = [case.inputs() for case in (first, second)]
    outs = [module(*x) for x in inputs]
    (outs[0] * first.dout() + outs[1] * second.dout()).sum().backward()
    for case, leaves in zip((first, second), inputs, strict=True):
        expected = exact(case, *leaves, case.dout())
        for x, x64 in zip(leaves, expected[2:], strict=True):
            torch.testing.assert_close(x.grad, x64, rtol=0, atol=1e-12)


def test_a_graph_that_is_kept_gives_its_gradients_again() -> None:
    case = Case(12, pattern=pattern_of([4, 8], [2, 1]))
    inputs = case.inputs()
    out = case.module()(*inputs)
    first = torch.autograd.grad(out, inputs, case.dout(), retain_graph=True)
    again = torch.autograd.grad(out, inputs, case.dout())
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, case.dout())


def test_gradients_add_up_in_leaves_and_flow_through_what_comes_before() -> None:
    case = Case(9, pattern=pattern_of([4], [1]))
    q, k, v = case.inputs()
    module = case.module()
    expected = exact(case, q * 2, k, v, case.dout())
    for _ in range(2):
        module(q * 2, k, v).backward(case.dout())
    assert q.grad is not None
    torch.testing.assert_close(q.grad, 4 * expected.dq, rtol=0, atol=1e-12)


def test_torchs_own_checkpointing_around_the_module() -> None:
    case = Case(12, pattern=pattern_of([4, 8], [2, 1]))
    inputs = case.inputs()
    out = torch.utils.checkpoint.checkpoint(case.module(), *inputs, use_reentrant=False)
    expected = exact(case, *inputs, case.dout())
    for grad, x64 in zip(torch.autograd.grad(out, inputs, case.dout()), expected[2:], strict=True):
        torch.testing.assert_close(grad, x64, rtol=0, atol=1e-12)


def test_a_backward_in_another_thread() -> None:
    case = Case(12, pattern=pattern_of([4, 8], [2, 1]))
    inputs = case.inputs()
    out = case.module()(*inputs)
    thread = threading.Thread(target=out.backward, args=(case.dout(),))
    thread.start()
    thread.join()
    assert inputs[0].grad is not None
    torch.testing.assert_close(inputs[0].grad, exact(case, *inputs, case.dout()).dq, rtol=0, atol=1e-12)


def test_an_output_that_is_not_used_costs_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    executed = record(monkeypatch)
    case = Case(8)
    module = case.module()
    for use, calls in ((lambda out, lse: out, 1), (lambda out, lse: lse, 1), (lambda out, lse: (out, lse), 2)):
        q, k, v = case.inputs()
        used = use(*module(q, k, v, return_lse=True))
        executed.calls.clear()
        sum(x.sum() for x in (used if isinstance(used, tuple) else (used,))).backward()
        assert len(executed.calls) == calls
    executed.calls.clear()
    q, k, v = case.inputs()
    _, lse = module(q, k, v, return_lse=True)
    (lse.detach().sum() + q.sum()).backward()
    assert [call.direction for call in executed.calls] == ["forward"]
    assert k.grad is None


# --- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_double_backward_is_refused_in_one_line(pattern: Pattern) -> None:
    case = Case(8, pattern=pattern)
    inputs = case.inputs()
    with pytest.raises(RingAttentionError, match=r"^double backward \(create_graph=True\) is not supported: [^\n]*$"):
        torch.autograd.grad(case.module()(*inputs), inputs, case.dout(), create_graph=True)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_input_changed_in_place_before_the_backward_is_noticed(which: int) -> None:
    case = Case(8, pattern=pattern_of([4, 8], [2, 1]))
    inputs = [x.detach().clone().requires_grad_() * 1 for x in case.inputs()]
    out = case.module()(*inputs)
    inputs[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_lse_changed_in_place_before_the_backward_is_noticed() -> None:
    case = Case(8, pattern=pattern_of([4, 8], [2, 1]))
    out, lse = case.module()(*case.inputs(), return_lse=True)
    lse.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_output_changed_in_place_before_the_backward_is_noticed_unless_the_forward_runs_again() -> None:
    case = Case(8, pattern=pattern_of([4, 8], [2, 1]))
    inputs = case.inputs()
    out = case.module()(*inputs)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(case.dout())
    out = case.module(checkpoint="full")(*inputs)
    out.mul_(2)
    grads = torch.autograd.grad(out, inputs, case.dout())
    for grad, x64 in zip(grads, exact(case, *inputs, case.dout() * 2)[2:], strict=True):
        torch.testing.assert_close(grad, x64, rtol=0, atol=1e-12)


# --- determinism -------------------------------------------------------------------------------------------------


def test_a_deterministic_torch_is_told_to_the_kernels_at_init(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    flash = KERNELS["flash-cpu"]

    def load(config: Any) -> Any:
        told.append(config.deterministic)
        return flash.load(config)

    monkeypatch.setitem(KERNELS, "flash-cpu", replace(flash, load=load))  # type: ignore[arg-type]
    monkeypatch.setattr(attention, "faults_among", lambda *arguments: [])  # the accuracy checks load kernels, too
    case = Case(8)
    inputs = [x.detach() for x in case.inputs(torch.float32)]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        module = case.module(backend="flash-cpu")
        module(*inputs)
    finally:
        torch.use_deterministic_algorithms(before)
    case.module(backend="flash-cpu")(*inputs)
    assert told == [True, False]
    assert module.plan.conditions.deterministic


@pytest.mark.parametrize("backend", ["math", "flash-cpu"])
def test_results_are_the_same_bit_for_bit_every_time(backend: str) -> None:
    case = Case(50, 4, 2, 8, 2, pattern_of([8, 16, 32], [1, 2, 4]), causal=True)
    q, k, v = case.inputs(torch.float32)
    module = case.module(backend=backend)
    first = found(module, q, k, v, case.dout(torch.float32))
    for _ in range(3):
        again = found(module, q, k, v, case.dout(torch.float32))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
