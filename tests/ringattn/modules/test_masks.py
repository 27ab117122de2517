"""Masks as numbers: what is recognised, what is refused, and that every way to attend gives what they describe."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked import allowed_by, masked
from torch import Tensor

from ringattn import RingAttention
from ringattn.errors import InputError
from ringattn.modules import masks
from ringattn.modules.attend import attend
from ringattn.modules.masks import Keys, keys_of_bounds, keys_of_mask, keys_of_padding, keys_of_positions, remembered
from ringattn.modules.pool import AttentionPool

POOL = AttentionPool(profile=None)


@st.composite
def described(draw: st.DrawFn) -> tuple[Keys, int, int]:
    """Keys, a batch size and a number of queries that fit them."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    documents = draw(st.integers(1, 3))
    causal = draw(st.booleans())
    rows = []
    for _ in range(batch):
        row = sorted(draw(st.lists(st.integers(1, documents), min_size=length, max_size=length)))
        gone = draw(st.sampled_from(("none", "left", "right", "any")))
        count = draw(st.integers(0, length))
        for at in range(length):
            if {"left": at < count, "right": at >= count, "any": draw(st.booleans())}.get(gone, False):
                row[at] = masks.PADDING
        rows.append(row)
    keys = Keys(torch.tensor(rows, dtype=torch.int), causal)
    own = causal or not keys.single
    queries = length if not causal and own else draw(st.integers(1, length if own else 15))
    return keys, batch, queries


def inputs(batch: int, queries: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries * 31 + length)
    shapes = ((batch, queries, 4, 8), (batch, length, 2, 8), (batch, length, 2, 8))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@given(described())
def test_attention_over_keys_is_that_under_the_mask_they_describe(example: tuple[Keys, int, int]) -> None:
    """With its gradients; in a cache that has room for more keys, which hold anything."""
    keys, batch, queries = example
    q, k, v = inputs(batch, queries, keys.length + 3)
    out, _ = attend(POOL, q, k, v, causal=keys.causal, keys=keys)
    allowed = allowed_by(keys, batch, queries)
    expected = masked(q, k[:, : keys.length], v[:, : keys.length], allowed)
    kept = torch.ones(batch, queries, dtype=torch.bool)
    if keys.causal or not keys.single:
        kept = keys.codes.expand(batch, -1)[:, keys.length - queries :] > 0
    torch.testing.assert_close(out[kept], expected[kept], rtol=0, atol=1e-12)
    assert not out[~kept].any()
    dout = torch.randn_like(out) * kept[..., None, None]
    found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for grad, exact in zip(found, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        torch.testing.assert_close(grad, exact, rtol=0, atol=1e-11)


@pytest.mark.parametrize("queries", [1, 4, 11])
@pytest.mark.parametrize("window", [1, 3, 10, 11, 50])
@pytest.mark.parametrize("padded", [False, True])
def test_windows(queries: int, window: int, padded: bool) -> None:
    codes = torch.ones(2, 11, dtype=torch.int)
    if padded:
        codes[1, :4] = masks.PADDING
    keys = Keys(codes, True, window)
    q, k, v = inputs(2, queries, 11)
    out, lse = attend(POOL, q, k, v, causal=True, keys=keys, with_lse=True)
    torch.testing.assert_close(out, masked(q, k, v, allowed_by(keys, 2, queries)), rtol=0, atol=1e-12)
    assert lse is not None
    assert lse.shape == (2, 4, queries)


def test_a_window_over_padding_inside_of_a_document_is_refused() -> None:
    keys = Keys(torch.tensor([[1, 1, masks.PADDING, 1, 1, 1]], dtype=torch.int), True, 3)
    with pytest.raises(InputError, match=r"^a sliding window counts positions, and a document has padding inside"):
        attend(POOL, *inputs(1, 6, 6), causal=True, keys=keys)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("value_dim", [3, 8, 20])
def test_values_of_another_width_than_keys(value_dim: int, lse: bool) -> None:
    q, k, _ = inputs(2, 7, 7)
    v = torch.randn(2, 7, 2, value_dim, dtype=torch.float64)
    out, _ = attend(POOL, q, k, v, causal=True, with_lse=lse)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=0, atol=1e-12)


def test_a_dilated_pattern_with_padding_among_other_queries_is_refused() -> None:
    pool = AttentionPool(profile=None, segment_lengths=[4], dilation_rates=[2])
    keys = keys_of_padding(torch.tensor([[1, 1, 1, 0, 0, 0, 0]]), causal=False)
    q, k, v = inputs(1, 7, 7)
    with pytest.raises(InputError, match=r"^pattern \[4\]/\[2\] counts positions, which padding shifts"):
        attend(pool, q, k, v, causal=False, keys=keys)
    out, _ = attend(pool, q, k, v, causal=False, keys=keys, of_one=True)
    alone = pool.module_for(q, k, False, 8**-0.5)(q[:, :3], k[:, :3], v[:, :3])
    torch.testing.assert_close(out[:, :3], alone, rtol=0, atol=1e-14)
    assert not out[:, 3:].any()


