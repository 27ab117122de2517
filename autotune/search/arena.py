"""Candidates against the default in paired blocks, checked before they are timed; one honest record of all of it.

An ``Arena`` is one stage of one cell. It checks a candidate before it times it, keeps the default plan in every
block (twice: the two readings give the noise floor for nothing), throws disturbed blocks away and repeats them,
and tells the record whatever happens. How long a candidate stays in it is decided by ``race``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune import statistics
from autotune.journal.stage_record import Entry, StageRecord
from autotune.measure.evaluator import Block, Checked, Clock, Evaluator, Fault, Sample
from autotune.outcome import TrialOutcome
from autotune.statistics import Interval
from ringattn.workload import Tunables, Workload

from .budget import Deadline
from .ledger import Ledger
from .limits import Limits

DEFAULT_ATTEMPTS = 2  # blocks in a row whose default failed, before it counts as broken
POLISHES = 3  # rounds of the median polish

TrialListener = Callable[[Tunables, TrialOutcome], None]


class DefaultBroken(Exception):
    """The plan everything is paired against stopped working; the cell has to choose another."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


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

    def chance_faster(self, entry: Entry, other: Entry, by: float) -> float:
        """How likely the entry is faster than the other by that much (log); 0.5 when they never met."""
        differences = self.difference(entry, other)
        return statistics.probability_below(differences, -by, seed=self.seed) if differences else 0.5
