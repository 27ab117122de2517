"""The cache of ``kv_cache`` on one rank: what it gives, and what it refuses in one line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tiny_models import BATCH, LENGTH, VOCABULARY, attention, padded, tiny, tokens
from torch import Tensor, nn

from ringattn.errors import InputError
from ringattn.integrations.transformers import kv_cache, register
from ringattn.modules.masks import PADDING


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register(profile=None)
    register("dilated", profile=None, segment_lengths=[4, 16], dilation_rates=[1, 2])


def model_of(family: str) -> Any:
    return copy.deepcopy(tiny(family)).double()


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("implementation", ["ringtune", "dilated"])
def test_chunks_are_the_whole(implementation: str, side: str) -> None:
    """Of a model's call, with padding on either side; dilated patterns among them, which no other cache takes so."""
    model, ids, mask = model_of("llama"), tokens(), padded(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = kv_cache()
    with attention(model, implementation), torch.no_grad():
        found = [
            model(
                ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions[:, begin:end],
                past_key_values=cache,
            ).logits
            for begin, end in ((0, 4), (4, 9), (9, 10), (10, 11), (11, 12))
        ]  # fmt: skip
        rows = [model(row[kept][None], use_cache=False).logits[0] for row, kept in zip(ids, mask.bool(), strict=True)]
    torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], torch.cat(rows), rtol=0, atol=1e-9)
    assert cache.layers[0].cache.lengths == tuple(mask.sum(1).tolist())
    assert cache.get_seq_length() == LENGTH


def test_sinks_and_narrow_values() -> None:
    """Of the attention function, against the whole of it without a cache."""
    q, k, v = (torch.randn(2, heads, 6, width).double() for heads, width in ((4, 8), (2, 8), (2, 5)))
    module, sinks, function = nn.Identity(), torch.randn(4).double(), transformers.AttentionInterface()["ringtune"]
    whole, _ = function(module, q, k, v, None, s_aux=sinks, is_causal=True)
    cache = kv_cache(max_length=6)
    for begin, end in ((0, 5), (5, 6)):
        mask = None if begin == 0 else torch.ones(2, end, dtype=torch.bool)
        key, value = cache.update(k[:, :, begin:end], v[:, :, begin:end], 0)
        out, _ = function(module, q[:, :, begin:end], key, value, mask, s_aux=sinks, is_causal=True)
        torch.testing.assert_close(out, whole[:, begin:end], rtol=0, atol=1e-12)


def test_what_is_proposed_and_not_accepted_is_taken_back() -> None:
    model, ids = model_of("mistral, window 5"), torch.randint(3, VOCABULARY, (1, 20))
    with attention(model, "ringtune"):
        alone = model.generate(ids, max_new_tokens=12, do_sample=False)
        looked_up = model.generate(
            ids, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3, past_key_values=kv_cache(rollback=4)
        )
    assert torch.equal(looked_up, alone)


def test_other_attention_takes_nothing_for_keys() -> None:
    """The cache hands on no keys; one that attended without them would give wrong numbers."""
    model = model_of("llama")
    for implementation in ("eager", "sdpa"):
        with attention(model, implementation), torch.no_grad(), pytest.raises((IndexError, RuntimeError, ValueError)):
            model(tokens(), past_key_values=kv_cache())


def test_a_compiled_model_appends_too() -> None:
    """By the graphs of the first call in the second: of another length they would be compiled again."""
    model, ids = model_of("llama"), tokens()
    with attention(model, "ringtune"), torch.no_grad():
        expected = model(ids).logits
        cache, compiled = kv_cache(), torch.compile(model, backend="eager")
        found = [compiled(part, past_key_values=cache).logits for part in (ids[:, :6], ids[:, 6:])]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-9)


Q, K = torch.zeros(BATCH, 4, 3, 8), torch.zeros(BATCH, 2, 3, 8)
BOUNDS = torch.tensor([0, 3])


def codes(*rows: list[int], kind: int = 1) -> Tensor:
    """A mask as ``mask_codes`` makes it."""
    made = torch.tensor(rows, dtype=torch.int32)
    return torch.stack((made, torch.full_like(made, kind)), 1)[:, None]


P = PADDING


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"is_causal": False}, "a cache is for causal attention, and this is not"),
        ({"lengths": BOUNDS}, "lengths is given with a cache, of which every rank is given all rows; leave it out"),
        ({"total_length": 3}, "total_length is given with a cache"),
        ({"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS}, "cu_seq_lens_q is given with a cache"),
        ({"dropout": 0.1}, "dropout is 0.1 in training mode"),
        ({"mask": torch.ones(BATCH, 1, 1, 6).bool()}, "a cache is for causal attention, and the attention mask is not"),
        ({"mask": torch.ones(BATCH, 5).bool()}, "the attention mask has 5 positions, the cache 3 and q 3; give"),
        ({"mask": codes([1, 1, 1, 2, 2, 2])}, "packed documents and chunks of fixed length are not for this cache"),
        ({"position_ids": torch.tensor([[3, 0, 1]])}, "position_ids start again at 0, and packed documents are not"),
        ({"mask": codes([P, 1, 1, 1, 1, 1])}, "the attention mask has other padding in the 3 positions of the cache"),
        ({"sliding_window": 4, "mask": codes([1] * 6)}, "sliding_window is 4, and the attention mask has no window"),
        ({"sliding_window": 4, "mask": codes([1] * 6, kind=7)}, "sliding_window is 4, and the attention mask has 3"),
        ({"sliding_window": 4, "mask": codes([1, 1, 1, P, 1, 1], kind=9)}, "a sliding window counts positions, and a"),
        ({"sliding_window": 8}, "sliding_window is 8, and was None; make another cache"),
        ({"query": Q[:1], "key": K[:1]}, "q has batch size 1, and the cache 2 rows; make another cache"),
        ({"sinks": torch.ones(3)}, "sinks is torch.float32 of shape (3,)"),
    ],
)
def test_what_is_refused(given: dict[str, Any], told: str) -> None:
    """In the second call, and the cache then goes on where it was."""
    module, function = nn.Identity(), transformers.AttentionInterface()["ringtune"]
    cache = kv_cache()

    def call(query: Tensor = Q, key: Tensor = K, mask: Tensor | None = None, **keywords: Any) -> Tensor:
        handed_on, _ = cache.update(key, key, 0)
        out: Tensor = function(module, query, handed_on, handed_on, mask, **({"is_causal": True} | keywords))[0]
        return out

    call()
    with pytest.raises(InputError) as error:
        call(**given)
    assert str(error.value).startswith(told)
    assert call().shape == (BATCH, 3, 4, 8)
    assert cache.get_seq_length() == 6


def test_keys_are_attended_over_once() -> None:
    function, cache = transformers.AttentionInterface()["ringtune"], kv_cache()
    key, value = cache.update(K, K, 0)
    function(nn.Identity(), Q, key, value, None)
    with pytest.raises(InputError, match=r"key has shape \(0,\), and stands for no new keys of a cache"):
        function(nn.Identity(), Q, key, value, None)


def test_rows_are_neither_repeated_nor_left_out() -> None:
    cache = kv_cache()
    cache.update(K, K, 0)
    with pytest.raises(InputError, match="a cache cannot repeat its rows 2 times; repeat the prompts"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(InputError, match="a cache cannot leave rows out; make another one"):
        cache.batch_select_indices(torch.tensor([0]))


@pytest.mark.parametrize("given", [{"max_length": 0}, {"rollback": -1}, {"max_length": 2.5}])
def test_arguments_that_make_no_sense(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(given))):
        kv_cache(**given)
