"""Who stays in an arena, and for how long: elimination among many, moves beside an incumbent, the final."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autotune import statistics
from autotune.journal.stage_record import Entry
from autotune.statistics import Interval

from .arena import Arena
from .budget import Deadline, EffortPreset
from .choose import GAIN_MARGIN

DISMISSED = 3.0  # a candidate whose check already took so many times the best's is not timed at all
FIRST_GATE = math.log(2.0)  # after its first repetition a candidate twice as slow as the best is out
SECOND_GATE = math.log(1.25)  # after two repetitions one that was so much slower in both is out: no outlier comes twice
SURE_BLOCKS = 4  # paired repetitions before anything may be called surely slower
ELIMINATION_MARGIN = 0.005  # log-ratio by which it must be, to leave a race
HOPELESS = 0.10  # chance of being faster below which a move is not timed again
PROMISING = 0.75  # chance of being faster from which a move is tried further
WORTH_TRYING = 0.003  # log-ratio: smaller gains are not worth a block
MOVE_GATE = math.log(1.3)  # a single move this much slower than where it came from is dropped after one block
LEAN_BLOCKS = 3  # repetitions of a slower plan that needs less memory
LOOKED_OFTEN = 0.998  # of an interval that is looked at after every block of a final: 95 % would drop the best by luck
FINAL_PRECISION = 0.008  # half-width of the interval at which the final stops early
# Where one plan is left beside a default that it surely beats by far, only the number in the profile is at stake: with
# the finer half-width an H100's longest cell took 29 blocks, 12 s, for what was clear after eight.
ALONE_PRECISION = 0.015
LARGE_GAIN = 0.05  # log-ratio


def race(
    arena: Arena,
    entries: Sequence[Entry],
    *,
    keep: int,
    max_blocks: int,
    deadline: Deadline,
) -> list[Entry]:
    """Successive elimination: those still standing, fastest first.

    The first repetition drops what takes twice as long as the best, the second what took a quarter longer in both;
    from SURE_BLOCKS on, what is surely slower than the leader goes. Ends with ``keep`` left
    (after SURE_BLOCKS), at ``max_blocks`` or in time.
    """
    alive = [entry for entry in entries if entry.fault is None and not entry.finished]
    alive = within_reach(arena, alive, DISMISSED * arena.fastest_call_ms(alive))
    while alive:
        fewest = min(len(entry.log_ratios) for entry in alive)
        if fewest >= max_blocks or (len(alive) <= keep and fewest >= SURE_BLOCKS):
            break
        if not deadline.allows(arena.estimate_s(alive)) and fewest > 0:
            break
        if not arena.block(alive):
            if deadline.passed():
                break
            continue
        alive = _eliminate(arena, [entry for entry in alive if entry.fault is None], keep)
    return sorted((entry for entry in alive if entry.log_ratios), key=arena.median)


def within_reach(arena: Arena, entries: Iterable[Entry], most_ms: float) -> list[Entry]:
    """Those that keep the limits and whose check's call took no longer, and the default; the others are dismissed."""
    kept = []
    for entry in entries:
        if entry.log_ratios or entry.tunables == arena.default or entry.checked is None:
            kept.append(entry)
        elif not arena.keeps_limits(entry):
            arena.dismiss(entry, "breaks a limit, not timed in pairs")
        elif arena.checked_ms(entry.checked) > most_ms:
            arena.dismiss(entry, "far slower at its first look, not timed in pairs")
        else:
            kept.append(entry)
    return kept


def _eliminate(arena: Arena, alive: list[Entry], keep: int) -> list[Entry]:
    standing = sorted(alive, key=arena.median)
    leader = next(filter(arena.keeps_limits, standing), None)
    if leader is None or not leader.log_ratios:
        return standing
    kept: list[Entry] = []
    for entry in standing:
        slower_by = arena.median(entry) - arena.median(leader)
        if entry.log_ratios and slower_by > _first_gate(arena):
            arena.leave(entry, "more than twice as slow as the best")
        elif _always_slower(arena, entry, leader):
            arena.leave(entry, "a quarter slower than the best, or more, whenever it was timed")
        elif len(kept) >= keep and _surely_slower(arena, entry, leader, ELIMINATION_MARGIN):
            arena.leave(entry, "surely slower than the best")
        else:
            kept.append(entry)
    return kept


def _first_gate(arena: Arena) -> float:
    """The log-ratio beyond which one repetition is enough to drop a candidate; wider where one says little."""
    sigma = arena.ledger.noise_sigma()
    return max(FIRST_GATE, 4 * sigma) if math.isfinite(sigma) else FIRST_GATE


