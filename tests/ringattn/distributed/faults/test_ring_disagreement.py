"""Ranks that call differently, in another order, or with shards that do not go together are told so at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import CASE, Told, assert_aborted, assert_each_told, assert_works, group_to_break, leaves_of, told_of
from oracle import exact
from pool import Pool
from ring_cases import RingCase

from ringattn import RingAttention

# --- ranks disagree about a call ----------------------------------------------------------------------------------


def _other_length_at_once() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = leaves_of(module)
    if dist.get_rank() == 1:
        leaves = [x[:, :6] for x in leaves]
    told = told_of(lambda: module(*leaves))
    assert_works()
    return told


def test_another_length_on_one_rank(ranks: Callable[[int], Pool]) -> None:
    for error, message in ranks(3).run(_other_length_at_once):
        assert error == "InputError"
        assert "rank 0 calls with batch 1, 8 positions of 24 in all" in message
        assert "rank 1 calls with batch 1, 6 positions of 18 in all" in message


def _bad_input_on_one_rank() -> Told:
    """In its first call, which ranks compare."""
    with group_to_break() as group:
        module = RingCase(CASE, "ring", "zigzag").module(group=group)
        leaves = leaves_of(module)
        if dist.get_rank() == 1:
            leaves[1] = leaves[1].float()
        told = told_of(lambda: module(*leaves))
        assert_aborted(module)
    assert_works()
    return told


def _sinks_of_one_rank_alone() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves, sinks = leaves_of(module), torch.zeros(CASE.heads, dtype=torch.float64)
    told = told_of(lambda: module(*leaves, sinks=sinks if dist.get_rank() == 1 else None))
    assert_works()
    return told


def test_sinks_on_one_rank_alone(ranks: Callable[[int], Pool]) -> None:
    told = set(ranks(2).run(_sinks_of_one_rank_alone))
    assert len(told) == 1
    error, message = told.pop()
    assert error == "InputError"
    assert "with gradients, by the plan" in message
    assert "with gradients, with sinks, by the plan" in message


def _bad_sinks_on_one_rank() -> Told:
    with group_to_break() as group:
        module = RingCase(CASE, "ring", "zigzag").module(group=group)
        sinks = torch.zeros(CASE.heads + (dist.get_rank() == 1), dtype=torch.float64)
        told = told_of(lambda: module(*leaves_of(module), sinks=sinks))
        assert_aborted(module)
    assert_works()
    return told


def test_bad_sinks_on_one_rank(ranks: Callable[[int], Pool]) -> None:
    told = ranks(2).run(_bad_sinks_on_one_rank)
    assert told[1] == (
        "InputError",
        "sinks is torch.float64 of shape (7,); it must be floating, one for each head, (6,)",
    )
    assert told[0][0] == "PeerError"
    assert told[0][1].startswith("rank 1 failed: InputError: sinks is torch.float64 of shape (7,)")


def test_a_bad_input_on_one_rank(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_bad_input_on_one_rank)
    assert told[1][0] == "InputError"
    for rank in (0, 2):
        assert told[rank][0] == "PeerError"
        assert told[rank][1].startswith("rank 1 failed: InputError: k is torch.float32")


def _gradients_on_one_rank() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = leaves_of(module)
    if dist.get_rank() == 1:
        leaves = [x.detach() for x in leaves]
    told = told_of(lambda: module(*leaves))
    assert_works()
    return told


def test_gradients_wanted_on_some_ranks_alone(ranks: Callable[[int], Pool]) -> None:
    for error, message in ranks(3).run(_gradients_on_one_rank):
        assert error == "InputError"
        assert "without gradients" in message


def _otherwise_on_one_rank(change: str) -> Told:
    """A call that goes through and is to differ from the next one on rank 1 alone, which all ranks compare."""
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = leaves_of(module)
    module(*leaves)
    module(*(x[:, :2] for x in leaves))
    here = dist.get_rank() == 1
    if here and change == "dtype":
        leaves = [x.detach().float().requires_grad_() for x in leaves]
    if here and change == "gradients":
        leaves = [x.detach() for x in leaves]
    if here and change == "batch":
        leaves = [torch.cat((x, x)) for x in leaves]
    told = told_of(lambda: module(*leaves))
    assert_works()
    return told


@pytest.mark.parametrize(
    ("change", "told"), [("dtype", "float32"), ("gradients", "without gradients"), ("batch", "batch 2")]
)
def test_what_differs_on_one_rank(change: str, told: str, ranks: Callable[[int], Pool]) -> None:
    for error, message in ranks(3).run(_otherwise_on_one_rank, change):
        assert error == "InputError"
        _, first, other = message.split(" calls with ")
        assert told in other
        assert told not in first


def _comparisons() -> tuple[list[int], list[int]]:
    """How often ranks have compared, after every call, and the calls of which the store still knows."""
    module = RingAttention(6, 4, causal=True, profile=None, device="cpu", process_group=dist.group.WORLD)
    assert module._ring is not None
    watchdog, counts, calls = module._ring.watchdog, list[int](), 0
    compare = watchdog.compare

    def counting(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        compare(*arguments)

    x = torch.randn(1, 8, 6, 4)
    more = x.clone().requires_grad_()
    watchdog.compare = counting  # type: ignore[method-assign]
    try:
        for given, total in ((x, None), (x, None), (x.double(), None), (more, None), (more, 24), (more[:, :7], None)):
            module(given, given, given, total_length=total)
            counts.append(calls)
        with torch.autocast("cpu", torch.bfloat16):
            module(more[:, :7], more[:, :7], more[:, :7])
        counts.append(calls)
    finally:
        del watchdog.compare
    kept = [watchdog._call_key(module._ring.module, call, watchdog.rank) for call in range(9)]
    return counts, [call for call, key in enumerate(kept) if watchdog._store.check([key])]


def test_ranks_compare_whenever_a_call_differs_from_the_last(ranks: Callable[[int], Pool]) -> None:
    """In its dtype, whether it trains, its total length, its shape, or autocast."""
    assert ranks(3).run(_comparisons) == [([1, 1, 2, 3, 4, 5, 6], [7])] * 3


def _autocast_on_one_rank() -> Told:
    module = RingAttention(6, 4, causal=True, profile=None, device="cpu", process_group=dist.group.WORLD)
    q = torch.randn(1, 8, 6, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() == 1):
        told = told_of(lambda: module(q, q, q))
    assert_works()
    return told


def test_autocast_on_one_rank(ranks: Callable[[int], Pool]) -> None:
    """Rows half as wide as the others waited for ended a process."""
    for error, message in ranks(3).run(_autocast_on_one_rank):
        assert error == "InputError"
        assert "in all, float32 under autocast to bfloat16, without gradients" in message


# --- ranks are in different calls ---------------------------------------------------------------------------------


def _in_another_order(backward: bool) -> tuple[Told, Told]:
    """Two modules of one shape, called, or gone back through, in another order on rank 1."""
    ring = RingCase(CASE, "ring", "zigzag")
    modules = [ring.module(), ring.module()]
    inputs = [leaves_of(module) for module in modules]
    outs = [module(*leaves) for module, leaves in zip(modules, inputs, strict=True)]
    first, second = (1, 0) if dist.get_rank() == 1 else (0, 1)

    def go(number: int) -> Told:
        if backward:
            return told_of(lambda: outs[number].sum().backward())
        return told_of(lambda: modules[number](*inputs[number]))

    told = go(first), go(second)
    assert_works()
    return told


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_modules_in_another_order_on_one_rank(backward: bool, ranks: Callable[[int], Pool]) -> None:
    """Each would take the other's rows: results were wrong by 1 and more."""
    name = "backward" if backward else "forward"
    for told in ranks(2).run(_in_another_order, backward):
        for error, message in told:
            assert error == "InputError"
            place = rf"rank \d was in the {name} of call \d of the module"
            assert re.search(f"{place} .* in the same order on every rank", message)