# --- what masks are recognised -----------------------------------------------------------------------------------


def minimum(allowed: Tensor, dtype: torch.dtype = torch.float32, least: float | None = None) -> Tensor:
    least = torch.finfo(dtype).min if least is None else least
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, least)


CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
PADDED = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()[:, None, None]


@pytest.mark.parametrize(
    "made", [lambda x: x, minimum, lambda x: minimum(x, torch.bfloat16), lambda x: minimum(x, least=-torch.inf)]
)
def test_causal_and_key_masks_are_recognised(made: Any) -> None:
    causal = keys_of_mask(made(CAUSAL))
    assert (causal.plain, causal.causal, causal.length) == (True, True, 5)
    for mask in (PADDED, PADDED.expand(2, 3, 4, 5)):
        keys = keys_of_mask(made(mask))
        assert keys.codes.tolist() == [[1, 1, 1, -1, -1], [-1, 1, 1, 1, 1]]
        assert not keys.causal


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (CAUSAL.flip(0), "is neither causal nor the same for all queries and heads; use FlexAttention"),
        (CAUSAL[:4], "is neither causal"),
        (torch.stack((CAUSAL, ~CAUSAL))[None], "is neither causal"),
        (torch.stack((CAUSAL[2], CAUSAL[3]))[None, :, None], "is neither causal"),
        (minimum(CAUSAL) + 0.25, "adds a bias to the logits, as ALiBi does, which no kernel here computes; use FlexA"),
        (CAUSAL.int(), "is of torch.int32; it must be boolean or floating point"),
    ],
)
def test_other_masks_are_refused_with_what_follows_them(mask: Tensor, told: str) -> None:
    with pytest.raises(InputError, match=r"^the attention mask") as error:
        keys_of_mask(mask)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_documents_begin_where_positions_start_again() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 7, 8]])
    keys = keys_of_positions(positions, None)
    assert keys is not None
    assert keys.codes.tolist() == [[1, 1, 1, 2, 2, 3], [1] * 6]
    assert keys_of_positions(positions[1:], None) is None
    padded = keys_of_padding(torch.tensor([[0, 1, 1, 1, 1, 1]]), causal=True)
    both = keys_of_positions(positions[:1], padded)
    assert both is not None
    assert both.documents.values == (0, 2, 4, 5)


def test_bounds_leave_what_lies_beyond_them_as_padding() -> None:
    keys = keys_of_bounds(torch.tensor([0, 2, 2, 5]), 7, True)
    assert keys.codes[0].tolist() == [1, 1, 2, 2, 2, -1, -1]


# --- what is remembered ------------------------------------------------------------------------------------------


def test_a_mask_is_read_once_until_it_is_written_to_or_freed() -> None:
    reads: list[Any] = []

    def read(x: Tensor, argument: int) -> int:
        reads.append(argument)
        return int(x.sum())

    x = torch.ones(3)
    assert [remembered(read, x, 1), remembered(read, x, 2), remembered(read, x, 1)] == [3, 3, 3]
    assert reads == [1, 2]
    x += 1
    assert remembered(read, x, 1) == 6
    before = len(masks._read)
    del x
    gc.collect()
    assert len(masks._read) == before - 1


def test_a_tensor_that_counts_no_versions_is_read_every_time() -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        assert remembered(lambda x: x.sum().item(), x) == 3
        x += 1
        assert remembered(lambda x: x.sum().item(), x) == 6


def test_a_cache_behind_padding_on_the_left_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring sequences of one length in one call, and none of the keys copied; jobs are found once."""
    kept = torch.arange(9) >= torch.tensor([[3], [3], [0], [5]])
    keys = keys_of_padding(kept, causal=True)
    q, k, v = (x.detach() for x in inputs(4, 1, 9))
    seen, real = [], RingAttention.cross

    def noted(self: RingAttention, *tensors: Any) -> Any:
        seen.append(tensors[1])
        return real(self, *tensors)

    monkeypatch.setattr(RingAttention, "cross", noted)
    out, _ = attend(POOL, q, k, v, causal=True, keys=keys)
    assert [tuple(x.shape[:2]) for x in seen] == [(2, 6), (1, 9), (1, 4)]
    assert all(x.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() for x in seen)
    torch.testing.assert_close(out, masked(q, k, v, allowed_by(keys, 4, 1)), rtol=0, atol=1e-12)
    assert keys.calls(4, 1) is keys.calls(4, 1)
