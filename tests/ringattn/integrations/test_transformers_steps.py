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


def test_dropout_takes_the_module() -> None:
    attend, (query, key, value) = of(), tensors(1)  # of one key, whose weight of 1 is 0 or 2
    attend(MODULE, query, key, value, None)
    out, _ = attend(MODULE, query, key, value, None, dropout=0.5)
    kept = out != 0
    assert 0 < kept[..., 0].sum() < kept[..., 0].numel()
    torch.testing.assert_close(out[kept], 2 * exact(query, key, value).float()[kept])


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


def padded(firsts: list[int], ends: list[int], dtype: torch.dtype = torch.float32, heads: int = 6) -> list[Tensor]:
    """Query (B, H, 1, D), key and value (B, Hkv, Sk, D) whose padding is large, and the mask (B, Sk) of what is not."""
    generator = torch.Generator().manual_seed(sum(firsts))
    batch, keys = len(firsts), 40
    query, key, value = (
        torch.randn(batch, h, n, 16, generator=generator) for h, n in ((heads, 1), (2, keys), (2, keys))
    )
    at = torch.arange(keys)
    mask = (at >= torch.tensor(firsts)[:, None]) & (at < torch.tensor(ends)[:, None])
    for x in (key, value):
        x.masked_fill_(~mask[:, None, :, None], 100.0)
    return [*(x.to(dtype) for x in (query, key, value)), mask]


def assert_spans(out: Tensor, given: list[Tensor], close: float = 1e-5) -> None:
    query, key, value, mask = given
    for b, kept in enumerate(mask):
        expected = exact(query[b : b + 1], key[b : b + 1][:, :, kept], value[b : b + 1][:, :, kept])
        torch.testing.assert_close(out[b : b + 1].double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 6])
def test_a_batch_padded_on_the_left_is_one_call(
    dtype: torch.dtype, heads: int, without_module: Callable[[], None]
) -> None:
    attend = of(dtype=dtype)  # a CPU without bfloat16 would compute in float32, by the module
    without_module()
    for firsts in ([0, 5, 39], [39, 0, 1], [7, 7, 7]):  # of one look
        given = padded(firsts, [40, 40, 40], dtype, heads)
        out, _ = attend(MODULE, *given)
        assert_spans(out, given, 1e-5 if dtype is torch.float32 else 2e-2)


def test_a_batch_that_the_plan_computes_in_another_dtype_takes_the_module() -> None:
    """float16 on a CPU, which is computed in float32."""
    given = padded([0, 5, 39], [40, 40, 40], torch.float16)
    assert_spans(of()(MODULE, *given)[0], given, 2e-3)


def test_cross_attention_to_a_batch_padded_on_the_right_is_one_call(without_module: Callable[[], None]) -> None:
    attend, given = of(), padded([0, 0, 3], [40, 7, 9])
    without_module()
    out, _ = attend(SimpleNamespace(is_causal=False), *given)
    assert_spans(out, given)


def test_padding_that_is_no_number_is_never_attended() -> None:
    attend = of()
    for bad in (torch.nan, torch.inf):
        given = padded([0, 5, 39], [40, 40, 40])
        query, key, value, mask = given
        for x in (key, value):
            x.masked_fill_(~mask[:, None, :, None], bad)
        assert_spans(attend(MODULE, *given)[0], given)
    given[1][0, 0, 3, 0] = torch.nan  # and a key that is none shows, in its row alone
    out, _ = attend(MODULE, *given)
    assert out[0, 0, :3].isnan().all()
    assert out[0, 0, 3:].isfinite().all()
    assert out[1:].isfinite().all()


def test_what_is_no_span_takes_the_module() -> None:
    attend, (query, key, value, mask) = of(), padded([0, 5, 9], [40, 40, 40])
    attend(MODULE, query, key, value, mask)
    gapped = mask.clone()
    gapped[0, 7] = False
    assert_spans(attend(MODULE, query, key, value, gapped)[0], [query, key, value, gapped])
    hidden = mask.clone()
    hidden[1] = False  # a sequence of padding alone
    out, _ = attend(MODULE, query, key, value, hidden)
    assert not out[1].any()
    with pytest.raises(InputError, match="the attention mask has no window"):
        attend(MODULE, query, key, value, mask, sliding_window=8)
    inputs = [x.double().requires_grad_() for x in (query, key, value)]
    grads = torch.autograd.grad(attend(MODULE, *inputs, mask)[0].sum(), inputs)
    assert not grads[1].masked_select(~mask[:, None, :, None]).any()
    with pytest.raises(InputError, match="40 positions and k has 39"):
        attend(MODULE, query, key[:, :, :39], value[:, :, :39], mask)


def test_a_cache_with_room_for_more_has_no_padding(without_module: Callable[[], None]) -> None:
    attend, (query, key, value, _) = of(), padded([0, 0], [40, 40])
    without_module()
    out, _ = attend(MODULE, query, key, value, torch.ones(2, 31, dtype=torch.bool))
    torch.testing.assert_close(out.double(), exact(query, key[:, :, :31], value[:, :, :31]), rtol=1e-5, atol=1e-5)
