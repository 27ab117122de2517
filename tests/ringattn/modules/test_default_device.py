"""``torch.set_default_device`` decides where users make tensors, and nothing about those that a call makes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import LongNetEncoder, MultiheadAttention, RingAttention, scaled_dot_product_attention

KEPT = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
LEFT = KEPT.flip(1)
X, Q = torch.randn(2, 9, 16), torch.randn(2, 9, 4, 16)
HEADS_FIRST = Q.transpose(1, 2)
ONE: dict[str, Any] = {"device": "cpu", "profile": None}
TORCHS: dict[str, Any] = {"batch_first": True, "profile": None}
DENSE, CAUSAL = RingAttention(4, 16, **ONE), RingAttention(4, 16, causal=True, **ONE)
DILATED = RingAttention(4, 16, segment_lengths=[4, 8], dilation_rates=[1, 2], **ONE)
MHA, ROTARY = MultiheadAttention(16, 4, **TORCHS), MultiheadAttention(16, 4, causal=True, rotary_base=1e4, **TORCHS)
ENCODER = LongNetEncoder(1, 16, 4, segment_lengths=[4, 8], dilation_rates=[1, 2], profile=None)
TRIANGLE = torch.ones(9, 9, dtype=torch.bool)


def prefilled(kept: Tensor) -> Tensor:
    cache = CAUSAL.kv_cache(2, dtype="fp32")
    CAUSAL.prefill(Q, Q, Q, cache, kept=kept)
    return CAUSAL.prefill(Q[:, :1], Q[:, :1], Q[:, :1], cache)


CALLS: dict[str, Callable[[], Any]] = {
    "documents": lambda: CAUSAL(*[Q[:1]] * 3, cu_seqlens=[0, 4, 9]),
    "documents of a pattern": lambda: DILATED(*[Q[:1]] * 3, cu_seqlens=[0, 5, 9]),
    "lengths": lambda: DILATED(Q, Q, Q, lengths=[9, 6]),
    "a cache": lambda: prefilled(KEPT),
    "a cache with padding on the left": lambda: prefilled(LEFT),
    "other keys": lambda: DENSE.cross(Q[:, :3], Q, Q),
    "received": lambda: DENSE.received(Q, Q, Q),
    "padding": lambda: MHA(X, X, X, key_padding_mask=~KEPT)[0],
    "padding on the left": lambda: ROTARY(X, X, X, key_padding_mask=~LEFT)[0],
    "padding of other keys": lambda: MHA(X[:, :4], X, X, key_padding_mask=~LEFT)[0],
    "a causal mask": lambda: MHA(X, X, X, attn_mask=~TRIANGLE.tril())[0],
    "a mask of keys": lambda: scaled_dot_product_attention(*[HEADS_FIRST] * 3, attn_mask=KEPT[:, None, None]),
    "a causal mask of torch's function": lambda: scaled_dot_product_attention(
        *[HEADS_FIRST] * 3, attn_mask=TRIANGLE.tril()
    ),
    "an encoder": lambda: ENCODER(X, ~KEPT),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_it(name: str) -> None:
    with torch.no_grad():
        with torch.device("meta"):
            found = CALLS[name]()
        torch.testing.assert_close(found, CALLS[name](), rtol=0, atol=1e-6)
