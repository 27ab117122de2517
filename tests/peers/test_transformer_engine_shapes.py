"""The configurations of TransformerEngine's context-parallel tests, over 2 and 4 ranks.

They are those of its tests/pytorch/attention/test_attention_with_cp.py: model configurations in three memory formats
(``thd`` packs sequences of random lengths into one row, with padding at its end or after each of them), and four ways
to exchange keys. Lengths and windows are 1/128 of theirs, for a CPU; heads and head dimensions are theirs. Results are
compared in float64 to 1e-10, where theirs are in bf16 to 2.5e-2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from oracle import Case
from peer_cases import Exchange, PeerCase, check_peers, packed, refusal_of
from peer_tables import assert_page_says
from pool import Pool

from ringattn import RingAttention
from ringattn.errors import InputError

SHRINK = 128
WINDOW = "sliding_window is"
BIAS = "the attention mask adds a bias to the logits"
REASONS = {WINDOW: "windows without a causal mask", BIAS: "biases"}
NO_WINDOW = (-1, -1)


def config(
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = NO_WINDOW,
    value_dim: int = 0,
    bias: str = "",
    sinks: bool = False,
    length: int = 4096,
) -> PeerCase:
    """A model configuration in their numbers; of a bias the letters of its shape."""
    length //= SHRINK
    shape = tuple({"b": 2, "h": heads, "s": length, "1": 1}[letter] for letter in bias)
    window = window if window == NO_WINDOW else (window[0] // SHRINK, window[1] // SHRINK)
    refused = BIAS if bias else WINDOW if window != NO_WINDOW and not causal else ""
    seen = window[0] + 1 if window != NO_WINDOW and causal else None
    case = Case(length, heads, kv_heads or heads, head_dim, batch=2, causal=causal, window=seen)
    return PeerCase(case, value_dim, window, shape, sinks, refused=refused)


LEFT, BOTH, SHORT = (512, 0), (512, 512), (128, 0)
CONFIGS = {
    # with flash attention
    "flash 1_0": config(12, 128, causal=True),
    "flash 1_1": config(12, 128),
    "flash 1_2": config(12, 128, causal=True, window=LEFT),
    "flash 1_3": config(12, 128, window=BOTH),
    "flash 2_0": config(32, 128, 4, causal=True),
    "flash 2_1": config(12, 128, 2),
    "flash 2_2": config(32, 128, causal=True, window=SHORT),
    "flash 2_3": config(12, 128, 2, window=BOTH),
    "flash 3_0": config(128, 192, causal=True, value_dim=128),
    "flash 3_1": config(12, 192, value_dim=128),
    "flash 3_2": config(12, 192, causal=True, window=LEFT, value_dim=128),
    "flash 3_3": config(12, 192, window=BOTH, value_dim=128),
    # with cuDNN's; 1_0, 1_1 and 2_4 return the largest logit as well, which nothing here does
    "fused 1_0": config(12, 128, causal=True),
    "fused 1_1": config(12, 128),
    "fused 1_2": config(12, 128, causal=True, bias="11ss"),
    "fused 1_3": config(12, 128, bias="11ss"),
    "fused 1_4": config(12, 128, bias="bhss"),
    "fused 1_5": config(12, 128, causal=True, window=BOTH),
    "fused 2_0": config(32, 128, 4, causal=True),
    "fused 2_1": config(32, 128, causal=True, window=SHORT),
    "fused 2_2": config(12, 128, 2, causal=True, bias="11ss"),
    "fused 2_3": config(12, 128, 2, causal=True, bias="11ss"),
    "fused 2_4": config(12, 128, 2, causal=True, bias="111s"),
    "fused 2_5": config(12, 128, 2, bias="11ss"),
    "fused 2_6": config(12, 128, 2, causal=True, window=BOTH),
    "fused 3_0": config(12, 128, causal=True, value_dim=64),
    "fused 3_1": config(128, 192, causal=True, value_dim=128),
    "fused 3_2": config(12, 128, causal=True, value_dim=64, bias="11ss"),
    "fused 3_3": config(12, 128, value_dim=64, bias="11ss"),
    "fused 3_4": config(12, 128, value_dim=64, bias="b1ss"),
    "fused 4_0": config(64, 64, 8, causal=True),
    "fused 4_1": config(64, 64, 8, causal=True, sinks=True),
    "fused 4_2": config(64, 64, 8, causal=True, sinks=True),
    "fused 4_3": config(64, 64, causal=True, window=SHORT, sinks=True),
    "fused d256": config(16, 256, causal=True, length=1024),
    "fused d256, window": config(16, 256, causal=True, window=SHORT, length=1024),
}
FORMATS = ("bshd", "sbhd", "thd")
LENGTHS = {32: (19, 10), 8: (5, 2)}  # of packed sequences, by the longest; theirs are drawn anew in every run
EXCHANGES = {
    "p2p": (2, Exchange("ring")),
    "all_gather": (2, Exchange("all-gather")),
    "a2a": (2, Exchange("ulysses")),
    "a2a+p2p": (4, Exchange("ulysses-ring", ulysses=2)),
}
WORK = {name: each for name, each in CONFIGS.items() if not each.refused}


def in_format(each: PeerCase, form: str, apart: int = 1) -> PeerCase:
    if form == "thd":
        return packed(each, LENGTHS[each.case.length], apart)
    return replace(each, case=replace(each.case, layout="plain" if form == "bshd" else "sequence_first"))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("form", FORMATS)
def test_configurations_over_ranks(form: str, exchange: str, ranks: Callable[[int], Pool]) -> None:
    """Packed ones with padding at the end of the row alone, and after each sequence to twice the number of ranks."""
    world, how = EXCHANGES[exchange]
    distinct = dict.fromkeys(WORK.values())
    cases = [in_format(each, form, apart) for each in distinct for apart in ((1, 2 * world) if form == "thd" else (1,))]
    assert ranks(world).run(check_peers, cases, how) == [len(cases)] * world


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [name for name, each in CONFIGS.items() if each.refused])
def test_configurations_that_are_refused(name: str, form: str) -> None:
    each = in_format(CONFIGS[name], form)
    told = refusal_of(each)
    assert told.startswith(each.refused)
    assert "\n" not in told


@pytest.mark.parametrize("given", ["fp8", "e4m3"])
def test_no_attention_in_fp8(given: str) -> None:
    """Theirs runs the configurations without a bias in fp8 too, to 0.1."""
    with pytest.raises(InputError, match=given):
        RingAttention(12, 128, dtype=given, profile=None)


def test_the_page_counts_them() -> None:
    refused = [REASONS[each.refused] for each in CONFIGS.values() if each.refused]
    assert_page_says("TransformerEngine, context parallel", len(WORK) * len(FORMATS), refused * len(FORMATS))
