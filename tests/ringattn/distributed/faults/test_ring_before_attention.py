"""What fails on one rank before its attention, around it or in another method, is told to the others at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import CASE, Told, group_to_break, leaves_of, told_of
from pool import Pool
from ring_cases import RingCase

from ringattn import LongNetBlock, MultiheadAttention

DOUBLE: dict[str, Any] = {"dtype": torch.float64, "profile": None}


def _calls(kind: str, wrong: dict[str, Any], first: bool) -> Told:
    """What a rank is told where rank 1 alone gives ``wrong``: in the first call, or in one after a right one."""
    x = torch.randn(1, 8, 24, dtype=torch.float64)
    with group_to_break() as group:
        if kind == "block":
            block = LongNetBlock(24, 4, process_group=group, **DOUBLE)

            def call(**given: Any) -> object:
                return block(given.pop("query", x), **given)
        else:
            module = MultiheadAttention(24, 4, batch_first=True, process_group=group, rotary_base=50.0, **DOUBLE)

            def call(**given: Any) -> object:
                query = given.pop("query", x)
                return module(query, query, query, **given)

        if not first:
            call()
        return told_of(lambda: call(**(wrong if dist.get_rank() == 1 else {})))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("module", {"need_weights": True}, "need_weights is True"),
    ("module", {"query": torch.randn(1, 8, 20, dtype=torch.float64)}, "its last dimension must be 24"),
    ("module", {"query": torch.randn(1, 8, 24)}, "convert it"),
    ("module", {"positions": torch.arange(3)}, "positions has shape"),
    ("module", {"attn_mask": torch.eye(8).bool()}, "use FlexAttention"),
    ("block", {"query": torch.randn(1, 8, 20, dtype=torch.float64)}, "its last dimension must be 24"),
]


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize(("kind", "wrong", "told"), WRONG, ids=[f"{k} {next(iter(w))}" for k, w, _ in WRONG])
def test_a_module_around_it(
    kind: str, wrong: dict[str, Any], told: str, first: bool, ranks: Callable[[int], Pool]
) -> None:
    found = ranks(2).run(_calls, kind, wrong, first)
    assert [error for error, _ in found] == ["PeerError", "InputError"]
    assert all(told in message for _, message in found)


def _cross_on_one_rank() -> Told:
    with group_to_break() as group:
        module = RingCase(CASE, "ring", "zigzag").module(group=group)
        q, k, v = leaves_of(module)
        return told_of(lambda: module.cross(q, k, v) if dist.get_rank() == 1 else module(q, k, v))


def test_cross_attention_of_one_rank(ranks: Callable[[int], Pool]) -> None:
    found = ranks(2).run(_cross_on_one_rank)
    assert [error for error, _ in found] == ["PeerError", "InputError"]
    assert all("cross attention over several ranks is not supported" in message for _, message in found)


def _keyword_on_one_rank() -> Told:
    transformers = pytest.importorskip("transformers")
    from ringattn.integrations.transformers import register

    with group_to_break() as group:
        register("ringtune-before", process_group=group, profile=None)
        attend = transformers.AttentionInterface()["ringtune-before"]
        q = torch.randn(1, 4, 8, 8)
        positions = torch.arange(16)[None, 8 * dist.get_rank() : 8 * dist.get_rank() + 8]
        wrong = {"head_mask": torch.ones(4)} if dist.get_rank() == 1 else {}
        call = lambda: attend(torch.nn.Identity(), q, q, q, None, is_causal=False, position_ids=positions, **wrong)  # noqa: E731
        return told_of(call)


def test_a_keyword_that_transformers_hands_to_one_rank(ranks: Callable[[int], Pool]) -> None:
    found = ranks(2).run(_keyword_on_one_rank)
    assert [error for error, _ in found] == ["PeerError", "InputError"]
    assert all("head_mask is given to attn_implementation='ringtune'" in message for _, message in found)