def _always_slower(arena: Arena, entry: Entry, other: Entry) -> bool:
    """Beyond the second gate in every block that held both, of which there are two or more."""
    differences = arena.difference(entry, other)
    return len(differences) >= 2 and min(differences) > max(SECOND_GATE, 4 * arena.ledger.noise_sigma())


def _surely_slower(arena: Arena, entry: Entry, other: Entry, margin: float, level: float = 0.95) -> bool:
    differences = arena.difference(entry, other)
    if len(differences) < SURE_BLOCKS:
        return False
    return statistics.interval_of(differences, seed=arena.seed, level=level).low > margin


def screen(arena: Arena, incumbent: Entry, moves: Sequence[Entry], max_blocks: int, deadline: Deadline) -> list[Entry]:
    """Those moves that are probably faster than the incumbent, best first.

    Everything is timed in the same blocks as the incumbent; what is clearly slower or hopeless drops out early.
    """
    alive = [entry for entry in moves if entry.fault is None and not entry.finished]
    rounds = 0
    while alive and rounds < max_blocks:
        if not deadline.allows(arena.estimate_s([incumbent, *alive])) and rounds > 0:
            break
        if not arena.block([incumbent, *alive]):
            if deadline.passed() or incumbent.fault is not None:
                break
            continue
        rounds += 1
        alive = [entry for entry in alive if entry.fault is None and _still_hopeful(arena, entry, incumbent)]
    met = [entry for entry in alive if len(arena.difference(entry, incumbent)) >= 2]
    good = [entry for entry in met if arena.chance_faster(entry, incumbent, by=WORTH_TRYING) >= PROMISING]
    return sorted(good, key=lambda entry: statistics.median(arena.difference(entry, incumbent)))


def _still_hopeful(arena: Arena, entry: Entry, incumbent: Entry) -> bool:
    differences = arena.difference(entry, incumbent)
    if not differences:
        return True
    slower_by = statistics.median(differences)
    if len(differences) < LEAN_BLOCKS and slower_by <= FIRST_GATE and _leaner(entry, incumbent):
        return True  # it may end on the front of time and memory, for which one repetition is too few
    if slower_by > MOVE_GATE:
        return False
    if len(differences) < 4:
        return True
    return arena.chance_faster(entry, incumbent, by=WORTH_TRYING) > HOPELESS


def _leaner(entry: Entry, other: Entry) -> bool:
    assert entry.checked is not None
    assert other.checked is not None
    return entry.checked.peak_bytes < 0.95 * other.checked.peak_bytes


def final_race(arena: Arena, entries: Sequence[Entry], preset: EffortPreset, deadline: Deadline) -> list[Entry]:
    """Blocks until every interval is narrow, or the best is decided beyond doubt, or time or the maximum is up."""
    alive = [entry for entry in entries if entry.fault is None and not entry.finished]
    while alive:
        done = min(len(entry.log_ratios) for entry in alive)
        alone = all(entry.tunables == arena.default for entry in alive)
        if done >= (SURE_BLOCKS if alone else preset.final_max_blocks):
            break
        if done >= preset.final_min_blocks and _decided(arena, alive):
            break
        if done >= 2 and not deadline.allows(arena.estimate_s(alive)):
            break
        arena.block(alive)
        alive = _in_question(arena, [entry for entry in alive if entry.fault is None], preset)
    return [entry for entry in entries if entry.fault is None]


def _in_question(arena: Arena, entries: Sequence[Entry], preset: EffortPreset) -> list[Entry]:
    """Without what is surely slower than the best by more than the final can tell apart; the default stays."""
    leader = min(filter(arena.keeps_limits, entries), key=arena.median, default=None)
    if leader is None or len(leader.log_ratios) < preset.final_min_blocks:
        return list(entries)
    return [
        entry
        for entry in entries
        if entry is leader
        or entry.tunables == arena.default
        or not _surely_slower(arena, entry, leader, FINAL_PRECISION, LOOKED_OFTEN)
    ]


def _decided(arena: Arena, entries: Sequence[Entry]) -> bool:
    """Whether more blocks would change nothing: each rival is known well enough, or cannot be chosen any more."""
    rivals = [entry for entry in entries if entry.tunables != arena.default]
    precision = FINAL_PRECISION if len(rivals) > 1 else ALONE_PRECISION
    return all(_is_settled(interval, precision) for interval in arena.intervals(rivals))


def _is_settled(gain: Interval, precision: float) -> bool:
    if gain.half_width < (precision if gain.high < -LARGE_GAIN else FINAL_PRECISION):
        return True
    # Surely no gain worth leaving the default for.
    return gain.low > math.log1p(-GAIN_MARGIN)
