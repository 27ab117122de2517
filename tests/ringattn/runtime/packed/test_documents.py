"""Packed documents and padded sequences: each equals the float64 oracle of that document alone."""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    DENSE,
    Case,
    Results,
    assert_equal_to,
    assert_within_rule_over,
    cases,
    exact_over,
    found,
    pattern_of,
    tunables_for,
)
from torch import Tensor

from ringattn import Documents, Pattern, RingAttention
from ringattn.errors import InputError, PlanError
from ringattn.hardware.kernel_faults import Combination
from ringattn.kernels.contract import BoundVarlen, KernelConfig, Sequences
from ringattn.kernels.registry import KERNELS
from ringattn.planning.equal_plans import plainest
from ringattn.planning.validation.accuracy_check import check_all
from ringattn.runtime.packed import documents as reading
from ringattn.runtime.packed.documents import documents_of
from ringattn.runtime.packed.varlen_program import VarlenProgram
from ringattn.workload import Branch, BranchTunables, Tunables

LONGNET = pattern_of([4, 8, 16], [1, 2, 4])


def bounds(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@st.composite
def packed(draw: st.DrawFn) -> tuple[Case, list[int]]:
    """A case of one row, and cu_seqlens that fit it: documents of length 0 and 1, equal ones, one huge, a tail."""
    kinds = st.sampled_from((0, 1, 2, 3, 5, 8, 8, 13, 40))
    lengths = draw(st.lists(kinds, min_size=1, max_size=6))
    tail = draw(st.integers(0, 4))
    case = replace(draw(cases()), batch=1, length=max(1, sum(lengths) + tail))
    return case, bounds(lengths)


@st.composite
def padded(draw: st.DrawFn) -> tuple[Case, list[int]]:
    case = draw(cases(longest=24))
    one = st.one_of(st.just(case.length), st.integers(0, case.length))
    return case, draw(st.lists(one, min_size=case.batch, max_size=case.batch))


def check(case: Case, module: RingAttention, **documents: Any) -> Results:
    q, k, v = case.inputs()
    results = found(module, q, k, v, case.dout(), **documents)
    placed = documents_of(documents.get("cu_seqlens"), documents.get("lengths")).placed(case.batch, case.length)
    assert_equal_to(results, exact_over(case, placed, q, k, v, case.dout()))
    return results


@settings(max_examples=60, deadline=None)
@given(packed(), st.data())
def test_packed_documents_equal_the_oracle(case_and_bounds: tuple[Case, list[int]], data: st.DataObject) -> None:
    case, cu_seqlens = case_and_bounds
    check(case, case.module(), cu_seqlens=cu_seqlens)


@settings(max_examples=60, deadline=None)
@given(padded())
def test_padded_sequences_equal_the_oracle(case_and_lengths: tuple[Case, list[int]]) -> None:
    case, lengths = case_and_lengths
    check(case, case.module(), lengths=lengths)


@settings(max_examples=40, deadline=None)
@given(packed(), st.data())
def test_every_plan_is_right_for_documents(case_and_bounds: tuple[Case, list[int]], data: st.DataObject) -> None:
    case, cu_seqlens = case_and_bounds
    documents = Documents(cu_seqlens)
    count, longest, positions = documents.sizes(1, case.length)
    tunables = data.draw(tunables_for(replace(case, length=longest)))
    if data.draw(st.booleans()):
        at_once = replace(tunables, packing="varlen")
        tunables = plainest(replace(case.workload(), seq_len=longest, batch=count, packed_tokens=positions), at_once)
        assert tunables.packing == "varlen"
    module = case.running_over(tunables, longest, count, positions)
    assert module.plan.plan_at(longest, "fp64", True, count, packed_tokens=positions).runnable().tunables == tunables
    check(case, module, cu_seqlens=documents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", [("math", "math"), ("flash-cpu", "flash-cpu"), ("flash-cpu", "math")])
@pytest.mark.parametrize("pattern", [DENSE, LONGNET])
def test_documents_keep_the_rule_of_accuracy(dtype: torch.dtype, kernels: tuple[str, str], pattern: Pattern) -> None:
    case = Case(64, heads=4, kv_heads=2, head_dim=16, pattern=pattern, causal=True)
    assert_within_rule_over(case, *kernels, dtype, cu_seqlens=[0, 1, 18, 34, 50, 61])


@pytest.mark.parametrize("kernel", ["math", "flash-cpu"])
@pytest.mark.parametrize("pattern", [DENSE, LONGNET])
@pytest.mark.parametrize("train", [False, True])
def test_a_call_without_lse_is_the_same(kernel: str, pattern: Pattern, train: bool) -> None:
    """Such calls may take torch's own function, or leave the gradient to it, which know no documents."""
    case = Case(24, heads=4, kv_heads=2, head_dim=8, pattern=pattern, causal=True)
    module, cu_seqlens = case.module(backend=kernel), [0, 9, 17, 24]
    q, k, v = case.inputs(torch.float32)
    expected = found(module, q, k, v, case.dout(torch.float32), cu_seqlens=cu_seqlens)
    with torch.set_grad_enabled(train):
        out = module(q, k, v, cu_seqlens=cu_seqlens)
    assert torch.equal(out, expected.out)
    if train:
        grads = torch.autograd.grad(out, (q, k, v), case.dout(torch.float32))
        assert all(map(torch.equal, grads, expected[2:]))


def test_documents_never_see_each_other() -> None:
    """Everything of the other documents stays bit for bit what it was when one is changed."""
    case = Case(40, heads=4, kv_heads=2, head_dim=8, pattern=LONGNET, causal=False)
    cu_seqlens, changed = [0, 7, 7, 23, 36], slice(7, 23)
    module = case.module(dtype=torch.float32)
    inputs = case.inputs(torch.float32)
    before = found(module, *inputs, case.dout(torch.float32), cu_seqlens=cu_seqlens)
    with torch.no_grad():
        for x in inputs:
            x[:, changed] = torch.randn_like(x[:, changed]) * 9
    dout = case.dout(torch.float32)
    dout[:, changed] *= -3
    after = found(module, *inputs, dout, cu_seqlens=cu_seqlens)
    others = torch.cat([torch.arange(7), torch.arange(23, 40)])
    for name, x, y in zip(Results._fields, before, after, strict=True):
        dim = 2 if name == "lse" else 1
        assert torch.equal(x.index_select(dim, others), y.index_select(dim, others)), name
        assert not torch.equal(x, y), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("pattern", [DENSE, LONGNET])
@pytest.mark.parametrize("packing", ["documents", "varlen"])
def test_padding_may_hold_anything(bad: float, pattern: Pattern, packing: str) -> None:
    case = Case(12, batch=3, heads=2, head_dim=8, pattern=pattern)
    lengths = [12, 0, 5]
    branches = (BranchTunables("math", "math"),) * len(pattern.resolved(12))
    module = case.running_over(Tunables("fp64", branches, packing=packing), 12, 2, 17)
    clean = found(module, *case.inputs(), case.dout(), lengths=lengths)
    inputs, dout = case.inputs(), case.dout()
    with torch.no_grad():
        for row, length in enumerate(lengths):
            for x in (*inputs, dout):
                x[row, length:] = bad
    dirty = found(module, *inputs, dout, lengths=lengths)
    for name, x, y in zip(Results._fields, clean, dirty, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("documents", [{"cu_seqlens": [0, 0]}, {"lengths": [0, 0]}])
def test_a_batch_of_padding_alone_is_zeros_with_zero_gradients(documents: dict[str, list[int]]) -> None:
    case = Case(6, batch=len(documents.get("lengths", [0])))
    results = check(case, case.module(), **documents)
    assert not results.out.any()
    assert not results.dq.any()


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_documents_are_given_in_any_form(form: Any, wrapped: bool) -> None:
    case = Case(9, causal=True)
    given = form([0, 4, 7])
    check(case, case.module(), cu_seqlens=[0, 4, 7])
    q, k, v = case.inputs()
    expected = case.module()(q, k, v, cu_seqlens=[0, 4, 7])
    assert torch.equal(case.module()(q, k, v, cu_seqlens=Documents(given) if wrapped else given), expected)


def test_gradients_by_finite_differences() -> None:
    case = Case(7, heads=2, kv_heads=1, head_dim=3, pattern=pattern_of([3, 4], [1, 2]), causal=True)
    module = case.module()
    assert torch.autograd.gradcheck(lambda q, k, v: module(q, k, v, cu_seqlens=[0, 4, 5, 6]), case.inputs())
    padded = replace(case, batch=2, pattern=DENSE)
    dense = padded.module()
    assert torch.autograd.gradcheck(lambda q, k, v: dense(q, k, v, lengths=[3, 7]), padded.inputs())


def test_a_loss_may_use_lse() -> None:
    case = Case(9, heads=2, head_dim=4, pattern=LONGNET, causal=True)
    cu_seqlens = [0, 4, 8]

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return out.square().sum() + lse.masked_fill(lse.isneginf(), 0).sin().sum()

    inputs = case.inputs()
    loss(*case.module()(*inputs, return_lse=True, cu_seqlens=cu_seqlens)).backward()
    again = case.inputs()
    parts = [tuple(x[:, b:e] for x in again) for b, e in itertools.pairwise(cu_seqlens)]
    sum(loss(*case.module()(*part, return_lse=True)) for part in parts).backward()  # type: ignore[union-attr]
    for x, y in zip(inputs, again, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", list(itertools.combinations("qkv", 2)))
def test_frozen_inputs_have_no_gradient(frozen: tuple[str, ...]) -> None:
    case = Case(9, pattern=LONGNET)
    inputs = dict(zip("qkv", case.inputs(), strict=True))
    for name in frozen:
        inputs[name].requires_grad_(False)
    case.module()(**inputs, cu_seqlens=[0, 5, 9]).sum().backward()
    assert {name for name, x in inputs.items() if x.grad is None} == set(frozen)


def test_autocast_computes_documents_in_its_dtype() -> None:
    case = Case(12, head_dim=8, causal=True)
    inputs = case.inputs(torch.float32)
    module = case.module()
    with torch.autocast("cpu", torch.bfloat16):
        out = module(*inputs, cu_seqlens=[0, 5, 12])
    narrow = module(*(x.bfloat16() for x in inputs), cu_seqlens=[0, 5, 12])
    assert out.dtype is torch.float32
    assert torch.equal(out, narrow.float())


def test_a_tensor_is_read_once_while_it_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = reading._on_host
    monkeypatch.setattr(reading, "_on_host", lambda name, given: reads.append(name) or original(name, given))
    case = Case(9)
    layers, cu_seqlens = [case.module() for _ in range(3)], torch.tensor([0, 4, 9])
    for layer in layers:
        layer(*case.inputs(), cu_seqlens=cu_seqlens)
    assert reads == ["cu_seqlens"]
    cu_seqlens[1] = 6
    q, k, v = case.inputs()
    assert torch.equal(layers[0](q, k, v, cu_seqlens=cu_seqlens), layers[0](q, k, v, cu_seqlens=[0, 6, 9]))
    documents = Documents(cu_seqlens)
    reads.clear()
    layers[0](q, k, v, cu_seqlens=documents)
    assert reads == []


def test_one_tensor_may_be_both_arguments_in_turn() -> None:
    case, given = Case(4, batch=2), torch.tensor([0, 4])
    module = case.module()
    q, k, v = case.inputs()
    out = module(q, k, v, lengths=given)
    assert not out[0].any()
    assert out[1].any()
    one = module(q[:1], k[:1], v[:1], cu_seqlens=given)
    assert one.any()


def test_documents_are_values() -> None:
    one = Documents([0, 3, 5])
    unpickled = pickle.loads(pickle.dumps(one))  # noqa: S301
    same = (Documents(torch.tensor([0, 3, 5])), copy.copy(one), copy.deepcopy(one), unpickled)
    assert all(other == one and hash(other) == hash(one) for other in same)
    assert one != Documents(lengths=[0, 3, 5])
    assert one != Documents([0, 3, 6])
    assert repr(one) == "Documents([0, 3, 5])"
    assert repr(Documents(lengths=[2])) == "Documents(lengths=[2])"


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ({"cu_seqlens": [1, 4]}, "cu_seqlens starts at 1; it must start at 0"),
        ({"cu_seqlens": [0, 5, 4]}, "cu_seqlens holds 4 after 5; it must hold integers, none below the last"),
        ({"cu_seqlens": [0, 2.0]}, "cu_seqlens holds 2.0 after 0"),
        ({"cu_seqlens": [0, 10]}, "cu_seqlens ends at 10, and q has 9 positions"),
        ({"cu_seqlens": [0]}, "cu_seqlens has 1 entry"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "cu_seqlens is a tensor of torch.float32"),
        ({"cu_seqlens": torch.tensor([[0, 4]])}, r"cu_seqlens has shape \(1, 2\)"),
        ({"cu_seqlens": "0, 4"}, "cu_seqlens is '0, 4'; give a list of integers, a tensor or Documents"),
        ({"cu_seqlens": 4}, "cu_seqlens is 4; give a list"),
        ({"cu_seqlens": [0, 4], "lengths": [4]}, "cu_seqlens and lengths are both given"),
        ({"lengths": [4, 4]}, "lengths has 2 entries and q batch size 1"),
        ({"lengths": [10]}, "lengths holds 10, and q has 9 positions"),
        ({"lengths": [-1]}, "lengths is -1; it must be an integer >= 0"),
        ({"lengths": [True]}, "lengths is True; it must be an integer >= 0"),
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": Documents([0, 4])}, r"lengths is Documents\(\[0, 4\]\); pass it as cu_seqlens"),
        ({"cu_seqlens": Documents(lengths=[4])}, r"cu_seqlens is Documents\(lengths=\[4\]\); pass it as lengths"),
        ({"cu_seqlens": [0, 4], "total_length": 8}, "total_length is 8, but this rank holds all 9; leave it out"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(documents: dict[str, Any], message: str) -> None:
    case = Case(9)
    with pytest.raises(InputError, match=message) as error:
        case.module()(*case.inputs(), **documents)
    assert "\n" not in str(error.value)


def test_packed_documents_have_one_row() -> None:
    case = Case(4, batch=2)
    with pytest.raises(InputError, match="cu_seqlens is for packed documents in one row, and q has batch size 2"):
        case.module()(*case.inputs(), cu_seqlens=[0, 4])


@pytest.mark.parametrize("given", [{}, {"cu_seqlens": [0, 1], "lengths": [1]}])
def test_documents_are_of_one_kind(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="give either cu_seqlens, of packed documents, or lengths"):
        Documents(**given)


def test_the_limit_on_length_is_on_documents() -> None:
    case = Case(20)
    module = case.module(max_seq_len=8)
    check(case, module, cu_seqlens=[0, 8, 16, 20])
    with pytest.raises(InputError, match="the sequence has 9 positions, more than max_seq_len, 8"):
        module(*case.inputs(), cu_seqlens=[0, 9])


def test_a_plan_with_graphs_of_its_own_is_not_for_documents() -> None:
    case = Case(16)
    tunables = Tunables("fp32", (BranchTunables("math", "math"),), launch="graph")
    with pytest.raises(PlanError, match="documents of a batch are others each time"):
        case.running_over(tunables, 8, 2, 16, dtype="fp32")


def test_torch_func_takes_no_documents() -> None:
    case = Case(6)
    module = case.module()
    with pytest.raises(InputError, match=r"torch.func takes neither cu_seqlens nor lengths; call for each document"):
        torch.func.vmap(lambda q, k, v: module(q, k, v, cu_seqlens=[0, 6]))(*(x.detach()[None] for x in case.inputs()))


@pytest.mark.parametrize("form", [torch.tensor, Documents, list])
@pytest.mark.parametrize("pattern", [DENSE, LONGNET])
def test_a_compiled_model_has_documents_in_its_graph(form: Any, pattern: Pattern) -> None:
    case = Case(12, head_dim=8, causal=True, pattern=pattern)
    module = case.module()

    def model(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any) -> Tensor:
        return module(q * 2, k, v, cu_seqlens=cu_seqlens) + 1

    inputs = case.inputs(torch.float32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for bounds in ([0, 5, 12], [0, 1, 11]):
        expected = model(*inputs, form(bounds))
        found_out = compiled(*inputs, form(bounds))
        assert torch.equal(found_out, expected)
        grads = (torch.autograd.grad(out.sum(), inputs) for out in (found_out, expected))
        for x, y in zip(*grads, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_model_has_padding_in_its_graph(autocast: bool) -> None:
    case = Case(12, head_dim=8, batch=3, causal=True)
    module = case.module()
    q, k, v = (x.detach() for x in case.inputs(torch.float32))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    lengths = torch.tensor([12, 0, 7])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(compiled(q, k, v, lengths=lengths), module(q, k, v, lengths=lengths))


def test_what_makes_no_sense_is_refused_in_a_compiled_graph() -> None:
    case = Case(9)
    compiled = torch.compile(case.module(), backend="aot_eager")
    with pytest.raises(InputError, match="cu_seqlens ends at 10, and q has 9 positions"):
        compiled(*case.inputs(torch.float32), cu_seqlens=torch.tensor([0, 10]))


class Packed(torch.nn.Module):
    def __init__(self, attn: RingAttention) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        out = self.attn(q, k, v, cu_seqlens=cu_seqlens)
        assert isinstance(out, Tensor)
        return out


def test_an_exported_model_takes_documents() -> None:
    case = Case(12, head_dim=8, pattern=LONGNET)
    model = Packed(case.module())
    q, k, v = (x.detach() for x in case.inputs(torch.float32))
    program = torch.export.export(model, (q, k, v, torch.tensor([0, 5, 12])))
    for bounds in (torch.tensor([0, 5, 12]), torch.tensor([0, 1, 9])):
        assert torch.equal(program.module()(q, k, v, bounds), model(q, k, v, bounds))


def test_equal_documents_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from recorder import record

    case = Case(40, head_dim=8)
    made = record(monkeypatch)
    module = case.module(backend="math")
    module(*case.inputs(torch.float32), cu_seqlens=[0, 8, 16, 24, 30, 36])
    assert [call.shape[:2] for call in made.calls] == [(3, 8), (2, 6)]
    made.clear()
    padded = replace(case, batch=4, length=9)
    module(*padded.inputs(torch.float32), lengths=[5, 5, 9, 9])
    assert [call.shape[:2] for call in made.calls] == [(2, 5), (2, 9)]


def test_segments_count_from_the_start_of_a_document() -> None:
    case = Case(10, pattern=Pattern((Branch(4, 2),)), heads=2, kv_heads=2)
    results = check(case, case.module(), cu_seqlens=[0, 3, 10])
    selected = ~results.lse[0, 0].isneginf()
    assert selected.tolist() == [True, False, True, True, False, True, False, True, False, True]


@pytest.mark.parametrize("pattern", [DENSE, LONGNET])
@pytest.mark.parametrize(("forward", "backward"), [("math", "math"), ("math", "flash-cpu")])
def test_all_documents_are_one_call_of_an_entry_for_them(pattern: Pattern, forward: str, backward: str) -> None:
    """math's entry stands in for those of GPUs; a kernel without one is refused by name."""
    case = Case(30, heads=4, kv_heads=2, pattern=pattern, causal=True)
    branches = (BranchTunables(forward, backward),) * len(pattern.resolved(30))
    tunables = Tunables("fp32", branches, packing="varlen")
    if backward == "flash-cpu":
        with pytest.raises(PlanError, match="backward flash-cpu: has no entry for packed sequences"):
            case.running_over(tunables, 12, 3, 30, dtype="fp32")
        return
    module = case.running_over(tunables, 12, 3, 30, dtype="fp32")
    inputs, dout = case.inputs(torch.float32), case.dout(torch.float32)
    results = found(module, *inputs, dout, cu_seqlens=[0, 7, 19, 30])
    (program,) = module._programs.values()
    assert isinstance(program, VarlenProgram)
    placed = Documents([0, 7, 19, 30]).placed(1, 30)
    assert_equal_to(results, exact_over(case, placed, *inputs, dout), 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": "none"}, "checkpoint none: packing varlen gathers rows again"),
        ({"window_tokens": 16}, "window_tokens: packing varlen runs all documents at once"),
        ({"pattern_cache": False}, "packing varlen gathers and merges all documents at once"),
    ],
)
def test_what_changes_nothing_beside_varlen_is_refused(change: dict[str, Any], message: str) -> None:
    case = Case(64, pattern=LONGNET)
    branches = (BranchTunables("math", "math"),) * 3
    with pytest.raises(PlanError, match=message):
        case.running_over(Tunables("fp64", branches, packing="varlen", **change), 32, 2, 64)


def test_varlen_is_for_documents() -> None:
    case = Case(8)
    with pytest.raises(PlanError, match="packing varlen is for documents"):
        case.running(Tunables("fp64", (BranchTunables("math", "math"),), packing="varlen"))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
def test_an_entry_that_forgets_the_bounds_fails_the_accuracy_check(
    backward: bool, causal: bool, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check calls it with two sequences, of which the first is not to be seen by the second."""
    load = KERNELS["math"].load_varlen
    assert load is not None

    def forgetting(config: KernelConfig) -> BoundVarlen:
        right = load(config)

        def joined(sequences: Sequences) -> Sequences:
            return replace(sequences, bounds=(0, sequences.bounds[-1])) if forgets else sequences

        return BoundVarlen(
            lambda q, k, v, sequences, /: right.forward(q, k, v, joined(sequences)),
            lambda dout, q, k, v, out, lse, sequences, /: right.backward(dout, q, k, v, out, lse, joined(sequences)),
        )

    entry = replace(KERNELS["flash-cpu"], load_varlen=forgetting)
    monkeypatch.setitem(KERNELS, "flash-cpu", entry)  # type: ignore[arg-type]
    asked = Combination("flash-cpu", 16, "fp32", backward, causal, grouped=True, packed=True)
    (verdict,) = check_all([asked], torch.device("cpu")).values()
    assert verdict.passes != forgets, verdict
