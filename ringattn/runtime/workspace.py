"""Pools the workspace of everything that lives only during a call.

A buffer is lent to one call and comes back at its end, so two calls never share one; it comes back to the stream
it was used on, where the next user is ordered behind the last. Nothing that is returned or saved for a backward
is ever taken from here.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from math import prod

import torch
from torch import Tensor

_MIB = 2**20
_Key = tuple[torch.device, int, int]  # device, stream, bytes


def size_class(nbytes: int) -> int:
    """Return the bucket of a size: the next of eight steps per power of two, so at most 12.5 % is wasted."""
    if nbytes <= 4096:
        return 4096
    step = 1 << (nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


class WorkspacePool:
    """Byte buffers kept for reuse, by device, stream and size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[_Key, list[Tensor]] = defaultdict(list)

    def take(self, key: _Key) -> Tensor:
        with self._lock:
            kept = self._free.get(key)
            if kept:
                return kept.pop()
        return torch.empty(key[2], dtype=torch.uint8, device=key[0])

    def give(self, key: _Key, buffer: Tensor) -> None:
        with self._lock:
            self._free[key].append(buffer)

    def clear(self) -> None:
        """Give every idle buffer back to the caching allocator."""
        with self._lock:
            self._free.clear()


POOL = WorkspacePool()


class Lease:
    """Workspace of one call. ``threshold_mib`` None leaves everything to the caching allocator."""

    __slots__ = ("_bucketed", "_device", "_lent", "_pooled", "_stream", "_threshold_bytes")

    def __init__(self, device: torch.device, threshold_mib: int | None, strategy: str) -> None:
        # Memory that a CUDA graph captures must come from the graph's own pool.
        self._pooled = threshold_mib is not None and not (
            device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        )
        self._device = device
        self._threshold_bytes = (threshold_mib or 0) * _MIB
        self._bucketed = strategy == "bucket"
        self._stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" and self._pooled else 0
        self._lent: list[tuple[_Key, Tensor]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor, valid until ``close``."""
        nbytes = prod(shape) * dtype.itemsize
        if not self._pooled or nbytes < self._threshold_bytes or nbytes == 0:
            return torch.empty(shape, dtype=dtype, device=self._device)
        key = (self._device, self._stream, size_class(nbytes) if self._bucketed else nbytes)
        buffer = POOL.take(key)
        self._lent.append((key, buffer))
        return buffer[:nbytes].view(dtype).view(shape)

    def close(self) -> None:
        """Return all buffers to the pool. After an error it is not called, and the buffers are freed."""
        for key, buffer in self._lent:
            POOL.give(key, buffer)
        self._lent.clear()