def _back_in_another_order(ring: RingCase, lengths: tuple[int, int]) -> tuple[Told, Told]:
    """Two calls of one module with inputs of their own, gone back through in another order on the last rank."""
    module = ring.module()
    outs = [module(*leaves_of(module, replace(ring.case, length=n, seed=seed))) for seed, n in enumerate(lengths)]
    last = dist.get_rank() == dist.get_world_size() - 1
    told = [told_of(lambda out=out: out.square().sum().backward()) for out in (outs[::-1] if last else outs)]  # type: ignore[misc]
    assert_works()
    return told[0], told[1]


@pytest.mark.parametrize("lengths", [(24, 24), (24, 48)], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    ("schedule", "checkpoint"),
    [("ring", "selective"), ("ring", "full"), ("all-gather", "selective"), ("ulysses", "none"), ("ulysses", "full")],
)
def test_calls_of_one_module_in_another_order_backwards(
    schedule: str, checkpoint: str, lengths: tuple[int, int], ranks: Callable[[int], Pool]
) -> None:
    """Gradients of equal lengths were wrong by 4.8; rows of unequal ones ended a process."""
    ring = RingCase(CASE, schedule, "zigzag", checkpoint=checkpoint)
    # "full" runs the forward again before anything else, where its profile's plan serves: for 24 positions.
    direction = "backward" if checkpoint != "full" else "forward" if lengths == (24, 24) else "(forward|backward)"
    for told in ranks(3).run(_back_in_another_order, ring, lengths):
        for error, message in told:
            assert error == "InputError"
            place = rf"rank \d was in the {direction} of call [12] of the module"
            assert re.search(f"{place} .* and {place} .* in the same order on every rank", message)


