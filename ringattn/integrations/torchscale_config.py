"""Reads torchscale's ``EncoderConfig``, or its keyword arguments, and refuses what the encoder here does not do."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringattn.errors import InputError

# Option: its default in torchscale. A value of another option is refused, with the reason below, or has no effect.
_FOLLOWED: dict[str, Any] = {
    "encoder_embed_dim": 768,
    "encoder_attention_heads": 12,
    "encoder_ffn_embed_dim": 3072,
    "encoder_layers": 12,
    "encoder_normalize_before": True,
    "normalize_output": True,
    "activation_fn": "gelu",
    "dropout": 0.0,
    "drop_path_rate": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "no_scale_embedding": True,
    "layernorm_embedding": False,
    "deepnorm": False,
    "subln": True,
    "no_output_layer": False,
    "layernorm_eps": 1e-5,
    "vocab_size": -1,
    "segment_length": None,
    "dilated_ratio": None,
}
_REFUSED = {
    "moe_freq": "mixture-of-experts layers are not built here",
    "multiway": "multiway layers are not built here",
    "rel_pos_buckets": "relative positions add a bias to the logits; torchscale's dilated attention refuses them too",
    "xpos_rel_pos": "xPos is not built here",
    "share_encoder_input_output_embed": "give output_projection, a module that holds the embedding's weight",
    "checkpoint_activations": "give checkpoint='full', or wrap layers in torch.utils.checkpoint",
    "fsdp": "wrap the encoder with torch.distributed.fsdp.fully_shard",
    "seq_parallel": "give process_group, whose ranks then hold a sequence together",
}
# Read nowhere in torchscale's encoder, or only where an option above is on, or only for initial values; and
# flash_attention, of which the plan decides here.
_WITHOUT_EFFECT = frozenset(
    {
        "moe_top1_expert",
        "moe_expert_count",
        "moe_gating_use_fp32",
        "moe_eval_capacity_token_fraction",
        "moe_second_expert_policy",
        "moe_normalize_gate_prob_before_dropping",
        "use_xmoe",
        "max_rel_pos",
        "bert_init",
        "max_source_positions",
        "img_size",
        "patch_size",
        "in_chans",
        "ddp_rank",
        "xpos_scale_base",
        "flash_attention",
        "block_shift",
    }
)


@dataclass(frozen=True)
class EncoderSettings:
    """Options of an encoder in torchscale's configuration, under plainer names."""

    embed_dim: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    pre_norm: bool
    last_norm: bool
    activation: str
    dropout: float
    drop_path: float
    attention_dropout: float
    activation_dropout: float
    embed_scale: float
    embedding_norm: bool
    residual_scale: float
    subln: bool
    vocab_size: int
    eps: float
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]


def settings_of(config: Any) -> EncoderSettings:
    """Return the settings of torchscale's ``EncoderConfig``, or of a mapping of its keyword arguments.

    Raises:
        InputError: an option that is not followed here, or a pattern that is missing or cannot be read.
    """
    given = dict(config) if isinstance(config, Mapping) else vars(config)
    for name, value in given.items():
        if name in _REFUSED and value:
            raise InputError(f"{name} is {value!r} in torchscale's configuration: {_REFUSED[name]}")
        if isinstance(config, Mapping) and name not in {*_FOLLOWED, *_REFUSED, *_WITHOUT_EFFECT}:
            raise InputError(f"{name} is no option of torchscale's EncoderConfig")
    of = {name: given.get(name, default) for name, default in _FOLLOWED.items()}
    if of["activation_fn"] not in ("relu", "gelu", "swish"):
        raise InputError(f"activation_fn is {of['activation_fn']!r}; it must be relu, gelu or swish")
    # torchscale lets deepnorm decide over subln, and either over encoder_normalize_before
    subln = bool(of["subln"]) and not of["deepnorm"]
    pre_norm = subln or (bool(of["encoder_normalize_before"]) and not of["deepnorm"])
    return EncoderSettings(
        embed_dim=of["encoder_embed_dim"],
        num_heads=of["encoder_attention_heads"],
        ffn_dim=of["encoder_ffn_embed_dim"],
        num_layers=of["encoder_layers"],
        pre_norm=pre_norm,
        last_norm=pre_norm and bool(of["normalize_output"]),
        activation=of["activation_fn"],
        dropout=of["dropout"],
        drop_path=of["drop_path_rate"],
        attention_dropout=of["attention_dropout"],
        activation_dropout=of["activation_dropout"],
        embed_scale=1.0 if of["no_scale_embedding"] else of["encoder_embed_dim"] ** 0.5,
        embedding_norm=bool(of["layernorm_embedding"]),
        residual_scale=(2.0 * of["encoder_layers"]) ** 0.25 if of["deepnorm"] else 1.0,
        subln=subln,
        vocab_size=0 if of["no_output_layer"] else max(of["vocab_size"], 0),
        eps=of["layernorm_eps"],
        segment_lengths=_integers("segment_length", of["segment_length"]),
        dilation_rates=_integers("dilated_ratio", of["dilated_ratio"]),
    )


def _integers(name: str, given: Any) -> tuple[int, ...]:
    """Return a list of integers, or the text of one, as torchscale takes it; it is never run as code."""
    try:
        return tuple(int(x) for x in (ast.literal_eval(given) if isinstance(given, str) else given))
    except (ValueError, SyntaxError, TypeError):
        raise InputError(
            f"{name} is {given!r} in torchscale's configuration; give a list such as [1024, 2048]"
        ) from None
