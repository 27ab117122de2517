"""Finalists timed again, until more blocks would change nothing."""

from __future__ import annotations

from collections.abc import Sequence

from autotune import statistics
from autotune.journal.study.entry import Entry
from autotune.search.budget import Deadline
from autotune.search.cell import CellState
from autotune.search.readings import Readings
from autotune.statistics import Interval
from ringattn.workload import Tunables

from .choose import gain_margin

LOOKED_OFTEN = 0.998  # of an interval that is looked at after every block of a final: 95 % would drop the best by luck
FINAL_PRECISION = 0.008  # half-width of the interval at which the final stops early
# Where one plan is left beside a default that it surely beats by far, only the number in the profile is at stake: with
# the finer half-width an H100's longest cell took 29 blocks, 12 s, for what was clear after eight.
ALONE_PRECISION = 0.015
LARGE_GAIN = 0.05  # log-ratio
SURE_BLOCKS = 4  # paired repetitions before anything may be called surely slower


def retime(state: CellState, entries: Sequence[Entry], since: int, deadline: Deadline) -> list[Entry]:
    """Time blocks until intervals are narrow, the best is beyond doubt, or time or the maximum is up."""
    preset = state.settings.preset
    alive = [entry for entry in entries if entry.fault is None]
    while alive:
        done = max(0, state.next_block() - since)
        alone = all(entry.tunables == state.default for entry in alive)
        if done >= (SURE_BLOCKS if alone else preset.final_max_blocks):
            break
        if done >= preset.final_min_blocks and _decided(state, alive, since):
            break
        if done >= 2 and not deadline.allows(state.block_s(entry.tunables for entry in alive)):
            break
        state.block(alive)
        alive = _in_question(state, [entry for entry in alive if entry.fault is None], since)
    return [entry for entry in entries if entry.fault is None]


def _in_question(state: CellState, entries: Sequence[Entry], since: int) -> list[Entry]:
    """Leave out what is surely slower than the best, however calls are launched; the default stays."""
    if state.next_block() - since < state.settings.preset.final_min_blocks:
        return list(entries)
    plans = [entry.tunables for entry in entries]
    slower = frozenset.intersection(*(_slower(readings, plans, since) for readings in state.ways()))
    return [entry for entry in entries if entry.tunables == state.default or entry.tunables not in slower]


def _slower(readings: Readings, plans: Sequence[Tunables], since: int) -> frozenset[Tunables]:
    """Return plans that are surely slower than the best by more than the final can tell apart, or never the best."""
    suited = [readings.entry(plan) for plan in plans if readings.suits(plan)]
    leader = min(filter(readings.keeps_limits, suited), key=lambda e: readings.median(e, since), default=None)
    if leader is None:
        return frozenset()
    near = set()
    for entry in suited:
        apart = readings.difference(entry, leader, since)
        surely = (
            len(apart) >= SURE_BLOCKS
            and (statistics.interval_of(apart, seed=readings.settings.seed, level=LOOKED_OFTEN).low) > FINAL_PRECISION
        )
        if entry is leader or not surely:
            near.add(entry.tunables)
    return frozenset(plans) - near


def _decided(state: CellState, entries: Sequence[Entry], since: int) -> bool:
    """Return whether more blocks change nothing: each rival is known well enough, or cannot be chosen any more."""
    rivals = [entry.tunables for entry in entries if entry.tunables != state.default]
    precision = FINAL_PRECISION if len(rivals) > 1 else ALONE_PRECISION
    return all(
        is_settled(interval, precision)
        for readings in state.ways()
        for interval in readings.intervals([readings.entry(plan) for plan in rivals if readings.suits(plan)], since)
    )


def is_settled(gain: Interval, precision: float) -> bool:
    if gain.half_width < (precision if gain.high < -LARGE_GAIN else FINAL_PRECISION):
        return True
    return gain.low > gain_margin(noisy=False)  # surely no gain worth leaving the default for
