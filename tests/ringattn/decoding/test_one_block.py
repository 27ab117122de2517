"""Calls in which every query sees every key run one kernel, whatever the number of keys, and look like all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cross_oracle import attend
from torch import Tensor

from ringattn import RingAttention
from ringattn.decoding.one_block import OneBlock
from ringattn.errors import InputError


def step(keys: int, dtype: torch.dtype = torch.float64, batch: int = 2, queries: int = 1) -> tuple[Tensor, ...]:
    """q, k and v of a step as a model gives them, views of (B, H, S, D)."""
    generator = torch.Generator().manual_seed(keys)
    shapes = ((batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 8))
    return tuple(torch.randn(shape, generator=generator, dtype=dtype).transpose(1, 2) for shape in shapes)


def made(causal: bool = True, **arguments: Any) -> RingAttention:
    return RingAttention(4, 8, 2, causal=causal, profile=None, device="cpu", **arguments)


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, torch.ones(4, q.shape[1], k.shape[1], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_lse", [True, False])
def test_steps_of_a_growing_cache(dtype: torch.dtype, with_lse: bool) -> None:
    """Lengths that share a function, and those that do not."""
    attn, tolerance = made(), 1e-5 if dtype is torch.float32 else 1e-12
    with torch.no_grad():
        for keys in range(1, 70):
            q, k, v = step(keys, dtype)
            found = attn.cross(q, k, v, return_lse=with_lse)
            for x, x64 in zip(found if with_lse else (found,), exact(q, k, v), strict=False):
                torch.testing.assert_close(x.double(), x64, rtol=0, atol=tolerance)
    functions = [key for key in attn.cross_programs if key[0] == "whole"]
    assert 5 < len(functions) < 30


def test_cross_attention_without_causality() -> None:
    attn = made(causal=False)
    with torch.no_grad():
        for queries, keys in ((1, 5), (7, 5), (40, 33), (40, 34)):
            q, k, v = step(keys, queries=queries)
            torch.testing.assert_close(attn.cross(q, k, v), exact(q, k, v)[0], rtol=0, atol=1e-12)


def test_logits_that_are_no_numbers_are_those_of_the_kernel() -> None:
    """torch's function for CPUs alone would give 0 for NaN."""
    attn = made()
    q, k, v = step(9, torch.float32)
    k[0, 3] = torch.nan
    k[1] = -torch.inf
    q = q.abs() + 0.1
    with torch.no_grad():
        for _ in range(2):
            out = attn.cross(q, k, v)
            assert out[0].isnan().all()
            assert (out[1] == 0).all()


def test_a_remembered_call_is_checked_as_the_first() -> None:
    attn = made(max_seq_len=60)
    with torch.no_grad():
        q, k, v = step(60)
        attn.cross(q, k, v)
        attn.cross(*step(57))  # of the same function
        _, longer, _ = step(61)
        with pytest.raises(InputError, match="more than max_seq_len, 60"):
            attn.cross(q, longer, longer)
        for name, wrong in {
            "v has 59 positions and k 60": (q, k, v[:, :59]),
            "k has batch size 1 and q 2": (q, k[:1], v[:1]),
            "k has shape": (q, k[..., :4], v[..., :4]),
            "v is torch.float32 and q is torch.float64": (q, k, v.float()),
            "k is on meta": (q, k.to("meta"), v),
        }.items():
            with pytest.raises(InputError, match=name):
                attn.cross(*wrong)


def test_what_is_not_alike_has_a_function_of_its_own() -> None:
    """Gradients, a window, the other alignment and autocast."""
    attn = made()
    q, k, v = step(20, torch.float32)
    with torch.no_grad():
        whole = attn.cross(q, k, v)
        windowed = attn.cross(q, k, v, window=5)
        torch.testing.assert_close(windowed, attn.cross(q, k[:, 15:], v[:, 15:]))
        first = attn.cross(q, k, v, align="start")
        torch.testing.assert_close(first, v[:, :1].repeat_interleave(2, 2))
        with torch.autocast("cpu", torch.bfloat16):
            narrow = attn.cross(q, k, v)
    assert (narrow - whole).abs().max() > 1e-4
    q.requires_grad_()
    out = attn.cross(q, k, v)
    torch.testing.assert_close(out.detach(), whole)
    assert torch.autograd.grad(out.sum(), q)[0].abs().max() > 0


def test_torchs_own_function_runs_steps_that_ask_for_no_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    made_entries = []
    real = OneBlock.torch_entry

    def counted(self: OneBlock, *tensors: Tensor) -> Any:
        made_entries.append(real(self, *tensors))
        return made_entries[-1]

    monkeypatch.setattr(OneBlock, "torch_entry", counted)
    attn = made()
    with torch.no_grad():
        attn.cross(*step(12, torch.float32), return_lse=True)
        assert made_entries == []
        attn.cross(*step(12, torch.float32))
        attn.cross(*step(12, torch.float32))
    assert [entry is None for entry in made_entries] == [False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keys", [15, 4096])
def test_query_heads_of_a_group_are_rows_of_one_head(dtype: torch.dtype, keys: int) -> None:
    """On a CPU, where that is faster, and with the same out and lse, also for logits that are no numbers."""
    attn = RingAttention(16, 8, 4, causal=True, profile=None, device="cpu")
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(2, n, h, 8, generator=generator).to(dtype) for n, h in ((1, 16), (keys, 4), (keys, 4)))
    k[1, 3, 2] = torch.nan
    out64, lse64 = attend(*(x.double() for x in (q, k, v)), torch.ones(16, 1, keys, dtype=torch.float64))
    close = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 2e-2, "equal_nan": True}
    with torch.no_grad():
        out, lse = attn.cross(q, k, v, return_lse=True)
        alone = attn.cross(q, k, v)
    torch.testing.assert_close(out.double(), out64, **close)
    torch.testing.assert_close(alone.double(), out64, **close)
    torch.testing.assert_close(lse.double(), lse64, **close)
    assert out[1, 0, 8:12].isnan().all()
    assert out[0].isfinite().all()
