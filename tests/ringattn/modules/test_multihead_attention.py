"""``MultiheadAttention`` against torch's, in float64: numbers, state_dicts both ways, and what it refuses."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from masked import masked
from torch import Tensor, nn

from ringattn import MultiheadAttention
from ringattn.errors import InputError
from ringattn.modules.rotary import rotated

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def pair(**options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """Ours with the weights of torch's."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(24, 4, **options, **DOUBLE)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = MultiheadAttention(24, 4, profile=None, **options, **DOUBLE)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 10, "vdim": 24},
    {"kdim": 24, "vdim": 7, "batch_first": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_state_dicts_fit_both_ways(options: dict[str, Any]) -> None:
    ours, theirs = pair(**options)
    assert {name: x.shape for name, x in ours.state_dict().items()} == {
        name: x.shape for name, x in theirs.state_dict().items()
    }
    theirs.load_state_dict(copy.deepcopy(ours).state_dict())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masks", ["none", "padding", "float padding", "causal", "boolean causal"])
def test_cross_attention_is_torchs(options: dict[str, Any], masks: str) -> None:
    """Also of as many queries as keys by chance: no query is padding."""
    ours, theirs = pair(**options)
    query, key, value = randn(2, 6, 24), randn(2, 6, ours.kdim), randn(2, 6, ours.vdim)
    if not ours.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    padding = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]]).bool()
    given: dict[str, Any] = {"need_weights": False}
    if "padding" in masks:
        mask = torch.zeros(2, 6, dtype=torch.float64).masked_fill(padding, -torch.inf)
        given["key_padding_mask"] = mask if "float" in masks else padding
    if "causal" in masks:
        mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
        given |= {"attn_mask": mask.isneginf() if "boolean" in masks else mask, "is_causal": True}
    out, weights = ours(query, key, value, **given)
    expected, _ = theirs(query, key, value, **given)
    assert weights is None
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    names = [name for name, _ in ours.named_parameters()]
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, list(ours.parameters()), dout)
    exact = torch.autograd.grad(expected, [theirs.get_parameter(name) for name in names], dout)
    for name, grad, reference in zip(names, found, exact, strict=True):
        torch.testing.assert_close(grad, reference, rtol=0, atol=1e-11, msg=name)


def test_queries_and_keys_of_different_lengths() -> None:
    ours, theirs = pair()
    query, key = randn(3, 2, 24), randn(7, 2, 24)
    padding = torch.zeros(2, 7).bool()
    padding[0, :3] = True
    for given in ({}, {"key_padding_mask": padding}):
        out, _ = ours(query, key, key, **given)
        torch.testing.assert_close(out, theirs(query, key, key, **given)[0], rtol=0, atol=1e-12)


def test_self_attention_leaves_out_what_is_padding() -> None:
    ours, theirs = pair(batch_first=True)
    x = randn(2, 6, 24)
    padding = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]]).bool()
    out, _ = ours(x, x, x, key_padding_mask=padding)
    expected, _ = theirs(x, x, x, key_padding_mask=padding)
    torch.testing.assert_close(out[~padding], expected[~padding], rtol=0, atol=1e-12)
    assert torch.equal(out[padding], ours.out_proj.bias.expand(4, -1))


def test_without_a_batch() -> None:
    ours, theirs = pair()
    x = randn(6, 24)
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_in_the_place_of_torchs_in_an_encoder_layer(training: bool) -> None:
    """In eval mode torch's layer would compute attention from the weights by itself; a pattern would be lost."""
    layer = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True, **DOUBLE).train(training)
    ours = copy.deepcopy(layer)
    ours.self_attn = MultiheadAttention(24, 4, batch_first=True, profile=None, **DOUBLE)
    ours.load_state_dict(layer.state_dict())
    ours.train(training)
    x = randn(2, 6, 24)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), layer(x), rtol=0, atol=1e-12)
        dilated = MultiheadAttention(
            24, 4, batch_first=True, profile=None, segment_lengths=[3], dilation_rates=[2], **DOUBLE
        )
        dilated.load_state_dict(layer.self_attn.state_dict())
        ours.self_attn = dilated.train(training)
        assert (ours(x) - layer(x)).abs().max() > 1e-3


