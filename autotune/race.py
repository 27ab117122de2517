"""Candidates against each other and the default: paired blocks, successive elimination, one honest record.

An ``Arena`` is one stage of one cell. It checks a candidate before it times it, keeps the default plan in every
block (twice: the two readings give the noise floor for nothing), throws disturbed blocks away and repeats them,
and tells the record whatever happens.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ringattn.workload import Tunables, Workload

from . import statistics
from .budget import Deadline, EffortPreset
from .choose import GAIN_MARGIN
from .evaluator import Block, Checked, Clock, Evaluator, Fault, Proven, Sample
from .head_start import judged_ms, sample_ms
from .probe import TrialOutcome
from .statistics import Interval
from .store import Entry, StageRecord

DISMISSED = 3.0  # a candidate whose check already took so many times the best's is not timed at all
FIRST_GATE = math.log(2.0)  # after its first repetition a candidate twice as slow as the best is out
SECOND_GATE = math.log(1.25)  # after two repetitions one that was so much slower in both is out: no outlier comes twice
SURE_BLOCKS = 4  # paired repetitions before anything may be called surely slower
DEFAULT_ATTEMPTS = 2  # blocks in a row whose default failed, before it counts as broken
PATIENCE = 0.15  # of a cell's time may go into blocks thrown away for foreign load; then the machine counts as loaded
HOPELESS = 0.10  # chance of being faster below which a move is not timed again
PROMISING = 0.75  # chance of being faster from which a move is tried further
WORTH_TRYING = 0.003  # log-ratio: smaller gains are not worth a block
MOVE_GATE = math.log(1.3)  # a single move this much slower than where it came from is dropped after one block
POLISHES = 3  # rounds of the median polish
LEAN_BLOCKS = 3  # repetitions of a slower plan that needs less memory
LOOKED_OFTEN = 0.998  # of an interval that is looked at after every block of a final: 95 % would drop the best by luck
FINAL_PRECISION = 0.008  # half-width of the interval at which the final stops early
# Where one plan is left beside a default that it surely beats by far, only the number in the profile is at stake: with
# the finer half-width an H100's longest cell took 29 blocks, 12 s, for what was clear after eight.
ALONE_PRECISION = 0.015
LARGE_GAIN = 0.05  # log-ratio
BLOCK_PACE = 1.15  # times its samples a block takes, until it is known: random order, flushes, messages, the record
LONGEST_PACE = 4.0  # a block that took longer was held up
LATEST_BLOCK = 0.2  # weight of the latest block in how long they take

TrialListener = Callable[[Tunables, TrialOutcome], None]


class DefaultBroken(Exception):
    """The plan everything is paired against stopped working; the cell has to choose another."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep to, beside being right. ``peak_bytes`` counts beyond the inputs."""

    peak_bytes: int | None = None
    error: float | None = None

    def constraints(self, checked: Checked) -> dict[str, float]:
        """By name, how far over the limit (relative); 0 or less keeps it."""
        broken = {}
        if self.peak_bytes is not None:
            broken["memory"] = checked.peak_bytes / max(self.peak_bytes, 1) - 1.0
        if self.error is not None:
            broken["error"] = checked.error / self.error - 1.0
        return broken

    def keeps(self, checked: Checked) -> bool:
        return all(value <= 0 for value in self.constraints(checked).values())


@dataclass(slots=True)
class Pace:
    """Times its samples a block takes; one for all cells of a probe, as all have the same machine around them."""

    factor: float = BLOCK_PACE

    def learn(self, taken_s: float, samples_s: float) -> None:
        self.factor += LATEST_BLOCK * (min(taken_s / samples_s, LONGEST_PACE) - self.factor)


