"""What one rank cannot begin, be it a call, a backward or a module, ends on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import CASE, Told, assert_aborted, assert_works, group_to_break, leaves_of, told_of
from oracle import Case, assert_equal_to, exact, pattern_of
from pool import Pool
from ring_cases import RingCase

from ringattn import RingAttention

# --- one rank does not begin a call that the others are in --------------------------------------------------------


def _steps(schedule: str, spoil: str) -> list[Told]:
    """What a loop that goes on after errors is told, where step 1 of 3 is spoilt on rank 1; right steps are right."""
    case = replace(CASE, heads=4, kv_heads=2) if schedule.startswith("ulysses") else CASE
    ulysses = 2 if schedule == "ulysses-ring" else 0
    wanted = exact(case, *case.inputs(), case.dout())
    told = []
    with group_to_break() as group:
        module = RingCase(case, schedule, "zigzag", ulysses=ulysses).module(group=group)
        for step in range(3):
            dist.barrier()  # of all ranks, which nobody aborts: rank 1 fails when the others are through the last step
            leaves, dout = leaves_of(module, case), module.shard(case.dout())

            def run(leaves: list[torch.Tensor] = leaves, dout: torch.Tensor = dout, spoilt: bool = step == 1) -> None:
                if spoilt and dist.get_rank() == 1:
                    leaves = _spoilt(leaves, spoil)
                out, lse = module(*leaves, return_lse=True)
                grads = torch.autograd.grad(out, leaves, dout)
                whole = [module.unshard(x.detach(), dim=2 if x is lse else 1) for x in (out, lse, *grads)]
                assert_equal_to(whole, list(wanted))

            told.append(told_of(run))
        assert_aborted(module, case)
    assert_works()
    return told


def _spoilt(leaves: list[torch.Tensor], how: str) -> list[torch.Tensor]:
    q, k, v = leaves
    spoilt: dict[str, list[Any]] = {
        "dtype": [q, k.float(), v],
        "heads": [q[:, :, :2], k, v],
        "length": [x[:, :4] for x in leaves],
        "gradients": [x.detach() for x in leaves],
        "object": [q, k, "v"],
    }
    return spoilt[how]


SPOILT = {
    "dtype": "k is torch.float32 and q is torch.float64",
    "heads": "num_heads",
    "length": "4 positions of",
    "gradients": "without gradients",
    "object": "v is a str",
}


@pytest.mark.parametrize(("schedule", "world"), [("ring", 3), ("all-gather", 3), ("ulysses", 2), ("ulysses-ring", 4)])
@pytest.mark.parametrize("spoil", list(SPOILT))
def test_a_call_that_one_rank_does_not_begin_ends_on_all(
    schedule: str, world: int, spoil: str, ranks: Callable[[int], Pool]
) -> None:
    """Its next call was taken for the one that it had missed: results were wrong by 0.7, and nobody was told."""
    for number, steps in enumerate(ranks(world).run(_steps, schedule, spoil)):
        assert [error for error, _ in steps] == ["", "InputError" if number == 1 else "PeerError", "PeerError"], steps
        assert all(SPOILT[spoil] in message for _, message in steps[1:]), steps
        assert number == 1 or steps[1][1].startswith("rank 1 failed: InputError"), steps


def _stays_within_ranks() -> list[str]:
    """Rank 1 fails where nothing is sent."""
    case = Case(24, 6, 3, 4, pattern=pattern_of([8], [1]), causal=True)
    with group_to_break() as group:
        module = RingCase(case, "local", "contiguous").module(group=group)
        other = RingCase(CASE, "ring", "zigzag").module(group=group)
        errors = []
        for step in range(3):
            dist.barrier()
            leaves = leaves_of(module, case)
            if step == 1 and dist.get_rank() == 1:
                leaves = _spoilt(leaves, "dtype")
            errors.append(told_of(lambda leaves=leaves: module(*leaves))[0])  # type: ignore[misc]
            errors.append(told_of(lambda: other(*leaves_of(other)))[0])
    assert_works()
    return errors


def test_a_call_that_sends_nothing_is_told_by_the_next_that_does(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_stays_within_ranks)
    assert told[1] == ["", "", "InputError", *["PeerError"] * 3]
    for each in (told[0], told[2]):
        assert each in (["", "", first, *["PeerError"] * 3] for first in ("", "PeerError"))


def _failure_of_all_ranks() -> tuple[Told, Told]:
    with group_to_break() as group:
        module = RingCase(CASE, "ring", "zigzag").module(group=group)
        leaves = leaves_of(module)
        module(*leaves)
        told = [told_of(lambda: module(*leaves, total_length=1000)) for _ in range(2)]
    assert_works()
    return told[0], told[1]


def test_what_all_ranks_fail_of_each_raises_for_itself(ranks: Callable[[int], Pool]) -> None:
    for first, second in ranks(3).run(_failure_of_all_ranks):
        assert first[0] in ("InputError", "PeerError")
        assert second[0] == "PeerError"
        assert "of total_length 1000 rank" in first[1]
        assert "of total_length 1000 rank" in second[1]


# --- one rank does not begin a backward that the others are in ----------------------------------------------------


def _backward_steps(ring: RingCase, spoil: str) -> list[Told]:
    """Step 1 of 3 is spoilt on rank 1, between its forward and its backward."""
    case = ring.case
    wanted = exact(case, *case.inputs(), case.dout())
    told = []
    with group_to_break() as group:
        module = ring.module(group=group)
        for step in range(3):
            dist.barrier()
            told.append(told_of(lambda step=step: _backward_step(module, case, wanted, step, spoil)))  # type: ignore[misc]
        assert_aborted(module, case)
    assert_works()
    return told


def _backward_step(module: RingAttention, case: Case, wanted: Any, step: int, spoil: str) -> None:
    spoilt = step == 1 and dist.get_rank() == 1
    leaves, dout = leaves_of(module, case), module.shard(case.dout())
    q, k, v = (x * 1 for x in leaves)
    out, lse = module(q, k, v, return_lse=True)
    if spoilt and spoil == "in place":
        with torch.no_grad():
            q.add_(1)
    if spoilt and spoil == "lse":
        torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    if spoilt and spoil == "lse alone":
        torch.autograd.grad(lse, leaves, torch.ones_like(lse))
    grads = torch.autograd.grad(out, leaves, dout, create_graph=spoilt and spoil == "twice")
    whole = [module.unshard(x.detach(), dim=2 if x is lse else 1) for x in (out, lse, *grads)]
    assert_equal_to(whole, list(wanted))


BACKWARDS = {
    "twice": "double backward",
    "in place": "modified by an inplace operation",
    "lse": "over several ranks it has no gradient: use lse.detach()",
    "lse alone": "over several ranks it has no gradient: use lse.detach()",
}


@pytest.mark.parametrize("spoil", list(BACKWARDS))
@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("ring", "selective"), ("ring", "full"), ("ulysses", "none"), ("ulysses", "full")]
)
def test_a_backward_that_one_rank_does_not_begin_ends_on_all(
    schedule: str, checkpoint: str, spoil: str, ranks: Callable[[int], Pool]
) -> None:
    """The others waited for the group's timeout, and heard that no rank had failed; an lse in the loss was dropped."""
    case = replace(CASE, heads=4, kv_heads=2)
    ring = RingCase(case, schedule, "zigzag", checkpoint=checkpoint)
    own = "RuntimeError" if spoil == "in place" else "RingAttentionError"
    for number, steps in enumerate(ranks(2).run(_backward_steps, ring, spoil)):
        assert [error for error, _ in steps] == ["", "PeerError" if number == 0 else own, "PeerError"], steps
        assert all(BACKWARDS[spoil] in message for _, message in steps[1:]), steps


