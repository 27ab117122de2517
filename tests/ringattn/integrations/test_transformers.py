"""``attn_implementation="ringtune"`` gives the logits, gradients and tokens of transformers' own attention."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import BATCH, CAUSAL, LENGTH, attention, padded, tiny, tokens
from torch import Tensor

from ringattn.integrations.transformers import register
from ringattn.planning.unmeasured_workloads import VARIABLE, read_record, record_at

POSITIONS = torch.cat([torch.arange(n) for n in (3, 1, 8)])[None]  # documents of 3, 1 and 8 tokens
BOUNDS = torch.tensor([0, 3, 4, 12], dtype=torch.int32)
CLOSE = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register(profile=None)
    logging.getLogger("transformers").setLevel(logging.ERROR)


def both(model: Any, kept: Tensor | None = None, **inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of the positions kept, and the gradients of all parameters: of ``ringtune`` and of ``eager``."""
    found = []
    for implementation in ("ringtune", "eager"):
        with attention(model, implementation):
            logits = model(**inputs).logits
            logits = logits if kept is None else logits[kept.bool()]
            dlogits = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
            used = [parameter for parameter in model.parameters() if parameter.requires_grad]
            found.append([logits.detach(), *torch.autograd.grad(logits, used, dlogits, materialize_grads=True)])
    return found[0], found[1]


def assert_same(model: Any, kept: Tensor | None = None, **inputs: Any) -> None:
    """By the 2-norm of each tensor; both compute in float32."""
    ours, theirs = both(model, kept, **inputs)
    assert ours[0].abs().max() > 0.1
    largest = max(float(other.norm()) for other in theirs)  # some gradients are 0 but for rounding, as a key's bias
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= 2e-5 * other.norm() + 1e-6 * largest


def test_nothing_happens_on_import() -> None:
    code = "import sys, ringattn.integrations.transformers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[transformers\]'"):
        register()


def test_steps_over_a_cache_are_recorded_for_a_probe_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were not recorded, and would have asked for the plans of full attention, which none measures of a Llama."""
    record = tmp_path / "missed.jsonl"
    monkeypatch.setenv(VARIABLE, str(record))
    register("recorded")
    model = tiny("llama")
    with attention(model, "recorded"):
        model.generate(tokens(), max_new_tokens=4, do_sample=False)
    record_at(str(record)).write()
    calls, _ = read_record(record)
    assert {workload.mode for workload in calls} == {"infer", "decode"}
    assert all(workload.causal for workload in calls)
    assert sum(n for workload, n in calls.items() if workload.decode) == 3 * model.config.num_hidden_layers


@pytest.mark.parametrize("name", [*CAUSAL, "bert"])
@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_logits_and_gradients(name: str, side: str) -> None:
    assert_same(tiny(name), padded(side), input_ids=tokens(), attention_mask=padded(side))


@pytest.mark.parametrize("name", [*CAUSAL, "bert"])
def test_without_a_mask(name: str) -> None:
    assert_same(tiny(name), input_ids=tokens())


@pytest.mark.parametrize("name", ["llama", "mistral, window 5", "gemma 2 without softcap", "deepseek 3, narrow values"])
def test_packed_by_positions_without_a_cache(name: str) -> None:
    inputs = {"input_ids": tokens(), "position_ids": POSITIONS.expand(BATCH, -1), "use_cache": False}
    assert_same(tiny(name), **inputs)


@pytest.mark.parametrize("given", ["positions and a cache", "bounds", "bounds and positions"])
@pytest.mark.parametrize("name", ["llama", "mistral, window 5", "gpt-oss, window and sinks"])
def test_documents_are_those_of_calls_of_their_own(name: str, given: str) -> None:
    """Where transformers' own attention lets them see each other."""
    model, ids = tiny(name), tokens()[:1]
    inputs: dict[str, Any] = {"use_cache": given == "positions and a cache", "position_ids": POSITIONS}
    if "bounds" in given:
        inputs |= {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS.clone(), "max_length_q": 8, "max_length_k": 8}
    if given == "bounds":
        inputs["use_cache"] = True  # or the mask would be made of the positions
    with attention(model, "ringtune"), torch.no_grad():
        logits = model(ids, **inputs).logits
        alone = [model(ids[:, begin:end]).logits for begin, end in ((0, 3), (3, 4), (4, 12))]
    torch.testing.assert_close(logits, torch.cat(alone, 1), **CLOSE)


