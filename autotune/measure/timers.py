"""Timers of calls on a host and on a CUDA device, and the memory that calls hold."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ringattn.hardware.facts import HardwareFacts

from .launch_overhead import FEWEST_LAUNCHES, flushes_for, is_launch_bound

FEWEST = 3  # readings that are taken however long they last
IN_FLIGHT = 4  # calls that the host may be ahead: with a thousand launches waiting, the next would wait as well
QUIET = 0.25  # what disturbs a host only adds to its time, so this quantile of it is what the call costs


@dataclass(frozen=True, slots=True)
class Reading:
    """One call: the time of the device, and that of the host to launch it.

    Where they are one, the device's time is the call's and ``host_us`` the same in us. ``late``: the device had begun
    before all of it was launched, so it may have waited for the host.
    """

    ms: float
    host_us: float
    late: bool = False


class HostTimer:
    """Times calls that are over when they return."""

    def calls_for(self, sample_ms: float, call_ms: float, host_us: float) -> int:
        """Return how many calls make a sample of this length; a microsecond is the timer's own."""
        return math.ceil(sample_ms / (call_ms + 1e-3))

    def time(
        self, call: Callable[[], None], repeats: int, limit_s: float = math.inf, host_us: float = 0.0
    ) -> list[Reading]:
        """Time as many calls as asked for, but none after ``limit_s`` once there are FEWEST.

        ``host_us`` is for devices that get a lead; here all of the time is the host's.
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

    def of(self, readings: Sequence[Reading]) -> Reading:
        """Return the typical reading."""
        return Reading(_quantile([r.ms for r in readings], 0.5), _quantile([r.host_us for r in readings], 0.5))


class CudaTimer:
    """Times calls between device events, with the L2 cache flushed before each.

    A flush takes long enough that the host has launched the call before it begins, or there are several: the device is
    timed without its host, whose own time is read off beside it. Where the host was slower than that, the reading says
    so.
    """

    def __init__(self, device: torch.device, facts: HardwareFacts) -> None:
        self._device = device
        self._flush = torch.empty(max(64, 2 * facts.l2_mib) * 2**20, dtype=torch.int8, device=device)
        self._flush_ms = 0.06  # until it is known
        self._flush_ms = min(reading.ms for reading in self.time(self._flush_once, FEWEST + 2))

    def calls_for(self, sample_ms: float, call_ms: float, host_us: float) -> int:
        """Return how many calls make a sample of this length, their leads included."""
        taken_ms = call_ms + flushes_for(host_us, self._flush_ms) * self._flush_ms
        fewest = FEWEST_LAUNCHES if is_launch_bound(call_ms, host_us) else 1
        return max(fewest, math.ceil(sample_ms / taken_ms))

    def _flush_once(self) -> None:
        self._flush.zero_()

    def time(
        self, call: Callable[[], None], repeats: int, limit_s: float = math.inf, host_us: float = 0.0
    ) -> list[Reading]:
        """Time as many calls as asked for, but launch none after ``limit_s`` once there are FEWEST.

        ``host_us`` is what the host takes for a call, as far as known; ranks that begin together give the same.
        """

        def event() -> torch.cuda.Event:
            return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

        events = [(event(), event()) for _ in range(repeats)]
        launched: list[tuple[float, bool]] = []
        torch.cuda.synchronize(self._device)
        first = time.perf_counter()
        for number, (begin, end) in enumerate(events):
            if time.perf_counter() - first > limit_s and len(launched) >= FEWEST:
                break
            if number >= IN_FLIGHT:
                events[number - IN_FLIGHT][1].synchronize()
            for _ in range(flushes_for(host_us, self._flush_ms)):
                self._flush_once()
            begin.record()
            started = time.perf_counter()
            call()
            taken_us = (time.perf_counter() - started) * 1e6
            end.record()
            launched.append((taken_us, begin.query()))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        return [
            Reading(begin.elapsed_time(end), taken_us, late)
            for (begin, end), (taken_us, late) in zip(events, launched, strict=False)
        ]

    def of(self, readings: Sequence[Reading]) -> Reading:
        """Return the device's typical time, and the host's where nothing disturbed it."""
        return Reading(_quantile([r.ms for r in readings], 0.5), _quantile([r.host_us for r in readings], QUIET))


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share))


def warm_up_device(device: torch.device) -> None:
    """Make the context and load the libraries of matrix products: no candidate's first call pays for them."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16):
        square = torch.ones(64, 64, dtype=dtype, device=device)
        torch.mm(square, square)
    torch.cuda.synchronize(device)


def cpu_peak_bytes(calls: Callable[[], object]) -> int:
    """Return the largest sum of live allocations during ``calls``, from the profiler's record."""
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
