"""Calls beyond a kernel's limits run in parts and give what one call would give."""

from __future__ import annotations

import pytest
import torch

from ringattn.kernels import grid_limits
from ringattn.kernels.contract import BoundKernel, KernelConfig
from ringattn.kernels.registry import KERNELS

_CONFIG = KernelConfig(causal=True, scale=0.5, dtype="fp64")


class Counted:
    """The math kernel, writing gradients where it is told, with the number of blocks of each call."""

    def __init__(self) -> None:
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self._math = KERNELS["math"].load(_CONFIG)

    def forward(self, q, k, v, /):
        self.forwards.append(q.shape[0])
        return self._math.forward(q, k, v)

    def backward(self, dout, q, k, v, out, lse, /, grads=None):
        self.backwards.append(q.shape[0])
        made = self._math.backward(dout, q, k, v, out, lse)
        if grads is None:
            return made
        for into, grad in zip(grads, made, strict=True):
            into.copy_(grad)
        return grads


def blocks_of(count: int) -> list[torch.Tensor]:
    return [torch.randn(count, 5, 2, 4, dtype=torch.float64) for _ in range(4)]


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("given", [False, True])
def test_parts_join_to_the_whole(monkeypatch: pytest.MonkeyPatch, most: int, given: bool) -> None:
    monkeypatch.setattr(grid_limits, "MAX_GRID", most)
    torch.manual_seed(0)
    q, k, v, dout = blocks_of(7)
    counted = Counted()
    parted = grid_limits.in_parts(BoundKernel(counted.forward, counted.backward))
    whole = KERNELS["math"].load(_CONFIG)
    out, lse = parted.forward(q, k, v)
    for mine, right in zip((out, lse), whole.forward(q, k, v), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)
    into = tuple(torch.full_like(x, torch.nan) for x in (q, k, v)) if given else None
    made = (
        parted.backward(dout, q, k, v, out, lse)
        if into is None
        else parted.backward(dout, q, k, v, out, lse, grads=into)
    )
    for mine, right in zip(made, whole.backward(dout, q, k, v, out, lse), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)
    assert max(counted.forwards) <= most
    assert max(counted.backwards) <= most
    assert sum(counted.forwards) == sum(counted.backwards) == 7


def test_flash_2s_backward_is_parted_at_its_32_bit_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    one = grid_limits.flash_2_elements(1, 5, 2, 4)
    assert one == 2 * 128 * 32
    monkeypatch.setattr(grid_limits, "FLASH_2_MAX_ELEMENTS", 3 * one + 1)
    q, k, v, dout = blocks_of(7)
    counted = Counted()
    parted = grid_limits.in_parts(BoundKernel(counted.forward, counted.backward), flash_2_backward=True)
    out, lse = parted.forward(q, k, v)
    parted.backward(dout, q, k, v, out, lse)
    assert counted.forwards == [7]
    assert counted.backwards == [3, 3, 1]


@pytest.mark.parametrize(("flash_2", "most"), [(True, 3), (False, 5)])
def test_autograd_is_not_left_alone_with_what_runs_in_parts(
    monkeypatch: pytest.MonkeyPatch, flash_2: bool, most: int
) -> None:
    monkeypatch.setattr(grid_limits, "FLASH_2_MAX_ELEMENTS", 3 * grid_limits.flash_2_elements(1, 5, 2, 4) + 1)
    monkeypatch.setattr(grid_limits, "MAX_GRID", 5)
    counted = Counted()
    whole = BoundKernel(counted.forward, counted.backward, lambda shape: counted.forward)
    parted = grid_limits.in_parts(whole, flash_2_backward=flash_2)
    assert parted.differentiable((most, 5, 2, 4)) == counted.forward
    assert parted.differentiable((most + 1, 5, 2, 4)) is None
