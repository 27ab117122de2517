"""What a training forward keeps in each checkpoint mode, and that every mode gives the same gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import DENSE, Case, assert_equal_to, exact, found, pattern_of
from recorder import Record, record, saved_tensors
from torch import Tensor

from ringattn import Pattern
from ringattn.autograd.checkpoint import HostCopies
from ringattn.autograd.function import differentiable
from ringattn.errors import PlanError, RingAttentionError
from ringattn.reference import dilated_attention_reference
from ringattn.runtime.merge import TorchOps
from ringattn.tunable_rules import CHECKPOINTS
from ringattn.workload import BranchTunables, Tunables

MANY = pattern_of([4, 8, 16, 5, 32, 7], [1, 2, 4, 3, 8, 1])
NESTED = pattern_of([4, 8, 16], [1, 2, 4])


def plan(pattern: Pattern, checkpoint: str, dtype: str = "fp64", **changes: Any) -> Tunables:
    branches = tuple(
        BranchTunables("math", "math", "copy" if branch.rate > 1 else "view") for branch in pattern.resolved(32)
    )
    return replace(Tunables(dtype, branches, checkpoint=checkpoint), **changes)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Record:
    return record(monkeypatch)


@pytest.mark.parametrize("pattern", [DENSE, pattern_of([8], [1]), pattern_of([8], [2]), MANY, NESTED], ids=str)
@pytest.mark.parametrize("window", [None, 16])
def test_by_default_only_q_k_v_out_and_lse_are_kept(pattern: Pattern, window: int | None) -> None:
    if window and pattern not in (NESTED,):
        pytest.skip("has no window")
    case = Case(32, 4, 2, 4, 2, pattern, causal=True)
    q, k, v = case.inputs()
    module = case.running(plan(pattern, "selective", window_tokens=window)) if window else case.module()
    with saved_tensors() as saved:
        out, lse = module(q, k, v, return_lse=True)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (q, k, v, out, lse)]
    assert [x.shape for x in saved] == [x.shape for x in (q, k, v, out, lse)]


@pytest.mark.parametrize("layout", ["heads_first", "packed", "every_second"])
def test_inputs_are_kept_where_they_lie(layout: str) -> None:
    case = Case(32, 4, 2, 4, 2, MANY, layout=layout)
    q, k, v = case.inputs()
    with saved_tensors() as saved:
        case.module()(q, k, v)
    assert [x.data_ptr() for x in saved[:3]] == [x.data_ptr() for x in (q, k, v)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wider_compute_dtype_keeps_nothing_wider_but_the_lse(dtype: torch.dtype) -> None:
    case = Case(32, 4, 2, 8, pattern=MANY)
    with saved_tensors() as saved:
        case.module(dtype=torch.float32)(*case.inputs(dtype))
    assert [x.dtype for x in saved] == [dtype] * 4 + [torch.float32]


def test_full_keeps_the_inputs_alone_and_runs_the_forward_again(executed: Record) -> None:
    case = Case(32, 4, 2, 4, 2, MANY, causal=True)
    q, k, v = case.inputs()
    with saved_tensors() as saved:
        out = case.running(plan(MANY, "full"))(q, k, v)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (q, k, v)]
    forwards = executed.count("forward")
    out.backward(case.dout())
    assert executed.count("forward") == 2 * forwards
    assert executed.steps["merge"] == 2


def test_none_keeps_the_gathered_rows_and_gathers_fewer_in_the_backward(executed: Record) -> None:
    case = Case(32, 4, 2, 4, 2, NESTED, causal=True)
    q, k, v = case.inputs()
    with saved_tensors() as saved:
        out, lse = case.running(plan(NESTED, "none"))(q, k, v, return_lse=True)
    copied = [call for call in executed.calls if not call.lies_in(q, k, v)]
    assert len(copied) == 2
    rows = [x for call in copied for x in call.tensors]
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (q, k, v, out, lse, *rows)]
    executed.calls.clear()
    out.backward(case.dout())
    kept = {x.data_ptr() for x in rows}
    again = [call for call in executed.calls if call.tensors[1].data_ptr() in kept]
    assert len(again) == 2  # the backward reads what the forward gathered


@pytest.mark.parametrize("pattern", [NESTED, MANY], ids=str)
@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_every_mode_gives_the_same_gradients_bit_for_bit(pattern: Pattern, checkpoint: str, dtype: str) -> None:
    case = Case(37, 4, 2, 4, 2, pattern, causal=True)
    torch_dtype = torch.float64 if dtype == "fp64" else torch.float32
    q, k, v = case.inputs(torch_dtype)
    dout = case.dout(torch_dtype)
    expected = found(case.running(plan(pattern, "selective", dtype), dtype), q, k, v, dout)
    results = found(case.running(plan(pattern, checkpoint, dtype), dtype), q, k, v, dout)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert_equal_to(results, exact(case, q, k, v, dout), 1e-10 if dtype == "fp64" else 2e-5)


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_every_mode_windows_its_work(checkpoint: str) -> None:
    case = Case(43, 4, 2, 4, 2, NESTED, causal=True)
    q, k, v = case.inputs()
    module = case.running(plan(NESTED, checkpoint, window_tokens=16, pool_threshold_mib=0))
    assert_equal_to(found(module, q, k, v, case.dout()), exact(case, q, k, v, case.dout()))


def test_an_argument_turns_the_mode_of_every_plan() -> None:
    case = Case(32, 4, 2, 4, 2, MANY)
    for checkpoint, kept in (("full", 3), ("selective", 5), (None, 5)):
        with saved_tensors() as saved:
            case.module(checkpoint=checkpoint)(*case.inputs())
        assert len(saved) == kept
    with saved_tensors() as saved:
        case.running(plan(MANY, "selective"), checkpoint="none")(*case.inputs())
    assert len(saved) > 5
    dense = Case(32)  # what gathers in a pattern differs from CPU to CPU
    with pytest.raises(PlanError, match="checkpoint none keeps gathered rows, and no branch gathers"):
        dense.module(checkpoint="none")(*dense.inputs())


def test_offload_on_a_cpu_is_refused() -> None:
    case = Case(32)
    with pytest.raises(PlanError, match="checkpoint offload moves tensors to the host, where a CPU has them already"):
        case.module(checkpoint="offload")(*case.inputs())


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_hooks_of_the_user_may_move_what_is_kept(checkpoint: str) -> None:
    case = Case(32, 4, 2, 4, 2, NESTED, causal=True)
    q, k, v = case.inputs()
    module = case.running(plan(NESTED, checkpoint))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True).copy(), torch.from_numpy):
        out = module(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), case.dout())
    for grad, x64 in zip(grads, exact(case, q, k, v, case.dout())[2:], strict=True):
        torch.testing.assert_close(grad, x64, rtol=0, atol=1e-12)


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_what_is_kept_dies_with_the_graph(checkpoint: str) -> None:
    q, k, v = Case(32, pattern=NESTED).inputs()
    out = Case(32, pattern=NESTED).running(plan(NESTED, checkpoint))(q, k, v)
    alive = weakref.ref(out.grad_fn), weakref.ref(q)  # type: ignore[arg-type]
    del out, q
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


# --- offload: what runs without a GPU ---------------------------------------------------------------------------------


def test_a_tensor_changed_in_place_while_its_copy_waits_is_noticed() -> None:
    x = torch.zeros(3)
    copies = HostCopies((x.clone(),), ((weakref.ref(x), x._version),), torch.device("cpu"))
    x.add_(1)
    with pytest.raises(RingAttentionError, match="modified in place after the forward; clone it before"):
        copies.fetch()


class OnHost:
    """``HostCopies`` without streams: what of the mode is not CUDA's."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [x.clone() for x in tensors]

    of = classmethod(lambda cls, tensors: cls(tensors))

    def fetch(self) -> list[Tensor]:
        return self._copies


