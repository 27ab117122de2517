"""A cache that ranks hold together gives what one rank's does, with one message a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from decode_cases import RankedCase, check_cross, check_decoding, check_faults
from oracle import pattern_of
from pool import Pool

NESTED, UNEVEN = pattern_of([8, 16, 32], [1, 2, 4]), pattern_of([5, 7, 33], [2, 1, 5], "blocked")
CASES = {
    "dense": [RankedCase(37, 10, 12), RankedCase(1, 1, 20), RankedCase(20, 20, 3, stripe=1)],
    "full": [RankedCase(37, 10, 12, causal=False), RankedCase(24, 9, 3, NESTED, causal=False)],
    "dilated": [RankedCase(37, 10, 12, NESTED), RankedCase(20, 7, 9, UNEVEN, stripe=2)],
    "window": [RankedCase(37, 10, 30, window=9), RankedCase(20, 20, 9, window=1)],
    "of their own lengths": [RankedCase(12, 12, 9, counts=(12, 3)), RankedCase(12, 12, 9, NESTED, counts=(0, 12))],
    "rolled back": [RankedCase(12, 12, 9, rollback=2), RankedCase(12, 12, 9, window=5, rollback=2)],
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_rank(name: str, world: int, ranks: Callable[[int], Pool]) -> None:
    assert ranks(world).run(check_decoding, CASES[name]) == [len(CASES[name])] * world


def test_a_cache_of_one_rank_is_refused(fragile: Pool) -> None:
    """By every rank, or by one whose error the others are told: the group is aborted, as others may wait for it."""
    for message in fragile.run(check_faults):
        assert "InputError: the cache has ranks 1 and the module 3; make it with kv_cache()" in message


def test_cross_attention_is_refused(fragile: Pool) -> None:
    for message in fragile.run(check_cross):
        assert message.startswith("InputError: cross attention over several ranks is not supported; use a KVCache")
