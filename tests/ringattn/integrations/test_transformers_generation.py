"""Tokens that ``generate`` makes with a cache are those of the whole sequence at once, for every cache."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, attention, tiny
from torch import Tensor

from ringattn.integrations.transformers import register

TOKENS = 300  # more than modules remember steps, and many times what a cache begins with
PROMPT = 9
STATIC = {"cache_implementation": "static", "disable_compile": True}
CONFIGURATIONS = {
    "dense": ("llama", 1, {}),
    "static cache": ("llama", 1, STATIC),
    "prompt in chunks": ("llama", 1, {"prefill_chunk_size": 4}),
    "sequences of their own lengths": ("llama", 3, {}),
    "sliding window": ("mistral, window 5", 1, {}),
    "sliding window, of their own lengths": ("mistral, window 5", 2, {}),
    "sliding windows in every second layer, static": ("gemma 2 without softcap", 1, STATIC),
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register(profile=None)
    logging.getLogger("transformers").setLevel(logging.ERROR)


def prompts(batch: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, S), and their mask: row b is b positions shorter, on the left."""
    ids = torch.randint(3, VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(5))
    return ids, (torch.arange(PROMPT) >= torch.arange(batch)[:, None]).long()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_tokens_are_those_of_each_sequence_alone(name: str) -> None:
    """In float64, but for the logits that ``generate`` returns, against ``eager`` over each sequence alone."""
    family, batch, options = CONFIGURATIONS[name]
    model: Any = copy.deepcopy(tiny(family)).double()
    model.config.max_position_embeddings = 512
    ids, mask = prompts(batch)
    with attention(model, "ringtune"):
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, return_dict_in_generate=True,
            output_logits=True, **options,
        )  # fmt: skip
    logits = torch.stack(made.logits, 1)
    assert logits.shape[:2] == (batch, TOKENS)
    for row in range(batch):
        whole = made.sequences[row : row + 1, row:]
        with attention(model, "eager"), torch.no_grad():
            expected = model(whole, use_cache=False).logits[0, PROMPT - row - 1 : -1]
        torch.testing.assert_close(logits[row], expected.float(), rtol=1e-6, atol=1e-5)
        assert torch.equal(made.sequences[row, PROMPT:], expected.argmax(-1))