def keeping(program: Any, checkpoint: str) -> None:
    program.plan = replace(program.plan, tunables=replace(program.plan.tunables, checkpoint=checkpoint))


@pytest.mark.parametrize("pattern", [DENSE, MANY], ids=str)
def test_offload_keeps_nothing_and_goes_back_from_its_copies(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringattn.autograd.checkpoint.HostCopies", OnHost)
    case = Case(37, 4, 2, 4, 2, pattern, causal=True)
    program = case.module().program_for(*case.inputs(), True)
    keeping(program, "offload")  # which a CPU refuses
    for frozen in (False, True):
        q, k, v = case.inputs()
        k.requires_grad_(not frozen)
        with saved_tensors() as saved:
            out, lse = differentiable(program, q, with_lse=True)(q, k, v)
        assert saved == []
        given = torch.ones_like(lse)
        torch.autograd.backward((out, lse), (case.dout(), given))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        expected = dilated_attention_reference(*leaves, case.pattern, case.causal)
        wanted = torch.autograd.grad(expected, leaves, (case.dout(), given))
        assert k.grad is None or not frozen
        for x, x64 in zip((q, k, v), wanted, strict=True):
            if x.requires_grad:
                torch.testing.assert_close(x.grad, x64, rtol=0, atol=1e-10)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_no_mode_sums_what_nobody_asked_for(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(32, 4, 2, 4, 2, NESTED, causal=True)
    q, k, v = (x.detach() for x in case.inputs())
    jobs: list[int] = []
    scatter_sum = TorchOps.scatter_sum
    monkeypatch.setattr(
        TorchOps,
        "scatter_sum",
        lambda self, geometry, window, given, lease: (
            jobs.append(len(given)) or scatter_sum(self, geometry, window, given, lease)
        ),
    )
    program = case.running(plan(NESTED, "selective")).program_for(q, k.requires_grad_(), v, True)
    monkeypatch.setattr("ringattn.autograd.checkpoint.HostCopies", OnHost)
    keeping(program, checkpoint)
    differentiable(program, q, with_lse=False)(q, k, v)[0].sum().backward()
    assert jobs == [1]


def on_gpu(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.detach().cuda().requires_grad_() for x in case.inputs(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", [DENSE, NESTED], ids=str)
def test_offload_keeps_nothing_on_the_gpu_and_gives_the_same_gradients(pattern: Pattern) -> None:
    case = Case(4096, 4, 2, 64, 2, pattern, causal=True)
    dout = case.dout(torch.bfloat16).cuda()
    results = {}
    for checkpoint in ("selective", "offload"):
        inputs = on_gpu(case, torch.bfloat16)
        module = case.module(device=None, checkpoint=checkpoint)
        with saved_tensors() as saved:
            out = module(*inputs)
        kept = [x for x in saved if x.numel() > 2]  # flash's op keeps an unused state of random numbers, too
        assert len(kept) == (5 if checkpoint == "selective" else 0)
        results[checkpoint] = (out.detach(), *torch.autograd.grad(out, inputs, dout))
    selective, offload = results.values()
    assert torch.equal(selective[0], offload[0])
    for right, mine in zip(selective[1:], offload[1:], strict=True):  # backwards add up dq in any order
        assert (mine - right).norm() <= 1e-2 * right.norm()


@pytest.mark.gpu
def test_offload_notices_an_input_changed_in_place() -> None:
    case = Case(512, 4, 4, 64)
    inputs = [x * 1 for x in on_gpu(case, torch.bfloat16)]
    out = case.module(device=None, checkpoint="offload")(*inputs)
    inputs[0].add_(1)
    with pytest.raises(RingAttentionError, match="modified in place"):
        out.sum().backward()
