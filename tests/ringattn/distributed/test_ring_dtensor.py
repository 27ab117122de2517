"""DTensors are refused by one line that names the remedy, before any message: over ranks, alone, compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from faults import CASE, Told, assert_each_told, assert_told, assert_works, group_to_break, leaves_of, told_of
from pool import Pool
from ring_cases import RingCase
from torch import Tensor

RING = RingCase(CASE, "ring", "zigzag")


def _distributed(x: Tensor, *, split: bool) -> Tensor:
    """A DTensor of which every rank holds ``x``: its rows, or all there is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(x, mesh, [Shard(1) if split else Replicate()])


def _told_over_ranks(given: tuple[int, ...], rank: int | None, before: bool, split: bool) -> tuple[Told, Told]:
    """What a call says in which the inputs numbered ``given`` are DTensors on a rank, or all; before, with to_local."""
    with group_to_break() as group:
        module = RING.module(group=group)
        leaves = leaves_of(module)
        distributed = [_distributed(x, split=split) if n in given else x for n, x in enumerate(leaves)]
        local, back = [x.to_local() if hasattr(x, "to_local") else x for x in distributed], ("", "")  # type: ignore[operator]
        if before:  # the runner of these shapes is known
            back = told_of(lambda: module(*local))
        here = rank is None or rank == dist.get_rank()
        told = told_of(lambda: module(*(distributed if here else leaves)))
    assert_works()
    return told, back


@pytest.mark.parametrize("split", [True, False], ids=["split", "replicated"])
@pytest.mark.parametrize("before", [False, True], ids=["new", "known"])
@pytest.mark.parametrize(("given", "name"), [((0, 1, 2), "q"), ((1, 2), "k"), ((2,), "v")])
def test_inputs_on_all_ranks(
    given: tuple[int, ...], name: str, before: bool, split: bool, ranks: Callable[[int], Pool]
) -> None:
    """One process was aborted by gloo, or every rank told of the sharding strategy of an operator."""
    answers = ranks(2).run(_told_over_ranks, given, None, before, split)
    text = f"{name} is a DTensor; pass the local tensor, {name}.to_local()"
    assert_each_told([told for told, _ in answers], "InputError", text)
    assert [back for _, back in answers] == [("", "")] * 2


@pytest.mark.parametrize("before", [False, True], ids=["new", "known"])
def test_inputs_on_one_rank(before: bool, ranks: Callable[[int], Pool]) -> None:
    """The other hears of it; neither waits for messages."""
    told = [told for told, _ in ranks(2).run(_told_over_ranks, (0, 1, 2), 1, before, False)]
    assert_told(told, "InputError", "q is a DTensor; pass the local tensor, q.to_local()")


def _told_elsewhere(rank: int | None, what: str) -> Told:
    """Of a gradient on this rank or all, of rows to unshard or to shard."""
    here = rank is None or rank == dist.get_rank()
    with group_to_break() as group:
        module = RING.module(group=group)
        leaves = leaves_of(module)
        out = module(*leaves)
        dout, rows = torch.ones_like(out), _distributed(leaves[0], split=True)
        given = _distributed(dout, split=False)
        if what == "gradient":
            told = told_of(lambda: torch.autograd.grad(out, leaves, given if here else dout))
        elif what == "unshard":
            told = told_of(lambda: module.unshard(rows if here else leaves[0]))
        else:
            told = told_of(lambda: module.shard(rows))
    assert_works()
    return told


@pytest.mark.parametrize("what", ["gradient", "unshard", "shard"])
def test_gradients_and_rows(what: str, ranks: Callable[[int], Pool]) -> None:
    name = "dout" if what == "gradient" else "x"
    text = f"{name} is a DTensor; pass the local tensor, {name}.to_local()"
    assert_each_told(ranks(2).run(_told_elsewhere, None, what), "InputError", text)
    if what != "shard":
        assert_told(ranks(2).run(_told_elsewhere, 1, what), "InputError", text)


def _told_alone() -> list[Told]:
    """Without a group: new, known to the runners as plain tensors, one of three, compiled, and a gradient."""
    module = CASE.module()
    inputs = [x.detach().requires_grad_() for x in CASE.inputs()]
    distributed = [_distributed(x, split=False) for x in inputs]
    told = [told_of(lambda: module(*distributed))]
    out = module(*inputs)
    told.append(told_of(lambda: module(*distributed)))
    told.append(told_of(lambda: module(inputs[0], distributed[1], inputs[2])))
    told.append(told_of(lambda: torch.compile(module, backend="eager")(*distributed)))
    dout = _distributed(torch.ones_like(out), split=False)
    told.append(told_of(lambda: torch.autograd.grad(out, inputs, dout)))
    return told


def test_without_a_group(ranks: Callable[[int], Pool]) -> None:
    for told in ranks(2).run(_told_alone):
        for (error, message), name in zip(told, ("q", "q", "k", "q", "dout"), strict=True):
            assert (error, message) == ("InputError", f"{name} is a DTensor; pass the local tensor, {name}.to_local()")


def _parameters() -> None:
    """Other tensors than plain ones are what they hold."""
    module = RING.module()
    leaves = leaves_of(module)
    assert torch.equal(module(*(torch.nn.Parameter(x) for x in leaves)), module(*leaves))


def test_parameters_are_tensors(ranks: Callable[[int], Pool]) -> None:
    ranks(2).run(_parameters)
