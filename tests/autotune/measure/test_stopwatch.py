"""A device that waited for its host is read again; ranks take the same readings of the same lead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import pytest

from autotune.measure.launch_overhead import LEAD, LONGEST_LAUNCH_US
from autotune.measure.rank_agreement import SingleRank
from autotune.measure.stopwatch import ROUNDS, LaunchOverhead, Stopwatch
from autotune.measure.timers import Reading


class SlowHost:
    """A device of 0.02 ms a call; where the host launches longer than its lead, the rest is waited for."""

    def __init__(self, launches_us: Iterable[float], *, waits: bool = False) -> None:
        self._launches_us = iter(launches_us)
        self._waits = waits
        self.leads_us: list[float] = []

    def time(
        self, call: Callable[[], None], repeats: int, limit_s: float = math.inf, host_us: float = 0.0
    ) -> list[Reading]:
        self.leads_us.append(host_us)
        readings = []
        for _ in range(repeats):
            us = next(self._launches_us)
            waited_us = us if self._waits else max(0.0, us - LEAD * host_us)
            readings.append(Reading(0.02 + waited_us / 1e3, us, waited_us > 0))
        return readings

    def of(self, readings: Sequence[Reading]) -> Reading:
        middle = sorted(readings, key=lambda reading: reading.ms)[len(readings) // 2]
        return Reading(middle.ms, middle.host_us)


def nothing() -> None: ...


def test_what_the_device_waited_for_does_not_count() -> None:
    """Three of five launches took three times the lead: their median is the host's, not the device's."""
    timer = SlowHost([100, 450, 100, 450, 450] + [450] * 5)
    launches = LaunchOverhead(100.0)
    assert Stopwatch(timer, SingleRank()).read(nothing, launches, 5).ms == 0.02
    assert timer.leads_us == [100.0, 450.0]
    assert launches.us >= 0.7 * 450


def test_readings_that_are_clean_are_not_repeated() -> None:
    timer = SlowHost([100] * 5)
    launches = LaunchOverhead(100.0)
    assert Stopwatch(timer, SingleRank()).read(nothing, launches, 5).ms == 0.02
    assert timer.leads_us == [100.0]
    assert not launches.always_late


def test_a_call_that_waits_for_the_device_itself_is_taken_as_it_comes_and_soon_without_repeats() -> None:
    timer = SlowHost([200] * 100, waits=True)
    launches = LaunchOverhead(200.0)
    stopwatch = Stopwatch(timer, SingleRank())
    assert stopwatch.read(nothing, launches, 5).ms == pytest.approx(0.22)
    assert len(timer.leads_us) == ROUNDS
    assert launches.always_late
    for _ in range(8):
        assert stopwatch.read(nothing, launches, 5).host_us == 200
    assert len(timer.leads_us) == ROUNDS + 2 * 8
    assert set(timer.leads_us[ROUNDS + 1 :: 2]) == {0.0}  # else the lead would count as the host's time


def test_a_call_that_no_longer_waits_is_read_like_any_other_again() -> None:
    timer = SlowHost([200] * 100)
    launches = LaunchOverhead(200.0, always_late=True)
    assert Stopwatch(timer, SingleRank()).read(nothing, launches, 5).ms == 0.02
    assert not launches.always_late


def test_one_launch_of_half_a_second_is_forgotten_soon() -> None:
    """It gave each of the next ten samples a lead of 10 ms before every call of 0.05 ms."""
    timer = SlowHost([5e5] + [100] * 100)
    launches = LaunchOverhead(100.0)
    stopwatch = Stopwatch(timer, SingleRank())
    stopwatch.read(nothing, launches, 1)
    assert launches.us <= LONGEST_LAUNCH_US
    for _ in range(12):
        stopwatch.read(nothing, launches, 5)
    assert launches.us < 150


def test_no_head_start_is_longer_than_the_longest() -> None:
    timer = SlowHost([9e6] * 100)
    launches = LaunchOverhead(LONGEST_LAUNCH_US)
    Stopwatch(timer, SingleRank()).read(nothing, launches, 3)
    assert len(timer.leads_us) == 1


def test_a_host_that_calms_down_gets_shorter_head_starts_again() -> None:
    timer = SlowHost([100] * 100)
    launches = LaunchOverhead(4000.0)
    stopwatch = Stopwatch(timer, SingleRank())
    for _ in range(12):
        stopwatch.read(nothing, launches, 5)
    assert launches.us == 100.0


def test_a_reading_that_was_late_on_another_rank_counts_on_none() -> None:
    class OtherIsLate(SingleRank):
        """The other rank's second and third readings of the first round are late."""

        asked = 0

        def max_over_ranks(self, *values: float) -> tuple[float, ...]:
            self.asked += 1
            if self.asked == 1:
                return (0.0, 1.0, 1.0)
            return values

    timer = SlowHost([100] * 6)
    Stopwatch(timer, OtherIsLate()).read(nothing, LaunchOverhead(100.0), 3)
    assert len(timer.leads_us) == 2
