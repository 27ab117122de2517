"""LongNet's block and encoder against the same formula over the float64 reference of dilated attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from ringattn import LongNetBlock, LongNetEncoder, RingAttention
from ringattn.errors import InputError
from ringattn.reference import dilated_attention_reference
from ringattn.workload import Pattern

PATTERN = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
DOUBLE: dict[str, Any] = {"dtype": torch.float64, "profile": None}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def block_by_hand(block: LongNetBlock, x: Tensor) -> Tensor:
    attention = block.attention
    normed = layer_norm(x, x.shape[-1:], block.attention_norm.weight, block.attention_norm.bias)
    q, k, v = linear(normed, attention.in_proj_weight, attention.in_proj_bias).unflatten(-1, (3, 4, -1)).unbind(2)
    pattern = Pattern.of(**PATTERN)
    attended, _ = dilated_attention_reference(q, k, v, pattern, causal=attention.causal)
    x = x + linear(attended.flatten(2), attention.out_proj.weight, attention.out_proj.bias)
    hidden = layer_norm(x, x.shape[-1:], block.mlp_norm.weight, block.mlp_norm.bias)
    return x + block.mlp[2](gelu(block.mlp[0](hidden)))


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_is_its_formula(causal: bool) -> None:
    torch.manual_seed(0)
    block = LongNetBlock(24, 4, causal=causal, **PATTERN, **DOUBLE)
    x = randn(2, 13, 24)
    torch.testing.assert_close(block(x), block_by_hand(block, x), rtol=0, atol=1e-12)


def test_an_encoder_is_its_blocks_and_a_norm() -> None:
    torch.manual_seed(0)
    encoder = LongNetEncoder(3, 24, 4, **PATTERN, **DOUBLE)
    assert len(encoder.blocks) == 3
    x = randn(1, 9, 24)
    y = x
    for block in encoder.blocks:
        y = block(y)
    torch.testing.assert_close(encoder(x), encoder.norm(y), rtol=0, atol=0)
    encoder(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def test_padding_changes_no_row_that_is_there() -> None:
    """Segments count from the start of each sequence, as without padding; on either side of it."""
    torch.manual_seed(0)
    encoder = LongNetEncoder(2, 24, 4, num_kv_heads=2, causal=True, **PATTERN, **DOUBLE)
    x = randn(2, 11, 24)
    padding = torch.zeros(2, 11).bool()
    padding[0, 7:] = True
    padding[1, :3] = True
    y = encoder(x, padding)
    torch.testing.assert_close(y[0, :7], encoder(x[:1, :7])[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(y[1, 3:], encoder(x[1:, 3:])[0], rtol=0, atol=1e-12)


def test_dropout_is_of_outputs_and_in_training_mode() -> None:
    block = LongNetBlock(24, 4, dropout=0.5, **PATTERN, **DOUBLE)
    x = randn(1, 8, 24)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_without_biases() -> None:
    encoder = LongNetEncoder(1, 24, 4, bias=False, mlp_dim=10, **PATTERN, **DOUBLE)
    assert not [name for name, _ in encoder.named_parameters() if "bias" in name]
    assert encoder.blocks[0].mlp[0].weight.shape == (10, 24)


def test_a_pattern_that_makes_no_sense_is_refused_when_it_is_met() -> None:
    with pytest.raises(InputError, match=r"^segment_lengths and dilation_rates go together"):
        LongNetBlock(24, 4, segment_lengths=[4])


def test_dense_by_default() -> None:
    block = LongNetBlock(24, 4, **DOUBLE)
    assert isinstance(block.attention._pool.module_for(randn(1, 2, 4, 6), randn(1, 2, 4, 6), False, 1.0), RingAttention)
    assert not block.attention._pool.dilated
