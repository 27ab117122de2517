"""A workspace pool that counts what it hands out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ringattn.runtime.workspace import WorkspacePool


class CountedPool(WorkspacePool):
    """``allocated`` and ``reused`` buffers so far."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.reused = 0
        self._own: set[int] = set()  # ids of what is idle

    def take(self, key: Any) -> Tensor:
        buffer = super().take(key)
        if id(buffer) in self._own:
            self._own.remove(id(buffer))
            self.reused += 1
        else:
            self.allocated += 1
        return buffer

    def give(self, key: Any, buffer: Tensor) -> None:
        self._own.add(id(buffer))
        super().give(key, buffer)

    def clear(self) -> None:
        self._own.clear()
        super().clear()

    def held_bytes(self) -> int:
        return sum(buffer.nbytes for kept in self._free.values() for buffer in kept)
