"""torchscale's encoder over a sequence that lies over several ranks gives the rows and gradients of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor

from ringattn import RingAttention
from ringattn.integrations.torchscale import TorchscaleLongNet

CONFIG = {
    "encoder_embed_dim": 24,
    "encoder_attention_heads": 4,
    "encoder_ffn_embed_dim": 40,
    "encoder_layers": 2,
    "segment_length": [4, 8, 64],
    "dilated_ratio": [1, 2, 4],
}
PATTERN: dict[str, Any] = {"segment_lengths": [4, 8, 64], "dilation_rates": [1, 2, 4], "head_offset": "blocked"}


def encoder_of(**options: Any) -> TorchscaleLongNet:
    torch.manual_seed(0)
    return TorchscaleLongNet(CONFIG, profile=None, **options).double()


def encoded_on_rank(x: Tensor) -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    encoder = encoder_of(process_group=group)
    attention = RingAttention(4, 6, process_group=group, profile=None, **PATTERN)  # says which rows are this rank's
    y = encoder(token_embeddings=attention.shard(x), total_length=x.shape[1])["encoder_out"]
    y.square().sum().backward()
    grad = encoder.layers[0].ffn.fc1.weight.grad
    dist.all_reduce(grad)
    return attention.unshard(y.detach(), x.shape[1]), grad


@pytest.mark.parametrize("length", [16, 13])
def test_rows_and_gradients(ranks: Callable[[int], Pool], length: int) -> None:
    x = torch.randn(1, length, 24, dtype=torch.float64)
    encoder = encoder_of()
    y = encoder(token_embeddings=x)["encoder_out"]
    y.square().sum().backward()
    for found, grad in ranks(2).run(encoded_on_rank, x):
        torch.testing.assert_close(found, y.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(grad, encoder.layers[0].ffn.fc1.weight.grad, rtol=0, atol=1e-10)
