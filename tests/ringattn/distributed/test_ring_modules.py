"""A LongNet encoder whose sequence lies over several ranks gives the rows and gradients of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor

from ringattn import LongNetEncoder, RingAttention

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
