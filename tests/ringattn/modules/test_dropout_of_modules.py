"""Dropout of the modules and functions over ``RingAttention``: in training mode, of whole sequences, as in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dropped import exact_of, kept_by, seeded
from oracle import Case
from torch import Tensor, nn

import ringattn
from ringattn import MultiheadAttention
from ringattn.errors import InputError

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
P = 0.3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [(8, 8), (8, 4), (4, 8)], ids=str)
def test_the_function_is_the_float64_result_of_what_it_kept(causal: bool, widths: tuple[int, int]) -> None:
    case = Case(11, 6, 2, widths[0], 2, causal=causal, head_dim_v=widths[1])
    q, k, v = case.inputs()
    dout = case.dout()

    def attend(*inputs: Tensor) -> Tensor:
        turned = (x.transpose(1, 2) for x in inputs)
        out = ringattn.scaled_dot_product_attention(*turned, dropout_p=P, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2)

    kept = kept_by(attend, case, q, k)
    out = seeded(lambda: attend(q, k, v))
    expected = exact_of(case, q, k, v, dout, kept, P)
    found = (out, *torch.autograd.grad(out, (q, k, v), dout))
    for x, exact in zip(found, (expected.out, expected.dq, expected.dk, expected.dv), strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-12, atol=1e-12)


def test_the_function_keeps_calls_with_and_without_apart() -> None:
    q = torch.randn(2, 4, 9, 8)
    attend = ringattn.scaled_dot_product_attention
    plain = attend(q, q, q)
    assert not torch.equal(attend(q, q, q, dropout_p=0.5), plain)
    assert torch.equal(attend(q, q, q), plain)
    assert torch.equal(attend(q, q, q, dropout_p=0.0), plain)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan"), "0.1", True, None])
def test_what_is_no_probability_is_named(p: Any) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(InputError, match=r"^dropout_p is .*; it must be in \[0, 1\)$"):
        ringattn.scaled_dot_product_attention(q, q, q, dropout_p=p)
    with pytest.raises(InputError, match=r"^dropout is .*; it must be in \[0, 1\)$"):
        MultiheadAttention(16, 2, dropout=p)


def test_the_module_drops_weights_in_training_mode_alone() -> None:
    """Against torch's: its weights come back from a call with them."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(24, 4, dropout=P, batch_first=True, **DOUBLE)
    ours = MultiheadAttention(24, 4, dropout=P, batch_first=True, profile=None, **DOUBLE)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 24, **DOUBLE)
    torch.testing.assert_close(ours.eval()(x, x, x)[0], theirs.eval()(x, x, x)[0], rtol=0, atol=1e-12)
    ours.train()
    one, other = seeded(lambda: ours(x, x, x)[0]), seeded(lambda: ours(x, x, x)[0])
    assert torch.equal(one, other)
    assert not torch.equal(one, ours(x, x, x)[0])
    draws = torch.stack([ours(x, x, x)[0] for _ in range(1500)]).detach()
    exact = ours.eval()(x, x, x)[0].detach()
    deviation = draws.std(0) / len(draws) ** 0.5
    assert bool(((draws.mean(0) - exact).abs() <= 7.5 * deviation).all())  # beyond once in 1e13, for each of 336


def test_the_modules_gradients_are_those_of_finite_differences() -> None:
    ours = MultiheadAttention(6, 2, dropout=P, batch_first=True, causal=True, profile=None, **DOUBLE)
    x = torch.randn(1, 5, 6, **DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: seeded(lambda: ours(x, x, x)[0]), (x,))


def test_padding_and_other_lengths_are_refused_in_training_mode() -> None:
    ours = MultiheadAttention(24, 4, dropout=P, batch_first=True, profile=None)
    x, padding = torch.randn(2, 6, 24), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    for call in (
        lambda: ours(x, x, x, key_padding_mask=padding),
        lambda: ours(x[:, :3], x, x),
        lambda: ringattn.scaled_dot_product_attention(x[:, None, :3], x[:, None], x[:, None], dropout_p=P),
    ):
        with pytest.raises(InputError, match=r"^dropout is 0\.3 in training mode; dropout is exact in one block"):
            call()
    ours.eval()
    ours(x, x, x, key_padding_mask=padding)
    ours(x[:, :3], x, x)
