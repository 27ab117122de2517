"""Padded batches over a cache that ranks hold together: each row as if it were alone, one merge a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import pattern_of, patterns
from padded_cases import ByModule, Chunk, PaddedCase, check_padded, wrong_on_one_rank
from padded_models import ByTransformers
from pool import Pool

SIDES = ("left", "right", "any")


def padded_row(count: int, new: int, side: str) -> tuple[bool, ...]:
    """``count`` of ``new`` positions."""
    left = {"left": new - count, "right": 0}[side]
    return tuple(left <= i < left + count for i in range(new))


@st.composite
def chunks(draw: st.DrawFn, batch: int) -> Chunk:
    """Positions of every row, none at all among them; steps of one position are as likely as longer chunks."""
    new = draw(st.one_of(st.just(1), st.integers(1, 14)))
    side = draw(st.sampled_from(SIDES))
    if side == "any":
        return tuple(tuple(draw(st.booleans()) for _ in range(new)) for _ in range(batch))
    return tuple(padded_row(draw(st.integers(0, new)), new, side) for _ in range(batch))


@st.composite
def cases(draw: st.DrawFn) -> PaddedCase:
    batch, pattern = draw(st.integers(1, 4)), draw(patterns())
    causal = draw(st.sampled_from((True, True, True, False)))
    windowed = pattern.dense and causal
    return PaddedCase(
        tuple(draw(chunks(batch)) for _ in range(draw(st.integers(1, 6)))),
        pattern,
        causal,
        draw(st.one_of(st.none(), st.integers(1, 12))) if windowed else None,
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 2)),
    )


@st.composite
def cases_of_models(draw: st.DrawFn) -> PaddedCase:
    """As a model has them, with masks that transformers makes: causal, under a window no padding inside of a row."""
    case = draw(cases().filter(lambda case: case.causal))
    if case.window is None:
        return case
    total = sum(len(chunk[0]) for chunk in case.chunks)
    ends = [sorted((draw(st.integers(0, total)), draw(st.integers(0, total)))) for _ in range(case.batch)]
    chunked, begin = [], 0
    for chunk in case.chunks:
        new = range(begin, begin + len(chunk[0]))
        chunked.append(tuple(tuple(first <= at < end for at in new) for first, end in ends))
        begin += len(new)
    return replace(case, chunks=tuple(chunked), back=0)


WAYS = {"module": (ByModule, cases()), "model": (ByTransformers, cases_of_models())}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", WAYS)
def test_every_row_is_as_if_it_were_alone(name: str, world: int, ranks: Callable[[int], Pool]) -> None:
    """In float64, to 1e-10; some rows have fewer positions than a rank's share, or none."""
    way, drawn = WAYS[name]

    @settings(max_examples=max(10, settings().max_examples // 4))
    @given(drawn)
    def check(case: PaddedCase) -> None:
        lengths = ranks(world).run(check_padded, case, way)
        assert lengths == [lengths[0]] * world

    check()


PROMPT = tuple(padded_row(count, 9, "left") for count in (9, 4, 0, 1))
STEPS = (((True,), (True,), (True,), (True,)),) * 8
NESTED = pattern_of([8, 16, 32], [1, 2, 4])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "case",
    [
        PaddedCase((PROMPT, *STEPS)),
        PaddedCase((PROMPT, *STEPS), NESTED),
        PaddedCase((PROMPT, *STEPS), window=3),
        PaddedCase((PROMPT, PROMPT, *STEPS), window=3, stripe=1),
    ],
    ids=["dense", "dilated", "window", "in chunks"],
)
def test_a_padded_prompt_and_steps(case: PaddedCase, side: str, ranks: Callable[[int], Pool]) -> None:
    if side == "right":
        case = replace(case, chunks=tuple(tuple(row[::-1] for row in chunk) for chunk in case.chunks))
    (lengths, *others) = ranks(3).run(check_padded, case, ByModule)
    assert others == [lengths] * 2


@pytest.mark.parametrize(
    "given",
    [{"counts": [6, 2]}, {"kept": torch.tensor([[True] * 6, [False] + [True] * 5])}],
    ids=["counts", "kept"],
)
def test_other_counts_on_one_rank_raise_on_all(given: dict[str, object], ranks: Callable[[int], Pool]) -> None:
    """Before any row travels: the group stays usable. Their parts would be merged as if they were of one position."""
    for rank, (first, second) in enumerate(ranks(3).run(wrong_on_one_rank, given)):
        assert first[0] == "InputError"
        assert first[1].startswith(f"rank {rank} has a cache of [6, ")
        assert first[1].endswith("other ones; give every rank the same")
        assert second == ("", "")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kept": torch.ones(2, 5).bool()}, "kept has shape (2, 5); it must be (2, 6), as q"),
        ({"kept": torch.ones(2, 6)}, "kept is torch.float32; it must be a dense boolean tensor"),
        ({"kept": [[True] * 6] * 2}, "kept is list; it must be a dense boolean tensor"),
        ({"kept": torch.ones(2, 6).bool(), "counts": [6, 6]}, "counts and kept are both given; use kept alone"),
        ({"counts": [6, 7]}, "counts is [6, 7]; each must be from 0 to the 6 positions given"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(given: dict[str, object], told: str, fragile: Pool) -> None:
    """By the rank that is given it, whose error the others are told, as they may wait for its rows."""
    results = fragile.run(wrong_on_one_rank, given)
    assert [first[0] for first, _ in results] == ["PeerError", "PeerError", "InputError"]
    assert all(told in first[1] for first, _ in results)
