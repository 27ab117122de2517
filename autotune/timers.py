"""How long a call takes and how much memory it holds, on one device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ringattn.hardware import HardwareFacts

FEWEST = 3  # readings that are taken however long they last


@dataclass(frozen=True, slots=True)
class Reading:
    """One call: what the search minimises, and how long the host worked for it."""

    ms: float
    host_us: float


class HostTimer:
    """Wall-clock of a call that is over when it returns."""

    overhead_ms = 1e-3

    def time(
        self, call: Callable[[], None], repeats: int, limit_s: float = math.inf, host_s: float | None = None
    ) -> list[Reading]:
        """As many calls as asked for, but none after ``limit_s`` once there are FEWEST.

        ``host_s`` is for devices that get a head start; here all of the time is the host's.
        """
        readings: list[Reading] = []
        first = time.perf_counter()
        for _ in range(repeats):
            begin = time.perf_counter()
            if begin - first > limit_s and len(readings) >= FEWEST:
                break
            call()
            seconds = time.perf_counter() - begin
            readings.append(Reading(seconds * 1e3, seconds * 1e6))
        return readings


class CudaTimer:
    """Device events around each call, the L2 cache flushed before it.

    A call in a loop cannot be faster than the host launches it, but in a model attention is not alone: at 4096
    positions the matrix products of a layer keep the device busy three times as long as attention does, with a third
    of its launches, and hide all of flash-attn-4's 195 us on a slow host; at 1024 they hide about half. So the device
    is given a head start of HIDDEN of the host's time; what it still waits for counts.
    """

    HIDDEN = 2 / 3

    def __init__(self, device: torch.device, facts: HardwareFacts) -> None:
        self._device = device
        self._flush = torch.empty(max(64, 2 * facts.l2_mib) * 2**20, dtype=torch.int8, device=device)
        self.overhead_ms = 0.06  # of a flush, until it is known
        self.overhead_ms = min(reading.ms for reading in self.time(self._flush_once, FEWEST + 2))

    def _flush_once(self) -> None:
        self._flush.zero_()

    def time(
        self, call: Callable[[], None], repeats: int, limit_s: float = math.inf, host_s: float | None = None
    ) -> list[Reading]:
        """As many calls as asked for, but none launched after ``limit_s`` once there are FEWEST.

        How long a head start must be is not known before the first of them, unless ``host_s`` says what the host takes
        for a call: then all calls get one head start, which ranks that begin together must.
        """

        def event() -> torch.cuda.Event:
            return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

        events = [(event(), event()) for _ in range(repeats)]
        taken_s: list[float] = []
        torch.cuda.synchronize(self._device)
        first = time.perf_counter()
        for begin, end in events:
            if time.perf_counter() - first > limit_s and len(taken_s) >= FEWEST:
                break
            expected_s = min(taken_s, default=0.0) if host_s is None else host_s
            for _ in range(flushes_for(expected_s, self.HIDDEN, self.overhead_ms)):
                self._flush_once()
            begin.record()
            started = time.perf_counter()
            call()
            taken_s.append(time.perf_counter() - started)
            end.record()
        torch.cuda.synchronize(self._device)
        return [
            Reading(begin.elapsed_time(end), seconds * 1e6)
            for (begin, end), seconds in zip(events, taken_s, strict=False)
        ]


def flushes_for(host_s: float, hidden: float, flush_ms: float) -> int:
    """How many flushes of the cache keep the device busy for that part of the host's time; at least one."""
    return max(1, math.ceil(hidden * host_s * 1e3 / flush_ms))


def wake(device: torch.device) -> None:
    """Make the context and load the libraries of matrix products: no candidate's first call pays for them."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16):
        square = torch.ones(64, 64, dtype=dtype, device=device)
        torch.mm(square, square)
    torch.cuda.synchronize(device)


def cpu_peak_bytes(calls: Callable[[], object]) -> int:
    """The largest sum of live allocations during ``calls``, from the profiler's record of every one of them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as recorded:
        calls()
    kineto = recorded.profiler
    assert kineto is not None
    assert kineto.kineto_results is not None
    live = peak = 0
    for event in kineto.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
