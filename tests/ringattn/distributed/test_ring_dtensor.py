"""DTensors are refused by one line that names the remedy, before any message: over ranks, alone, compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from faults import CASE, Told, assert_works, leaves_of, told_of
from oracle import exact
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
    """What a call says in which the inputs numbered ``given`` are DTensors on a rank, or all; then with to_local."""
    module = RING.module()
    leaves = leaves_of(module)
    if before:
        module(*leaves)  # the runner of these shapes is known
    here = rank is None or rank == dist.get_rank()
    distributed = [_distributed(x, split=split) if n in given else x for n, x in enumerate(leaves)]
    told = told_of(lambda: module(*(distributed if here else leaves)))
    assert_works()
    back = told_of(lambda: module(*(x.to_local() if hasattr(x, "to_local") else x for x in distributed)))  # type: ignore[operator]
    return told, back


@pytest.mark.parametrize("split", [True, False], ids=["split", "replicated"])
@pytest.mark.parametrize("before", [False, True], ids=["new", "known"])
@pytest.mark.parametrize(("given", "name"), [((0, 1, 2), "q"), ((1, 2), "k"), ((2,), "v")])
def test_inputs_on_all_ranks(
    given: tuple[int, ...], name: str, before: bool, split: bool, ranks: Callable[[int], Pool]
) -> None:
    """One process was aborted by gloo, or every rank told of the sharding strategy of an operator."""
    for told, back in ranks(2).run(_told_over_ranks, given, None, before, split):
        assert told[:2] == ("InputError", f"{name} is a DTensor; pass the local tensor, {name}.to_local()")
        assert back[:2] == ("", "")


@pytest.mark.parametrize("before", [False, True], ids=["new", "known"])
def test_inputs_on_one_rank(before: bool, ranks: Callable[[int], Pool]) -> None:
    """The other hears of it; neither waits for messages."""
    (other, _), (own, _) = ranks(2).run(_told_over_ranks, (0, 1, 2), 1, before, False)
    assert own[:2] == ("InputError", "q is a DTensor; pass the local tensor, q.to_local()")
    assert other[:2] == ("PeerError", f"rank 1 failed: InputError: {own[1]}")


def _told_elsewhere(rank: int | None) -> list[Told]:
    """Of gradients on this rank or all, of rows to unshard and to shard."""
    module = RING.module()
    leaves = leaves_of(module)
    out = module(*leaves)
    dout = torch.ones_like(out)
    here = rank is None or rank == dist.get_rank()
    given = _distributed(dout, split=False)
    told = [told_of(lambda: torch.autograd.grad(out, leaves, given if here else dout, retain_graph=True))]
    assert_works()
    rows = _distributed(leaves[0], split=True)
    told.append(told_of(lambda: module.unshard(rows if here else leaves[0])))
    assert_works()
    told.append(told_of(lambda: module.shard(rows)))
    grads = torch.autograd.grad(out, leaves, dout)
    whole = exact(CASE, *CASE.inputs(), torch.ones(CASE.dout().shape))
    for grad, expected in zip(grads, whole[2:], strict=True):
        assert (grad - module.shard(expected)).abs().max() < 1e-10
    return told


def test_gradients_and_rows(ranks: Callable[[int], Pool]) -> None:
    names = ("dout", "x", "x")
    for told in ranks(2).run(_told_elsewhere, None):
        for (error, message), name in zip(told, names, strict=True):
            assert (error, message) == ("InputError", f"{name} is a DTensor; pass the local tensor, {name}.to_local()")
    other, own = ranks(2).run(_told_elsewhere, 1)
    for number, name in ((0, "dout"), (1, "x")):
        assert own[number][:2] == ("InputError", f"{name} is a DTensor; pass the local tensor, {name}.to_local()")
        assert other[number][:2] == ("PeerError", f"rank 1 failed: InputError: {own[number][1]}")


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
