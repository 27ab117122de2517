"""A kernel that is wrong on some ranks alone: one plan on all, or an error on all; never a hang, never two plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import Told, assert_works, group_to_break, told_of
from oracle import Case, assert_equal_to, cpu, exact
from pool import Pool
from ring_cases import RingCase, run_ring
from wrong_kernels import with_wrong_dq

from ringattn import RingAttention
from ringattn.kernels.registry import KERNELS
from ringattn.workload import describe

CASE = Case(24, 2, 2, 4, causal=True)


@contextmanager
def _wrong_on(ranks: tuple[int, ...], home: str) -> Iterator[None]:
    """flash-cpu has a wrong dq on these ranks, and every rank remembers for itself."""
    before, right = os.environ.get("XDG_CONFIG_HOME"), KERNELS["flash-cpu"]
    os.environ["XDG_CONFIG_HOME"] = str(Path(home) / str(dist.get_rank()))
    if dist.get_rank() in ranks:
        KERNELS["flash-cpu"] = with_wrong_dq()  # type: ignore[index]
    try:
        yield
    finally:
        KERNELS["flash-cpu"] = right  # type: ignore[index]
        os.environ.pop("XDG_CONFIG_HOME")
        if before is not None:
            os.environ["XDG_CONFIG_HOME"] = before


def _module(**arguments: Any) -> RingAttention:
    given = {"causal": True, "profile": None, "device": "cpu", "process_group": dist.group.WORLD}
    return RingAttention(2, 4, **(given | arguments))


def _train(module: RingAttention) -> None:
    """A training step, held against float64."""
    q, k, v = (x.detach().float() for x in CASE.inputs())
    dout = CASE.dout(torch.float32)
    results = run_ring(RingCase(CASE, "", module.layout), module, q, k, v, dout)
    assert_equal_to(results, exact(CASE, q, k, v, dout), tolerance=1e-5)


def _plan(module: RingAttention) -> str:
    return describe(module.plan_for(CASE.length // 2, torch.float32, True).tunables)


def _first_call_and_the_next_module(ranks: tuple[int, ...], home: str) -> tuple[Told, str]:
    with _wrong_on(ranks, home):
        module = _module()
        told = told_of(lambda: _train(module))
        again = _module()
        _train(again)
        plan = _plan(again)
    assert_works()
    return told, plan


@pytest.mark.parametrize("wrong", [0, 1])
def test_wrong_on_one_rank(wrong: int, ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    answers = ranks(2).run(_first_call_and_the_next_module, (wrong,), str(tmp_path))
    for (error, message), _ in answers:
        assert error == "InputError"
        assert f"rank {wrong} calls with" in message
        assert "by the plan flash-cpu/math fp32" in message
        assert "by the plan flash-cpu fp32" in message or "by the plan flash-cpu/flash-cpu fp32" in message
        assert message.endswith(
            "a kernel failed its accuracy check on some ranks alone; name a backend that is right on all"
        )
    plans = {plan for _, plan in answers}  # the next module knows, and all ranks of it obey what is right on all
    assert len(plans) == 1
    assert "flash-cpu/math" in plans.pop()


def test_wrong_on_all_ranks(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    for (error, message), plan in ranks(2).run(_first_call_and_the_next_module, (0, 1), str(tmp_path)):
        assert (error, message) == ("", "")
        assert "flash-cpu/math" in plan


def _forced(home: str) -> Told:
    with _wrong_on((1,), home), group_to_break() as group:
        module = _module(backend="flash-cpu", process_group=group)
        told = told_of(lambda: _train(module))
    assert_works()
    return told


def test_a_forced_backend_that_is_wrong_on_one_rank(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    other, own = ranks(2).run(_forced, str(tmp_path))
    assert own[0] == "PlanError"
    assert "is wrong on this machine: dq errs by 4.0e-01" in own[1]
    assert other[0] == "PeerError"
    assert other[1].startswith("rank 1 failed: PlanError: ")


def _same_faults_and_other_figures(home: str) -> tuple[str, list[str]]:
    """Both ranks know from earlier that the kernel is wrong; by how much differs."""
    with _wrong_on((0, 1), home):
        KERNELS["flash-cpu"] = with_wrong_dq(1.4 + dist.get_rank())  # type: ignore[index]
        _train(_module())
        again = _module()
        return _plan(again), [line for line in again.explain().split("\n") if "different plans" in line]


def test_how_wrong_a_kernel_is_need_not_be_equal(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    (one, trace), (other, _) = ranks(2).run(_same_faults_and_other_figures, str(tmp_path))
    assert one == other
    assert trace == []
    assert cpu().faults == ()
