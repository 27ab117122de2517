"""Documents on this machine's GPU, by every entry for packed sequences that it has, and one after the other."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import DENSE, Case, Results, assert_within_rule_over, exact_over, found, lists_of, pattern_of

from ringattn import Documents, Pattern, Profile, RingAttention, detect
from ringattn.hardware.kernel_faults import Combination
from ringattn.kernels.contract import KernelNeed
from ringattn.kernels.registry import KERNELS
from ringattn.planning.validation.accuracy_check import check_all
from ringattn.runtime.packed.varlen_program import VarlenProgram
from ringattn.workload import BranchTunables, Tunables

pytestmark = pytest.mark.gpu

ENTRIES = [name for name, kernel in KERNELS.items() if kernel.load_varlen is not None and name != "math"]
LONGNET = pattern_of([64, 256], [1, 4])
BOUNDS = [0, 1, 130, 130, 387, 515, 643, 900]  # of 1, 129, 0, 257, 128, 128 and 257 positions


def _skip_where_it_cannot_run(name: str, need: KernelNeed) -> None:
    if reasons := KERNELS[name].unsupported_reasons(need, detect("cuda")):
        pytest.skip(f"{name}: {', '.join(reasons)}")


def _need(head_dim: int, heads: int, kv_heads: int, causal: bool, dtype: str = "bf16") -> KernelNeed:
    facts = detect("cuda")
    return KernelNeed(
        facts.vendor, facts.arch, dtype, head_dim, heads, kv_heads, 257, 7, causal, backward=True, packed_rows=900
    )  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_entries_pass_the_accuracy_check(name: str, dtype: str, head_dim: int) -> None:
    """Forward, and backward against a merged out and LSE."""
    _skip_where_it_cannot_run(name, _need(head_dim, 4, 2, True, dtype))
    asked = [
        Combination(name, head_dim, dtype, backward, causal, grouped, packed=True)
        for backward, causal, grouped in itertools.product((False, True), repeat=3)
    ]
    verdicts = check_all(asked, torch.device("cuda"))
    assert not [f"{combination}: {verdict.reason}" for combination, verdict in verdicts.items() if not verdict.passes]


def _module(case: Case, name: str, packing: str, **changes: Any) -> RingAttention:
    """A module that runs this kernel both ways, with all documents of ``BOUNDS`` at once or one after the other."""
    count, longest, positions = Documents(BOUNDS).sizes(1, case.length)
    workload = replace(case.workload("bf16"), seq_len=longest, batch=count, packed_tokens=positions)
    branches = (BranchTunables(name, name),) * len(case.pattern.resolved(longest))
    profile = Profile.single(detect("cuda"), workload, Tunables("bf16", branches, packing=packing, **changes))
    lists = {} if case.pattern.dense else lists_of(case.pattern)
    return RingAttention(
        case.heads, case.head_dim, case.kv_heads, causal=case.causal, profile=profile, device="cuda", **lists
    )


@pytest.mark.parametrize("packing", ["documents", "varlen"])
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("pattern", [DENSE, LONGNET], ids=["dense", "dilated"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_documents_keep_the_rule_of_accuracy(name: str, pattern: Pattern, causal: bool, packing: str) -> None:
    case = Case(930, heads=8, kv_heads=2, head_dim=64, pattern=pattern, causal=causal)
    _skip_where_it_cannot_run(name, _need(64, 8, 2, causal))
    module = _module(case, name, packing)
    assert_within_rule_over(case, name, name, torch.bfloat16, module, "cuda", cu_seqlens=BOUNDS)
    (program,) = module._programs.values()
    assert isinstance(program, VarlenProgram) == (packing == "varlen")
    q, k, v = case.inputs(torch.bfloat16, device="cuda")  # without lse a dense plan may be torch's own function
    assert torch.equal(module(q, k, v, cu_seqlens=BOUNDS), module(q, k, v, return_lse=True, cu_seqlens=BOUNDS)[0])


@pytest.mark.parametrize("packing", ["documents", "varlen"])
@pytest.mark.parametrize("pattern", [DENSE, LONGNET], ids=["dense", "dilated"])
def test_documents_never_see_each_other(pattern: Pattern, packing: str) -> None:
    case = Case(900, heads=8, kv_heads=2, head_dim=64, pattern=pattern, causal=False)
    _skip_where_it_cannot_run("flash", _need(64, 8, 2, False))
    module, inputs = _module(case, "flash", packing), case.inputs(torch.bfloat16, device="cuda")
    dout = case.dout(torch.bfloat16, "cuda")
    before = found(module, *inputs, dout, cu_seqlens=BOUNDS)
    with torch.no_grad():
        for x in inputs:
            x[:, 130:387] = torch.randn_like(x[:, 130:387]) * 9
    after = found(module, *inputs, dout, cu_seqlens=BOUNDS)
    others = torch.cat([torch.arange(130), torch.arange(387, 900)]).cuda()
    for field, x, y in zip(Results._fields, before, after, strict=True):
        dim = 2 if field == "lse" else 1
        x, y = x.index_select(dim, others), y.index_select(dim, others)
        # FlashAttention 2 sums dq by atomics, in an order of its own each time.
        assert torch.allclose(x, y, atol=1e-2) if field == "dq" else torch.equal(x, y), field
    assert not torch.equal(before.out, after.out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [DENSE, LONGNET], ids=["dense", "dilated"])
def test_padding_on_the_default_plan(dtype: torch.dtype, pattern: Pattern) -> None:
    case = Case(300, heads=4, kv_heads=2, head_dim=64, batch=3, pattern=pattern, causal=True)
    module = case.module(device="cuda")
    inputs, dout = case.inputs(dtype, device="cuda"), case.dout(dtype, "cuda")
    lengths = torch.tensor([300, 0, 129], device="cuda")
    results = found(module, *inputs, dout, lengths=lengths)
    expected = exact_over(case, Documents(lengths=lengths).placed(3, 300), *inputs, dout)
    bound = 2e-2 if dtype is torch.bfloat16 else 2e-3
    for field, x, x64 in zip(Results._fields, results, expected, strict=True):
        if field == "lse":
            assert torch.equal(x.isneginf(), x64.isneginf())
            x, x64 = x.nan_to_num(neginf=0.0), x64.nan_to_num(neginf=0.0)
        assert (x.double() - x64).norm() <= bound * x64.norm(), field
        if field != "lse":
            assert not x[1].any(), field
            assert not x[2, 129:].any(), field


@pytest.mark.parametrize("packing", ["documents", "varlen"])
def test_a_graph_of_the_user_replays_the_documents_it_was_captured_with(packing: str) -> None:
    case = Case(900, heads=8, kv_heads=2, head_dim=64, causal=True)
    _skip_where_it_cannot_run("flash", _need(64, 8, 2, True))
    module = _module(case, "flash", packing)
    q, k, v = (x.detach() for x in case.inputs(torch.bfloat16, device="cuda"))
    documents = Documents(BOUNDS)
    with torch.no_grad():
        module(q, k, v, cu_seqlens=documents)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(q, k, v, cu_seqlens=documents)
        q.normal_()
        graph.replay()
        assert torch.equal(out, module(q, k, v, cu_seqlens=documents))
