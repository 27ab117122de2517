"""The state of one cell's search: its plans, every reading of them, and the paired blocks that make the readings.

One object, which the loop asks and tells. Every reading is log(t / t_default) in a block that holds the default too
(twice: the two readings give the noise for nothing); disturbed blocks are thrown away and repeated.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from autotune import statistics
from autotune.journal.entry import Entry
from autotune.measure.evaluator import Block, Checked, Evaluator, Fault, Interference, Proven, Sample
from autotune.measure.head_start import judged_ms, sample_ms
from autotune.outcome import TrialOutcome
from autotune.statistics import Interval
from ringattn.workload import Tunables, Workload

from .budget import Deadline
from .settings import SearchSettings
from .transfer import Transfer, costs_a_worker, traits_of

CALLS_BEFORE_HANG = 15  # a call may take this many times the default's before it counts as hung
HANG_SHARE = 0.2  # of the time that is left, at most, goes into waiting for one plan
LEAST_HANG_S = 1.0
PATIENCE = 0.15  # of a cell's time may go into blocks thrown away for foreign load; then the machine counts as loaded
DEFAULT_ATTEMPTS = 2  # blocks in a row whose default failed, before it counts as broken
POLISHES = 3  # rounds of the median polish
UNKNOWN_SIGMA = 0.05  # noise assumed before any was seen

Trait = tuple[str, Any]
TrialListener = Callable[[Tunables, TrialOutcome], None]


class DefaultBroken(Exception):
    """The plan everything is paired against stopped working; the cell has to choose another."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class Record(Protocol):
    """Keeps what is measured as it comes."""

    def checked(self, entry: Entry) -> None: ...

    def failed(self, entry: Entry, fault: Fault) -> None: ...

    def validated(self, entry: Entry) -> None: ...

    def block(self, number: int, default_ms: float, repeated: float | None) -> None: ...

    def reading(self, entry: Entry, block: int, log_ratio: float) -> None: ...


class NoRecord:
    """Keeps nothing: a verification writes no study."""

    def checked(self, entry: Entry) -> None: ...

    def failed(self, entry: Entry, fault: Fault) -> None: ...

    def validated(self, entry: Entry) -> None: ...

    def block(self, number: int, default_ms: float, repeated: float | None) -> None: ...

    def reading(self, entry: Entry, block: int, log_ratio: float) -> None: ...


