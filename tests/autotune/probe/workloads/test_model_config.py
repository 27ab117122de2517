"""Which attention is read from the config of a model, in the words of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import FACTS

from autotune.exit_codes import UsageFailure
from autotune.probe.request import ProbeRequest
from autotune.probe.workloads.grid import cells_for
from autotune.probe.workloads.model_config import ModelShape, read_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "is_encoder_decoder": True, "d_model": 1280, "encoder_attention_heads": 20,
    "decoder_attention_heads": 16, "max_source_positions": 1500, "max_target_positions": 448,
}  # fmt: skip
VIT = {"model_type": "vit", "hidden_size": 768, "num_attention_heads": 12, "image_size": 224, "patch_size": 16}
GEMMA_TEXT = {
    "model_type": "gemma3_text", "hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "max_position_embeddings": 131072, "sliding_window": 1024,
}  # fmt: skip


def config(tmp_path: Path, plain: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(plain), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("plain", "shape"),
    [
        (LLAMA, (32, 8, 128, True, 131072)),
        (LLAMA | {"num_key_value_heads": None}, (32, 32, 128, True, 131072)),
        ({"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
          "hidden_size": 2560, "max_position_embeddings": 40960}, (32, 8, 128, True, 40960)),
        ({"model_type": "gpt2", "n_head": 12, "n_embd": 768, "n_positions": 1024, "is_decoder": False},
         (12, 12, 64, True, 1024)),
        ({"model_type": "bert", "num_attention_heads": 12, "hidden_size": 768, "max_position_embeddings": 512},
         (12, 12, 64, False, 512)),
        ({"model_type": "bert", "num_attention_heads": 12, "hidden_size": 768, "max_position_embeddings": 512,
          "is_decoder": True}, (12, 12, 64, True, 512)),
        ({"model_type": "distilbert", "n_heads": 12, "dim": 768, "max_position_embeddings": 512},
         (12, 12, 64, False, 512)),
        ({"model_type": "t5", "is_encoder_decoder": True, "num_heads": 12, "d_kv": 64, "d_model": 768,
          "n_positions": 512}, (12, 12, 64, False, 512)),
        ({"model_type": "falcon", "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True,
          "max_position_embeddings": 2048}, (71, 1, 64, True, 2048)),
        ({"model_type": "falcon", "num_attention_heads": 128, "num_kv_heads": 8, "hidden_size": 8192,
          "multi_query": True, "new_decoder_architecture": True, "max_position_embeddings": 2048},
         (128, 8, 64, True, 2048)),
        ({"model_type": "new", "architectures": ["NewForCausalLM"], "num_attention_heads": 4, "hidden_size": 256,
          "max_position_embeddings": 2048}, (4, 4, 64, True, 2048)),
        (VIT, (12, 12, 64, False, 197)),
        (VIT | {"model_type": "dinov2_with_registers", "image_size": 518, "patch_size": 14, "num_register_tokens": 4},
         (12, 12, 64, False, 1374)),
        (VIT | {"image_size": [224, 112], "patch_size": [16, 16]}, (12, 12, 64, False, 99)),
        (WHISPER, (20, 20, 64, False, 1500)),
        ({"model_type": "gemma3", "text_config": GEMMA_TEXT, "vision_config": VIT}, (8, 4, 256, True, 131072)),
        ({"model_type": "clip", "vision_config": VIT | {"model_type": "clip_vision_model"}}, (12, 12, 64, False, 197)),
    ],
)  # fmt: skip
def test_every_family_says_it_in_its_own_words(plain: Any, shape: tuple[Any, ...], tmp_path: Path) -> None:
    read = read_model(config(tmp_path, plain))
    assert (read.heads, read.kv_heads, read.head_dim, read.causal, read.longest) == shape
    assert read_model(tmp_path) == read  # the folder


def test_what_is_given_is_taken_instead(tmp_path: Path) -> None:
    path = config(tmp_path, LLAMA)
    read = read_model(path, heads=8, kv_heads=2, causal=False, needs_length=False)
    assert read == ModelShape(8, 2, 128, False, None)  # a share of the heads, as large as they are
    assert read_model(path, head_dim=96).head_dim == 96
    assert read_model(config(tmp_path, {}), heads=4, head_dim=64, causal=True, needs_length=False) == ModelShape(
        4, 4, 64, True, None
    )


def test_the_decoder_of_two_is_asked_for_by_causal(tmp_path: Path) -> None:
    read = read_model(config(tmp_path, WHISPER), causal=True)
    assert (read.heads, read.causal, read.longest) == (16, True, 448)
    assert "the decoder is probed" in read.notes[0]
    assert "the encoder is probed" in read_model(config(tmp_path, WHISPER)).notes[0]


def test_a_window_is_said_to_be_left_out(tmp_path: Path) -> None:
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": 4096}
    (note,) = read_model(config(tmp_path, mistral)).notes
    assert "sliding_window 4096: sliding windows are no pattern of RingAttention" in note
    for off in ({"sliding_window": None}, {"use_sliding_window": False}):
        assert read_model(config(tmp_path, mistral | off)).notes == ()
    nested = read_model(config(tmp_path, {"text_config": GEMMA_TEXT}))
    assert "text_config is probed" in nested.notes[0]
    assert "sliding_window 1024" in nested.notes[1]


@pytest.mark.parametrize(
    ("plain", "missing", "option"),
    [
        ({k: v for k, v in LLAMA.items() if k != "num_attention_heads"}, "num_attention_heads", "--heads"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size", "--head-dim"),
        ({k: v for k, v in LLAMA.items() if k != "max_position_embeddings"}, "max_position_embeddings", "--seq-len"),
        ({k: v for k, v in LLAMA.items() if k not in ("model_type", "architectures")}, "causal", "--causal"),
        (LLAMA | {"hidden_size": 4100}, "width 4100 is no multiple of 32 heads", "--head-dim"),
        (LLAMA | {"num_key_value_heads": 5}, "32 heads are no multiple of 5", "--kv-heads"),
        (LLAMA | {"kv_lora_rank": 512}, "kv_lora_rank", "--head-dim"),
        (LLAMA | {"num_attention_heads": "many"}, "num_attention_heads is 'many'", "integer >= 1"),
        (LLAMA | {"num_attention_heads": True}, "num_attention_heads is True", "integer >= 1"),
        (LLAMA | {"hidden_size": 0}, "hidden_size is 0", "integer >= 1"),
        ({"num_heads": [3, 6, 12], "embed_dim": 96}, r"num_heads is \[3, 6, 12\]", "integer >= 1"),
        (VIT | {"image_size": [1, 2, 3]}, "image_size is", "one or two integers"),
        ([], "no JSON object", "--model"),
    ],
)
def test_what_is_missing_or_senseless_is_named_with_the_remedy(
    plain: Any, missing: str, option: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageFailure, match=f"config.json: .*{missing}.*{option}") as raised:
        read_model(config(tmp_path, plain))
    assert "\n" not in str(raised.value)


def test_no_config_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageFailure, match=r"config.json: cannot be read \(No such file or directory\)"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff{")
    with pytest.raises(UsageFailure, match="is no JSON"):
        read_model(tmp_path)


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 100) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({*LLAMA, *WHISPER, *VIT, *GEMMA_TEXT, "text_config", "num_register_tokens", "multi_query"})


@given(st.dictionaries(st.sampled_from(KEYS), junk, max_size=8), st.booleans())
def test_any_config_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, plain: Any, onto: bool) -> None:
    path = config(tmp_path_factory.getbasetemp(), {**LLAMA, **plain} if onto else plain)
    try:
        shape = read_model(path)
    except UsageFailure:
        return
    assert min(shape.heads, shape.kv_heads, shape.head_dim, shape.longest or 0) >= 1
    assert shape.heads % shape.kv_heads == 0


@pytest.mark.parametrize(
    ("plain", "dtype", "said"),
    [
        (LLAMA | {"torch_dtype": "bfloat16"}, "bf16", "inputs are bf16 (torch_dtype); --precision names another"),
        (LLAMA | {"dtype": "float16"}, "fp16", "inputs are fp16 (dtype)"),
        (LLAMA | {"dtype": "float32", "torch_dtype": "float16"}, "fp32", "inputs are fp32 (dtype)"),
        (LLAMA | {"torch_dtype": "auto"}, None, ""),
        (LLAMA | {"torch_dtype": None}, None, ""),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, None, "torch_dtype is 'float8_e4m3fn', no dtype that is probed"),
        (LLAMA | {"torch_dtype": "float64"}, None, "torch_dtype is 'float64', no dtype that is probed"),
        (LLAMA | {"torch_dtype": ["bfloat16"]}, None, "no dtype that is probed"),
        ({"text_config": LLAMA, "torch_dtype": "bfloat16"}, "bf16", "inputs are bf16"),
        ({"text_config": LLAMA | {"dtype": "float16"}, "torch_dtype": "bfloat16"}, "fp16", "inputs are fp16"),
    ],
)
def test_the_dtype_of_the_weights_is_that_of_the_inputs(
    tmp_path: Path, plain: dict[str, Any], dtype: str | None, said: str
) -> None:
    shape = read_model(config(tmp_path, plain))
    assert shape.input_dtype == dtype
    notes = [note for note in shape.notes if "dtype" in note.rpartition("config.json: ")[2]]
    assert [said in note for note in notes] == [True] * bool(said)


@pytest.mark.parametrize(("precision", "dtype"), [("auto", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")])
def test_a_precision_wins_over_the_dtype_of_the_model(precision: str, dtype: str) -> None:
    asked = ProbeRequest(seq_lens=(512,), dense=True, input_dtype="bf16", precision=precision)  # type: ignore[arg-type]
    assert {cell.workload.dtype for cell in cells_for(asked, FACTS)} == {dtype}


@pytest.mark.parametrize("name", ["num_attention_heads", "max_position_embeddings", "hidden_size"])
def test_a_number_that_no_model_has_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageFailure, match=f"{name} is 2000000000000; it must be an integer >= 1 and <="):
        read_model(config(tmp_path, LLAMA | {name: 2 * 10**12}))
