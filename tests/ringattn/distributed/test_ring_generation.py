"""What ``generate`` makes over ranks, with a cache that they hold together, is what each prompt gives alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from tiny_models import VOCABULARY, attention, tiny
from torch import Tensor

from ringattn.decoding import cache as caches
from ringattn.errors import RingAttentionError
from ringattn.integrations.transformers import kv_cache, register

TOKENS, PROMPT = 14, 9
DILATED = {"segment_lengths": [4, 16], "dilation_rates": [1, 2]}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("llama", {}, {}),
    "dense, prompt in chunks": ("llama", {}, {"prefill_chunk_size": 4}),
    "dilated": ("llama", DILATED, {}),
    "dilated, prompt in chunks": ("llama", DILATED, {"prefill_chunk_size": 4}),
    "sliding window": ("mistral, window 5", {}, {}),
    "softcap, windows in every second layer": ("gemma 2, softcap 2", {}, {"prefill_chunk_size": 4}),
    "heads of their own": ("gpt 2", {}, {}),
}


def model_of(family: str) -> Any:
    return copy.deepcopy(tiny(family)).double()


def prompts() -> tuple[Tensor, Tensor]:
    """Tokens (B, S), and their mask: rows of 9, 6 and 1 tokens, padded on the left."""
    ids = torch.randint(3, VOCABULARY, (3, PROMPT), generator=torch.Generator().manual_seed(5))
    return ids, (torch.arange(PROMPT) >= torch.tensor([0, 3, 8])[:, None]).long()


def generated_on_rank(name: str, stripe: int, **options: Any) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens, logits, and how many rows this rank holds in each layer."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    usual, caches.STRIPE = caches.STRIPE, stripe
    try:
        family, pattern, more = CONFIGURATIONS[name]
        register("over-ranks", profile=None, process_group=dist.group.WORLD, **pattern)
        model, (ids, mask), cache = model_of(family), prompts(), kv_cache()
        with attention(model, "over-ranks"):
            made = model.generate(
                ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, return_dict_in_generate=True,
                output_logits=True, past_key_values=cache, **more, **options,
            )  # fmt: skip
        held = [layer.cache.most_rows for layer in cache.layers]
        return made.sequences, torch.stack(made.logits, 1), held
    finally:
        caches.STRIPE = usual


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_tokens_and_logits_over_ranks(name: str, ranks: Callable[[int], Pool]) -> None:
    """In float64, but for the logits that ``generate`` returns, against the whole of each row, on one device."""
    family, pattern, _ = CONFIGURATIONS[name]
    register("alone", profile=None, **pattern)
    model, stripe = model_of(family), 2
    (sequences, logits, held), *others = ranks(3).run(generated_on_rank, name, stripe)
    for other, other_logits, _ in others:
        assert torch.equal(other, sequences)
        assert torch.equal(other_logits, logits)
    if family == "llama":
        assert all(rows <= -(-(PROMPT + TOKENS) // (3 * stripe)) * stripe for rows in held)
    for row, padding in enumerate((0, 3, 8)):
        whole = sequences[row : row + 1, padding:]
        with attention(model, "alone" if pattern else "eager"), torch.no_grad():
            expected = model(whole, use_cache=False).logits[0, PROMPT - padding - 1 : -1]
        torch.testing.assert_close(logits[row], expected.float(), rtol=1e-6, atol=1e-5)
        assert torch.equal(sequences[row, PROMPT:], expected.argmax(-1))


def beams_on_rank() -> Tensor:
    return generated_on_rank("dense", 2, num_beams=3)[0]


def test_beams_over_ranks(ranks: Callable[[int], Pool]) -> None:
    register(profile=None)
    model, (ids, mask) = model_of("llama"), prompts()
    with attention(model, "ringtune"):
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, num_beams=3)
    for found in ranks(2).run(beams_on_rank):
        assert torch.equal(found, expected)


def refused_on_one_rank() -> str:
    """The last rank's second call has a mask in which a token of the first has become padding."""
    register("over-ranks", profile=None, process_group=dist.group.WORLD)
    model, (ids, mask), cache = model_of("llama"), prompts(), kv_cache()
    later = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), 1)
    if dist.get_rank() == dist.get_world_size() - 1:
        later[0, 2] = 0
    try:
        with attention(model, "over-ranks"), torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            model(ids[:, :1], attention_mask=later, past_key_values=cache)
    except RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_step_that_one_rank_refuses_ends_on_all(fragile: Pool) -> None:
    told = fragile.run(refused_on_one_rank)
    assert [text.partition(":")[0] for text in told] == ["PeerError", "PeerError", "InputError"]
    assert all("the attention mask has other padding in the 9 positions of the cache" in text for text in told)
