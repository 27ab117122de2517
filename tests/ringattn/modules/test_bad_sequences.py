"""``MultiheadAttention`` and ``LongNetBlock`` name what is wrong with their arguments and sequences, in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ringattn import LongNetBlock, MultiheadAttention
from ringattn.errors import InputError

X = torch.randn(2, 6, 24)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        *(({name: value}, f"{name} is {value!r}; it must be an integer >= 1")
          for name in ("kdim", "vdim") for value in (0, -1, 2.5, True, "8")),
        *(({"dropout": value}, f"dropout is {value!r}; it must be in [0, 1)") for value in (-1, 1.0, "x")),
        *(({name: 1}, f"{name} is 1; it must be True or False") for name in ("bias", "batch_first", "causal")),
    ],
    ids=str,
)  # fmt: skip
def test_arguments(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as error:
        MultiheadAttention(24, 4, **wrong)
    assert str(error.value) == told


def test_integers_of_numpy_are_integers() -> None:
    assert MultiheadAttention(24, 4, kdim=np.int64(10)).k_proj_weight.shape == (24, 10)


SEQUENCES: list[tuple[dict[str, Any], str]] = [
    ({"query": [1.0]}, "query is a list; it must be a tensor"),
    ({"value": None}, "value is a NoneType; it must be a tensor"),
    ({"query": X.to_sparse()}, "query is no dense tensor; call once for each sequence"),
    ({"query": X[None]}, "query has shape (1, 2, 6, 24); it must have two dimensions, or three"),
    ({"query": X[0, 0]}, "query has shape (24,); it must have two dimensions, or three"),
    ({"key": X[0]}, "key has shape (6, 24); it must have two dimensions, or three with a batch, as the others"),
    ({"key": X[..., :8]}, "key has shape (2, 6, 8); its last dimension must be 24"),
    ({"query": X[:, :0]}, "query has shape (2, 0, 24); batch and sequence must not be empty"),
    ({"query": X[:0], "key": X[:0], "value": X[:0]}, "query has shape (0, 6, 24); batch and sequence must not"),
    ({"query": X.double()}, "query is torch.float64 and the module's parameters torch.float32; convert it"),
    ({"value": X.long()}, "value is torch.int64 and the module's parameters torch.float32; convert it"),
    ({"key": X.to("meta")}, "key is on meta and the module's parameters on cpu; move it there"),
    ({"key": X[:1], "value": X[:1]}, "key has shape (1, 6, 24) and query (2, 6, 24); dimension 0, the batch, must"),
    ({"value": X[:, :5]}, "value has shape (2, 5, 24) and key (2, 6, 24); all but the last dimension must be equal"),
    ({"key_padding_mask": torch.zeros(2, 6).long()}, "key_padding_mask is of torch.int64; it must be boolean, or"),
    ({"key_padding_mask": torch.ones(2, 6).int()}, "key_padding_mask is of torch.int32; it must be boolean, or"),
    ({"key_padding_mask": [[False] * 6] * 2}, "key_padding_mask is a list; it must be a tensor"),
    ({"attn_mask": torch.zeros(6, 6).long()}, "attn_mask is of torch.int64; it must be boolean, or"),
    ({"key_padding_mask": torch.zeros(2, 5).bool()}, "key_padding_mask has shape (2, 5); it must be (2, 6)"),
]


@pytest.mark.parametrize(("wrong", "told"), SEQUENCES, ids=lambda each: next(iter(each)) if each else "")
def test_sequences_and_masks(wrong: dict[str, Any], told: str) -> None:
    module = MultiheadAttention(24, 4, batch_first=True, profile=None)
    with pytest.raises(InputError) as error:
        module(**({"query": X, "key": X, "value": X} | wrong))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("wrong", "told"), [
    ({"positions": [0, 1, 2, 3, 4, 5]}, "positions is a list; it must be a tensor"),
    ({"positions": torch.arange(5)}, "positions has shape (5,); it must be (S,) or (B, S) of the queries"),
    ({"total_length": 0}, "total_length is 0; it must be an integer >= 1"),
])  # fmt: skip
def test_positions(wrong: dict[str, Any], told: str) -> None:
    module = MultiheadAttention(24, 4, batch_first=True, profile=None, rotary_base=100.0)
    with pytest.raises(InputError) as error:
        module(X, X, X, **wrong)
    assert told in str(error.value)


def test_a_block_names_its_sequence() -> None:
    block = LongNetBlock(24, 4, profile=None)
    for wrong, told in (
        (X[..., :8], r"^x has shape \(2, 6, 8\); its last dimension must be 24$"),
        (X.double(), r"^x is torch.float64 and the module's parameters torch.float32; convert it$"),
        (X[:, :0], r"^x has shape \(2, 0, 24\); batch and sequence must not be empty$"),
        ("x", r"^x is a str; it must be a tensor$"),
    ):
        with pytest.raises(InputError, match=told):
            block(wrong)


def test_autocast_takes_what_it_casts() -> None:
    module = MultiheadAttention(24, 4, batch_first=True, profile=None)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(X.bfloat16(), X, X)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), module(X, X, X)[0], rtol=5e-2, atol=5e-2)
