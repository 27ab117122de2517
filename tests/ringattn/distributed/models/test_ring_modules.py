"""A LongNet encoder whose sequence lies over several ranks gives the rows and gradients of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor

from ringattn import LongNetEncoder, MultiheadAttention, RingAttention
from ringattn.distributed.peer_errors import PeerError
from ringattn.errors import InputError

PATTERN = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
OPTIONS: dict[str, Any] = {"causal": True, "profile": None, **PATTERN}


def encoder_of(**options: Any) -> LongNetEncoder:
    torch.manual_seed(0)
    return LongNetEncoder(2, 24, 4, rotary_base=50.0, dtype=torch.float64, **OPTIONS, **options)


def encoded_on_rank(x: Tensor) -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    encoder = encoder_of(process_group=group)
    attention = RingAttention(4, 6, process_group=group, **OPTIONS)  # says which rows are this rank's
    y = encoder(attention.shard(x), total_length=x.shape[1])
    y.square().sum().backward()
    grad = encoder.blocks[0].mlp[0].weight.grad
    dist.all_reduce(grad)
    return attention.unshard(y.detach(), x.shape[1]), grad


@pytest.mark.parametrize("length", [16, 13])
def test_rows_and_gradients_with_rotary_embeddings(ranks: Callable[[int], Pool], length: int) -> None:
    x = torch.randn(1, length, 24, dtype=torch.float64)
    encoder = encoder_of()
    y = encoder(x)
    y.square().sum().backward()
    for found, grad in ranks(2).run(encoded_on_rank, x):
        torch.testing.assert_close(found, y.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(grad, encoder.blocks[0].mlp[0].weight.grad, rtol=0, atol=1e-10)


def padded_on_rank() -> str:
    options: dict[str, Any] = {"batch_first": True, "causal": True, "profile": None, "dtype": torch.float64}
    module = MultiheadAttention(24, 4, process_group=dist.group.WORLD, **options)
    x = torch.zeros(1, 8, 24, dtype=torch.float64)
    mask = torch.tensor([[False] * 6 + [True] * 2]) if dist.get_rank() == 0 else None
    with pytest.raises((InputError, PeerError)) as error:
        module(x, x, x, mask)
    return f"{type(error.value).__name__}: {error.value}"


def test_a_mask_of_keys_is_refused_on_all_ranks(fragile: Pool) -> None:
    """It had its rank's own positions for the whole sequence: numbers were wrong without an error."""
    told = fragile.run(padded_on_rank)
    assert [text.partition(":")[0] for text in told] == ["InputError", *["PeerError"] * (len(told) - 1)]
    assert all("a mask of keys is for one rank; over several ranks give RingAttention cu_seqlens" in x for x in told)
