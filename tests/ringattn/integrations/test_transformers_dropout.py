"""Dropout that transformers hands to its attention: obeyed where every query sees its sequence, refused elsewhere.

What a call kept, and the float64 result of that, are of support/ringattn/dropped.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from dropped import exact_of, kept_by, seeded
from oracle import Case
from tiny_models import DECODER, LENGTH, attention, padded, tokens
from torch import Tensor, nn

from ringattn.errors import InputError
from ringattn.integrations.transformers import register

P = 0.3
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "causal": (Case(LENGTH, 4, 2, 8, 2, causal=True), {}),
    "every key": (Case(LENGTH, 4, 4, 8, 2), {}),
    "scaling": (Case(LENGTH, 4, 1, 8, 2, causal=True, scale=0.7), {"scaling": 0.7}),
    "softcap": (Case(LENGTH, 4, 2, 8, 2, causal=True, softcap=2.0), {"softcap": 2.0}),
    "sliding window": (Case(LENGTH, 4, 2, 8, 2, causal=True, window=5), {"sliding_window": 5}),
    "sinks": (Case(LENGTH, 4, 2, 8, 2, causal=True), {"s_aux": torch.randn(4, dtype=torch.float64)}),
    "all of them": (
        Case(LENGTH, 4, 2, 8, 2, causal=True, window=5, softcap=2.0),
        {"sliding_window": 5, "softcap": 2.0, "s_aux": torch.randn(4, dtype=torch.float64)},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register(profile=None)


def attended(case: Case, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    module = nn.Identity()
    module.is_causal = case.causal
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = transformers.AttentionInterface()["ringtune"](module, *heads_first, None, **given)[0]
    return out


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_the_float64_result_of_the_weights_that_it_kept(name: str) -> None:
    case, given = CASES[name]
    given = {**given, "dropout": P}
    q, k, v = case.inputs()
    dout = case.dout()
    kept = kept_by(lambda *x: attended(case, *x, **given), case, q, k)
    out = seeded(lambda: attended(case, q, k, v, **given))
    expected = exact_of(case, q, k, v, dout, kept, P, given.get("s_aux"))
    found = (out, *torch.autograd.grad(out, (q, k, v), dout))
    for x, exact in zip(found, (expected.out, expected.dq, expected.dk, expected.dv), strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-12, atol=1e-12)


def test_one_query_without_gradients_is_dropped_as_any_other() -> None:
    """Decoding steps, which have a way of their own, are one query without gradients."""
    case = Case(1, 4, 2, 8, 2, causal=True)
    q, k, v = (x.detach() for x in case.inputs())
    with torch.no_grad():
        attended(case, q, k, v)
        kept = kept_by(lambda *x: attended(case, *x, dropout=P), case, q, k)
        out = seeded(lambda: attended(case, q, k, v, dropout=P))
    assert 0 < int(kept.sum()) < kept.numel()
    torch.testing.assert_close(out, v.repeat_interleave(2, 2) * kept.transpose(1, 2) / (1 - P), rtol=1e-12, atol=1e-12)
    keys = torch.randn(2, 6, 2, 8, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(InputError, match=r"^dropout is 0\.3 in training mode; .*in forward alone"):
        attended(case, q, keys, keys, dropout=P)


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "a mask of ones"])
def test_a_model_drops_in_training_mode_and_again_where_it_is_checkpointed(masked: bool) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, attention_dropout=P))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    inputs = {"input_ids": tokens()} | ({"attention_mask": torch.ones_like(tokens())} if masked else {})
    with attention(model, "sdpa"), torch.no_grad():
        without = model.eval()(**inputs).logits
    with attention(model, "ringtune"):
        torch.testing.assert_close(model.eval()(**inputs).logits, without, rtol=1e-4, atol=1e-5)
        found = []
        model.train()
        for again in (False, True):
            if again:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.zero_grad()
            out = seeded(lambda: model(**inputs, use_cache=False).logits)
            out.sum().backward()
            found.append([out.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)])
        assert not torch.allclose(found[0][0], without, atol=1e-3)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        with pytest.raises(
            InputError, match=r"^dropout is 0\.3 in training mode; .*, without padding and documents; set"
        ):
            model(tokens(), attention_mask=padded("right"))
