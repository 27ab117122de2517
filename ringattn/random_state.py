"""Holds the state of torch's random numbers, to draw the same ones again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """State of torch's random numbers, of the CPU and of a device."""

    device: torch.device
    of_cpu: Tensor
    of_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the present state of the CPU and of ``device``."""
        return cls(device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Return a context with this state, after which the present one goes on."""
        with torch.random.fork_rng([self.device] if self.of_device is not None else []):
            torch.set_rng_state(self.of_cpu)
            if self.of_device is not None:
                torch.cuda.set_rng_state(self.of_device, self.device)
            yield
