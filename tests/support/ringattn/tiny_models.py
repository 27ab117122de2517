"""Tiny transformers models with random weights: each made once, in eval mode, and the inputs that they are tried with.

Legend: B batch, S positions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY = 2, 12, 64
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, **SPECIAL,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GEMMA2 = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 2,
}  # fmt: skip
WHISPER = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8,
    "max_source_positions": 10, "max_target_positions": 40, "decoder_start_token_id": 1, "suppress_tokens": None,
    "begin_suppress_tokens": None, **SPECIAL,
}  # fmt: skip
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **SPECIAL}
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
# The family and the kind of model, and the values of its config.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "CausalLM", DECODER),
    "qwen3": ("Qwen3", "CausalLM", DECODER | {"head_dim": 16}),
    "gemma, head_dim 256": ("Gemma", "CausalLM", DECODER | {"num_key_value_heads": 1, "head_dim": 256}),
    "gemma 2 without softcap": ("Gemma2", "CausalLM", DECODER | GEMMA2 | {"attn_logit_softcapping": None}),
    "gemma 2, softcap 2": ("Gemma2", "CausalLM", DECODER | GEMMA2 | {"attn_logit_softcapping": 2.0}),
    "mistral, window 5": ("Mistral", "CausalLM", DECODER | {"sliding_window": 5}),
    "gpt-oss, window and sinks": (
        "GptOss",
        "CausalLM",
        DECODER | {"head_dim": 16, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "deepseek 3, narrow values": ("DeepseekV3", "CausalLM", DECODER | LATENT),
    "gpt 2": ("GPT2", "LMHeadModel", GPT2),
    "bert": ("Bert", "MaskedLM", DECODER | NO_DROPOUT),
    "whisper": ("Whisper", "ConditionalGeneration", WHISPER),
    "t5": ("T5", "ConditionalGeneration", T5),
    "modernbert, window 4": (
        "ModernBert",
        "MaskedLM",
        DECODER | {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    ),
}
CAUSAL = list(MODELS)[:9]


@functools.cache
def tiny(name: str) -> Any:
    """The model, its weights large enough that attention is far from uniform; of ``eager`` attention."""
    family, kind, values = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**values, attn_implementation="eager")
    model = getattr(transformers, f"{family}{kind}" if family == "GPT2" else f"{family}For{kind}")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return model


@contextmanager
def attention(model: Any, implementation: str) -> Iterator[None]:
    """The model with another attention, for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def tokens() -> Tensor:
    """(B, S), none of them special."""
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def padded(side: str) -> Tensor:
    """Mask (B, S), of which the second row is short."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if side == "right":
        mask[1, 7:] = 0
    elif side == "left":
        mask[1, :5] = 0
    else:
        assert side == "none"
    return mask
