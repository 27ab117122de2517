"""Numbers that no tensor or float holds, tensors without data and empty heads: one line of ours for each."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

import ringattn
from ringattn import KVCache, MultiheadAttention, RingAttention
from ringattn.errors import InputError
from ringattn.runtime.packed.documents import Documents

X = torch.randn(1, 8, 2, 4)
META = torch.tensor([0, 8], device="meta")


def module(**options: Any) -> RingAttention:
    return RingAttention(2, 4, profile=None, device="cpu", **options)


def cache(**options: Any) -> KVCache:
    return KVCache(2, 2, 4, dtype="fp32", device="cpu", **options)


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "cu_seqlens": (lambda: module()(X, X, X, cu_seqlens=[0, 2**70]), f"cu_seqlens holds {2**70} after 0; it must hold"),
    "one of many digits": (lambda: Documents([0, 10**5000]), "cu_seqlens holds an integer of 16610 bits after 0"),
    "its start": (
        lambda: Documents([10**5000, 1]),
        "cu_seqlens starts at an integer of 16610 bits; it must start at 0",
    ),
    "lengths": (lambda: module()(X, X, X, lengths=[2**70]), f"lengths is {2**70}; it must be an integer >= 0 and <= "),
    "total_length": (
        lambda: module()(X, X, X, total_length=2**70),
        f"total_length is {2**70}, but this rank holds",
    ),
    "positions": (lambda: module().positions(2**70), f"total_length is {2**70}; it must be an integer >= 1 and <= "),
    "heads": (lambda: RingAttention(10**5000, 4), "heads is an integer of 16610 bits; it must be"),
    "scale": (lambda: module(scale=10**400), "scale is an integer of 1329 bits; it must be a finite number > 0"),
    "scale as a fraction": (lambda: module(scale=Fraction(10**400)), "; it must be a finite number > 0"),
    "scale that is 0 as a float": (lambda: module(scale=Fraction(1, 10**400)), "; it must be a finite number > 0"),
    "softcap": (lambda: module(softcap=10**400), "; it must be a finite number > 0"),
    "dropout": (lambda: module(dropout=10**400), "dropout is an integer of 1329 bits; it must be in [0, 1)"),
    "rotary_base": (lambda: MultiheadAttention(8, 2, rotary_base=10**400), "rotary_base is an integer of 1329 bits"),
    "max_length": (lambda: cache(max_length=2**70), f"max_length is {2**70}; it must be an integer >= 1 and <= "),
    "window of a cache": (lambda: cache(window=2**70), f"window is {2**70}; it must be an integer >= 1 and <= "),
    "rollback": (lambda: cache(rollback=2**70), f"rollback is {2**70}; it must be an integer >= 0 and <= "),
    "index without data": (lambda: cache().reorder(META), "index is on meta or not dense; give a list of integers"),
    "sparse index": (lambda: cache().reorder(torch.tensor([0, 1]).to_sparse()), "index is on meta or not dense"),
    "cu_seqlens without data": (
        lambda: module()(X, X, X, cu_seqlens=META),
        "cu_seqlens is on meta, where tensors hold",
    ),
    "lengths without data": (lambda: module()(X, X, X, lengths=META[:1]), "lengths is on meta, where tensors hold no"),
    "no head dimension": (
        lambda: ringattn.scaled_dot_product_attention(X[..., :0], X[..., :0], X),
        "query has shape (1, 8, 2, 0); its last dimension, head_dim, must not be 0",
    ),
    "compiled": (
        lambda: torch.compile(lambda x: module_of_graph(x, x, x, cu_seqlens=[0, 2**70]), backend="eager")(X),
        "cu_seqlens holds",
    ),
}
module_of_graph = module()


@pytest.mark.parametrize("name", CALLS)
def test_each_is_named_in_one_line(name: str) -> None:
    call, told = CALLS[name]
    with pytest.raises(InputError) as error:
        call()
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 900


def test_values_without_width_are_torchs() -> None:
    out = ringattn.scaled_dot_product_attention(X, X, X[..., :0])
    assert out.shape == torch.nn.functional.scaled_dot_product_attention(X, X, X[..., :0]).shape == (1, 8, 2, 0)


def test_lists_and_fractions_that_make_sense_are_taken() -> None:
    torch.testing.assert_close(module(scale=Fraction(1, 2))(X, X, X), module(scale=0.5)(X, X, X))
    compiled = torch.compile(lambda x: module_of_graph(x, x, x, cu_seqlens=[0, 3, 8]), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), module_of_graph(X, X, X, cu_seqlens=[0, 3, 8]))
