"""The shapes of ring-attention-pytorch's checks, over 2 and 4 ranks.

They are the defaults and flags of its assert.py, assert_attn.py, assert_zig_zag.py, assert_tree_attn.py and
assert_flash.py, on 8 ranks there, and the key padding that its module takes. Shapes are theirs, but for twice as many
positions in a decode step, for all ranks to hold some. Theirs compare in float32 to 1e-6, and gradients to 1e-2; here
it is float64 to 1e-10. How a rank cuts its rows (their buckets) is the kernel's choice here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from document_cases import DocumentsCase, check_documents
from oracle import Case, assert_equal_to, exact, found
from peer_cases import call_with_batches, check_decode_step, check_pairs
from peer_tables import assert_page_says
from pool import Pool
from ring_cases import RingCase, check_exact

from ringattn import RingAttention
from ringattn.errors import InputError

WORLDS = (2, 4)
MASKS = (True, False)
ATTENTION = [RingCase(Case(31, 8, 8, 8, 2, causal=causal), "ring", "contiguous", ragged=True) for causal in MASKS]
TRANSFORMER = [RingCase(Case(32, 8, 8, 8, 2, causal=causal), "ring", "contiguous") for causal in MASKS]
ZIGZAG = [RingCase(Case(31, 8, 4, 16, 2, causal=True), "all-gather", "zigzag", ragged=True)]
PADDED = [DocumentsCase(each, lengths=(31, 20)) for each in ATTENTION]
SHARDED_BATCHES = [RingCase(Case(32, 8, 8, 8, 2, causal=causal), "ring", "contiguous") for causal in MASKS]
STEPS = [Case(31, 8, 8, 64), Case(62, 8, 8, 64)]
ALONE = Case(62, 2, 2, 16, 2, causal=True)


@pytest.mark.parametrize("world", WORLDS)
def test_attention_over_ranks(world: int, ranks: Callable[[int], Pool]) -> None:
    """31 positions, which no number of ranks divides."""
    cases = [*ATTENTION, *TRANSFORMER, *ZIGZAG]
    assert ranks(world).run(check_exact, cases) == [len(cases)] * world


@pytest.mark.parametrize("world", WORLDS)
def test_key_padding(world: int, ranks: Callable[[int], Pool]) -> None:
    assert ranks(world).run(check_documents, PADDED) == [len(PADDED)] * world


def test_batches_over_pairs_of_ranks(ranks: Callable[[int], Pool]) -> None:
    assert ranks(4).run(check_pairs, SHARDED_BATCHES) == [len(SHARDED_BATCHES)] * 4


@pytest.mark.parametrize("world", WORLDS)
def test_a_decode_step(world: int, ranks: Callable[[int], Pool]) -> None:
    assert ranks(world).run(check_decode_step, STEPS) == [len(STEPS)] * world


def test_one_rank() -> None:
    inputs = (*ALONE.inputs(), ALONE.dout())
    assert_equal_to(found(ALONE.module(), *inputs), exact(ALONE, *inputs))


@pytest.mark.parametrize("causal", MASKS)
def test_striped_is_no_layout(causal: bool) -> None:
    with pytest.raises(InputError, match="layout is 'striped'"):
        RingAttention(8, 8, causal=causal, layout="striped")


def test_ranks_with_batches_of_different_sizes_are_refused(ranks: Callable[[int], Pool]) -> None:
    with pytest.raises(AssertionError, match="calls with batch 2, 16 positions") as error:
        ranks(2).run(call_with_batches, (2, 3))
    assert "calls with batch 3, 16 positions" in str(error.value)


def test_the_page_counts_them() -> None:
    groups = (ATTENTION, TRANSFORMER, ZIGZAG, PADDED, SHARDED_BATCHES, STEPS[:1], [ALONE])
    refused = [*["layout striped"] * len(MASKS), "ranks with unequal batches"]
    assert_page_says("ring-attention-pytorch", sum(map(len, groups)), refused)