def _backward_missed() -> Told:
    """Rank 1 skips the backward of its first call."""
    with group_to_break() as group:
        module = RingCase(CASE, "ring", "zigzag").module(group=group)
        leaves = leaves_of(module)
        out = module(*leaves)
        told = told_of(lambda: module(*leaves) if dist.get_rank() == 1 else out.sum().backward())
    assert_works()
    return told


def test_a_backward_that_one_rank_misses(ranks: Callable[[int], Pool]) -> None:
    """Its next forward meets the others' backward."""
    for error, message in ranks(2).run(_backward_missed):
        assert error == "InputError"
        assert "rank 0 was in the backward of call 1" in message
        assert "rank 1 was in the forward of call 2" in message


# --- one rank cannot build its module -----------------------------------------------------------------------------


def _wrongly_built(here: dict[str, Any]) -> Told:
    wrong = here if dist.get_rank() == 1 else {}
    told = told_of(
        lambda: RingAttention(**({"num_heads": 2, "head_dim": 4, "process_group": dist.group.WORLD} | wrong))
    )
    assert_works()  # no message was lost
    return told


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"num_kv_heads": 3}, "num_heads is 2, not a multiple of num_kv_heads, 3"),
        ({"layout": "nope"}, "layout is 'nope'"),
        ({"segment_lengths": [4]}, "dilation_rates"),
        ({"prefer": "speed"}, "prefer is 'speed'"),
        ({"launch": "graph"}, "launch is 'graph'"),
        ({"dropout": 0.1}, "dropout is 0.0 on rank 0 of the group and 0.1 on rank 1"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_module_that_one_rank_cannot_build(wrong: dict[str, Any], told: str, ranks: Callable[[int], Pool]) -> None:
    """The others waited for the group's timeout."""
    for number, (error, message) in enumerate(ranks(2).run(_wrongly_built, wrong)):
        assert error == ("InputError" if number == 1 or "dropout" in wrong else "PeerError")
        assert told in message


def _deterministic_on_one_rank() -> Told:
    torch.use_deterministic_algorithms(dist.get_rank() == 1)
    try:
        return told_of(lambda: RingCase(CASE, "ring", "zigzag").module())
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_on_one_rank(ranks: Callable[[int], Pool]) -> None:
    for error, message in ranks(2).run(_deterministic_on_one_rank):
        assert error == "InputError"
        assert "use_deterministic_algorithms is False on rank 0 of the group and True on rank 1" in message
