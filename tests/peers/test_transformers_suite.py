"""transformers' own tests of attention interfaces, for Llama, Mistral (window 2) and BERT with random weights.

Of tests/test_modeling_common.py: ``test_eager_matches_sdpa_inference`` (7 sequences of 7 tokens in three dtypes,
padding on either side or no mask, and attention weights), ``test_eager_matches_sdpa_generate``, and those that compare
padded batches with packed rows; of tests/utils/test_modeling_utils.py the names of ``TestAttentionImplementation``.
Results are no further from the model in float64 than 1.5 times eager attention of the same dtype is, where theirs
differ by up to 1e-2.

Legend: B batch, S positions.
"""

from __future__ import annotations

import copy
import functools
import logging
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from peer_tables import assert_page_says
from tiny_models import DECODER, MODELS, VOCABULARY, attention, tiny
from torch import Tensor

from ringattn.errors import InputError
from ringattn.integrations.transformers import register

BATCH, LENGTH = 7, 7
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FAMILIES = ("llama", "mistral, window 5", "bert")
DECODERS = FAMILIES[:2]
SIDES = ("left", "right")
INFERENCE = list(product(FAMILIES, UNIT_ROUNDOFF, SIDES, (True, False)))
PADDING_FREE = list(product(DECODERS, ("position ids", "position ids and bounds")))
# Names that no model takes until they are registered.
UNKNOWN = ("foo", "ringtune-of-no-one")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register(profile=None)
    logging.getLogger("transformers").setLevel(logging.ERROR)


@functools.cache
def model_of(name: str, dtype: torch.dtype) -> Any:
    """The tiny model in ``dtype``; windows are of 2 positions, as in theirs."""
    model = copy.deepcopy(tiny(name)).to(dtype)
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = 2
        for layer in model.model.layers:
            layer.self_attn.sliding_window = 2
    return model


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(42))


def padded(side: str) -> Tensor:
    """The last sequence lacks two tokens."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[-1, slice(0, 2) if side == "left" else slice(-2, None)] = 0
    return mask


def logits(name: str, dtype: torch.dtype, implementation: str, **inputs: Any) -> Tensor:
    model = model_of(name, dtype)
    with attention(model, implementation), torch.no_grad():
        found: Tensor = model(**inputs).logits
    return found


def exact(name: str, mask: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits in float64 of the positions that ``mask`` keeps: of each sequence alone, without its padding."""
    positions = torch.arange(LENGTH).expand(BATCH, -1) if positions is None else positions
    found = []
    for ids, kept, at in zip(tokens(), mask.bool(), positions, strict=True):
        found.append(logits(name, torch.float64, "sdpa", input_ids=ids[kept][None], position_ids=at[kept][None])[0])
    return torch.cat(found)


@pytest.mark.parametrize(("name", "dtype", "side", "with_mask"), INFERENCE)
def test_eager_matches_inference(name: str, dtype: torch.dtype, side: str, with_mask: bool) -> None:
    mask = padded(side) if with_mask else torch.ones(BATCH, LENGTH, dtype=torch.long)
    inputs, kept = {"input_ids": tokens(), "attention_mask": mask if with_mask else None}, mask.bool()
    expected = exact(name, mask)
    ours, eager = (logits(name, dtype, implementation, **inputs)[kept] for implementation in ("ringtune", "eager"))
    assert ours.dtype is dtype
    error, allowed = (ours.double() - expected).norm(), (eager.double() - expected).norm()
    assert error <= 1.5 * allowed + 4 * UNIT_ROUNDOFF[dtype] * expected.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_weights_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"^output_attentions is given .*; use attn_implementation='eager'$"):
        logits(name, torch.float32, "ringtune", input_ids=tokens(), output_attentions=True)


@pytest.mark.parametrize("name", DECODERS)
def test_eager_matches_generation(name: str) -> None:
    model, made = model_of(name, torch.float32), []
    for implementation in ("ringtune", "eager"):
        with attention(model, implementation):
            limits = {"max_new_tokens": 6, "min_new_tokens": 6}
            made.append(model.generate(tokens(), attention_mask=padded("left"), do_sample=False, **limits))
    assert torch.equal(*made)


@pytest.mark.parametrize(("name", "given"), PADDING_FREE)
def test_padding_matches_padding_free(name: str, given: str) -> None:
    """A batch padded on the left, and its sequences in one row without padding."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for row in range(BATCH):
        mask[row, : row % 4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    kept = mask.bool()
    row: dict[str, Any] = {"input_ids": tokens()[kept][None], "position_ids": positions[kept][None], "use_cache": False}
    if "bounds" in given:
        bounds = torch.cat((torch.zeros(1, dtype=torch.int32), mask.sum(1).cumsum(0).int()))
        row |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": LENGTH, "max_length_k": LENGTH}
    batch = {"input_ids": tokens(), "attention_mask": mask, "position_ids": positions}
    free, whole = (logits(name, torch.float64, "ringtune", **inputs) for inputs in (row, batch))
    for found in (free[0], whole[kept]):
        torch.testing.assert_close(found, exact(name, mask, positions), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_implementation_is_refused_by_transformers(name: str) -> None:
    with pytest.raises(ValueError, match=f'attn_implementation="{name}"'):
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, attn_implementation=name))


def test_a_registered_name_is_taken_by_config_and_by_model() -> None:
    family, kind, values = MODELS["llama"]
    config = getattr(transformers, f"{family}Config")(**values, attn_implementation="ringtune")
    model = getattr(transformers, f"{family}For{kind}")(config)
    assert model.config._attn_implementation == "ringtune"
    model.set_attn_implementation("eager")
    model.set_attn_implementation("ringtune")
    assert model.model.config._attn_implementation == "ringtune"


def test_the_page_counts_them() -> None:
    passed = len(INFERENCE) + len(DECODERS) + len(PADDING_FREE) + len(UNKNOWN) + 1
    assert_page_says("transformers, attention interfaces", passed, ["attention weights"] * len(FAMILIES))
