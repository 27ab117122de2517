"""Readings of a device that did not wait for its host: those that may have are repeated with a longer lead.

On one H100's host a launch takes twice as long now as a moment ago, for calls of 0.03 ms that it launches in 0.3: with
late readings counted, a plan of 0.023 ms was timed as 0.050, and two probes agreed in 15 of 20 cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from autotune.statistics import median

from .launch_overhead import LEAD_DECAY, LONGEST_LAUNCH_US
from .rank_agreement import SingleRank
from .timers import Reading

Item = TypeVar("Item")

ROUNDS = 3  # of readings in a sample, each with twice the lead of the one before
ENOUGH = 0.5  # of the readings of a round, when that many are not late


class Timer(Protocol):
    """Times calls, and takes the typical one of several readings."""

    def time(
        self, call: Callable[[], None], repeats: int, limit_s: float = math.inf, host_us: float = 0.0
    ) -> list[Reading]: ...

    def of(self, readings: Sequence[Reading]) -> Reading: ...


@dataclass(slots=True)
class LaunchOverhead:
    """Host time of a call in us that its lead must cover, as the latest readings tell.

    ``always_late``: the call waits for the device itself, so that no lead is long enough.
    """

    us: float = 0.0
    always_late: bool = False


class Stopwatch:
    """Times calls on one device, in step with the ranks that make the same calls."""

    def __init__(self, timer: Timer, peers: SingleRank) -> None:
        self._timer, self._peers = timer, peers

    def read(
        self, call: Callable[[], None], launches: LaunchOverhead, repeats: int, limit_s: float = math.inf
    ) -> Reading:
        """Return the typical reading of those that were late on no rank, or of all where every one was late.

        ``launches`` learns from it; ranks with unequal leads would time how long they wait for each other. Over
        ranks ``limit_s`` is infinite, so that all take as many readings.
        """
        if launches.always_late:
            (late,) = self._peers.max_over_ranks(float(self._timer.time(call, 1, host_us=launches.us)[0].late))
            if late:  # no lead is long enough, and what it adds would count as the host's time
                return self._timer.of(_warmed(self._timer.time(call, repeats, limit_s)))
            launches.always_late = False
        everything: list[Reading] = []
        clean: list[Reading] = []
        for number in range(ROUNDS):
            readings = self._timer.time(call, repeats, limit_s, launches.us)
            flags = self._peers.max_over_ranks(*(float(reading.late) for reading in readings))
            counted = list(zip(readings, flags, strict=True))
            counted = _warmed(counted) if number == 0 else counted
            everything += [reading for reading, _ in counted]
            clean += [reading for reading, late in counted if not late]
            if len(clean) >= ENOUGH * len(counted) or launches.us >= LONGEST_LAUNCH_US:
                break
            (slowest_us,) = self._peers.max_over_ranks(max(reading.host_us for reading in readings))
            launches.us = min(max(2 * launches.us, slowest_us), LONGEST_LAUNCH_US)
        launches.always_late = not clean and repeats > 1
        (typical_us,) = self._peers.max_over_ranks(median([reading.host_us for reading in everything]))
        launches.us = min(max(typical_us, LEAD_DECAY * launches.us), LONGEST_LAUNCH_US)
        return self._timer.of(clean or everything)


def _warmed(readings: list[Item]) -> list[Item]:
    """Drop the first of several: it paid for what the candidate before it left in the caches of the host."""
    return readings[1:] if len(readings) > 2 else readings
