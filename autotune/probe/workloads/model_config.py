"""Reads what attention a model runs from its Hugging Face ``config.json``.

Each family names the same numbers in its own way; the first of the names below that a config has is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.exit_codes import UsageFailure
from ringattn.arguments import dtype_name
from ringattn.profile.whole_file import read_regular
from ringattn.workload import LONGEST as MOST

MOST_BYTES = 16 * 2**20  # of a config.json, which has some KiB
_SHOWN = 40  # characters of a value that a message names
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads")
HEAD_DIM = ("head_dim", "d_kv", "kv_channels")
WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
LONGEST = ("max_position_embeddings", "n_positions", "max_source_positions", "n_ctx", "max_seq_len", "seq_length")
DTYPES = ("dtype", "torch_dtype")
WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window", "local_attention")
# Configs of several models in one, the first of which is taken where the outer one names no heads.
NESTED = ("text_config", "llm_config", "language_config", "vision_config")

CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")
FULL_CLASSES = ("ForMaskedLM", "ForImageClassification", "ForPreTraining", "ForMaskedImageModeling")
# Model types whose class may be missing from a config, or says nothing.
CAUSAL_TYPES = """
    bloom codegen cohere cohere2 falcon gemma gemma2 gemma3 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox
    gpt_oss gptj granite llama llama4_text mistral mixtral mpt nemotron olmo olmo2 opt persimmon phi phi3 qwen2
    qwen2_5_vl_text qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2
"""
FULL_TYPES = """
    albert audio-spectrogram-transformer bart beit bert camembert clip_vision_model data2vec-vision deberta deberta-v2
    deit dinov2 dinov2_with_registers dinov3_vit distilbert electra ernie esm hubert ijepa marian mbart modernbert mpnet
    nomic_bert roberta siglip_vision_model t5 vit vit_mae wav2vec2 wavlm whisper xlm-roberta
"""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Attention of a model.

    ``longest`` is None where a length was given, ``input_dtype`` where the config names no dtype of inputs; ``notes``
    say what is taken from the config beside the shape, and what is not probed.
    """

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    longest: int | None
    input_dtype: str | None = None
    notes: tuple[str, ...] = ()


def read_model(
    path: Path,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    causal: bool | None = None,
    needs_length: bool = True,
) -> ModelShape:
    """Return the attention of the model whose config is the file ``path``, or ``config.json`` in that folder.

    What is given is taken instead of the config's. UsageFailure, naming what is missing and the option that says it,
    where the config does not tell.
    """
    config, path = _load(path)
    outer = config
    notes = []
    if _first(config, HEADS) is None:
        for name in NESTED:
            if isinstance(inner := config.get(name), dict):
                notes.append(f"{path}: {name} is probed")
                config = {"architectures": config.get("architectures"), **inner}
                break
    where = _Where(config, path)
    if head_dim is None:
        _check_one_size(where)
    decoder = bool(config.get("is_encoder_decoder") and causal)
    heads = heads or where.number(HEADS[::-1] if decoder else HEADS, "the number of heads", "--heads")
    kv_heads = kv_heads or _kv_heads(where, heads)
    if heads % kv_heads:
        raise UsageFailure(f"{path}: {heads} heads are no multiple of {kv_heads} key/value heads; give --kv-heads")
    head_dim = head_dim or where.number(HEAD_DIM) or _head_dim_of_width(where, heads)
    longest = _longest(where, decoder) if needs_length else None
    if causal is None:
        causal = _causal(where)
    if config.get("is_encoder_decoder"):
        notes.append(f"{path}: has an encoder and a decoder; the {'decoder' if decoder else 'encoder'} is probed")
    if window := _window(config):
        notes.append(
            f"{path}: {window}: sliding windows are no pattern of RingAttention; the full attention is probed instead"
        )
    input_dtype, note = _input_dtype(outer, config, path)
    notes += [note] if note else []
    return ModelShape(heads, kv_heads, head_dim, causal, longest, input_dtype, tuple(notes))


