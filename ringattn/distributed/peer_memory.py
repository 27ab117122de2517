"""Memory that the GPUs of one host write into on each other: copies and signals that need no multiprocessor.

A copy goes through a copy engine, with strides: rows of 4 KiB reach a peer at 350 GB/s of NVLink (H200), where NCCL's
all-to-all of packed rows does 276 and waits for an attention kernel beside it to end. Signals are stream memory
operations, as in NCCL's copy-engine collectives: a kernel that signals would wait for a free multiprocessor, 0.75 ms
beside a forward of 0.94.

Buffers are torch's symmetric memory, mapped on every rank of a group. Multicast is not used.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from ringattn.errors import RingAttentionError

from .comm import Comm, CommError, first_line
from .strided_copy import copies_2d
from .symmetric_exchange import BufferPool
from .watchdog import Watchdog

_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: of the difference modulo 2**32
_FENCED = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what the stream wrote before is seen before
_DEVICE_TO_DEVICE = 3
_RELEASED = 2**30  # ahead of every number that is waited for


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a 32-bit wait or write: a union of 48 bytes."""

    _fields_ = [
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    ]


class SymmetricBuffer:
    """Buffer of ``nbytes`` at the same place of every rank's memory; ``of`` gives each as bytes of this device."""

    def __init__(self, own: Tensor, of: Sequence[Tensor], handle: Any = None) -> None:
        self.own, self.of, self.handle = own, of, handle
        self.nbytes = own.nbytes


