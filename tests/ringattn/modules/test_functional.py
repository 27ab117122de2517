"""``scaled_dot_product_attention`` against torch's, in float64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import ringattn
from ringattn.errors import InputError


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def check(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> None:
    out = ringattn.scaled_dot_product_attention(q, k, v, **arguments)
    expected = functional.scaled_dot_product_attention(q, k, v, **arguments)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    for grad, exact in zip(found, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        torch.testing.assert_close(grad, exact, rtol=0, atol=1e-11)


@given(
    st.lists(st.integers(1, 2), max_size=2),
    st.integers(1, 2),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([None, 0.3]),
)
def test_it_is_torchs(
    lead: list[int], heads: int, queries: int, keys: int, dim: int, value_dim: int, causal: bool, scale: float | None
) -> None:
    q, k = randn(*lead, heads, queries, dim), randn(*lead, heads, keys, dim)
    check(q, k, randn(*lead, heads, keys, value_dim), is_causal=causal, scale=scale)


def test_grouped_heads() -> None:
    q, k, v = randn(2, 6, 7, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 8)
    check(q, k, v, is_causal=True, enable_gqa=True)
    with pytest.raises(InputError, match=r"^query has 6 heads and key 2; use enable_gqa=True$"):
        ringattn.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("shape", [(7, 8), (3, 7, 8)])
def test_without_batch_or_heads(shape: tuple[int, ...]) -> None:
    check(randn(*shape), randn(*shape), randn(*shape), is_causal=True)


def test_masks_that_are_causal_or_of_keys() -> None:
    q, k, v = randn(2, 2, 6, 8), randn(2, 2, 6, 8), randn(2, 2, 6, 8)
    check(q, k, v, attn_mask=torch.ones(6, 6).tril().bool())
    of_keys = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1]]).bool()[:, None, None]
    check(q, k, v, attn_mask=of_keys)
    check(q, k, v, attn_mask=of_keys[:1])
    check(q, k, v, attn_mask=torch.ones(2, 1, 6, 1).bool())  # one for all keys
    check(q, k, v, attn_mask=torch.zeros(1, 1, dtype=torch.float64))
    check(q, k, v, attn_mask=torch.zeros(2, 1, 1, 6, dtype=torch.float64).masked_fill(~of_keys, -torch.inf))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"dropout_p": 1.0}, r"dropout_p is 1.0; it must be in \[0, 1\)"),
        (
            {"attn_mask": torch.rand(6, 6)},
            "adds a bias to the logits, as ALiBi does, which no kernel here computes; use",
        ),
        ({"attn_mask": torch.eye(6).bool()}, "use FlexAttention"),
        ({"attn_mask": torch.ones(6, 6).tril().bool(), "is_causal": True}, "attn_mask and is_causal are both given"),
        ({"attn_mask": torch.ones(3, 1, 1, 6).bool()}, r"attn_mask has shape \(3, 1, 1, 6\)"),
        ({"attn_mask": torch.ones(1, 1, 1, 9).bool()}, r"attn_mask has shape \(1, 1, 1, 9\), which does not broadcast"),
        ({"attn_mask": torch.ones(1, 1, 1, 5).bool()}, r"attn_mask has shape \(1, 1, 1, 5\), which does not broadcast"),
        ({"attn_mask": torch.ones(5, 6).bool()}, r"attn_mask has shape \(5, 6\), which does not broadcast"),
        ({"attn_mask": torch.ones(3, 3).tril().bool()}, r"attn_mask has shape \(3, 3\), which does not broadcast"),
        ({"attn_mask": torch.ones(6).bool()}, r"attn_mask has shape \(6,\), which does not broadcast"),
        ({"attn_mask": torch.ones(0, 0).bool()}, r"attn_mask has shape \(0, 0\), which does not broadcast"),
        ({"attn_mask": [[True] * 6] * 6}, "attn_mask is a list; it must be a tensor"),
    ],
)
def test_what_is_not_exact_is_refused_in_one_line(arguments: dict[str, Any], told: str) -> None:
    q = randn(2, 2, 6, 8)
    with pytest.raises(InputError, match=told) as error:
        ringattn.scaled_dot_product_attention(q, q, q, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [(2, 2, 6, 4), (2, 2, 5, 8), (1, 2, 6, 8), (8,)])
def test_shapes_that_do_not_fit_are_named(wrong: tuple[int, ...]) -> None:
    q = randn(2, 2, 6, 8)
    with pytest.raises(InputError, match="must be"):
        ringattn.scaled_dot_product_attention(q, randn(*wrong), q)


def test_its_arguments_are_torchs() -> None:
    ours = inspect.signature(ringattn.scaled_dot_product_attention).parameters
    names = functional.scaled_dot_product_attention.__doc__.split("->")[0].split("(")[1].split(")")[0]  # type: ignore[union-attr]
    listed = [part.split("=")[0].strip() for part in names.split(",")]
    assert list(ours) == listed


def test_it_compiles_whole() -> None:
    def f(q: Tensor) -> Tensor:
        return ringattn.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = randn(1, 2, 6, 8)
    compiled = torch.compile(f, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q), f(q), rtol=0, atol=0)
