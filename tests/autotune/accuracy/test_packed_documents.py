"""Documents that packed workloads are measured with, and the reference rows of each."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Case, exact_over

from autotune.accuracy.arithmetic import EXACT
from autotune.accuracy.documents import packed_documents, whole_length
from autotune.accuracy.inputs import KINDS, make_inputs, validation_inputs
from autotune.accuracy.sampled_rows import compute_rows, pick_rows, sample_positions
from autotune.measure.module_calls import results_of
from ringattn.workload import Pattern, Workload, nearest_bucket

CPU = torch.device("cpu")
PATTERNS = (Pattern(), Pattern.of([32, 64, 128], [1, 2, 4]), Pattern.of([20], [3]))


@st.composite
def packed(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 40))
    longest = draw(st.integers(1, 300))
    tokens = draw(st.integers(longest + count - 1, count * longest))
    return Workload("train", True, longest, 2, 8, "fp32", batch=count, packed_tokens=tokens)


@given(packed(), st.floats(0.5, 2.0))
@settings(max_examples=200, deadline=None)
def test_they_are_what_the_workload_says(workload: Workload, factor: float) -> None:
    documents = packed_documents(workload, workload.packed_tokens)
    assert documents is not None
    assert documents.sizes(1, workload.packed_tokens) == (workload.batch, workload.seq_len, workload.packed_tokens)
    tokens = max(workload.batch, round(workload.packed_tokens * factor))
    others = packed_documents(workload, tokens)
    assert others is not None
    assert others.values[-1] == tokens
    assert all(begin < end for begin, end in itertools.pairwise(others.values))
    assert len(others.values) == workload.batch + 1


def test_other_workloads_have_none() -> None:
    assert packed_documents(Workload("train", True, 64, 2, 8, "fp32"), 64) is None


def test_validations_are_in_the_bucket_of_the_workload() -> None:
    """Another bucket would have another plan validated."""
    workload = Workload("train", True, 171, 2, 8, "fp32", batch=6, packed_tokens=512)
    for length, _ in validation_inputs(workload, 50, 3):
        tokens = whole_length(workload, length)
        documents = packed_documents(workload, tokens)
        assert documents is not None
        assert nearest_bucket(documents.sizes(1, tokens)[1], [171]) == 171


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_rows_are_those_of_each_document_alone(pattern: Pattern, causal: bool, kind: str) -> None:
    workload = Workload("train", causal, 90, 4, 16, "fp64", kv_heads=2, batch=5, pattern=pattern, packed_tokens=260)
    inputs = make_inputs(workload, 260, kind, 1, CPU)
    assert inputs.q.shape == (1, 260, 4, 16)
    assert inputs.documents is not None
    sampled = sample_positions(workload, 260, 1)
    rows = compute_rows(workload, inputs, sampled, EXACT)
    case = Case(260, 4, 2, 16, pattern=pattern, causal=causal)
    tensors = inputs.q, inputs.k, inputs.v, inputs.dout
    exact = exact_over(case, inputs.documents.placed(1, 260), *tensors)
    for out, lse, grads in (
        (exact.out, exact.lse, exact[2:]),
        results_of(case.module(), inputs, workload),
    ):
        expected = pick_rows(workload, sampled, out, lse, grads)
        for (name, got), (_, wanted) in zip(rows.tensors, expected.tensors, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=name)
        torch.testing.assert_close(rows.lse, expected.lse, rtol=1e-10, atol=1e-10)
