"""The oracle against what can be computed by hand, by plain loops, and by torch's own attention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from oracle import DENSE, Case, cases, exact, pattern_of, patterns, times_seen
from torch import Tensor

from ringattn import Pattern
from ringattn.reference import dilated_attention_reference


def column(*values: float) -> Tensor:
    """One batch element, one head, head_dim 1."""
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)


def test_two_positions_by_hand() -> None:
    # q0 = 1 gives logits (0, ln 3) and so weights (1/4, 3/4); q1 = 2 gives (0, ln 9) and (1/10, 9/10)
    q, k, v = column(1, 2), column(0, math.log(3)), column(10, 20)
    out, lse = dilated_attention_reference(q, k, v, DENSE, causal=False, scale=1.0)
    torch.testing.assert_close(out, column(17.5, 19.0))
    torch.testing.assert_close(lse, torch.tensor([[[math.log(4), math.log(10)]]], dtype=torch.float64))
    out, lse = dilated_attention_reference(q, k, v, DENSE, causal=True, scale=1.0)
    torch.testing.assert_close(out, column(10, 19.0))
    torch.testing.assert_close(lse, torch.tensor([[[0.0, math.log(10)]]], dtype=torch.float64))


def test_gradients_by_hand() -> None:
    q, k, v = (x.requires_grad_() for x in (column(1, 2), column(0, math.log(3)), column(10, 20)))
    out, _ = dilated_attention_reference(q, k, v, DENSE, causal=False, scale=1.0)
    dq, dk, dv = torch.autograd.grad(out[0, 0, 0, 0], (q, k, v))
    # d out / d logit1 = p0 p1 (v1 - v0) = 3/16 * 10, and -that for logit0; logit = q k
    torch.testing.assert_close(dq, column(1.875 * math.log(3), 0))
    torch.testing.assert_close(dk, column(-1.875, 1.875))
    torch.testing.assert_close(dv, column(0.25, 0.75))


def test_default_scale_is_one_over_the_root_of_head_dim() -> None:
    q, k, v = Case(5, head_dim=4).inputs()
    default, _ = dilated_attention_reference(q, k, v, DENSE, causal=True)
    half, _ = dilated_attention_reference(q, k, v, DENSE, causal=True, scale=0.5)
    assert torch.equal(default, half)


def test_a_key_seen_by_two_branches_counts_twice() -> None:
    # position 0 sees key 0 twice (both branches) and key 1 once: weights 2/3 and 1/3 at equal logits
    q, k, v = column(0, 0, 0), column(1, 2, 3), column(3, 6, 9)
    out, lse = dilated_attention_reference(q, k, v, pattern_of([1, 2], [1, 1]), causal=False, scale=1.0)
    torch.testing.assert_close(out, column(4.0, 5.0, 9.0))
    torch.testing.assert_close(lse, torch.tensor([[[math.log(3), math.log(3), math.log(2)]]], dtype=torch.float64))


@pytest.mark.parametrize("times", [2, 5])
def test_a_branch_repeated_changes_lse_alone(times: int) -> None:
    case = Case(9, pattern=pattern_of([4], [2]), causal=True)
    q, k, v = case.inputs()
    once, lse_once = dilated_attention_reference(q, k, v, case.pattern, True)
    again, lse_again = dilated_attention_reference(q, k, v, pattern_of([4] * times, [2] * times), True)
    torch.testing.assert_close(again, once)
    torch.testing.assert_close(lse_again, lse_once + math.log(times))


def test_what_no_branch_selects_is_zero_and_minus_infinity_and_has_no_gradient() -> None:
    case = Case(8, heads=1, kv_heads=1, pattern=pattern_of([4], [4]))
    q, k, v = case.inputs()
    result = exact(case, q, k, v, case.dout())
    unselected = [1, 2, 3, 5, 6, 7]
    assert (result.out[:, unselected] == 0).all()
    assert result.lse[..., unselected].isneginf().all()
    for grad in (result.dq, result.dk, result.dv):
        assert (grad[:, unselected] == 0).all()
        assert not grad.isnan().any()
    # rate 4 in segments of 4 leaves one key per query: out is v
    assert torch.equal(result.out[:, [0, 4]], v[:, [0, 4]])


def test_offsets_follow_the_key_value_head_by_either_rule() -> None:
    q = torch.zeros(1, 4, 8, 1)
    k = torch.zeros(1, 4, 4, 1)
    for rule, offsets in (("interleaved", [0, 1, 0, 1]), ("blocked", [0, 0, 1, 1])):
        _, lse = dilated_attention_reference(q, k, k, pattern_of([4], [2], rule), causal=False)
        for kv_head, offset in enumerate(offsets):
            for head in (2 * kv_head, 2 * kv_head + 1):  # a whole group shares its offset
                assert (~lse[0, head].isneginf()).nonzero().flatten().tolist() == [offset, offset + 2]


def test_a_segment_longer_than_the_sequence_is_one_segment() -> None:
    q, k, v = Case(6).inputs()
    dense = dilated_attention_reference(q, k, v, DENSE, causal=True)
    wide = dilated_attention_reference(q, k, v, pattern_of([1000], [1]), causal=True)
    assert all(torch.equal(x, y) for x, y in zip(dense, wide, strict=True))


@pytest.mark.parametrize("pattern", [DENSE, pattern_of([2, 4], [1, 2])], ids=str)
def test_the_gradient_of_out_and_lse_is_that_of_finite_differences(pattern: Pattern) -> None:
    inputs = Case(6, 2, 2, 3).inputs()

    def results(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = dilated_attention_reference(*inputs, pattern, causal=True)
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    assert torch.autograd.gradcheck(results, inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_a_key_of_minus_infinity_is_no_key(causal: bool) -> None:
    """The results are those without it, and a row that has no other is nothing."""
    q, k, v = (x.detach() for x in Case(6, 1, 1, 3).inputs())
    q, k = q.abs() + 0.1, k.clone()
    k[:, 0] = -torch.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dilated_attention_reference(*leaves, DENSE, causal, 1.0)
    grads = torch.autograd.grad(out.sum() + lse[..., 1:].sum(), leaves)
    assert all(x.isfinite().all() for x in (out, *grads))
    kept = [x.detach()[:, 1:] for x in leaves]
    if causal:
        expected, expected_lse = dilated_attention_reference(*kept, DENSE, causal, 1.0)
        torch.testing.assert_close((out[:, 1:], lse[..., 1:]), (expected, expected_lse))
        assert (out[:, 0] == 0).all()
        assert lse[..., 0].isneginf().all()
        assert (grads[0][:, 0] == 0).all()
    else:
        logits = torch.einsum("bqhd,bkhd->bhqk", q.detach(), kept[1])
        torch.testing.assert_close(lse, logits.logsumexp(-1))
        torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), kept[2]))
    assert (grads[1][:, 0] == 0).all()
    assert (grads[2][:, 0] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_dense_is_torchs_attention(causal: bool, group: int) -> None:
    case = Case(17, heads=2 * group, kv_heads=2, head_dim=5, batch=2, causal=causal)
    q, k, v = case.inputs()
    result = exact(case, q, k, v, case.dout())
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(result.out, out, rtol=0, atol=1e-12)
    for grad, expected in zip(result[2:], torch.autograd.grad(out, (q, k, v), case.dout()), strict=True):
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


@given(cases(layouts=("plain",), longest=9))
def test_the_definition_written_as_loops(case: Case) -> None:
    q, k, v = (x.detach() for x in case.inputs())
    out, lse = dilated_attention_reference(q, k, v, case.pattern, case.causal, case.scale)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    counts = times_seen(case).tolist()
    group = case.heads // case.kv_heads
    for batch in range(case.batch):
        for head in range(case.heads):
            for query in range(case.length):
                weights = [
                    count * math.exp(scale * float(q[batch, query, head] @ k[batch, key, head // group]))
                    for key, count in enumerate(counts[head][query])
                ]
                if sum(weights) == 0:
                    assert lse[batch, head, query] == -math.inf
                    assert (out[batch, query, head] == 0).all()
                    continue
                assert lse[batch, head, query].item() == pytest.approx(math.log(sum(weights)), abs=1e-12)
                expected = sum(w * v[batch, key, head // group] for key, w in enumerate(weights)) / sum(weights)
                torch.testing.assert_close(out[batch, query, head], expected, rtol=0, atol=1e-12)


@given(patterns(longest=8), st.booleans())
def test_gradients_are_those_of_finite_differences(pattern: Pattern, causal: bool) -> None:
    case = Case(7, heads=2, kv_heads=1, head_dim=2, pattern=pattern, causal=causal)

    def attend(*inputs: Tensor) -> Tensor:
        return dilated_attention_reference(*inputs, pattern, causal)[0]

    assert torch.autograd.gradcheck(attend, case.inputs(), fast_mode=True)


def test_any_float_dtype_is_computed_in_itself() -> None:
    case = Case(6, pattern=pattern_of([4], [2]))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out, lse = dilated_attention_reference(*case.inputs(dtype), case.pattern, True)
        assert (out.dtype, lse.dtype) == (dtype, dtype)
        expected, _ = dilated_attention_reference(*case.inputs(), case.pattern, True)
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