def test_grouped_heads_and_rotary_embeddings_by_true_positions() -> None:
    ours = MultiheadAttention(
        24, 6, num_kv_heads=2, causal=True, rotary_base=100.0, batch_first=True, profile=None, **DOUBLE
    )
    assert {name: tuple(x.shape) for name, x in ours.named_parameters()} == {
        "q_proj_weight": (24, 24),
        "k_proj_weight": (8, 24),
        "v_proj_weight": (8, 24),
        "in_proj_bias": (40,),
        "out_proj.weight": (24, 24),
        "out_proj.bias": (24,),
    }
    x = randn(2, 5, 24)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    weights = (ours.q_proj_weight, ours.k_proj_weight, ours.v_proj_weight)
    q, k, v = ((x @ weight.T).unflatten(-1, (-1, 4)) for weight in weights)
    causal = torch.ones(5, 5).tril().bool()[None]
    attended = masked(rotated(q, positions, 100.0), rotated(k, positions, 100.0), v, causal)
    expected = ours.out_proj(attended.flatten(2))
    torch.testing.assert_close(ours(x, x, x, positions=positions)[0], expected, rtol=0, atol=1e-12)
    # Only differences of positions count, so those of rows from 0 are the same.
    torch.testing.assert_close(ours(x, x, x)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"add_bias_kv": True}, "add_bias_kv is True, which adds keys of no position; use torch.nn.MultiheadAttention"),
        ({"add_zero_attn": True}, "add_zero_attn is True"),
        ({"num_kv_heads": 3}, "embed_dim is 24, num_heads 4 and num_kv_heads 3; each must be a multiple of the next"),
        ({"rotary_base": 0.5}, "rotary_base is 0.5 and head_dim 6"),
        ({"backends": "math"}, "backends is no option here"),
    ],
)
def test_arguments_that_make_no_sense(made: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as error:
        MultiheadAttention(24, 4, **made)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"need_weights": True}, "need_weights is True, and no kernel keeps attention weights; use torch.nn.Multihead"),
        ({"attn_mask": torch.eye(6).bool()}, "FlexAttention"),
        # True is what is not attended, so that this one sees the future.
        ({"attn_mask": torch.ones(6, 6).tril().bool()}, "is neither causal nor the same"),
        ({"attn_mask": torch.ones(5, 5).triu(1).bool()}, "attn_mask has shape (5, 5) and is not causal"),
        ({"attn_mask": torch.zeros(2, 1, 1, 6)}, r"attn_mask has shape (2, 1, 1, 6) and is not causal"),
        ({"attn_mask": torch.rand(6, 6)}, "as ALiBi does, which no kernel here computes; use FlexAttention"),
        ({"key_padding_mask": torch.rand(2, 6)}, "key_padding_mask adds a bias to the logits"),
        ({"key_padding_mask": torch.ones(6, 2).bool()}, "key_padding_mask has shape (6, 2); it must be (2, 6)"),
        ({"positions": torch.arange(6)}, "positions is given, and the module was built without rotary_base"),
    ],
)
def test_what_is_refused_is_one_line(given: dict[str, Any], told: str) -> None:
    ours, _ = pair(batch_first=True)
    x = randn(2, 6, 24)
    with pytest.raises(InputError) as error:
        ours(x, x, x, **given)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_padding_of_keys_alone_is_not_taken_for_padding_of_queries() -> None:
    """Queries at the keys' padding were given the bias of the projection alone."""
    ours, _ = pair(batch_first=True)
    x, y = randn(2, 6, 24), randn(2, 6, 24)
    padding = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    for given in ({"is_causal": True}, {"attn_mask": torch.ones(6, 6).triu(1).bool()}):
        with pytest.raises(InputError, match="causality needs one tensor as query and key"):
            ours(x, y, y, key_padding_mask=padding, **given)


def test_dropout_is_ignored_in_eval_mode() -> None:
    ours, theirs = pair(dropout=0.2)
    x = randn(6, 2, 24)
    torch.testing.assert_close(ours.eval()(x, x, x)[0], theirs.eval()(x, x, x)[0], rtol=0, atol=1e-12)


def test_rotary_embeddings_are_of_one_sequence() -> None:
    ours = MultiheadAttention(24, 4, rotary_base=100.0, profile=None, **DOUBLE)
    with pytest.raises(InputError, match=r"^rotary_base is for attention of one sequence to itself"):
        ours(randn(6, 2, 24), randn(6, 2, 24), randn(6, 2, 24))


def test_its_arguments_are_torchs_in_their_order() -> None:
    for ours, theirs in ((MultiheadAttention, nn.MultiheadAttention),):
        for method in ("__init__", "forward"):
            expected = list(inspect.signature(getattr(theirs, method)).parameters)
            assert list(inspect.signature(getattr(ours, method)).parameters)[: len(expected)] == expected
