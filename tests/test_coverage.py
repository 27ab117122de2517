"""docs/coverage.md is true: it lists every argument and function, what works runs, and what is refused raises."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from documents import ROOT, text_of
from torch import nn

import ringattn
from ringattn import MultiheadAttention, RingAttention
from ringattn.errors import InputError

TEXT = text_of(ROOT / "docs" / "coverage.md")
ANSWERS = {"yes", "in part", "refused"}
FLASH_ATTN = {
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
}  # fmt: skip
RING_FLASH_ATTENTION = {
    *(f"{kind}flash_attn{packed}_func" for kind in ("ring_", "zigzag_ring_", "stripe_")
      for packed in ("", "_kvpacked", "_qkvpacked")),
    *(f"{kind}flash_attn_varlen{packed}_func" for kind in ("ring_", "zigzag_ring_", "llama3_")
      for packed in ("", "_kvpacked", "_qkvpacked")),
    "llama3_flash_attn_prepare_cu_seqlens", "substitute_hf_flash_attn", "update_ring_flash_attn_params",
}  # fmt: skip


def rows(section: str) -> dict[str, str]:
    """What the tables of a section answer, by argument or function."""
    (text,) = [part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE) if part.startswith(section + "\n")]
    found = {}
    for names, answer in re.findall(r"^\| (`.*?`) \| ([\w ]+) \|", text, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), answer)
    assert set(found.values()) <= ANSWERS
    return found


SDPA, MODULE = rows("`torch.nn.functional.scaled_dot_product_attention`"), rows("`torch.nn.MultiheadAttention`")
Q = torch.randn(1, 2, 4, 8)
CAUSAL, OTHER = torch.ones(4, 4).tril().bool(), torch.eye(4).bool()
# Of each argument one value that works, and one that does not.
OF_FUNCTION: dict[str, tuple[list[Any], list[Any]]] = {
    "attn_mask": ([CAUSAL], [OTHER, torch.rand(4, 4)]),
    "dropout_p": ([0.0, 0.1], [1.0]),
    "is_causal": ([True], []),
    "scale": ([0.5], []),
    "enable_gqa": ([True], []),
}
OF_MODULE: dict[str, tuple[list[Any], list[Any]]] = {
    "dropout": ([0.0, 0.1], [1.0]),
    "bias": ([False], []),
    "add_bias_kv": ([False], [True]),
    "add_zero_attn": ([False], [True]),
    "kdim": ([16], []),
    "vdim": ([16], []),
    "batch_first": ([True], []),
    "device": (["cpu"], []),
    "dtype": ([torch.float32], []),
    "key_padding_mask": ([torch.tensor([[False, False, True, True]])], []),
    "need_weights": ([False], [True]),
    "attn_mask": ([~CAUSAL], [OTHER]),  # of a module True is masked, as in torch
    "average_attn_weights": ([False], []),
    "is_causal": ([True], []),
}


def test_every_argument_of_torchs_function_is_listed_in_order() -> None:
    """Ours are torch's, as its own test shows."""
    assert list(SDPA) == list(inspect.signature(ringattn.scaled_dot_product_attention).parameters)


def test_every_argument_of_torchs_module_is_listed_in_order() -> None:
    names = [name for method in (nn.MultiheadAttention.__init__, nn.MultiheadAttention.forward)
             for name in inspect.signature(method).parameters if name != "self"]  # fmt: skip
    assert list(MODULE) == names


def test_every_function_of_the_packages_is_listed() -> None:
    assert {name for name in rows("flash-attn") if name.startswith("flash_attn")} == FLASH_ATTN
    assert rows("ring-flash-attention").keys() == RING_FLASH_ATTENTION


def call_function(name: str, value: Any) -> None:
    ringattn.scaled_dot_product_attention(Q, Q, Q, **{name: value})


def call_module(name: str, value: Any) -> None:
    made = {name: value} if name in inspect.signature(MultiheadAttention.__init__).parameters else {}
    module = MultiheadAttention(16, 2, profile=None, **{"batch_first": True} | made)
    x = torch.randn(1, 4, 16)
    module(x, x, x, **({} if made else {name: value}))


@pytest.mark.parametrize(
    ("name", "call", "answer", "works", "refused"),
    [
        *((name, call_function, SDPA[name], *values) for name, values in OF_FUNCTION.items()),
        *((name, call_module, MODULE[name], *values) for name, values in OF_MODULE.items()),
    ],
)
def test_what_it_says_of_an_argument_is_so(
    name: str, call: Any, answer: str, works: list[Any], refused: list[Any]
) -> None:
    for value in works:
        call(name, value)
    for value in refused:
        with pytest.raises(InputError):
            call(name, value)
    assert (answer == "yes") == (not refused)


def test_what_it_names_exists() -> None:
    for name in re.findall(r"`(?:ringattn\.)(\w+)`", TEXT):
        assert hasattr(ringattn, name)
    for name in re.findall(r"`RingAttention\.(\w+)`", TEXT):
        assert hasattr(RingAttention, name)
    arguments = inspect.signature(RingAttention.forward).parameters.keys()
    arguments |= inspect.signature(RingAttention.cross).parameters.keys()
    assert {"cu_seqlens", "return_lse", "align", "window"} <= arguments


def test_what_it_refuses_of_rings_is_refused() -> None:
    with pytest.raises(InputError, match="striped"):
        RingAttention(2, 8, layout="striped")