@dataclass(slots=True)
class Ledger:
    """What one cell knows of its candidates, over all of its stages."""

    checked: dict[Tunables, Checked | Fault] = field(default_factory=dict)
    proven: dict[Tunables, Proven | Fault] = field(default_factory=dict)
    repeated_default: list[float] = field(default_factory=list)  # log of one default reading over the other
    default_ms: list[float] = field(default_factory=list)  # of every block
    deaths: dict[Tunables, int] = field(default_factory=dict)  # while timed, after it had been checked
    disturbances: list[str] = field(default_factory=list)
    discarded: int = 0
    patience_s: float = 0.0  # left for blocks that are thrown away
    loaded: bool = False  # foreign load did not end: what was timed under it counts, with a wider margin
    asynchronous: bool = False  # the device works while the host goes on, and is timed with a head start
    host_us: dict[Tunables, list[float]] = field(default_factory=dict)  # of every block
    pace: Pace = field(default_factory=Pace)

    def noise_sigma(self) -> float:
        """Standard deviation of one paired log-ratio; infinite until two blocks were seen."""
        return statistics.noise_floor(self.repeated_default)

    def first_look(self, plan: Tunables, default: Tunables) -> float | None:
        """log(t / t_default) by the call of its check: unpaired, and good enough to doubt a single reading."""
        mine, other = self.checked.get(plan), self.checked.get(default)
        if not isinstance(mine, Checked) or not isinstance(other, Checked) or plan == default:
            return None
        # A default whose one call was disturbed would make every first look a promise; its blocks tell.
        default_ms = min([other.call_ms, *([statistics.median(self.default_ms)] if self.default_ms else [])])
        return math.log(self.judged_ms(mine.call_ms, mine.host_us, default_ms, other.host_us) / default_ms)

    def launches_too_long(self, plan: Tunables, default: Tunables) -> bool:
        """Whether it was judged by how long the host takes to launch it, which says nothing of longer calls."""
        mine = self.checked.get(plan)
        return isinstance(mine, Checked) and self.checked_ms(mine, default) > mine.call_ms

    def checked_ms(self, mine: Checked, default: Tunables) -> float:
        """What the call of a check counts as."""
        other = self.checked.get(default)
        if not isinstance(other, Checked):
            return mine.call_ms
        return self.judged_ms(mine.call_ms, mine.host_us, other.call_ms, other.host_us)

    def judged_ms(self, ms: float, host_us: float, default_ms: float, default_host_us: float) -> float:
        """What a call counts as: its own time where the host waits for all of it."""
        return judged_ms(ms, host_us, default_ms, default_host_us) if self.asynchronous else ms

    def typical_host_us(self, plan: Tunables) -> float:
        """Over all blocks: one reading is too rough to judge by."""
        return statistics.median(self.host_us[plan])

    def sample_s(self, plan: Tunables, least_s: float) -> float:
        """About what one sample takes: where the host is slower than the device, it is waited for first."""
        known = self.checked.get(plan)
        if not isinstance(known, Checked):
            return least_s
        taken_ms = sample_ms(known.call_ms, known.host_us) if self.asynchronous else known.call_ms
        return max(least_s, taken_ms / 1e3)

    def failures(self) -> dict[Tunables, Fault]:
        failed = {plan: result for plan, result in self.checked.items() if isinstance(result, Fault)}
        return failed | {plan: result for plan, result in self.proven.items() if isinstance(result, Fault)}


