"""A decoding step of a model goes around the module: with the module's numbers, errors, gradients and counts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ringattn.attention import RingAttention
from ringattn.errors import InputError
from ringattn.integrations.transformers import register

Attend = Callable[..., tuple[Tensor, None]]
MODULE = SimpleNamespace(is_causal=True)


def of(name: str = "steps", **options: Any) -> Attend:
    register(name, profile=None, **options)
    found: Attend = transformers.AttentionInterface()[name]
    return found


def tensors(keys: int, heads: int = 6, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query (2, H, 1, D), and key and value (2, Hkv, Sk, D) in the memory order of a cache."""
    generator = torch.Generator().manual_seed(keys)
    shapes = [(2, heads, 1, 16), (2, kv_heads, keys, 16), (2, kv_heads, keys, 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float = 0.25, softcap: float | None = None) -> Tensor:
    """Return out (B, 1, H, D) in float64 by the definition."""
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(x.double().repeat_interleave(group, 1) for x in (key, value))
    logits = scale * query @ key.mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits.softmax(-1) @ value).transpose(1, 2)


@pytest.fixture
def without_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which every way through the module fails."""

    def forbid() -> None:
        for method in ("forward", "cross"):
            monkeypatch.setattr(RingAttention, method, lambda *_, **__: pytest.fail("a step went through the module"))

    return forbid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_steps_of_a_growing_cache(dtype: torch.dtype, kv_heads: int, without_module: Callable[[], None]) -> None:
    attend = of()
    without_module()
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    for keys in (1, 2, 3, 7, 8, 9, 63, 64, 65, 100):
        given = tensors(keys, kv_heads=kv_heads, dtype=dtype)
        out, none = attend(MODULE, *given, None, scaling=0.3, sliding_window=100)
        assert none is None
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact(*given, scale=0.3), rtol=close, atol=close)


def test_views_with_any_strides(without_module: Callable[[], None]) -> None:
    """As many keys, in a static cache's room, in heads that lie last, and with a last stride that is not 1."""
    attend, (query, key, value) = of(), tensors(40)
    without_module()
    turned = [x.mT.contiguous().mT for x in (query, key, value)]
    interleaved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    roomy = [query, *(torch.cat((x, x), 2)[:, :, :40] for x in (key, value))]
    for given in ([query, key, value], turned, interleaved, roomy, [query, turned[1], value]):
        out, _ = attend(MODULE, *given, None)
        torch.testing.assert_close(out.double(), exact(query, key, value), rtol=1e-5, atol=1e-5)


def test_cross_attention_of_one_query(without_module: Callable[[], None]) -> None:
    attend, given = of(), tensors(40)
    without_module()
    out, _ = attend(SimpleNamespace(is_causal=False), *given, None)
    torch.testing.assert_close(out.double(), exact(*given), rtol=1e-5, atol=1e-5)


def test_scale_and_softcap_are_the_calls(without_module: Callable[[], None]) -> None:
    attend, given = of(backend="math"), tensors(40)
    without_module()
    for scale, softcap in ((0.3, None), (0.7, None), (0.7, 2.0), (0.3, 5.0), (0.3, None)):
        out, _ = attend(MODULE, *given, None, scaling=scale, softcap=softcap)
        expected = exact(*given, scale=scale, softcap=softcap)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_logit_that_is_no_number_gives_what_the_module_gives() -> None:
    attend, (query, key, value) = of(), tensors(40)
    attend(MODULE, query, key, value, None)
    query[0, 0, 0, 0] = torch.nan
    out, _ = attend(MODULE, query, key, value, None)
    assert out[0, 0, 0].isnan().all()
    assert out[1].isfinite().all()


def test_gradients_windows_autocast_and_other_value_sizes_take_the_module() -> None:
    attend, (query, key, value) = of(), tensors(40, dtype=torch.float64)
    attend(MODULE, query, key, value, None)  # a step like these is known by now
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    wanted = [x.clone().requires_grad_() for x in (query, key, value)]
    found = torch.autograd.grad(attend(MODULE, *inputs, None)[0].square().sum(), inputs)
    expected = torch.autograd.grad(exact(*wanted).square().sum(), wanted)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    out, _ = attend(MODULE, query, key, value, None, sliding_window=8)
    torch.testing.assert_close(out, exact(query, key[:, :, -8:], value[:, :, -8:]))
    out, _ = attend(MODULE, query, key, value[..., :8], None)
    torch.testing.assert_close(out, exact(query, key, value)[..., :8])
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attend(MODULE, *(x.float() for x in (query, key, value)), None)
    torch.testing.assert_close(out.double(), exact(query, key, value), rtol=2e-2, atol=2e-2)


def test_errors_are_those_of_the_module() -> None:
    attend, (query, key, value) = of("short", max_seq_len=64), tensors(60)
    attend(MODULE, query, key, value, None)
    with pytest.raises(InputError, match="max_seq_len"):
        attend(MODULE, *tensors(65), None)
    with pytest.raises(InputError, match="v has"):
        attend(MODULE, query, key, value[:, :, :59], None)
    with pytest.raises(InputError, match="dtype"):
        attend(MODULE, query, key, value.double(), None)
    with pytest.raises(InputError, match="kv"):
        attend(MODULE, query[:, :5], key, value, None)
    with pytest.raises(InputError, match="output_attentions"):
        attend(MODULE, query, key, value, None, output_attentions=True)


def test_a_dilated_pattern_and_determinism_are_kept_apart() -> None:
    given = tensors(40)
    dilated, _ = of("dilated", segment_lengths=[8, 16], dilation_rates=[1, 2])(MODULE, *given, None)
    assert not torch.allclose(dilated.double(), exact(*given), atol=1e-3)
    attend = of()
    plain, _ = attend(MODULE, *given, None)
    torch.use_deterministic_algorithms(True)
    try:
        out, _ = attend(MODULE, *given, None)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(out, plain)
