"""A keyword that changes the mathematics and is not followed is refused in one line, by model and function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import BATCH, LENGTH, attention, padded, tiny, tokens
from torch import Tensor, nn
from transformers.utils.generic import TransformersKwargs

from ringattn.errors import InputError
from ringattn.integrations.transformers import _NO_MATHEMATICS, _REFUSED, register


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register(profile=None)


def call(
    causal: bool = True, queries: int = LENGTH, keys: int = LENGTH, mask: Tensor | None = None, **given: Any
) -> Tensor:
    module = nn.Identity()
    module.is_causal = causal
    drawn = torch.Generator().manual_seed(0)
    q, k = torch.randn(BATCH, 4, queries, 8, generator=drawn), torch.randn(BATCH, 2, keys, 8, generator=drawn)
    out, weights = transformers.AttentionInterface()["ringtune"](module, q, k, k, mask, **given)
    assert weights is None
    assert out.shape == (BATCH, queries, 4, 8)
    return out


X = torch.ones(1)
BOUNDS = torch.tensor([0, 4, 12])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        *(({name: X}, f"{name} is given to attn_implementation='ringtune' and asks for {_REFUSED[name]}")
          for name in _REFUSED),
        ({"new_mathematics": X}, "new_mathematics is given to attn_implementation='ringtune' and asks for nothing"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be in [0, 1)"),
        ({"dropout": 0.1, "queries": 1}, "dropout is 0.1 in training mode; dropout is exact in one block of"),
        ({"causal": False, "sliding_window": 4}, "sliding_window is 4 without a causal mask, and there are 12 keys"),
        ({"queries": 3}, "there are 3 queries, 12 keys, a causal mask and no attention_mask to say where"),
        ({"cu_seq_lens_q": BOUNDS}, "one of cu_seq_lens_q and cu_seq_lens_k is given; give both"),
        ({"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS}, "cu_seq_lens_q is for documents packed into one row"),
        ({"mask": torch.rand(BATCH, 1, LENGTH, LENGTH)}, "adds a bias to the logits, as ALiBi does"),
        ({"mask": torch.ones(BATCH, 1, LENGTH, LENGTH).bool().triu()}, "use FlexAttention"),
        ({"total_length": 24}, "total_length is 24, but this rank holds all 12 positions; leave it out, or register("),
        ({"scaling": -1.0}, "scale is -1.0"),
    ],
)  # fmt: skip
def test_the_function_says_so_in_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as error:
        call(**given)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_bounds_that_disagree_are_refused() -> None:
    q = torch.randn(1, 4, LENGTH, 8)
    attend = transformers.AttentionInterface()["ringtune"]
    other = torch.tensor([0, 5, 12])
    with pytest.raises(InputError, match=r"^cu_seq_lens_q and cu_seq_lens_k differ"):
        attend(nn.Identity(), q, q, q, None, cu_seq_lens_q=BOUNDS, cu_seq_lens_k=other)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    with pytest.raises(InputError, match=r"^cu_seq_lens_q disagrees with the attention mask or position_ids"):
        attend(nn.Identity(), q, q, q, None, cu_seq_lens_q=BOUNDS, cu_seq_lens_k=BOUNDS, position_ids=positions)


def test_a_window_that_the_mask_does_not_have_is_refused() -> None:
    mask = transformers.AttentionMaskInterface()["ringtune"](
        BATCH, LENGTH, LENGTH, attention_mask=padded("left").bool()
    )
    with pytest.raises(InputError, match=r"^sliding_window is 4, and the attention mask has no window$"):
        call(mask=mask, sliding_window=4)
    assert torch.equal(call(mask=mask, sliding_window=12), call(mask=mask))


@pytest.mark.parametrize(
    "given",
    [
        dict.fromkeys(_NO_MATHEMATICS, X),
        dict.fromkeys(_REFUSED),
        {"softcap": 0.0, "output_attentions": False, "dropout": 0.0},
    ],
    ids=["no mathematics", "refused ones that are None", "off"],
)
def test_what_changes_no_number_is_taken(given: dict[str, Any]) -> None:
    assert torch.equal(call(**given), call())


def test_every_keyword_that_transformers_declares_is_taken_or_refused_by_name() -> None:
    parameters = {"cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "is_causal"}
    assert set(TransformersKwargs.__annotations__) <= parameters | _NO_MATHEMATICS | _REFUSED.keys()


@pytest.mark.parametrize(
    ("name", "inputs", "told"),
    [
        ("modernbert, window 4", {}, "the model's mask is neither causal nor full"),
        ("t5", {"decoder_input_ids": tokens()}, "position_bias is given"),
        ("llama", {"output_attentions": True}, "output_attentions is given"),
    ],
)
def test_models_that_ask_for_it(name: str, inputs: dict[str, Any], told: str) -> None:
    model = tiny(name)
    with attention(model, "ringtune"), pytest.raises(InputError) as error:
        model(tokens(), **inputs)
    assert told in str(error.value)


def test_dropout_is_refused_with_padding_and_in_training_mode_alone() -> None:
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
            attn_implementation="ringtune",
        )
    )  # fmt: skip
    model.train()(tokens())
    with pytest.raises(InputError, match=r"^dropout is 0\.1 in training mode; .*, without padding and documents; set"):
        model(tokens(), attention_mask=padded("right"))
    model.eval()(tokens(), attention_mask=padded("right"))


def test_a_model_whose_window_covers_its_sequences_has_none() -> None:
    """ModernBERT's windows count to both sides."""
    model = tiny("modernbert, window 4")
    ids = tokens()[:, :5]
    with torch.no_grad():
        expected = model(ids).logits
        with attention(model, "ringtune"):
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=2e-5)