@dataclass(slots=True)
class Arena:
    """One stage of one cell, between an evaluator and a record."""

    cell: Workload
    stage: str
    evaluator: Evaluator
    record: StageRecord
    ledger: Ledger
    default: Tunables
    limits: Limits
    seed: int
    timeout_s: float
    sample_s: float  # what one sample takes at least
    clock: Clock
    listener: TrialListener
    _seed_stage: int = 0
    _default_faults: int = 0

    def __post_init__(self) -> None:
        self._seed_stage = zlib.crc32(f"{self.cell}|{self.stage}".encode())
        self.ledger.repeated_default.extend(self.record.repeated_default)  # of an earlier run
        self.ledger.default_ms.extend(self.record.default_ms.values())

    # --- entering and leaving -----------------------------------------------------------------------------------

    def admit(self, plans: Iterable[Tunables], deadline: Deadline) -> list[Entry]:
        """The entries of those plans that agree with float64 and may be timed; the rest is recorded and told.

        Stops admitting at the deadline: a plan nobody looked at is neither good nor bad.
        """
        admitted = []
        for plan in plans:
            entry = self.record.find(plan)
            if entry is None or (entry.checked is None and entry.fault is None):
                known = self.ledger.checked.get(plan)
                if known is None and not deadline.allows(self.sample_s):
                    break
                entry = entry or self.record.open(plan)
                self._check(entry)
            self._remember(entry)
            if entry.fault is None:
                admitted.append(entry)
        return admitted

    def enter(self, entry: Entry) -> bool:
        """Check an entry that the sampler asked for; whether it may be timed."""
        self._check(entry)
        return entry.fault is None

    def _remember(self, entry: Entry) -> None:
        result = entry.fault or entry.checked
        if result is not None:
            self.ledger.checked.setdefault(entry.tunables, result)

    def _check(self, entry: Entry) -> None:
        result = self.ledger.checked.get(entry.tunables)
        if result is None:
            default = self.ledger.checked.get(self.default)
            pace_ms = default.call_ms if isinstance(default, Checked) else None
            result = self.evaluator.check(self.cell, entry.tunables, timeout_s=self.timeout_s, pace_ms=pace_ms)
            self.ledger.checked[entry.tunables] = result
        if isinstance(result, Fault):
            self._fail(entry, result)
        else:
            self.record.checked(entry, result)

    def _fail(self, entry: Entry, fault: Fault) -> None:
        self.ledger.checked[entry.tunables] = fault
        self.record.fail(entry, fault)
        self.listener(entry.tunables, TrialOutcome(fault.kind, self.stage, message=fault.message))

    def leave(self, entry: Entry, reason: str) -> None:
        """Tell the record what the entry came to; entries without a single block stay open."""
        if entry.finished or not entry.log_ratios:
            return
        assert entry.checked is not None
        median = statistics.median(entry.log_ratios.values())
        constraints = self.limits.constraints(entry.checked)
        self.record.complete(
            entry, median, constraints, reason=reason, blocks=len(entry.log_ratios), ms=self.median_ms(entry)
        )
        over = next((name for name, value in constraints.items() if value > 0), None)
        self.listener(
            entry.tunables,
            TrialOutcome(
                "over-memory" if over == "memory" else "over-error" if over == "error" else "ok",
                self.stage,
                median_ms=self.median_ms(entry),
                default_ratio=math.exp(median),
                error=entry.checked.error,
                peak_bytes=entry.checked.peak_bytes,
                message=reason,
            ),
        )

    def dismiss(self, entry: Entry, reason: str) -> None:
        """Tell what a first look is enough for: the ratio is of two unpaired calls, and the reason says so."""
        default = self.ledger.checked[self.default]
        assert isinstance(default, Checked)
        assert entry.checked is not None
        self.record.default_ms.setdefault(0, default.call_ms)
        self.record.report(entry, 0, math.log(self.checked_ms(entry.checked) / default.call_ms))
        self.leave(entry, reason)

    def keeps_limits(self, entry: Entry) -> bool:
        """Whether it may be chosen: what may not is no measure for the others."""
        return entry.checked is not None and self.limits.keeps(entry.checked)

    def fastest_call_ms(self, entries: Iterable[Entry]) -> float:
        """Of those that may be chosen, by their checks; infinite where there are none."""
        allowed = [e.checked for e in entries if e.checked is not None and self.keeps_limits(e)]
        return min(map(self.checked_ms, allowed), default=math.inf)

    def checked_ms(self, checked: Checked) -> float:
        """What the call of a check counts as."""
        return self.ledger.checked_ms(checked, self.default)

    # --- blocks -------------------------------------------------------------------------------------------------

    def estimate_s(self, entries: Sequence[Entry]) -> float:
        """Seconds that one block of these entries takes."""
        return self.ledger.pace.factor * self._samples_s(entries)

    def _samples_s(self, entries: Sequence[Entry]) -> float:
        """The default's are two, also where it is an entry."""
        timed = [entry.tunables for entry in entries if entry.tunables != self.default]
        return sum(self.ledger.sample_s(plan, self.sample_s) for plan in (self.default, self.default, *timed))

    def block(self, entries: Sequence[Entry]) -> bool:
        """One paired repetition of every entry; False when the block could not be used and nothing was learned.

        Raises DefaultBroken after DEFAULT_ATTEMPTS blocks without a default. A disturbed block is thrown away and
        the caller repeats it; on a machine where that does not end, blocks count and the machine as loaded.
        """
        began, samples_s = self.clock.now(), self._samples_s(entries)
        try:
            return self._block(entries)
        finally:
            self.ledger.pace.learn(self.clock.now() - began, samples_s)

    def _block(self, entries: Sequence[Entry]) -> bool:
        number = max(self.record.default_ms, default=-1) + 1
        rng = np.random.default_rng((self.seed, self._seed_stage, number, self.ledger.discarded + self._default_faults))
        timed = [entry for entry in entries if entry.tunables != self.default]
        plans = [self.default, self.default, *(entry.tunables for entry in timed)]
        order: list[Tunables] = [plans[index] for index in rng.permutation(len(plans))]
        began = self.clock.now()
        block = self.evaluator.block(self.cell, order, timeout_s=self.timeout_s)
        if block.disturbances and not self._accepts(block, self.clock.now() - began):
            return False
        times, faults = self._split(order, block)
        self._handle_faults(faults, timed)
        readings = times.get(self.default, [])
        if not readings:
            self._default_faults += 1
            fault = faults.get(self.default, Fault("error", "gave no time"))
            if self._default_faults >= DEFAULT_ATTEMPTS:
                raise DefaultBroken(fault)
            return False
        self._default_faults = 0
        logs = [math.log(ms) for ms in readings]
        repeated = logs[0] - logs[1] if len(logs) == 2 else None
        if repeated is not None:
            self.ledger.repeated_default.append(repeated)
        # A slow default makes everything else in its block look fast.
        default_log = statistics.settled(logs, self.ledger.noise_sigma())
        self.ledger.default_ms.append(math.exp(default_log))
        self.record.begin_block(number, math.exp(default_log), repeated)
        for entry in entries:
            if entry.tunables == self.default:
                self.record.report(entry, number, 0.0)
            elif entry.tunables in times:
                self.record.report(
                    entry, number, self._log_ratio(entry.tunables, times[entry.tunables][0], default_log)
                )
        return True

    def _log_ratio(self, plan: Tunables, ms: float, default_log: float) -> float:
        hosts_us = self.ledger.typical_host_us(plan), self.ledger.typical_host_us(self.default)
        return math.log(self.ledger.judged_ms(ms, hosts_us[0], math.exp(default_log), hosts_us[1])) - default_log

    def _split(
        self, order: Sequence[Tunables], block: Block
    ) -> tuple[dict[Tunables, list[float]], dict[Tunables, Fault]]:
        """Of each plan its times in ms, and its fault."""
        times: dict[Tunables, list[float]] = {}
        faults: dict[Tunables, Fault] = {}
        for plan, result in zip(order, block.results, strict=True):
            if isinstance(result, Sample):
                times.setdefault(plan, []).append(result.ms)
                self.ledger.host_us.setdefault(plan, []).append(result.host_us)
            else:
                faults[plan] = result
        return times, faults

    def _accepts(self, block: Block, took_s: float) -> bool:
        """Whether a disturbed block counts: not while there is time to repeat it."""
        self.ledger.disturbances.extend(block.disturbances)
        if took_s <= self.ledger.patience_s:
            self.ledger.patience_s -= took_s
            self.ledger.discarded += 1
            return False
        self.ledger.loaded = True
        return True

    def _handle_faults(self, faults: Mapping[Tunables, Fault], entries: Sequence[Entry]) -> None:
        for entry in entries:
            fault = faults.get(entry.tunables)
            if fault is None:
                continue
            # It ran well when it was checked, so it may have died of someone else's hand, once in a while.
            deaths = self.ledger.deaths.get(entry.tunables, 0) + 1
            self.ledger.deaths[entry.tunables] = deaths
            repetitions = len(entry.log_ratios)
            external = fault.kind in ("crash", "timeout") and deaths <= 1 + repetitions // 5
            if not external:
                self._fail(entry, fault)

    # --- numbers ------------------------------------------------------------------------------------------------

    def interval(self, entry: Entry) -> Interval:
        """log(t / t_default) of the entry, misreadings of the default taken out."""
        (interval,) = self.intervals([entry])
        return interval

    def intervals(self, entries: Iterable[Entry]) -> list[Interval]:
        """``interval`` of each: what costs time is taking out the misreadings, which is done once for all."""
        polished, sigma = self.polished(), self.ledger.noise_sigma()
        return [
            statistics.interval_of(
                polished[entry],
                seed=self.seed,
                sigma=sigma,
                first_look=self.ledger.first_look(entry.tunables, self.default),
            )
            for entry in entries
        ]

    def polished(self) -> dict[Entry, list[float]]:
        """log(t / t_default) of every timed entry, with the misreadings of the default taken out of each block.

        A default that was slow by chance makes everything in its block look fast. What the other entries of the
        block, known from elsewhere, agree on is that misreading (median polish).
        """
        timed = [entry for entry in self.record.entries() if entry.log_ratios and entry.fault is None]
        medians = {entry: self.median(entry) for entry in timed}
        known: dict[int, list[Entry]] = {block: [] for entry in timed for block in entry.log_ratios}
        for entry in timed:
            if len(entry.log_ratios) > 1:
                for block in entry.log_ratios:
                    known[block].append(entry)
        offsets: dict[int, float] = {}
        for _ in range(POLISHES):
            for block, entries in known.items():
                # The default itself says 0, with two readings behind it.
                offsets[block] = statistics.median([0.0, 0.0, *(e.log_ratios[block] - medians[e] for e in entries)])
            medians = {e: statistics.median([r - offsets[b] for b, r in e.log_ratios.items()]) for e in timed}
        return {entry: [ratio - offsets[b] for b, ratio in entry.log_ratios.items()] for entry in timed}

    def first_gate(self) -> float:
        """The log-ratio beyond which one repetition is enough to drop a candidate; wider where one says little."""
        sigma = self.ledger.noise_sigma()
        return max(FIRST_GATE, 4 * sigma) if math.isfinite(sigma) else FIRST_GATE

    def median(self, entry: Entry) -> float:
        """log(t / t_default), see ``statistics.settled``; infinite before the first block."""
        if not entry.log_ratios:
            return math.inf
        ratios = list(entry.log_ratios.values())
        return statistics.settled(
            ratios, self.ledger.noise_sigma(), self.ledger.first_look(entry.tunables, self.default)
        )

    def median_ms(self, entry: Entry) -> float:
        times = [self.record.default_ms[block] * math.exp(ratio) for block, ratio in entry.log_ratios.items()]
        return statistics.median(times)

    def difference(self, entry: Entry, other: Entry) -> list[float]:
        """log(t_entry / t_other) in the blocks that held both."""
        return statistics.paired_differences(entry.log_ratios, other.log_ratios)

    def surely_slower(self, entry: Entry, other: Entry, margin: float = 0.0, level: float = 0.95) -> bool:
        differences = self.difference(entry, other)
        if len(differences) < SURE_BLOCKS:
            return False
        return statistics.interval_of(differences, seed=self.seed, level=level).low > margin

    def always_slower(self, entry: Entry, other: Entry) -> bool:
        """Beyond the second gate in every block that held both, of which there are two or more."""
        differences = self.difference(entry, other)
        return len(differences) >= 2 and min(differences) > max(SECOND_GATE, 4 * self.ledger.noise_sigma())

    def chance_faster(self, entry: Entry, other: Entry, by: float = 0.0) -> float:
        """How likely the entry is faster than the other by that much (log); 0.5 when they never met."""
        differences = self.difference(entry, other)
        return statistics.probability_below(differences, -by, seed=self.seed) if differences else 0.5