class BarrierWork:
    """Copies and a barrier under way; what ``comm.Pending`` waits for."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class PeerMemory:
    """The memory of one group's ranks for each other. Every rank makes the same calls in the same order.

    ``begin`` orders what follows behind the caller's stream; ``copy`` starts copies; ``barrier`` starts to tell the
    members that they are done, and to wait until theirs are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = weakref.ref(group), device
        self._rank, self._size = group.rank(), group.size()
        self._far, self._near = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._runtime, self._driver = _libraries()
        self._buffers: list[SymmetricBuffer] = []
        self._barriers = 0
        self._lock = threading.Lock()
        self._waits: deque[tuple[float, torch.cuda.Event]] = deque()
        self._numbers = self.allocate(4 * self._size)  # of the last barrier, by the rank that came to it

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """Return a new zeroed buffer, which all ranks allocate together; RingAttentionError on all where one fails.

        Torch does not count it among the memory of its allocator.
        """
        group, error, own = self._group(), None, None
        assert group is not None
        try:
            own = symmetric.empty(nbytes, dtype=torch.uint8, device=self._device)
            own.zero_()
            torch.cuda.synchronize(self._device)
        except RuntimeError as failed:
            error = failed
        if not all(Comm(group).gather_numbers(error is None, self._device)) or own is None:
            reason = f": {first_line(error)}" if error is not None else " on another rank"
            raise RingAttentionError(f"no {nbytes / 2**20:.0f} MiB of symmetric memory{reason}") from error
        try:
            handle = symmetric.rendezvous(own, group.group_name)
        except RuntimeError as failed:
            raise CommError(f"peers' memory cannot be mapped: {first_line(failed)}") from failed
        of = [
            own if rank == self._rank else handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(self._size)
        ]
        buffer = SymmetricBuffer(own, of, handle)
        with self._lock:
            self._buffers.append(buffer)
        return buffer

    def begin(self) -> None:
        """Order what is started from now on behind what the current stream has been given so far."""
        if torch.cuda.is_current_stream_capturing():
            raise RingAttentionError(
                "exchange symmetric cannot be captured in a CUDA graph: its ranks count their barriers; use a plan "
                "without it, or call outside of the capture"
            )
        event = torch.cuda.current_stream(self._device).record_event()
        self._far.wait_event(event)
        self._near.wait_event(event)

    def copy(self, source: Tensor, target: Tensor, *, far: bool) -> None:
        """Start to copy rows: (B, S, heads, D) of equal shape and dtype. ``far`` targets lie on another rank."""
        if source.numel() == 0:
            return
        stream, copy = (self._far if far else self._near).cuda_stream, self._runtime.cudaMemcpy2DAsync
        here, there = source.data_ptr(), target.data_ptr()
        for rows in copies_2d(source.shape, source.stride(), target.stride(), source.itemsize):
            status = copy(
                there + rows.target_offset, rows.target_pitch, here + rows.source_offset, rows.source_pitch,
                rows.width, rows.height, _DEVICE_TO_DEVICE, stream,
            )  # fmt: skip
            if status:
                raise RingAttentionError(f"cudaMemcpy2DAsync of {rows} failed: CUDA error {status}")

    def barrier(self, members: Sequence[int]) -> BarrierWork:
        """Start to signal ``members`` that what was started here is done, and to wait for the same from each."""
        self._barriers += 1
        self._far.wait_stream(self._near)
        others = [rank for rank in members if rank != self._rank]
        operations = (_Operation * (2 * len(others)))()
        number, mine = self._barriers % 2**32, 4 * self._rank
        for place, rank in enumerate(others):
            there, here = self._numbers.of[rank].data_ptr() + mine, self._numbers.own.data_ptr() + 4 * rank
            operations[place] = _Operation(_WRITE, there, number, _FENCED)
            operations[len(others) + place] = _Operation(_WAIT, here, number, _AT_LEAST)
        status = self._driver.cuStreamBatchMemOp_v2(self._far.cuda_stream, len(operations), operations, 0)
        if status:
            raise RingAttentionError(f"cuStreamBatchMemOp failed: error {status}")
        event = self._far.record_event()
        with self._lock:
            self._forget_done()
            self._waits.append((time.monotonic(), event))
        return BarrierWork(event, self._device)

    # -- a peer that does not come --

    def waits_s(self) -> float:
        """Return the seconds for which the oldest barrier has been under way; 0 where none is."""
        with self._lock, torch.cuda.device(self._device):
            self._forget_done()
            return time.monotonic() - self._waits[0][0] if self._waits else 0.0

    def release(self) -> None:
        """End every wait, after all that could have been received was made NaN: no result looks like a right one."""
        with self._lock:
            buffers = list(self._buffers)
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
            for buffer in buffers:
                if buffer is not self._numbers:
                    buffer.own.fill_(255)
            torch.cuda.current_stream().synchronize()
            numbers = self._numbers.own.view(torch.int32)
            released = (self._barriers + _RELEASED + 2**31) % 2**32 - 2**31
            numbers.fill_(released)
            torch.cuda.current_stream().synchronize()

    def _forget_done(self) -> None:
        while self._waits and self._waits[0][1].query():  # type: ignore[no-untyped-call]
            self._waits.popleft()


_pools: weakref.WeakKeyDictionary[dist.ProcessGroup, BufferPool] = weakref.WeakKeyDictionary()


def buffer_pool_of(group: dist.ProcessGroup, device: torch.device, watchdog: Watchdog) -> BufferPool:
    """Return the buffers of a group, which its modules take turns to use; made by all its ranks together."""
    pool = _pools.get(group)
    if pool is None:
        memory = PeerMemory(group, device)
        watchdog.add_device_waits(memory)
        pool = _pools[group] = BufferPool(memory)
    return pool


def _libraries() -> tuple[Any, Any]:
    """Return the CUDA runtime that torch has loaded, and the driver."""
    assert torch.version.cuda is not None
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    runtime.cudaMemcpy2DAsync.argtypes = [pointer, size, pointer, size, size, size, number, pointer]
    runtime.cudaMemcpy2DAsync.restype = number
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuStreamBatchMemOp_v2.argtypes = [pointer, ctypes.c_uint, pointer, ctypes.c_uint]
    driver.cuStreamBatchMemOp_v2.restype = number
    return runtime, driver