class _Where:
    """One config and the file that it is from."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.config = config
        self.path = path

    def number(self, names: tuple[str, ...], what: str = "", option: str = "") -> int:
        """Return the first of these that the config has; without any, 0, or UsageFailure where an option can say it."""
        name = _first(self.config, names)
        if name is not None:
            return self._integer(name, self.config[name])
        if option:
            raise UsageFailure(f"{self.path}: does not say {what} ({', '.join(names)}); give {option}")
        return 0

    def side(self, name: str) -> tuple[int, int]:
        """Return height and width, given as one number or two."""
        value = self.config[name]
        sides = value if isinstance(value, list) else [value, value]
        if len(sides) != 2:
            raise UsageFailure(f"{self.path}: {name} is {_shown(value)}; it must be one or two integers >= 1")
        return self._integer(name, sides[0]), self._integer(name, sides[1])

    def _integer(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise UsageFailure(f"{self.path}: {name} is {_shown(value)}; it must be an integer >= 1 and <= 2**40")
        return value


def _load(path: Path) -> tuple[dict[str, Any], Path]:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_regular(path, MOST_BYTES))
    except OSError as error:
        raise UsageFailure(
            f"{path}: cannot be read ({error.strerror}); --model names a config.json or the folder it is in; "
            "`hf download NAME config.json --local-dir FOLDER` fetches one"
        ) from None
    except (ValueError, RecursionError):
        raise UsageFailure(f"{path}: is no JSON; --model names a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise UsageFailure(f"{path}: is no JSON object; --model names a Hugging Face config.json")
    return config, path


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if config.get(name) is not None), None)


def _kv_heads(where: _Where, heads: int) -> int:
    config = where.config
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):  # GPTBigCode, Falcon
        return 1
    if config.get("multi_query_attention") is False:  # ChatGLM, whose number of groups is then not used
        return heads
    inner = config.get("attn_config")  # DBRX, MPT
    if isinstance(inner, dict) and _first(inner, KV_HEADS) is not None:
        return _Where(inner, where.path).number(KV_HEADS)
    return where.number(KV_HEADS) or heads


def _check_one_size(where: _Where) -> None:
    """Raise UsageFailure where keys are wider than values, of which probes know nothing."""
    config = where.config
    size, size_v = config.get("head_dim"), config.get("v_head_dim")
    latent = config.get("kv_lora_rank") is not None
    if latent or (size is not None and size_v is not None and size != size_v):
        name = "kv_lora_rank" if latent else f"head_dim is {_shown(size)} and v_head_dim {_shown(size_v)}"
        raise UsageFailure(
            f"{where.path}: {name}: keys and values differ in size in this model, which no probe measures; "
            "give --head-dim for attention over heads of one size"
        )


def _head_dim_of_width(where: _Where, heads: int) -> int:
    width = where.number(WIDTH, "the size of a head or the width of the model", "--head-dim")
    own_heads = where.number(HEADS) or heads  # of that width, also where --heads names a share of them
    if width % own_heads:
        raise UsageFailure(f"{where.path}: width {width} is no multiple of {own_heads} heads; give --head-dim")
    return width // own_heads


def _longest(where: _Where, decoder: bool) -> int:
    """Return the most positions; an image has one for each patch, the class token and any registers."""
    config = where.config
    if _first(config, LONGEST) is None and config.get("image_size") and config.get("patch_size"):
        images, patches = where.side("image_size"), where.side("patch_size")
        registers = where.number(("num_register_tokens",)) if config.get("num_register_tokens") else 0
        return (images[0] // patches[0]) * (images[1] // patches[1]) + 1 + registers
    return where.number((*(("max_target_positions",) if decoder else ()), *LONGEST), "the largest length", "--seq-len")


def _causal(where: _Where) -> bool:
    """Return whether the attention is causal; of an encoder and a decoder, the encoder's counts."""
    config = where.config
    kind = config.get("model_type")
    listed = config.get("architectures")
    classes = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if config.get("is_decoder") is True:  # False says nothing: GPT-2 has it, too
        return True
    if config.get("is_encoder_decoder") or kind in FULL_TYPES.split() or config.get("use_bidirectional_attention"):
        return False
    if kind in CAUSAL_TYPES.split() or any(name.endswith(CAUSAL_CLASSES) for name in classes):
        return True
    if any(name.endswith(FULL_CLASSES) for name in classes) or config.get("patch_size"):
        return False
    raise UsageFailure(
        f"{where.path}: does not say whether the attention is causal (is_decoder, architectures, a known model_type); "
        "give --causal or --no-causal"
    )


def _input_dtype(outer: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> tuple[str | None, str]:
    """Return the dtype of the weights, which that of the inputs follows, and what to say of it.

    A model in several has one in its own part, or one for all of them.
    """
    for part in (config, outer):
        if (name := _first(part, DTYPES)) is None or part[name] == "auto":
            continue
        taken = dtype_name(part[name])
        if taken is not None and taken != "fp64":  # against which the others are checked
            return taken, f"{path}: inputs are {taken} ({name}); --precision names another dtype"
        return None, f"{path}: {name} is {_shown(part[name])}, no dtype that is probed; the device's usual one is"
    return None, ""


def _window(config: Mapping[str, Any]) -> str:
    """Return the key and value of a window; "" where there is none or it is switched off."""
    if config.get("use_sliding_window") is False:
        return ""
    name = _first(config, WINDOWS)
    return f"{name} {_shown(config[name])}" if name else ""


def _shown(value: object) -> str:
    """Return a value of a config as text that neither fills a terminal nor steers it."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