def race(
    arena: Arena,
    entries: Sequence[Entry],
    *,
    keep: int,
    max_blocks: int,
    deadline: Deadline,
    margin: float = 0.005,
) -> list[Entry]:
    """Successive elimination: those still standing, fastest first.

    The first repetition drops what takes twice as long as the best, the second what took a quarter longer in both;
    from SURE_BLOCKS on, what is surely slower than the leader by ``margin`` goes. Ends with ``keep`` left
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
        alive = _eliminate(arena, [entry for entry in alive if entry.fault is None], keep, margin)
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


def _eliminate(arena: Arena, alive: list[Entry], keep: int, margin: float) -> list[Entry]:
    standing = sorted(alive, key=arena.median)
    leader = next(filter(arena.keeps_limits, standing), None)
    if leader is None or not leader.log_ratios:
        return standing
    kept: list[Entry] = []
    for entry in standing:
        slower_by = arena.median(entry) - arena.median(leader)
        if entry.log_ratios and slower_by > arena.first_gate():
            arena.leave(entry, "more than twice as slow as the best")
        elif arena.always_slower(entry, leader):
            arena.leave(entry, "a quarter slower than the best, or more, whenever it was timed")
        elif len(kept) >= keep and arena.surely_slower(entry, leader, margin):
            arena.leave(entry, "surely slower than the best")
        else:
            kept.append(entry)
    return kept


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
        or not arena.surely_slower(entry, leader, FINAL_PRECISION, LOOKED_OFTEN)
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
