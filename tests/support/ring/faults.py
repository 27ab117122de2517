"""Shared parts of tests of faults over ranks: groups to break, a kernel that breaks, errors that all ranks raise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from oracle import Case, assert_equal_to, exact
from patience import patient
from pool import TIMES
from ring_cases import RingCase, run_ring

from ringattn import RingAttention
from ringattn.distributed.watchdog import watchdog_of
from ringattn.kernels.contract import BoundKernel
from ringattn.kernels.registry import KERNELS

TIMEOUT_S = patient(3.0)  # of the group of ranks that are to be lost; some tests wait for it
CASE = Case(24, 6, 3, 4, causal=True)
Told = tuple[str, str]  # (error, its message)


def told_of(step: Callable[[], object]) -> Told:
    try:
        step()
    except Exception as error:  # noqa: BLE001  the test looks at it
        return type(error).__name__, str(error)
    return "", ""


def leaves_of(module: RingAttention, case: Case = CASE) -> list[torch.Tensor]:
    return [module.shard(x.detach()).clone().requires_grad_() for x in case.inputs()]


@contextmanager
def group_to_break(ranks: list[int] | None = None) -> Iterator[Any]:
    """A group of its own for a test that aborts it: the ranks of the pool serve other tests after it."""
    group: Any = dist.new_group(ranks)
    watchdog_of(group, torch.device("cpu"), TIMES)
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


def assert_works(group: Any = None) -> None:
    """The group, or all ranks where it is None, gives right results."""
    ring = RingCase(CASE, "ring", "zigzag")
    q, k, v = CASE.inputs()
    assert_equal_to(run_ring(ring, ring.module(group=group), q, k, v, CASE.dout()), exact(CASE, q, k, v, CASE.dout()))


def assert_aborted(module: RingAttention, case: Case = CASE) -> None:
    """Calls, messages of rows and new modules raise at once, for one reason."""
    assert module._ring is not None
    group, rows = module._ring.comm.group, leaves_of(module, case)
    told = {
        told_of(lambda: module(*rows)),
        told_of(lambda: module.unshard(rows[0])),
        told_of(lambda: RingAttention(2, 4, process_group=group)),
    }
    ((error, message),) = told
    assert error == "PeerError", message
    assert re.fullmatch(r"rank \d .*; the process group is aborted, build a new one", message)


class Breaking:
    """The math kernel, raising at one of its calls."""

    def __init__(self, at: int, error: Exception) -> None:
        self.at, self.error, self.calls = at, error, 0
        self.original = KERNELS["math"].load

    def load(self, config: object) -> BoundKernel:
        kernel = self.original(config)  # type: ignore[arg-type]

        def breaking(step: Callable[..., object]) -> Callable[..., object]:
            def run(*args: object, **kwargs: object) -> object:
                self.calls += 1
                if self.calls == self.at:
                    raise self.error
                return step(*args, **kwargs)

            return run

        return BoundKernel(breaking(kernel.forward), breaking(kernel.backward))  # type: ignore[arg-type]


def assert_told(told: list[Told], error: str, message: str) -> None:
    """Rank 1 raises its own error, the others that of rank 1."""
    aborted = f"rank 1 failed: {error}: {message}; the process group is aborted, build a new one"
    for rank, each in enumerate(told):
        assert each == ((error, message) if rank == 1 else ("PeerError", aborted))


def assert_each_told(told: list[Told], error: str, message: str) -> None:
    """The first rank raises its own error, the others theirs or that of the first."""
    assert any(each[0] == error for each in told)
    for found, text in told:
        assert found in (error, "PeerError")
        assert message in text


def call_until_told(step: Callable[[], object]) -> Told:
    """What the first call raises that raises: a failure after its last message is told in the next one."""
    for _ in range(2):
        told = told_of(step)
        if told[0]:
            return told
    return "", ""
