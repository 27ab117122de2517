"""What one rank cannot begin, be it a call, a backward or a module, ends on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import CASE, Told, assert_works, leaves_of, told_of
from oracle import Case, assert_equal_to, exact, pattern_of
from pool import TIMES, Pool
from ring_cases import RingCase

from ringattn import RingAttention

# --- one rank does not begin a call that the others are in --------------------------------------------------------


def _steps(schedule: str, spoil: str, backward: bool = True) -> list[Told]:
    """What a loop that goes on after errors is told, where step 1 of 3 is spoilt on rank 1; right steps are right."""
    case = replace(CASE, heads=4, kv_heads=2) if schedule == "ulysses" else CASE
    module = RingCase(case, schedule, "zigzag").module()
    wanted = exact(case, *case.inputs(), case.dout())
    told = []
    for step in range(4):
        leaves, dout = leaves_of(module, case), module.shard(case.dout())

        def run(leaves: list[torch.Tensor] = leaves, dout: torch.Tensor = dout, spoilt: bool = step == 1) -> None:
            if spoilt and dist.get_rank() == 1:
                leaves = _spoilt(leaves, spoil)
                if spoil == "late":
                    time.sleep(3 * TIMES.beat_s)
            if spoilt and dist.get_rank() == 0 and spoil == "late":
                leaves = _spoilt(leaves, "heads")
            out, lse = module(*leaves, return_lse=True)
            grads = torch.autograd.grad(out, leaves, dout) if backward else ()
            whole = [module.unshard(x.detach(), dim=2 if x is lse else 1) for x in (out, lse, *grads)]
            assert_equal_to(whole, list(wanted)[: len(whole)])

        told.append(told_of(run))
    return told


def _spoilt(leaves: list[torch.Tensor], how: str) -> list[torch.Tensor]:
    q, k, v = leaves
    spoilt: dict[str, list[Any]] = {
        "dtype": [q, k.float(), v],
        "heads": [q[:, :, :2], k, v],
        "length": [x[:, :6] for x in leaves],
        "gradients": [x.detach() for x in leaves],
        "object": [q, k, "v"],
        "late": leaves,
    }
    return spoilt[how]


SPOILT = {
    "dtype": "k is torch.float32 and q is torch.float64",
    "heads": "num_heads",
    "length": "6 positions of 1",
    "gradients": "without gradients",
    "object": "v is a str",
}


def _assert_only_the_spoilt_step_failed(told: list[list[Told]], rank: int, message: str) -> None:
    for number, steps in enumerate(told):
        assert [error for error, _ in steps] == ["", "InputError" if number == rank else "PeerError", "", ""], steps
        assert message in steps[1][1]


@pytest.mark.parametrize("schedule", ["ring", "all-gather", "ulysses"])
@pytest.mark.parametrize("spoil", list(SPOILT))
def test_a_call_that_one_rank_does_not_begin_ends_on_all(
    schedule: str, spoil: str, ranks: Callable[[int], Pool]
) -> None:
    """Its next call was taken for the one that it had missed: results were wrong by 0.7, and nobody was told."""
    told = ranks(2 if schedule == "ulysses" else 3).run(_steps, schedule, spoil)
    _assert_only_the_spoilt_step_failed(told, 1, SPOILT[spoil])


def test_a_rank_that_comes_late_misses_a_call_that_another_has_missed(ranks: Callable[[int], Pool]) -> None:
    """The third one is in its messages, and both exchange them with it."""
    _assert_only_the_spoilt_step_failed(ranks(3).run(_steps, "ring", "late"), 0, SPOILT["heads"])


def _over_degrees(spoil: str) -> list[Told]:
    case = replace(CASE, heads=4, kv_heads=2)
    module = RingCase(case, "ulysses-ring", "zigzag", ulysses=2).module()
    told = []
    for step in range(3):
        leaves = leaves_of(module, case)
        if step == 1 and dist.get_rank() == 2:
            leaves = _spoilt(leaves, spoil)
        told.append(told_of(lambda leaves=leaves: module(*leaves)[0].sum().backward()))  # type: ignore[misc]
    return told


def test_such_a_call_over_two_dimensions(ranks: Callable[[int], Pool]) -> None:
    for number, steps in enumerate(ranks(4).run(_over_degrees, "dtype")):
        assert [error for error, _ in steps] == ["", "InputError" if number == 2 else "PeerError", ""]


def _stays_within_ranks() -> list[str]:
    """Rank 1 fails where nothing is sent: the others are not in need of it, and are told nothing later either."""
    case = Case(24, 6, 3, 4, pattern=pattern_of([8], [1]), causal=True)
    module = RingCase(case, "local", "contiguous").module()
    other = RingCase(CASE, "ring", "zigzag").module()
    errors = []
    for step in range(3):
        leaves = leaves_of(module, case)
        if step == 1 and dist.get_rank() == 1:
            leaves = _spoilt(leaves, "dtype")
        errors.append(told_of(lambda leaves=leaves: module(*leaves))[0])  # type: ignore[misc]
        errors.append(told_of(lambda: other(*leaves_of(other)))[0])
    return errors


def test_a_call_that_sends_nothing_fails_where_it_fails(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_stays_within_ranks)
    assert told[1] == ["", "", "InputError", "", "", ""]
    for each in (told[0], told[2]):  # one that has not come yet by then misses it as well
        assert each in ([""] * 6, ["", "", "PeerError", "", "", ""])


def _failures_one_after_the_other() -> list[Told]:
    """First of all ranks, which catch theirs; then of rank 1 alone, for another reason."""
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = leaves_of(module)
    module(*leaves)
    told = [told_of(lambda: module(*leaves, total_length=1000)) for _ in range(2)]
    if dist.get_rank() == 1:
        leaves = _spoilt(leaves, "dtype")
    told.append(told_of(lambda: module(*leaves)))
    assert_works()
    return told


def test_what_all_ranks_failed_of_is_no_reason_of_a_later_failure(ranks: Callable[[int], Pool]) -> None:
    for number, (first, second, third) in enumerate(ranks(3).run(_failures_one_after_the_other)):
        assert (first[0], second[0]) == ("InputError", "InputError")
        assert third[0] == ("InputError" if number == 1 else "PeerError")
        assert "k is torch.float32" in third[1]


# --- one rank does not begin a backward that the others are in ----------------------------------------------------


def _backward_steps(ring: RingCase, spoil: str) -> list[Told]:
    """Step 1 of 3 is spoilt on rank 1, between its forward and its backward."""
    module, case = ring.module(), ring.case
    wanted = exact(case, *case.inputs(), case.dout())
    told = []
    for step in range(3):
        spoilt = step == 1 and dist.get_rank() == 1
        leaves, dout = leaves_of(module, case), module.shard(case.dout())
        q, k, v = (x * 1 for x in leaves)
        out, lse = module(q, k, v, return_lse=True)
        if spoilt and spoil == "in place":
            with torch.no_grad():
                q.add_(1)

        def run(out: torch.Tensor = out, lse: torch.Tensor = lse, leaves: Any = leaves, dout: Any = dout) -> None:
            if spoilt and spoil == "lse":  # noqa: B023
                torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
            if spoilt and spoil == "lse alone":  # noqa: B023
                torch.autograd.grad(lse, leaves, torch.ones_like(lse))
            grads = torch.autograd.grad(out, leaves, dout, create_graph=spoilt and spoil == "twice")  # noqa: B023
            rows = (out, lse, *grads)
            whole = [module.unshard(x.detach(), dim=2 if x is lse else 1) for x in rows]
            assert_equal_to(whole, list(wanted))

        told.append(told_of(run))
    return told


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
    for number, steps in enumerate(ranks(2).run(_backward_steps, ring, spoil)):
        assert [error for error, _ in steps] == [
            "",
            "PeerError" if number == 0 else "RuntimeError" if spoil == "in place" else "RingAttentionError",
            "",
        ], steps
        assert BACKWARDS[spoil] in steps[1][1]


# --- one rank cannot build its module -----------------------------------------------------------------------------


def _wrongly_built(here: dict[str, Any]) -> Told:
    wrong = here if dist.get_rank() == 1 else {}
    told = told_of(
        lambda: RingAttention(**({"num_heads": 2, "head_dim": 4, "process_group": dist.group.WORLD} | wrong))
    )
    assert_works()
    return told


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"num_kv_heads": 3}, "num_heads is 2, not a multiple of num_kv_heads, 3"),
        ({"layout": "nope"}, "layout is 'nope'"),
        ({"segment_lengths": [4]}, "dilation_rates"),
        ({"prefer": "speed"}, "prefer is 'speed'"),
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