def _back_once_and_twice() -> None:
    """What ranks may do: go back in another order than forwards, again, and not at all through some calls."""
    ring = RingCase(CASE, "ring", "zigzag")
    module, leaves = ring.module(), []
    outs = []
    for number in range(3):
        leaves.append([x.detach().mul(1 + number).requires_grad_() for x in leaves_of(module)])
        outs.append(module(*leaves[-1]))
    dout = module.shard(CASE.dout()).contiguous()
    for number in (2, 0, 0):
        q, k, v = (x.detach() * (1 + number) for x in CASE.inputs())
        expected = exact(CASE, q, k, v, CASE.dout())
        grads = torch.autograd.grad(outs[number], leaves[number], dout, retain_graph=True)
        for grad, whole in zip(grads, expected[2:], strict=True):
            assert (grad - module.shard(whole)).abs().max() < 1e-10


def test_any_order_that_is_the_same_on_all_ranks(ranks: Callable[[int], Pool]) -> None:
    ranks(3).run(_back_once_and_twice)


# --- shards that are wrong ----------------------------------------------------------------------------------------


def _total_on_one_rank() -> Told:
    """Shards that are right for one total are not for another."""
    with group_to_break() as group:
        module = RingCase(CASE, "ring", "contiguous").module(group=group)
        rows = torch.zeros(1, 5 - dist.get_rank(), 2, 4)
        told = told_of(lambda: module.unshard(rows, (9, 11)[dist.get_rank()]))
        assert_aborted(module)
    assert_works()
    return told


def test_a_shard_that_is_wrong_on_one_rank_is_told_to_those_who_unshard(ranks: Callable[[int], Pool]) -> None:
    told = ranks(2).run(_total_on_one_rank)
    assert told[1][0] == "InputError"
    assert told[0][0] == "PeerError"
    assert told[0][1].startswith("rank 1 failed: InputError: the sequence has 4 positions here; of total_length 11")


@pytest.mark.parametrize("total_length", [True, 24.0, "24", 0])
def test_a_total_length_that_is_no_length(total_length: object, ranks: Callable[[int], Pool]) -> None:
    assert_each_told(
        ranks(2).run(_told_of_a_total, total_length),
        "FieldError",
        f"total_length is {total_length!r}; it must be an integer >= 1",
    )


def _told_of_a_total(total_length: object) -> Told:
    with group_to_break() as group:
        module = RingCase(CASE, "ring", "zigzag").module(group=group)
        return told_of(lambda: module(*leaves_of(module), total_length=total_length))


def _wrong_shard() -> Told:
    with group_to_break() as group:
        module = RingCase(CASE, "ring", "zigzag").module(group=group)
        return told_of(lambda: module(*(x.detach() for x in leaves_of(module)), total_length=23))


def _unshard_uneven(total_length: int | None, dim: int) -> Told:
    module = RingCase(CASE, "ring", "contiguous").module()
    rows = torch.full((1, 5 - dist.get_rank(), 2, 4), float(dist.get_rank()))
    found: list[torch.Tensor] = []
    told = told_of(lambda: found.append(module.unshard(rows, total_length, dim)))
    dist.barrier()
    if found:
        assert found[0][0, :, 0, 0].tolist() == [0.0] * 5 + [1.0] * 4
    assert_works()
    return told


def test_uneven_shards_are_not_unsharded_without_their_total(ranks: Callable[[int], Pool]) -> None:
    """gloo ended the process of one rank, and gave the other rows of nobody."""
    told = ranks(2).run(_unshard_uneven, None, 1)
    assert [error for error, _ in told] == ["InputError"] * 2
    assert all("unshards 10 positions in all" in text and "unshards 8 positions" in text for _, text in told)
    assert [error for error, _ in ranks(2).run(_unshard_uneven, 9, 1)] == [""] * 2
    assert [error for error, _ in ranks(2).run(_unshard_uneven, 9, -3)] == [""] * 2


def test_a_length_that_is_not_the_shard_of_the_total(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_wrong_shard)
    wrong = [each for each in told if each[0] == "InputError"]
    assert wrong
    for _, message in wrong:
        assert "of total_length 23 rank" in message


@pytest.mark.parametrize("asked", ["export", "func"])
def test_what_cannot_run_over_ranks_is_refused_before_a_message(asked: str, ranks: Callable[[int], Pool]) -> None:
    message = "torch.export and torch.func take no RingAttention over several ranks"
    assert_each_told(ranks(2).run(_told_of_what_maps, asked), "InputError", message)


def _told_of_what_maps(asked: str) -> Told:
    with group_to_break() as group:
        module = RingAttention(6, 4, causal=True, profile=None, device="cpu", process_group=group)
        q, k, v = (x.detach() for x in leaves_of(module))
        if asked == "export":
            return told_of(lambda: torch.export.export(module, (q, k, v)))
        return told_of(lambda: torch.func.grad(lambda q: module(q, k, v).sum())(q))
