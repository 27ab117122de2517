"""torchscale's LongNet encoder here: against the formula over the float64 reference, and against torchscale itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F  # noqa: N812
from torchscale_peer import longnet_of, randomized

from ringattn import Documents
from ringattn.errors import InputError
from ringattn.integrations import torchscale
from ringattn.integrations.torchscale import TorchscaleLongNet, lengths_of
from ringattn.reference import dilated_attention_reference
from ringattn.workload import Pattern

HEADS = 6  # no multiple of the rate 4, so that blocks of heads are unequal
CONFIG: dict[str, Any] = {
    "encoder_embed_dim": 24,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_embed_dim": 40,
    "encoder_layers": 2,
    "segment_length": "[8, 16, 64]",
    "dilated_ratio": "[1, 2, 4]",
}
PATTERN = Pattern.of([8, 16, 64], [1, 2, 4], "blocked")


def made(**config: Any) -> TorchscaleLongNet:
    torch.manual_seed(0)
    return randomized(TorchscaleLongNet({**CONFIG, **config}, profile=None).double())


def by_hand(encoder: TorchscaleLongNet, x: Tensor) -> Tensor:
    """Return the output of an encoder with torchscale's default options."""
    for layer in encoder.layers:
        attention = layer.self_attn
        y = layer.self_attn_layer_norm(x)
        q, k, v = (p(y).unflatten(-1, (HEADS, -1)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        attended = dilated_attention_reference(q, k, v, PATTERN, causal=False)[0].flatten(2)
        x = x + attention.out_proj(attention.inner_attn_ln(attended))
        x = x + layer.ffn.fc2(layer.ffn.ffn_layernorm(F.gelu(layer.ffn.fc1(layer.final_layer_norm(x)))))
    return encoder.layer_norm(x)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("length", [1, 7, 37, 64, 101])
def test_an_encoder_is_its_formula(length: int) -> None:
    encoder, x = made(), randn(2, length, 24)
    found = encoder(token_embeddings=x)["encoder_out"]
    torch.testing.assert_close(found, by_hand(encoder, x), rtol=0, atol=1e-11)


def test_gradients_are_the_formula_s() -> None:
    encoder, x, weight = made(), randn(1, 37, 24).requires_grad_(), randn(1, 37, 24)
    parameters = [x, *encoder.parameters()]
    found = torch.autograd.grad((encoder(token_embeddings=x)["encoder_out"] * weight).sum(), parameters)
    expected = torch.autograd.grad((by_hand(encoder, x) * weight).sum(), parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("given", ["mask", "lengths", "packed"])
def test_ragged_rows_are_each_alone(given: str) -> None:
    encoder, lengths = made(), [37, 5, 64]
    rows = [randn(1, length, 24) * (1 + length) for length in lengths]
    alone = [encoder(token_embeddings=row)["encoder_out"][0] for row in rows]
    if given == "packed":
        cu_seqlens = torch.tensor([0, 37, 42, 106])
        out = encoder(token_embeddings=torch.cat(rows, 1), cu_seqlens=cu_seqlens)["encoder_out"]
        found = out[0].split(lengths)
    else:
        x = torch.full((3, 64, 24), 1e6, dtype=torch.float64)
        for row, at in zip(rows, x, strict=True):
            at[: row.shape[1]] = row[0]
        mask = torch.arange(64) >= torch.tensor(lengths)[:, None]
        options = {"encoder_padding_mask": mask} if given == "mask" else {"lengths": lengths}
        out = encoder(token_embeddings=x, **options)["encoder_out"]
        found = [y[:length] for y, length in zip(out, lengths, strict=True)]
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"subln": False},
        {"deepnorm": True},
        {"subln": False, "encoder_normalize_before": False, "activation_fn": "relu"},
        {"normalize_output": False, "activation_fn": "swish"},
        {"layernorm_embedding": True, "no_scale_embedding": False},
        {"vocab_size": 11, "layernorm_eps": 1e-3},
        {"vocab_size": 11, "no_output_layer": True},
    ],
    ids=lambda options: ",".join(options) or "default",
)
def test_a_state_dict_of_torchscale_gives_its_results(options: dict[str, Any]) -> None:
    """Every position is in whole segments here: theirs pads nothing."""
    torch.manual_seed(0)
    theirs = longnet_of(**CONFIG, **options)
    ours = TorchscaleLongNet({**CONFIG, **options}, profile=None)
    assert ours.load_state_dict(theirs.state_dict()) == ([], [])
    ours.eval()
    for length in (16, 48, 128):  # 48 is a segment of its own to the branch of 64, in theirs as in ours
        x = randn(2, length, 24).float()
        expected, found = (
            model(src_tokens=None, token_embeddings=x, return_all_hiddens=True) for model in (theirs, ours)
        )
        torch.testing.assert_close(found["encoder_out"], expected["encoder_out"], rtol=2e-5, atol=2e-5)
        for one, other in zip(found["encoder_states"], expected["encoder_states"], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    theirs.load_state_dict(ours.state_dict())


def test_theirs_attends_to_its_padding_and_ours_does_not() -> None:
    """Shown on a length that no segment divides, and on a row whose mask theirs drops."""
    torch.manual_seed(0)
    theirs = longnet_of(**CONFIG).double()
    ours = TorchscaleLongNet.of(theirs, profile=None)
    x = randn(1, 37, 24)
    expected = by_hand(ours, x)
    torch.testing.assert_close(ours(token_embeddings=x)["encoder_out"], expected, rtol=0, atol=1e-11)
    assert (theirs(None, token_embeddings=x)["encoder_out"] - expected).abs().max() > 0.1
    padded = torch.cat((randn(1, 48, 24), torch.zeros(1, 16, 24).double()), 1)
    mask = torch.arange(64)[None] >= 48
    expected = by_hand(ours, padded[:, :48])
    found = ours(token_embeddings=padded, encoder_padding_mask=mask)["encoder_out"]
    torch.testing.assert_close(found[:, :48], expected, rtol=0, atol=1e-11)
    dropped = theirs(None, token_embeddings=padded, encoder_padding_mask=mask)["encoder_out"]
    assert (dropped[:, :48] - expected).abs().max() > 0.1


def test_a_mask_without_padding_asks_for_no_documents() -> None:
    assert lengths_of(torch.zeros(2, 8)) is None
    assert lengths_of(torch.arange(8)[None] >= torch.tensor([[8], [3]])) == Documents(lengths=[8, 3])


def test_of_takes_embeddings_dtype_and_mode_over() -> None:
    torch.manual_seed(0)
    theirs = longnet_of(**CONFIG, vocab_size=11).double().train()
    theirs.embed_tokens = nn.Embedding(11, 24).double()
    ours = TorchscaleLongNet.of(theirs, profile=None)
    assert ours.training
    assert ours.embed_tokens is theirs.embed_tokens
    tokens = torch.arange(32).view(2, 16) % 11
    expected, found = (model(tokens, features_only=False)["encoder_out"] for model in (theirs.eval(), ours.eval()))
    assert found.shape == (2, 16, 11)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # its activation is in float32


@pytest.mark.parametrize("positions", [1, 7, 20])
@pytest.mark.parametrize("random", [False, True])
def test_a_network_some_positions_at_a_time_is_the_whole(
    positions: int, random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients, also of an activation that drops: what is made again for the backward drops the same."""
    ffn, x, weight = made(activation_dropout=0.5).layers[0].ffn.train(random), randn(2, 37, 24), randn(2, 37, 24)
    leaves = [x.requires_grad_(), *ffn.parameters()]

    def results(y: Tensor) -> list[Tensor]:
        return [y, *torch.autograd.grad(y, leaves, weight)]

    monkeypatch.setattr(torchscale, "_CHUNK_BYTES", (40 * 8, 40 * 8 * positions))
    torch.manual_seed(3)
    found = results(ffn(x))
    torch.manual_seed(3)
    parts = [ffn._inner(ffn.fc1(part)) for part in torch.split(x.flatten(0, 1), positions)]
    for one, other in zip(found, results(torch.cat(parts).view_as(x)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.manual_seed(3)
        assert torch.equal(ffn(x), found[0])


@pytest.mark.parametrize("frozen", ["", "fc1", "fc2"])
def test_parts_leave_gradients_to_others_and_run_backward_twice(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of one row: what it gives a bias may be the gradient of the output itself."""
    ffn, x = made().layers[0].ffn, randn(1, 5, 24)
    for name, parameter in ffn.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    leaves = [parameter for parameter in ffn.parameters() if parameter.requires_grad]
    leaves += [x.requires_grad_()] if frozen != "fc1" else []
    dout = randn(1, 5, 24)
    expected, given = torch.autograd.grad(ffn(x), leaves, dout), dout.clone()
    monkeypatch.setattr(torchscale, "_CHUNK_BYTES", (40 * 8, 40 * 8))
    out = ffn(x)
    for retain_graph in (True, False):
        found = torch.autograd.grad(out, leaves, dout, retain_graph=retain_graph)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(dout, given)


@pytest.mark.parametrize("autocast", [False, True])
def test_weight_gradients_of_many_parts_are_as_exact_as_those_of_the_whole(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 and under its autocast, against float64: summed in 16 bits they erred by 2 to 4 times as much."""
    ffn, x, dout = made().layers[0].ffn, randn(1, 512, 24) + 1.0, randn(1, 512, 24) + 1.0
    exact = dict(zip(dict(ffn.named_parameters()), torch.autograd.grad(ffn(x), [*ffn.parameters()], dout), strict=True))
    dtype = torch.float32 if autocast else torch.bfloat16
    ffn, x = ffn.to(dtype), x.to(dtype).requires_grad_()
    ffn.fc2.bias.requires_grad_(False)
    named = {name: parameter for name, parameter in ffn.named_parameters() if parameter.requires_grad}
    errors, kept = [], []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    for positions in (1024, 2):
        monkeypatch.setattr(torchscale, "_CHUNK_BYTES", (x.element_size() * 40 * positions,) * 2)
        kept.clear()
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), hooks:
            out = ffn(x)
        found = torch.autograd.grad(out, [*named.values()], dout.to(out.dtype))
        assert all(one.dtype is parameter.dtype for one, parameter in zip(found, named.values(), strict=True))
        differ = {name: (one.double() - exact[name]).norm() for name, one in zip(named, found, strict=True)}
        errors.append({name: float(by / exact[name].norm()) for name, by in differ.items()})
    whole, parts = errors
    assert all(parts[name] <= 1.3 * whole[name] for name in named), errors
    weights = {tensor.data_ptr() for tensor in kept if sorted(tensor.shape) == sorted(ffn.fc1.weight.shape)}
    assert len(weights) == 1, "a copy for each part"


@pytest.mark.parametrize("small", [False, True])
def test_compilers_see_a_network_of_any_length_as_one(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many parts there are would be a graph for each length; a symbolic length cannot be cut at all."""
    ffn = made().layers[0].ffn
    if not small:
        monkeypatch.setattr(torchscale, "_CHUNK_BYTES", (40 * 8, 40 * 8 * 7))
    length = torch.export.Dim("length", min=2, max=10**6)
    exported = torch.export.export(ffn, (randn(2, 9, 24),), dynamic_shapes=({1: length},)).module()
    graphs = CompileCounter()
    compiled = torch.compile(ffn, backend=graphs, dynamic=True, fullgraph=True)
    for positions in (9, 31, 40):
        x = randn(2, positions, 24)
        expected = ffn(x)
        torch.testing.assert_close(exported(x), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(compiled(x.requires_grad_()), expected, rtol=1e-12, atol=1e-12)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("activation", ["relu", "gelu", "swish"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_activation_is_that_of_float32_and_nothing_is_kept_so_wide(activation: str, dtype: torch.dtype) -> None:
    encoder = made(activation_fn=activation).to(dtype)
    ffn, kept = encoder.layers[0].ffn, []
    x = (8 * randn(1, 50, 24)).to(dtype)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = ffn(x)
    assert {tensor.dtype for tensor in kept if tensor.shape[-1] == ffn.fc1.out_features} == {dtype}
    wide = ffn.fc1(x).float()
    hidden = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}[activation](wide).to(dtype)
    torch.testing.assert_close(found, ffn.fc2(ffn.ffn_layernorm(hidden)), rtol=2e-2, atol=2e-2)


def test_dropout_and_stochastic_depth_are_of_training() -> None:
    x = randn(4, 16, 24)
    for option in ("dropout", "activation_dropout", "drop_path_rate"):
        encoder = made(**{option: 0.5}).train()
        assert not torch.equal(encoder(token_embeddings=x)["encoder_out"], encoder(token_embeddings=x)["encoder_out"])
        expected = made()(token_embeddings=x)["encoder_out"]
        assert torch.equal(encoder.eval()(token_embeddings=x)["encoder_out"], expected)
    depths = [layer.drop_path for layer in made(drop_path_rate=0.5, encoder_layers=3).layers]
    assert depths == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"moe_freq": 2}, r"^moe_freq is 2 .*mixture-of-experts"),
        ({"xpos_rel_pos": True}, r"^xpos_rel_pos is True .*xPos"),
        ({"seq_parallel": True}, r"process_group"),
        ({"segment_lengths": [8]}, r"^segment_lengths is no option"),
        ({"segment_length": None}, r"^segment_length is None .*give a list"),
        ({"segment_length": "print(1)"}, r"^segment_length is 'print"),
        ({"dilated_ratio": [1]}, r"segment"),
        ({"activation_fn": "tanh"}, r"^activation_fn is 'tanh'"),
        ({"encoder_embed_dim": 25}, r"25, not a multiple of 6 heads"),
    ],
)
def test_what_is_not_followed_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TorchscaleLongNet({**CONFIG, **config}, profile=None)


def test_calls_that_make_no_sense_are_refused() -> None:
    encoder, x = made(), randn(2, 8, 24)
    mask = torch.tensor([[True] + [False] * 7, [False] * 8])
    with pytest.raises(InputError, match="padding before a row's end"):
        encoder(token_embeddings=x, encoder_padding_mask=mask)
    with pytest.raises(InputError, match="give one"):
        encoder(token_embeddings=x, encoder_padding_mask=~mask, lengths=[8, 8])
    with pytest.raises(InputError, match="give token_embeddings"):
        encoder(src_tokens=torch.zeros(2, 8).long())
    with pytest.raises(InputError, match=r"attention_dropout is 0\.1 in training mode"):
        made(attention_dropout=0.1).train()(token_embeddings=x)
