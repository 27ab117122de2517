"""Configs that mislead: sizes named elsewhere, switched off, unequal, or meant for the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.exit_codes import UsageFailure
from autotune.probe.workloads.model_config import read_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
DBRX = {
    "model_type": "dbrx",
    "architectures": ["DbrxForCausalLM"],
    "d_model": 6144,
    "n_heads": 48,
    "max_seq_len": 32768,
    "attn_config": {"kv_n_heads": 8, "rope_theta": 500000},
}
CHATGLM = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "multi_query_group_num": 2,
    "seq_length": 8192,
}


def config(folder: Path, plain: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(plain))
    return path


@pytest.mark.parametrize(
    ("plain", "kv_heads"),
    [
        (DBRX, 8),
        (DBRX | {"attn_config": {"kv_n_heads": None}}, 48),
        (DBRX | {"attn_config": "none"}, 48),
        (CHATGLM | {"multi_query_attention": True}, 2),
        (CHATGLM | {"multi_query_attention": False}, 32),
        (LLAMA | {"kv_lora_rank": None}, 8),
        (LLAMA | {"head_dim": 128, "v_head_dim": 128}, 8),
    ],
)
def test_key_value_heads_are_read_where_the_family_has_them(
    tmp_path: Path, plain: dict[str, Any], kv_heads: int
) -> None:
    shape = read_model(config(tmp_path, plain))
    assert (shape.kv_heads, shape.head_dim) == (kv_heads, 128)


def test_values_of_another_size_than_keys_are_not_measured_as_if_they_were_equal(tmp_path: Path) -> None:
    path = config(tmp_path, LLAMA | {"head_dim": 192, "v_head_dim": 128})
    with pytest.raises(UsageFailure, match=r"head_dim is 192 and v_head_dim 128.*--head-dim"):
        read_model(path)
    assert read_model(path, head_dim=128).head_dim == 128


@pytest.mark.parametrize("name", ["sliding_window", "dtype", "num_attention_heads", "head_dim"])
@pytest.mark.parametrize("value", ["\x1b[2J\ud800", "x" * 100_000, list(range(50_000))])
def test_a_value_neither_steers_nor_fills_a_terminal(tmp_path: Path, name: str, value: Any) -> None:
    try:
        said = " ".join(read_model(config(tmp_path, LLAMA | {name: value})).notes)
    except UsageFailure as failure:
        said = str(failure)
    assert name in said
    assert said.isascii()
    assert said.isprintable()
    assert len(said) < 300 + len(str(tmp_path)) * 2
