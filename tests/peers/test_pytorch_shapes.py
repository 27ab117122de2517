"""The shapes of PyTorch's tests of context parallelism, over 2 and 4 ranks.

They are those of test/distributed/tensor/test_attention.py: ``RingAttentionTest`` on all GPUs that there are, and
``CPFlexAttentionTest`` on two. Heads, head dimensions, batches and numbers of documents are theirs; sequences of 1024
a rank, 512 and 2048 have 16, 32 and 64 positions here, for a CPU. Theirs skip what is compiled, and run in bf16 to 8e-3
times the number of ranks; here it is float64 to 1e-10.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, pairwise, product

import pytest
import torch
from document_cases import DocumentsCase, check_documents
from faults import group_to_break, told_of
from oracle import Case
from peer_cases import check_forwards
from peer_tables import assert_page_says
from pool import Pool
from ring_cases import RingCase, check_exact

from ringattn import RingAttention
from ringattn.errors import InputError

# Whether causal, and the layout: they balance the work of a causal mask alone.
MASKS = [(True, "zigzag"), (True, "contiguous"), (False, "contiguous")]
ROTATIONS = ["ring", "all-gather"]  # theirs: all-to-all, all-gather
WORLDS = (2, 4)


def sdpa(world: int) -> list[RingCase]:
    """8 sequences of 8 heads of 32, of causal and full attention."""
    return [
        RingCase(Case(16 * world, 8, 8, 32, 8, causal=causal), schedule, layout)
        for (causal, layout), schedule in product(MASKS, ROTATIONS)
    ]


def transformers(world: int) -> list[RingCase]:
    """8 sequences of 8 tokens in torch's own encoder, of 8 heads of 4."""
    return [
        RingCase(Case(8, 8, 8, 4, 8, causal=causal), schedule, "zigzag" if causal else "contiguous")
        for causal, schedule in product((True, False), ROTATIONS)
    ]


def flex() -> list[RingCase]:
    """8 sequences of 8 heads of 32 under a causal mask; the shortest of them is refused by theirs."""
    return [
        RingCase(Case(length, 8, 8, 32, 8, causal=True), "all-gather", layout)
        for length, layout in product((8, 32, 64), ("contiguous", "zigzag"))
    ]


def documents() -> list[DocumentsCase]:
    """28 documents in each sequence of a batch, all in one row; zigzag balances each, as one of theirs does."""
    drawn = random.Random(10)
    found = []
    for batch, length, layout in product((2, 4, 8), (32, 64), ("contiguous", "zigzag")):
        lengths = []
        for _ in range(batch):
            cuts = [0, *sorted(drawn.sample(range(1, length), 27)), length]
            lengths += [end - begin for begin, end in pairwise(cuts)]
        case = Case(batch * length, 8, 8, 32, causal=True)
        found.append(DocumentsCase(RingCase(case, "all-gather", layout), (0, *accumulate(lengths))))
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_scaled_dot_product_attention(world: int, ranks: Callable[[int], Pool]) -> None:
    cases = sdpa(world)
    assert ranks(world).run(check_exact, cases) == [len(cases)] * world


@pytest.mark.parametrize("world", WORLDS)
def test_forward_alone(world: int, ranks: Callable[[int], Pool]) -> None:
    cases = sdpa(world)
    assert ranks(world).run(check_forwards, cases) == [len(cases)] * world


@pytest.mark.parametrize("world", WORLDS)
def test_the_attention_of_a_transformer(world: int, ranks: Callable[[int], Pool]) -> None:
    cases = transformers(world)
    assert ranks(world).run(check_exact, cases) == [len(cases)] * world


def test_a_causal_mask(ranks: Callable[[int], Pool]) -> None:
    assert ranks(2).run(check_exact, flex()) == [len(flex())] * 2


def test_documents_in_a_batch(ranks: Callable[[int], Pool]) -> None:
    cases = documents()
    assert ranks(2).run(check_documents, cases) == [len(cases)] * 2


def test_documents_of_several_rows_are_put_into_one() -> None:
    x = torch.zeros(2, 8, 8, 32)
    with pytest.raises(InputError, match="cu_seqlens is for packed documents in one row, and q has batch size 2"):
        RingAttention(8, 32, profile=None, device="cpu")(x, x, x, cu_seqlens=[0, 4, 8])


def refused_dropout(told: str) -> bool:
    x = torch.zeros(2, 8, 4, 4)
    with group_to_break() as group:
        module = RingAttention(4, 4, profile=None, device="cpu", dropout=0.1, process_group=group)
        error, message = told_of(lambda: module(x, x, x))
    return error in ("InputError", "PeerError") and told in message


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_dropout_is_refused(ranks: Callable[[int], Pool], rotation: str) -> None:
    """Their transformer of 2 layers with 4 heads of 4 has dropout of 0.1, and only its messages are counted."""
    told = "dropout is 0.1 in training mode; dropout is exact in one block of one kernel"
    assert ranks(2).run(refused_dropout, told) == [True, True]


def test_the_page_counts_them() -> None:
    passed = 2 * len(sdpa(2)) + len(transformers(2)) + len(flex()) + len(documents())
    assert_page_says("PyTorch, `RingAttentionTest` and `CPFlexAttentionTest`", passed, ["dropout"] * len(ROTATIONS))