GENERATIONS = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "prefill in chunks": {"prefill_chunk_size": 5},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("how", GENERATIONS)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gemma 2 without softcap", "gpt-oss, window and sinks"])
def test_generated_tokens(name: str, side: str, how: str) -> None:
    model = tiny(name)
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True, **GENERATIONS[how]}
    found = []
    for implementation in ("ringtune", "eager"):
        with attention(model, implementation):
            made = model.generate(
                tokens(), attention_mask=padded(side), return_dict_in_generate=True, output_logits=True, **options
            )
            found.append((made.sequences, torch.stack(made.logits)))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", CAUSAL)
def test_generated_tokens_of_every_model(name: str) -> None:
    model, found = tiny(name), []
    for implementation in ("ringtune", "eager"):
        with attention(model, implementation):
            found.append(model.generate(tokens(), attention_mask=padded("left"), max_new_tokens=4, do_sample=False))
    assert torch.equal(*found)


def test_whisper() -> None:
    """An encoder, and a decoder with cross attention to it; as many queries as keys among the lengths."""
    model = tiny("whisper")
    features = torch.randn(BATCH, 8, 20, generator=torch.Generator().manual_seed(3))
    for length in (10, 4):
        assert_same(model, input_features=features, decoder_input_ids=tokens()[:, :length])
    found = []
    for implementation in ("ringtune", "eager"):
        with attention(model, implementation):
            found.append(model.generate(features, max_new_tokens=6, do_sample=False))
    assert torch.equal(*found)


def test_a_decoder_attends_both_ways_where_its_config_or_the_call_says_so() -> None:
    model = tiny("llama")
    assert_same(model, input_ids=tokens(), is_causal=False)
    model.config.is_causal = False
    try:
        assert_same(model, padded("left"), input_ids=tokens(), attention_mask=padded("left"))
    finally:
        del model.config.is_causal


def test_a_compiled_model_is_one_graph() -> None:
    model = tiny("llama")
    with attention(model, "ringtune"), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(tokens()).logits, model(tokens()).logits, **CLOSE)


def test_compiled_attention_with_padding_breaks_its_graph_and_is_exact() -> None:
    attend = transformers.AttentionInterface()["ringtune"]
    mask = transformers.AttentionMaskInterface()["ringtune"](2, LENGTH, LENGTH, attention_mask=padded("left").bool())
    q, k = (torch.randn(BATCH, heads, LENGTH, 8, dtype=torch.float64) for heads in (4, 2))

    def layer(q: Tensor, k: Tensor) -> Tensor:
        return attend(torch.nn.Identity(), q * 2, k, k, mask)[0] + 1

    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(q, k), layer(q, k), rtol=0, atol=0)


def test_names_hold_options_of_their_own() -> None:
    """A dilated pattern under a name of its own: not the dense numbers, and padding changes no row that is there."""
    register("dilated", profile=None, segment_lengths=[4, 12], dilation_rates=[1, 2])
    model, mask = tiny("bert"), padded("right")
    with torch.no_grad():
        with attention(model, "dilated"):
            dilated = model(tokens(), attention_mask=mask).logits
            alone = model(tokens()[1:, :7]).logits
        with attention(model, "ringtune"):
            dense = model(tokens(), attention_mask=mask).logits
    assert (dilated - dense)[mask.bool()].abs().max() > 1e-3
    torch.testing.assert_close(dilated[1:, :7], alone, **CLOSE)
    assert dilated.shape == (BATCH, LENGTH, 64)
