"""What tests of faults over ranks share: a kernel that breaks, what a rank is told, whether the group still works."""

from __future__ import annotations

from collections.abc import Callable

import torch
from oracle import Case, assert_equal_to, exact
from ring_cases import RingCase, run_ring

from ringattn import RingAttention
from ringattn.kernels.contract import BoundKernel
from ringattn.kernels.registry import KERNELS

TIMEOUT_S = 3.0  # of the group of ranks that are to be lost
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


def assert_works(schedule: str = "ring") -> None:
    ring = RingCase(CASE, schedule, "zigzag")
    q, k, v = CASE.inputs()
    assert_equal_to(run_ring(ring, ring.module(), q, k, v, CASE.dout()), exact(CASE, q, k, v, CASE.dout()))


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
    assert told[1] == (error, message)
    for rank in (0, 2):
        assert told[rank] == ("PeerError", f"rank 1 failed: {error}: {message}")
