"""Groups of heads that see one branch each, against a mask in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringattn.errors import InputError
from ringattn.integrations.head_groups import HeadGroupAttention

SEGMENTS, RATES = [8, 16, 32], [1, 2, 4]


def by_mask(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return the attention of 8 heads with 4 key/value heads, of which the groups have 1, 1 and 2."""
    length, heads = q.shape[1:3]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    at = torch.arange(length)
    out = []
    for head in range(heads):
        group = min(head // 2, 2)
        w, r = SEGMENTS[group], RATES[group]
        selected = at % w % r == group % r
        seen = (at[:, None] // w == at // w) & selected & selected[:, None]
        seen = seen & (at[:, None] >= at) if causal else seen
        logits = torch.einsum("bqd,bkd->bqk", q[:, :, head], k[:, :, head]) * q.shape[-1] ** -0.5
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)
        out.append(torch.where(selected[:, None], weights.nan_to_num() @ v[:, :, head], 0.0))
    return torch.stack(out, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 37, 64])
def test_each_group_sees_its_branch_alone(length: int, causal: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, length, 8, 8, dtype=torch.float64)
    k, v = (torch.randn(2, length, 4, 8, dtype=torch.float64) for _ in range(2))
    attention = HeadGroupAttention(8, 8, SEGMENTS, RATES, num_kv_heads=4, causal=causal, profile=None)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    found, expected = attention(*tensors), by_mask(*tensors, causal)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), tensors),
        torch.autograd.grad((expected * weight).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match=r"^num_heads is 4 and num_kv_heads 2; .* at least 3, one for each branch"):
        HeadGroupAttention(4, 8, num_kv_heads=2, segment_lengths=SEGMENTS, dilation_rates=RATES, profile=None)
    with pytest.raises(InputError, match=r"^num_heads is 5 and num_kv_heads 3"):
        HeadGroupAttention(5, 8, num_kv_heads=3, segment_lengths=SEGMENTS, dilation_rates=RATES, profile=None)
    with pytest.raises(InputError, match=r"^segment length 9"):
        HeadGroupAttention(4, 8, [9, 16, 32], [2, 2, 4], profile=None)
    with pytest.raises(InputError, match=r"^segment length 10 is not a multiple of its rate, 4"):
        HeadGroupAttention(3, 8, [8, 16, 10], RATES, profile=None)
    with pytest.raises(InputError, match="process_group"):
        HeadGroupAttention(3, 8, SEGMENTS, RATES, profile=None, process_group=object())