class CellState:
    """What is known of one cell, between an evaluator and a record."""

    def __init__(
        self,
        workload: Workload,
        default: Tunables,
        evaluator: Evaluator,
        settings: SearchSettings,
        listener: TrialListener,
        deadline: Deadline,
        *,
        record: Record | None = None,
        main_dtypes: Sequence[str] = (),
        transfer: Transfer | None = None,
    ) -> None:
        """``main_dtypes`` may win (all, where there are none); others compete for ``auto`` only."""
        self.workload = workload
        self.default = default
        self.evaluator = evaluator
        self.settings = settings
        self.record = record if record is not None else NoRecord()
        self.deadline = deadline  # of whatever is measured now
        self.main_dtypes = frozenset(main_dtypes)
        self.transfer = transfer if transfer is not None else Transfer()
        self.entries: dict[Tunables, Entry] = {}
        self.default_ms: dict[int, float] = {}  # by block
        self.repeated: list[float] = []  # log of one of the default's two readings over the other
        self.disturbances: list[Interference] = []
        self.discarded = 0
        self.loaded = False  # foreign load did not end: what was timed under it counts, with a wider margin
        self.trials = 0
        self.measured = 0  # counts whatever is learned, so that what is worked out of it is worked out once
        self._listener = listener
        self._patience_s = 0.0  # left for blocks that are thrown away
        self._default_faults = 0
        self._ran: set[tuple[Trait, Trait]] = set()  # pairs of traits of plans that ran
        self._blamed: set[tuple[Trait, Trait]] = set()
        self._place = zlib.crc32(str(workload).encode())

    # --- questions ----------------------------------------------------------------------------------------------

    def entry(self, plan: Tunables) -> Entry:
        """The entry of a plan, made when it is first asked for."""
        if plan not in self.entries:
            self.entries[plan] = Entry(plan)
        return self.entries[plan]

    def is_main(self, plan: Tunables) -> bool:
        return not self.main_dtypes or plan.dtype in self.main_dtypes

    def keeps_limits(self, entry: Entry) -> bool:
        return entry.checked is not None and self.settings.limits.keeps(entry.checked)

    def may_be_chosen(self, entry: Entry) -> bool:
        """Whether it is right as far as is known, within the limits, and of a dtype that may win."""
        return self.is_main(entry.tunables) and self.keeps_limits(entry) and entry.failure is None

    def failures(self) -> dict[Tunables, Fault]:
        return {plan: entry.failure for plan, entry in self.entries.items() if entry.failure is not None}

    def timed(self) -> list[Entry]:
        """Entries with readings that did not fail, the default aside."""
        return [
            entry
            for entry in self.entries.values()
            if entry.log_ratios and entry.failure is None and entry.tunables != self.default
        ]

    def is_noisy(self, bound: float) -> bool:
        return self.noise_sigma() > bound or self.loaded

    def noise_sigma(self) -> float:
        """Standard deviation of one paired log-ratio; infinite until two blocks were seen."""
        return statistics.noise_floor(self.repeated)

    def sigma(self) -> float:
        """The same; before it was seen that of other cells, or what is assumed."""
        sigma = self.noise_sigma()
        return sigma if math.isfinite(sigma) else self.transfer.usual_sigma(UNKNOWN_SIGMA)

    def _checked_default(self) -> Checked | None:
        known = self.entries.get(self.default)
        return known.checked if known is not None and known.fault is None else None

    def call_s(self) -> float:
        """A warm call of the default in seconds; 0 before it was checked."""
        known = self._checked_default()
        return known.call_ms / 1e3 if known is not None else 0.0

    def waited_s(self) -> float:
        """The same where it is waited for: the device's time or the host's, whichever is longer."""
        known = self._checked_default()
        return max(known.call_ms / 1e3, known.host_us / 1e6) if known is not None else 0.0

    def sample_s(self, plan: Tunables | None = None) -> float:
        """About what one sample of a plan (the default's) takes: a slow host is waited for first."""
        least_s = self.settings.preset.sample_target_ms / 1e3
        entry = self.entries.get(self.default if plan is None else plan)
        if entry is None or entry.checked is None:
            return least_s
        known = entry.checked
        taken_ms = sample_ms(known.call_ms, known.host_us) if self.settings.asynchronous else known.call_ms
        return max(least_s, taken_ms / 1e3)

    def block_s(self, plans: Iterable[Tunables]) -> float:
        """Seconds that one block of these plans takes; the default's are two, also where it is among them."""
        return self.transfer.pace.factor * self._samples_s(plans)

    def _samples_s(self, plans: Iterable[Tunables]) -> float:
        timed = [plan for plan in plans if plan != self.default]
        return sum(self.sample_s(plan) for plan in (self.default, self.default, *timed))

    def validation_s(self, plan: Tunables | None = None) -> float:
        """About what validating a plan (the default) takes."""
        provers: int = getattr(self.evaluator, "provers", 1)  # processes that share one
        lengths = math.ceil((1 + self.settings.preset.ragged_lengths) / provers)
        return self.transfer.validation_s(self.workload, plan or self.default, self.call_s(), lengths)

    @property
    def lost_s(self) -> float:
        """Seconds that this cell should not pay for alone: crashes, hangs, new workers, loading and compiling."""
        lost: float = getattr(self.evaluator, "lost_s", 0.0)
        return lost + self.transfer.one_off_s

    def timeout_s(self) -> float:
        """Seconds after which a plan counts as hung: never so many that the cell, or the probe, would end with it."""
        affordable_s = max(LEAST_HANG_S, HANG_SHARE * self.deadline.remaining_s())
        return min(self.settings.hang_s, affordable_s) + CALLS_BEFORE_HANG * self.call_s()

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self, entry: Entry, timeout_s: float | None = None) -> bool:
        """Hold a plan against float64, once; whether it may be timed."""
        if entry.checked is None and entry.fault is None:
            default = self._checked_default()
            result = self.evaluator.check(
                self.workload,
                entry.tunables,
                timeout_s=self.timeout_s() if timeout_s is None else timeout_s,
                pace_ms=default.call_ms if default is not None else None,
            )
            if isinstance(result, Fault):
                self.fail(entry, result, "check")
            else:
                entry.checked = result
                self.record.checked(entry)
                self.transfer.first_call(self.workload, entry.tunables, result)
            self._learn(entry, result)
            self.measured += 1
        return entry.fault is None

    def _learn(self, entry: Entry, result: Checked | Fault) -> None:
        """What it says of other plans; a hang or crash that no kernel is to blame for is of two traits together."""
        self.transfer.learn(entry.tunables, result)
        pairs = set(itertools.combinations(sorted(traits_of(entry.tunables), key=str), 2))
        if isinstance(result, Checked):
            self._ran |= pairs
            self._blamed -= pairs
        elif costs_a_worker(result) and not self.transfer.traps.holds(entry.tunables):
            self._blamed |= pairs - self._ran

    def is_trap(self, plan: Tunables) -> bool:
        """Whether it would hang or crash as another did, as far as can be told from what they share."""
        if self.transfer.traps.holds(plan):
            return True
        pairs = itertools.combinations(sorted(traits_of(plan), key=str), 2)
        return bool(self._blamed) and not self._blamed.isdisjoint(pairs)

    def fail(self, entry: Entry, fault: Fault, stage: str) -> None:
        entry.fault = fault
        self.record.failed(entry, fault)
        self.tell(entry, TrialOutcome(fault.kind, stage, message=fault.message))

    def validate(self, plan: Tunables) -> Fault | None:
        """Hold a plan against float64 at ragged lengths of the bucket, once; None when it passed."""
        entry = self.entry(plan)
        if entry.validated is None:
            began = self.deadline.clock.now()
            entry.validated = self.evaluator.prove(self.workload, plan, timeout_s=self.timeout_s())
            self.record.validated(entry)
            if isinstance(entry.validated, Proven):
                call_s = entry.checked.call_ms / 1e3 if entry.checked is not None else 0.0
                self.transfer.validated(self.workload, plan, call_s, self.deadline.clock.now() - began)
            if isinstance(entry.validated, Fault):
                fault = entry.validated
                self.tell(entry, TrialOutcome(fault.kind, "validate", message=fault.message))
        return entry.validated if isinstance(entry.validated, Fault) else None

    def tell(self, entry: Entry, outcome: TrialOutcome) -> None:
        self.trials += 1
        self.measured += 1
        self._listener(entry.tunables, outcome)

    # --- blocks ---------------------------------------------------------------------------------------------------

    def recall(self, entries: Iterable[Entry], blocks: Mapping[int, tuple[float, float | None]]) -> None:
        """Take over what an earlier run measured."""
        for entry in entries:
            self.entries[entry.tunables] = entry
            result = entry.fault or entry.checked
            if result is not None:
                self._learn(entry, result)
        for number, (default_ms, repeated) in sorted(blocks.items()):
            self.keep_block(number, default_ms, repeated)

    def be_patient(self) -> None:
        """Blocks may be thrown away again, in a cell that has so much time left."""
        self._patience_s = PATIENCE * self.deadline.remaining_s()

    def next_block(self) -> int:
        """Blocks count from 1: reading 0 of a trial is that of its check."""
        return max(self.default_ms, default=0) + 1

    def block(self, entries: Sequence[Entry]) -> bool:
        """One paired repetition of every entry; False when the block could not be used and nothing was learned.

        Raises DefaultBroken after DEFAULT_ATTEMPTS blocks without a default. A disturbed block is thrown away and
        the caller repeats it; on a machine where that does not end, blocks count and the machine as loaded.
        """
        clock, samples_s = self.deadline.clock, self._samples_s(entry.tunables for entry in entries)
        began = clock.now()
        number = self.next_block()
        rng = np.random.default_rng((self.settings.seed, self._place, number, self.discarded + self._default_faults))
        timed = [entry for entry in entries if entry.tunables != self.default]
        plans = [self.default, self.default, *(entry.tunables for entry in timed)]
        order: list[Tunables] = [plans[index] for index in rng.permutation(len(plans))]
        block = self.evaluator.block(self.workload, order, timeout_s=self.timeout_s())
        self.transfer.pace.learn(clock.now() - began, samples_s)
        if block.disturbances and not self._accepts(block, clock.now() - began):
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
        # A slow default makes everything else in its block look fast.
        default_log = statistics.settled(logs, self.noise_sigma())
        repeated = logs[0] - logs[1] if len(logs) == 2 else None
        self.keep_block(number, math.exp(default_log), repeated)
        self.record.block(number, math.exp(default_log), repeated)
        for entry in entries:
            if entry.tunables == self.default:
                self._keep(entry, number, 0.0)
            elif entry.tunables in times:
                self._keep(entry, number, self._log_ratio(entry, times[entry.tunables][0], default_log))
        return True

    def keep_block(self, number: int, default_ms: float, repeated: float | None) -> None:
        self.default_ms[number] = default_ms
        if repeated is not None:
            self.repeated.append(repeated)

    def _keep(self, entry: Entry, block: int, log_ratio: float) -> None:
        entry.log_ratios[block] = log_ratio
        self.measured += 1
        self.record.reading(entry, block, log_ratio)

    def _log_ratio(self, entry: Entry, ms: float, default_log: float) -> float:
        mine, other = (statistics.median(e.host_us) for e in (entry, self.entry(self.default)))
        return math.log(self._judged_ms(ms, mine, math.exp(default_log), other)) - default_log

    def _split(
        self, order: Sequence[Tunables], block: Block
    ) -> tuple[dict[Tunables, list[float]], dict[Tunables, Fault]]:
        """Of each plan its times in ms, and its fault."""
        times: dict[Tunables, list[float]] = {}
        faults: dict[Tunables, Fault] = {}
        for plan, result in zip(order, block.results, strict=True):
            if isinstance(result, Sample):
                times.setdefault(plan, []).append(result.ms)
                self.entry(plan).host_us.append(result.host_us)
            else:
                faults[plan] = result
        return times, faults

    def _accepts(self, block: Block, took_s: float) -> bool:
        """Whether a disturbed block counts: not while there is time to repeat it."""
        self.disturbances.extend(block.disturbances)
        if took_s <= self._patience_s:
            self._patience_s -= took_s
            self.discarded += 1
            return False
        self.loaded = True
        return True

    def _handle_faults(self, faults: Mapping[Tunables, Fault], entries: Sequence[Entry]) -> None:
        for entry in entries:
            fault = faults.get(entry.tunables)
            if fault is None:
                continue
            # It ran well when it was checked, so it may have died of someone else's hand, once in a while.
            entry.deaths += 1
            external = fault.kind in ("crash", "timeout") and entry.deaths <= 1 + len(entry.log_ratios) // 5
            if not external:
                self.fail(entry, fault, "time")

    # --- another default --------------------------------------------------------------------------------------------

    def replace_default(self, plan: Tunables) -> None:
        """Pair with another plan from now on: every ratio so far was against one that is gone."""
        if plan == self.default:
            return
        self.default = plan
        self.default_ms.clear()
        for entry in self.entries.values():
            entry.log_ratios.clear()

    # --- numbers ----------------------------------------------------------------------------------------------------

    def _judged_ms(self, ms: float, host_us: float, default_ms: float, default_host_us: float) -> float:
        """What a call counts as: its own time where the host waits for all of it."""
        return judged_ms(ms, host_us, default_ms, default_host_us) if self.settings.asynchronous else ms

    def first_look(self, entry: Entry) -> float | None:
        """log(t / t_default) by the call of its check: unpaired, and good enough to doubt a single reading."""
        mine, other = entry.checked, self._checked_default()
        if mine is None or other is None or entry.tunables == self.default:
            return None
        # A default whose one call was disturbed would make every first look a promise; its blocks tell.
        known_ms = [statistics.median(self.default_ms.values())] if self.default_ms else []
        default_ms = min([other.call_ms, *known_ms])
        return math.log(self._judged_ms(mine.call_ms, mine.host_us, default_ms, other.host_us) / default_ms)

    def launches_too_long(self, entry: Entry) -> bool:
        """Whether it was judged by how long the host takes to launch it, which says nothing of longer calls."""
        mine, other = entry.checked, self._checked_default()
        if mine is None or other is None:
            return False
        return self._judged_ms(mine.call_ms, mine.host_us, other.call_ms, other.host_us) > mine.call_ms

    def median(self, entry: Entry, since: int = 0) -> float:
        """log(t / t_default) from a block on, see ``statistics.settled``; infinite before the first."""
        ratios = [ratio for block, ratio in entry.log_ratios.items() if block >= since]
        return statistics.settled(ratios, self.noise_sigma(), self.first_look(entry)) if ratios else math.inf

    def median_ms(self, entry: Entry, since: int = 0) -> float:
        return statistics.median(
            [self.default_ms[b] * math.exp(ratio) for b, ratio in entry.log_ratios.items() if b >= since]
        )

    def intervals(self, entries: Iterable[Entry], since: int = 0) -> list[Interval]:
        """log(t / t_default) of each from a block on, the misreadings of the default taken out."""
        polished, sigma = self.polished(since), self.noise_sigma()
        return [
            statistics.interval_of(
                polished[entry], seed=self.settings.seed, sigma=sigma, first_look=self.first_look(entry)
            )
            for entry in entries
        ]

    def polished(self, since: int = 0) -> dict[Entry, list[float]]:
        """log(t / t_default) of every timed entry, with the misreadings of the default taken out of each block.

        A default that was slow by chance makes everything in its block look fast. What the other entries of the
        block, known from elsewhere, agree on is that misreading (median polish).
        """
        ratios = {
            entry: {block: ratio for block, ratio in entry.log_ratios.items() if block >= since}
            for entry in self.entries.values()
            if entry.fault is None
        }
        ratios = {entry: by_block for entry, by_block in ratios.items() if by_block}
        medians = {entry: self.median(entry, since) for entry in ratios}
        several: dict[int, list[Entry]] = {block: [] for by_block in ratios.values() for block in by_block}
        for entry, by_block in ratios.items():
            if len(by_block) > 1:
                for block in by_block:
                    several[block].append(entry)
        offsets: dict[int, float] = {}
        for _ in range(POLISHES):
            for block, entries in several.items():
                # The default itself says 0, with two readings behind it.
                offsets[block] = statistics.median([0.0, 0.0, *(ratios[e][block] - medians[e] for e in entries)])
            for entry, by_block in ratios.items():
                if len(by_block) > 1:
                    medians[entry] = statistics.median([r - offsets[b] for b, r in by_block.items()])
        return {entry: [r - offsets[b] for b, r in by_block.items()] for entry, by_block in ratios.items()}

    def difference(self, entry: Entry, other: Entry, since: int = 0) -> list[float]:
        """log(t_entry / t_other) in the blocks that held both."""
        blocks = [block for block in sorted(entry.log_ratios.keys() & other.log_ratios.keys()) if block >= since]
        return [entry.log_ratios[block] - other.log_ratios[block] for block in blocks]
