"""Attention maps over ranks against the softmax built whole in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from map_oracle import mask_of, received_of, softmax_of
from oracle import Case, pattern_of
from pool import Pool
from random_cases import trials
from ring_cases import RingCase
from torch import Tensor

from ringattn.errors import RingAttentionError

CAUSAL = Case(24, 4, 2, 4, causal=True)


def _check(ring: RingCase, dtype: torch.dtype, compute: str, kernel: str, mask: str, reduce: Any) -> None:
    case, total = ring.case, ring.case.length if ring.ragged else None
    module = ring.module(dtype, compute, (kernel, kernel))
    q, k, v = case.inputs(dtype)
    p, queries = softmax_of(case, q, k), mask_of(case, mask)
    local = [module.shard(x.detach()) for x in (q, k, v)]
    own = None if queries is None else module.shard(queries, -1)
    expected = module.shard(received_of(p, queries, reduce), 2)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-6}[dtype]
    _, lse = module(*local, return_lse=True, total_length=total)
    for given in (None, lse.detach()):
        found = module.received(*local, reduce, own, given, total_length=total)
        assert found.dtype is expected.dtype or dtype is not torch.float64
        assert bool(((found - expected).abs() <= tolerance * (1 + expected)).all()), (ring, given is None)
    positions = [0, case.length // 2, case.length - 1]
    rows = module.rows(*local, positions, total_length=total)
    assert rows.shape == (case.batch, case.heads, 3, local[1].shape[1])
    assert (rows - module.shard(p[:, :, positions], 3)).abs().max() <= (1e-12 if dtype is torch.float64 else 1e-5)
    whole = module.unshard(rows, total, dim=3)
    assert (whole - p[:, :, positions]).abs().max() <= (1e-12 if dtype is torch.float64 else 1e-5)


def _check_trials(world: int, count: int) -> int:
    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
    for number, trial in enumerate(trials(world, count)):
        mask, reduce = ("all", "some", "each", "none")[number % 4], ("sum", "mean")[number // 4 % 2]
        _check(trial.ring, dtypes[trial.dtype], trial.compute, trial.kernel, mask, reduce)
    return count


@pytest.mark.parametrize(("world", "count"), [(2, 24), (3, 8), (4, 12)])
def test_random_cases(world: int, count: int, ranks: Callable[[int], Pool]) -> None:
    assert ranks(world).run(_check_trials, world, count) == [count] * world


def _more_heads_than_columns() -> None:
    case = Case(24, 10, 2, 2, 2, pattern_of([6, 24], [1, 2]), causal=True)
    _check(RingCase(case, "ring", "contiguous"), torch.float64, "fp64", "math", "each", "mean")


def test_more_heads_in_a_group_than_columns(ranks: Callable[[int], Pool]) -> None:
    ranks(2).run(_more_heads_than_columns)


def _between_steps() -> None:
    """A map between a forward and its backward changes neither."""
    ring = RingCase(CAUSAL, "ring", "zigzag")
    module = ring.module()
    local = [module.shard(x.detach()).requires_grad_() for x in CAUSAL.inputs()]
    dout = module.shard(CAUSAL.dout())
    expected = torch.autograd.grad(module(*local), local, dout)
    out = module(*local)
    module.received(*local)
    module.rows(*local, [3])
    for one, other in zip(torch.autograd.grad(out, local, dout), expected, strict=True):
        assert torch.equal(one, other)


def test_between_a_forward_and_its_backward(ranks: Callable[[int], Pool]) -> None:
    ranks(2).run(_between_steps)


def _raised(call: Callable[[Any, list[Tensor]], object]) -> str:
    module = RingCase(CAUSAL, "ring", "zigzag").module()
    local = [module.shard(x.detach()) for x in CAUSAL.inputs()]
    with pytest.raises(RingAttentionError) as caught:
        call(module, local)
    return f"{type(caught.value).__name__}: {caught.value}"


def _other_rows(module: Any, local: list[Tensor]) -> None:
    module.rows(*local, [3 + dist.get_rank()])


def _map_and_forward(module: Any, local: list[Tensor]) -> None:
    if dist.get_rank():
        module(*local)
    else:
        module.received(*local)


def _one_refuses(module: Any, local: list[Tensor]) -> None:
    module.received(*local, reduce="max" if dist.get_rank() else "sum")


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (_other_rows, ("rows [3] of the softmax", "rows [4] of the softmax")),
        (_map_and_forward, ("sum of what keys received from all queries",)),
        (_one_refuses, ("reduce is 'max'",)),
    ],
)
def test_ranks_that_ask_for_different_things(call: Any, parts: tuple[str, ...]) -> None:
    pool = Pool(2)
    try:
        messages = pool.run(_raised, call)
    finally:
        pool.kill()
    for message in messages:
        for part in parts:
            assert part in message, messages
