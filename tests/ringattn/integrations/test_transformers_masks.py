"""The codes of a mask say what transformers' own mask says, or are refused where they cannot."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked import allowed_by
from transformers import masking_utils

from ringattn.errors import InputError
from ringattn.integrations.transformers_masks import keys_of_codes, mask_codes

codes_of = partial(mask_codes, masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
KINDS = ("causal", "full", "window", "full window", "chunks", "packed")


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a mask function, as transformers passes them."""
    kind, batch = draw(st.sampled_from(KINDS)), draw(st.integers(1, 3))
    queries = draw(st.integers(1, 9))
    cached = 0 if kind in ("packed", "full", "full window") else draw(st.integers(0, 6))
    room = draw(st.integers(0, 3)) if kind in ("causal", "window") else 0
    keys = queries + cached + room
    size = draw(st.integers(1, 12))
    function, given = masking_utils.causal_mask_function, {}
    if kind == "full":
        function, keys = masking_utils.bidirectional_mask_function, draw(st.integers(1, 9))
    elif kind == "window":
        function, given = masking_utils.sliding_window_causal_mask_function(size), {"local_size": size}
    elif kind == "full window":
        function, given = masking_utils.sliding_window_bidirectional_mask_function(size), {"local_size": size}
    attention_mask = None
    if kind != "packed" and draw(st.booleans()):
        width = keys - room if draw(st.booleans()) else keys
        rows = draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=batch, max_size=batch))
        attention_mask = torch.tensor(rows)
        if width == keys and room:
            attention_mask[:, keys - room :] = False
    if kind == "chunks":
        left = torch.zeros(batch, dtype=torch.long)
        if attention_mask is not None:
            left = (attention_mask.cumsum(-1) == 0).sum(-1)
        function, given = masking_utils.chunked_causal_mask_function(size, left), {"local_size": size}
    if kind == "packed":
        begins = draw(st.lists(st.booleans(), min_size=queries, max_size=queries))
        begins[0] = True
        positions = torch.tensor([at - max(b for b in range(at + 1) if begins[b]) for at in range(queries)])[None]
        number = torch.tensor(begins).cumsum(0)[None]
        windowed = draw(st.booleans())
        base = masking_utils.causal_mask_function
        if windowed:
            base, given = masking_utils.sliding_window_causal_mask_function(size), {"local_size": size}
        positions, number = positions.expand(batch, -1), number.expand(batch, -1)
        function = masking_utils.and_masks(
            masking_utils.remap_positions_for_packed_sequence(base, positions),
            masking_utils.packed_sequence_mask_function(number),
        )
    offset: Any = cached if draw(st.booleans()) else torch.tensor(cached)
    if kind in ("full", "full window", "packed"):
        offset = 0
    return {
        "batch_size": batch, "q_length": queries, "kv_length": keys, "q_offset": offset, "mask_function": function,
        "attention_mask": attention_mask, **given,
    }  # fmt: skip


@given(asked())
def test_codes_say_what_transformers_mask_says(arguments: dict[str, Any]) -> None:
    """For every query that is no padding. Windows to both sides that cut something are refused, and nothing else."""
    expected = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
    batch, queries, length = expected.shape
    mask = codes_of(**arguments)
    if mask is None:
        plain = torch.ones(queries, length, dtype=torch.bool)
        if arguments["mask_function"] is masking_utils.causal_mask_function:
            plain = plain.tril(length - queries)
        assert (expected == plain).all()
        return
    assert (mask.shape, mask.dtype) == ((batch, 1, 2, length), torch.int32)
    try:
        keys = keys_of_codes(mask)
    except InputError:
        two_sided = arguments["mask_function"].__qualname__.startswith("and_masks") and arguments.get("local_size")
        assert two_sided
        assert arguments["local_size"] < length - 1
        return
    found = torch.zeros_like(expected)
    found[..., : keys.length] = allowed_by(keys, batch, queries)
    real = torch.ones(batch, queries, dtype=torch.bool)
    if keys.causal or not keys.single:
        real = keys.codes[:, keys.length - queries :] > 0
    assert torch.equal(found[real], expected[real])


@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_sliding_caches_last_keys_have_an_offset(window: int) -> None:
    """What a cache of a sliding window holds of a longer sequence."""
    function = masking_utils.sliding_window_causal_mask_function(window)
    arguments: dict[str, Any] = {
        "batch_size": 1, "q_length": 3, "kv_length": 6, "q_offset": 20, "kv_offset": 17, "mask_function": function,
        "attention_mask": torch.ones(1, 23, dtype=torch.bool), "local_size": window,
    }  # fmt: skip
    mask = codes_of(**arguments)
    assert mask is not None
    expected = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
    assert torch.equal(allowed_by(keys_of_codes(mask), 1, 3), expected)


def blocks(ids: list[int]) -> Any:
    overlay = masking_utils.blockwise_overlay(torch.tensor([ids]))
    return masking_utils.or_masks(masking_utils.causal_mask_function, overlay)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mask_function": blocks([-1, 0, 0, -1, 1])},
        {"mask_function": masking_utils.sliding_window_bidirectional_mask_function(2), "local_size": 2},
    ],
)
def test_other_masks_are_refused_when_they_are_read(arguments: dict[str, Any]) -> None:
    mask = codes_of(1, 5, 5, **arguments)
    assert mask is not None
    with pytest.raises(InputError, match=r"^the model's mask is neither causal nor full, .* use attn_implementation="):
        keys_of_codes(mask)


def test_a_mask_function_of_the_users_own_is_refused() -> None:
    with pytest.raises(InputError, match=r"^the model's mask is neither causal nor full"):
        codes_of(1, 5, 5, mask_function=masking_utils.causal_mask_function, use_vmap=True)


def test_it_takes_every_argument_that_transformers_gives() -> None:
    model_gives = {
        "allow_is_causal_skip": True,
        "allow_is_bidirectional_skip": True,
        "dtype": torch.float32,
        "config": None,
    }
    assert codes_of(1, 5, 5, mask_function=masking_utils.causal_mask_function, **model_gives) is None


def test_a_mask_without_padding_is_none() -> None:
    """As ``generate`` passes one on at every step; with padding, or of a cache with room, it is not."""
    ones = torch.ones(2, 6).bool()
    assert codes_of(2, 1, 6, q_offset=5, attention_mask=ones) is None
    assert codes_of(2, 6, 6, attention_mask=ones) is None
    assert codes_of(2, 1, 6, q_offset=5, attention_mask=ones[:, :5]) is not None
    assert codes_of(2, 1, 6, q_offset=5, attention_mask=ones & (torch.arange(6) > 0)) is not None
    assert codes_of(2, 1, 8, q_offset=5, attention_mask=ones) is not None
