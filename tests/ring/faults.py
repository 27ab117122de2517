"""What tests of faults over ranks share: a call that is told of, and whether the group still works."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from oracle import Case, assert_equal_to, exact
from ring_cases import RingCase, run_ring

from ringattn import RingAttention

TIMEOUT_S = 6.0
CASE = Case(24, 6, 3, 4, causal=True)
Told = tuple[str, str, float]  # (error, its message, seconds until it was raised)


def told_of(step: Callable[[], object]) -> Told:
    begin = time.monotonic()
    try:
        step()
    except Exception as error:  # noqa: BLE001  the test looks at it
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def leaves_of(module: RingAttention, case: Case = CASE) -> list[torch.Tensor]:
    return [module.shard(x.detach()).clone().requires_grad_() for x in case.inputs()]


def assert_works(schedule: str = "ring") -> None:
    ring = RingCase(CASE, schedule, "zigzag")
    q, k, v = CASE.inputs()
    assert_equal_to(run_ring(ring, ring.module(), q, k, v, CASE.dout()), exact(CASE, q, k, v, CASE.dout()))
