"""In float32 and bfloat16 the rule of accuracy (see ``oracle``) holds over ranks, and errors do not grow with them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from oracle import Case, exact, found, pattern_of
from pool import Pool
from ring_cases import RingCase, assert_keeps_the_rule, run_ring

DENSE_CASE = Case(96, 8, 4, 16, causal=True)
DILATED_CASE = Case(96, 4, 4, 16, pattern=pattern_of([12, 96, 96], [1, 2, 5]), causal=True)


def _keep_the_rule(rings: list[RingCase], dtype: torch.dtype, compute: str, kernel: str) -> None:
    """Every rank has the whole results; ranks take turns with comparing them."""
    for number, ring in enumerate(rings):
        q, k, v = ring.case.inputs(dtype)
        dout = ring.case.dout(dtype)
        results = run_ring(ring, ring.module(dtype, compute, (kernel, kernel)), q, k, v, dout)
        if number % dist.get_world_size() == dist.get_rank():
            wide = {"fp32": torch.float32, "bf16": torch.bfloat16}[compute]
            assert_keeps_the_rule(ring, results, (q, k, v, dout), wide, kernel)


@pytest.mark.parametrize(
    ("dtype", "compute", "kernel"),
    [
        (torch.float32, "fp32", "flash-cpu"),
        (torch.bfloat16, "bf16", "flash-cpu"),
        (torch.bfloat16, "bf16", "math"),
        (torch.bfloat16, "fp32", "flash-cpu"),
    ],
    ids=str,
)
def test_rule(dtype: torch.dtype, compute: str, kernel: str, ranks: Callable[[int], Pool]) -> None:
    rings = [
        RingCase(DENSE_CASE, "ring", "zigzag"),
        RingCase(DENSE_CASE, "all-gather", "zigzag", head_groups=2),
        RingCase(DENSE_CASE, "ulysses", "zigzag"),
        RingCase(DENSE_CASE, "ulysses-ring", "zigzag", ulysses=2),
        RingCase(DILATED_CASE, "ring", "contiguous"),
    ]
    ranks(4).run(_keep_the_rule, rings, dtype, compute, kernel)


def _gradient_errors(ring: RingCase, compute: str) -> dict[str, float]:
    """Errors of out, dk and dv against float64, relative, by rank 0, which has the whole results as every rank."""
    case = ring.case
    q, k, v = case.inputs(torch.bfloat16)
    dout = case.dout(torch.bfloat16)
    results = run_ring(ring, ring.module(torch.bfloat16, compute, ("flash-cpu", "flash-cpu")), q, k, v, dout)
    if dist.get_rank():
        return {}
    expected = exact(case, q, k, v, dout)
    return {
        name: ((getattr(results, name).double() - x64).norm() / x64.norm()).item()
        for name, x64 in zip(("out", "dk", "dv"), (expected.out, expected.dk, expected.dv), strict=True)
    }


def _one_rank_errors(case: Case, dtype: torch.dtype) -> dict[str, float]:
    q, k, v = case.inputs(torch.bfloat16)
    dout = case.dout(torch.bfloat16)
    module = case.module(backend="flash-cpu", dtype=dtype)
    results, expected = found(module, q, k, v, dout), exact(case, q, k, v, dout)
    return {
        name: ((getattr(results, name).double() - x64).norm() / x64.norm()).item()
        for name, x64 in zip(("out", "dk", "dv"), (expected.out, expected.dk, expected.dv), strict=True)
    }


@pytest.mark.parametrize(
    ("compute", "grad_wire"), [("bf16", ""), ("fp32", ""), ("fp32", "compute")], ids=["bf16", "rounded", "exact"]
)
@pytest.mark.parametrize("schedule", ["ring", "all-gather"])
def test_errors_do_not_grow_with_the_world(
    schedule: str, compute: str, grad_wire: str, ranks: Callable[[int], Pool]
) -> None:
    """Gradients of keys go home in one hop and are added in float32: each is rounded once, whatever the world.

    Independent roundings of parts add up to at most one of the sum, which is rounded itself: sqrt(2) of one rank's.
    """
    case = Case(192, 4, 4, 16, causal=True)
    alone = _one_rank_errors(case, {"bf16": torch.bfloat16, "fp32": torch.float32}[compute])
    limit = 1.01 if grad_wire else math.sqrt(2)
    for world in (2, 3, 4):
        ring = RingCase(case, schedule, "zigzag", grad_wire=grad_wire)
        (errors, *_) = ranks(world).run(_gradient_errors, ring, compute)
        for name, error in errors.items():
            assert error <= limit * alone[name], f"{world} ranks, {name}: {error:.3e}, one rank {alone[name]:.3e}"


def test_errors_do_not_grow_with_the_branches(ranks: Callable[[int], Pool]) -> None:
    """What chunks that no program joins gave is added and merged in float32, and rounded once."""
    case = Case(192, 4, 4, 16, pattern=pattern_of([128] * 8, [1] * 8), causal=True)
    alone = _one_rank_errors(case, torch.bfloat16)
    (errors, *_) = ranks(2).run(_gradient_errors, RingCase(case, "ring", "contiguous"), "bf16")
    for name, error in errors.items():
        assert error <= 1.07 * alone[name], f"{name}: {error:.3e}, one rank {alone[name]:.3e}"
