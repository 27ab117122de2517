"""Finalists timed again, until more blocks would change nothing."""

from __future__ import annotations

from collections.abc import Sequence

from autotune import statistics
from autotune.journal.entry import Entry
from autotune.search.budget import Deadline
from autotune.search.cell import CellState
from autotune.statistics import Interval

from .choose import gain_margin

LOOKED_OFTEN = 0.998  # of an interval that is looked at after every block of a final: 95 % would drop the best by luck
FINAL_PRECISION = 0.008  # half-width of the interval at which the final stops early
# Where one plan is left beside a default that it surely beats by far, only the number in the profile is at stake: with
# the finer half-width an H100's longest cell took 29 blocks, 12 s, for what was clear after eight.
ALONE_PRECISION = 0.015
LARGE_GAIN = 0.05  # log-ratio
SURE_BLOCKS = 4  # paired repetitions before anything may be called surely slower


def retime(state: CellState, entries: Sequence[Entry], since: int, deadline: Deadline) -> list[Entry]:
    """Blocks until every interval is narrow, or the best is decided beyond doubt, or time or the maximum is up."""
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
    """Without what is surely slower than the best by more than the final can tell apart; the default stays."""
    leader = min(filter(state.keeps_limits, entries), key=lambda e: state.median(e, since), default=None)
    if leader is None or state.next_block() - since < state.settings.preset.final_min_blocks:
        return list(entries)
    kept = []
    for entry in entries:
        apart = state.difference(entry, leader, since)
        surely = (
            len(apart) >= SURE_BLOCKS
            and (statistics.interval_of(apart, seed=state.settings.seed, level=LOOKED_OFTEN).low) > FINAL_PRECISION
        )
        if entry is leader or entry.tunables == state.default or not surely:
            kept.append(entry)
    return kept


def _decided(state: CellState, entries: Sequence[Entry], since: int) -> bool:
    """Return whether more blocks change nothing: each rival is known well enough, or cannot be chosen any more."""
    rivals = [entry for entry in entries if entry.tunables != state.default]
    precision = FINAL_PRECISION if len(rivals) > 1 else ALONE_PRECISION
    return all(is_settled(interval, precision) for interval in state.intervals(rivals, since))


def is_settled(gain: Interval, precision: float) -> bool:
    if gain.half_width < (precision if gain.high < -LARGE_GAIN else FINAL_PRECISION):
        return True
    return gain.low > gain_margin(noisy=False)  # surely no gain worth leaving the default for
