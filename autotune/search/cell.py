"""The state of one cell's search: its plans, every reading of them, and the paired blocks that make the readings.

One object, which the loop asks and tells. Every reading is log(t / t_default) in a block that holds the default too
(twice: the two readings give the noise for nothing); disturbed blocks are thrown away and repeated.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from autotune.journal.study.entry import Entry, PairedBlock
from autotune.measure.evaluator import Block, Checked, Evaluator, Fault, Interference, Proven, Sample
from autotune.measure.launch_overhead import sample_ms
from autotune.trial_outcome import TrialOutcome
from ringattn.workload import Tunables, Workload

from .budget import Deadline
from .compilers import judged
from .readings import Readings
from .settings import SearchSettings
from .suspects import GIVEN_UP, Suspects
from .transfer import Transfer, costs_a_worker

CALLS_BEFORE_HANG = 15  # a call may take this many times the default's before it counts as hung
HANG_SHARE = 0.2  # of the time that is left, at most, goes into waiting for one plan
LEAST_HANG_S = 2.5
# Of what starting a worker takes, which follows: a busy CPU gave a plan up after 4.4 s, and took 25 for the new worker.
HANG_OF_START = 0.5
PATIENCE = 0.15  # of a cell's time may go into blocks thrown away for foreign load; then the machine counts as loaded
DEFAULT_ATTEMPTS = 2  # blocks in a row whose default failed, before it counts as broken

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

    def block(self, number: int, block: PairedBlock) -> None: ...

    def reading(self, entry: Entry, block: int, log_ratio: float) -> None: ...

    def under_load(self) -> None: ...


def is_a_time(ms: float) -> bool:
    return math.isfinite(ms) and ms > 1e-9  # a picosecond: less is a clock that does not run


def no_time(ms: float) -> Fault:
    return Fault("error", f"took {ms:g} ms, which is no time of a call")


class NoRecord:
    """Keeps nothing: a verification writes no study."""

    def checked(self, entry: Entry) -> None: ...

    def failed(self, entry: Entry, fault: Fault) -> None: ...

    def validated(self, entry: Entry) -> None: ...

    def block(self, number: int, block: PairedBlock) -> None: ...

    def reading(self, entry: Entry, block: int, log_ratio: float) -> None: ...

    def under_load(self) -> None: ...


class CellState(Readings):
    """State of one cell, between an evaluator and a record."""

    def __init__(
        self,
        workload: Workload,
        default: Tunables,
        evaluator: Evaluator,
        settings: SearchSettings,
        listener: TrialListener,
        end: Deadline,
        *,
        record: Record | None = None,
        main_dtypes: Sequence[str] = (),
        transfer: Transfer | None = None,
    ) -> None:
        """``main_dtypes``: see Readings."""
        super().__init__(workload, default, settings, main_dtypes, transfer if transfer is not None else Transfer())
        self.evaluator = evaluator
        self.record = record if record is not None else NoRecord()
        self.end = end  # of the probe: a cell may run into the time of others, but not beyond that
        self.deadline = end  # of whatever is measured now
        self.disturbances: list[Interference] = []
        self.discarded = 0
        self.trials = 0
        self.checks, self.validations = Suspects(), Suspects()
        self.validations.clear(default)
        self.note = ""
        self.owes_validation = False  # of the default, which stays, at other lengths
        self.standing: Sequence[Tunables] = ()  # what served the cell before this probe
        self.seeds: Sequence[Tunables] = ()  # winners of cells nearby
        self.torch: Tunables | None = None  # the plan to which torch dispatches, where that is in the space
        self.undecided_s = 0.0  # beyond its time, that a final may take which noise keeps from an answer
        self._listener = listener
        self._patience_s = 0.0  # left for blocks that are thrown away
        self._default_faults = 0
        self._place = zlib.crc32(str(workload).encode())

    # --- time -----------------------------------------------------------------------------------------------------

    def call_s(self) -> float:
        """Return a warm call of the default in seconds; 0 before it was checked."""
        known = self.checked_default()
        return known.call_ms / 1e3 if known is not None else 0.0

    def waited_s(self) -> float:
        """Return the seconds that such a call is waited for: the device's time or the host's, the longer one."""
        known = self.checked_default()
        return max(known.call_ms / 1e3, known.host_us / 1e6) if known is not None else 0.0

    def sample_s(self, plan: Tunables | None = None) -> float:
        """Estimate what one sample of a plan (the default's) takes: a slow host is waited for first."""
        least_s = self.settings.preset.sample_target_ms / 1e3
        entry = self.entries.get(self.default if plan is None else plan)
        if entry is None or entry.checked is None:
            return least_s
        known = entry.checked
        taken_ms = sample_ms(known.call_ms, known.host_us) if self.settings.asynchronous else known.call_ms
        return max(least_s, taken_ms / 1e3)

    def block_s(self, plans: Iterable[Tunables]) -> float:
        """Return seconds that one block of these plans takes; the default's are two, also where it is among them."""
        return self.transfer.pace.factor * self._samples_s(plans)

    def _samples_s(self, plans: Iterable[Tunables]) -> float:
        timed = [plan for plan in plans if plan != self.default]
        return sum(self.sample_s(plan) for plan in (self.default, self.default, *timed))

    def validation_s(self, plan: Tunables | None = None) -> float:
        """Estimate what validating the default takes, or ``plan`` if its kernels were validated here already."""
        validation_workers: int = getattr(self.evaluator, "validation_workers", 1)  # processes that share one
        lengths = math.ceil((1 + self.settings.preset.ragged_lengths) / validation_workers)
        compiled = plan is not None and self.transfer.has_validated(self.workload, plan)
        known = plan if plan is not None and compiled else self.default
        references: Mapping[Workload, float] = getattr(self.evaluator, "reference_s", {})
        reference_s = references.get(self.workload, 0.0)
        return self.transfer.validation_s(self.workload, known, self.call_s(), lengths, reference_s)

    @property
    def lost_s(self) -> float:
        """Seconds that this cell should not pay for alone: crashes, hangs, new workers, loading and compiling."""
        lost: float = getattr(self.evaluator, "lost_s", 0.0)
        return lost + self.transfer.one_off_s

    def timeout_s(self, first: Tunables | None = None) -> float:
        """Return seconds after which a plan counts as hung: fewer than the cell, or the probe, has left.

        The first call of a plan, ``first``, may have to compile, which has a limit of its own.
        """
        affordable_s = max(LEAST_HANG_S, HANG_SHARE * self.deadline.remaining_s())
        start_s: float = getattr(self.evaluator, "start_s", 0.0)
        hang_s = max(min(self.settings.hang_s, affordable_s), HANG_OF_START * start_s)
        hang_s += CALLS_BEFORE_HANG * self.call_s()
        return hang_s if first is None else max(hang_s, self._compile_limit_s(first))

    def _compile_limit_s(self, plan: Tunables) -> float:
        return self.transfer.compilers.limit_s(self.workload, plan, self.end.remaining_s())

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self, entry: Entry, timeout_s: float | None = None) -> bool:
        """Hold a plan against float64, once; whether it may be timed."""
        if entry.checked is None and entry.fault is None:
            default = self.checked_default()
            may_compile = self._compile_limit_s(entry.tunables) > 0
            limit_s = self.timeout_s(entry.tunables) if timeout_s is None else timeout_s
            result = self.evaluator.check(
                self.workload,
                entry.tunables,
                timeout_s=limit_s,
                pace_ms=default.call_ms if default is not None else None,
            )
            if isinstance(result, Fault):
                result = judged(result, limit_s, may_compile=may_compile)
            else:
                self.transfer.compilers.ran(self.workload, entry.tunables)
            if isinstance(result, Checked) and not is_a_time(result.call_ms):
                result = no_time(result.call_ms)
            if isinstance(result, Fault):
                self.fail(entry, result, "check")
            else:
                entry.checked = result
                self.record.checked(entry)
                self.transfer.first_call(self.workload, entry.tunables, result)
            self._learn(entry, result)
        return entry.fault is None

    def _learn(self, entry: Entry, result: Checked | Fault) -> None:
        """Note what it says of other plans, here and in other cells.

        A standing plan comes before any that has one new kernel, so that nobody knows what one is lost by; but a
        default is not waited for in every cell, whether it stood or not.
        """
        stood = entry.tunables in self.standing and entry.tunables != self.default
        if isinstance(result, Checked) or not stood or not costs_a_worker(result):
            self.transfer.learn(entry.tunables, result)
        if isinstance(result, Checked):
            self.checks.clear(entry.tunables)
        elif not result.ended_from_outside:
            self.checks.blame(entry.tunables, result.direction)

    def is_trap(self, plan: Tunables) -> bool:
        """Return whether it would likely fail its check as others did."""
        return self.transfer.traps.holds(plan) or self.checks.odds(plan) < GIVEN_UP

    def fail(self, entry: Entry, fault: Fault, stage: str) -> None:
        entry.fault = fault
        self.measured += 1
        self.record.failed(entry, fault)
        self.tell(entry, TrialOutcome(fault.kind, stage, message=fault.message))

    def validate(self, plan: Tunables) -> Fault | None:
        """Hold a plan against float64 at ragged lengths of the bucket, once; None when it passed."""
        entry = self.entry(plan)
        if entry.validated is None:
            began = self.deadline.clock.now()
            compiled = self.transfer.has_validated(self.workload, plan)
            limit_s = self.timeout_s() if compiled else self.timeout_s(plan)
            entry.validated = self.evaluator.validate(self.workload, plan, timeout_s=limit_s)
            self.record.validated(entry)
            self.measured += 1
            self._learn_validation(entry)
            if isinstance(entry.validated, Proven):
                call_s = entry.checked.call_ms / 1e3 if entry.checked is not None else 0.0
                self.transfer.validated(self.workload, plan, call_s, self.deadline.clock.now() - began)
            if isinstance(entry.validated, Fault):
                fault = entry.validated
                self.tell(entry, TrialOutcome(fault.kind, "validate", message=fault.message))
        return entry.validated if isinstance(entry.validated, Fault) else None

    def _learn_validation(self, entry: Entry) -> None:
        if isinstance(entry.validated, Proven):
            self.validations.clear(entry.tunables)
        elif entry.tunables == self.default:  # which was presumed to be right
            self.validations = Suspects()
            for other in self.entries.values():
                if isinstance(other.validated, Proven):
                    self.validations.clear(other.tunables)
            self.validations.blame(entry.tunables)
        else:
            self.validations.blame(entry.tunables)

    def hope(self, plan: Tunables, value: float) -> float:
        """Return what is to be had of a plan: a gain (below 0) counts as far as it is likely to pass validation."""
        return value * self.validations.odds(plan) if value < 0 else value

    def tell(self, entry: Entry, outcome: TrialOutcome) -> None:
        self.trials += 1
        self._listener(entry.tunables, outcome)

    # --- blocks ---------------------------------------------------------------------------------------------------

    def recall(
        self, entries: Iterable[Entry], blocks: Mapping[int, PairedBlock], default: Tunables, loaded: bool
    ) -> None:
        """Take over what an earlier run measured; ``default`` is what it paired with at its end."""
        self.loaded = loaded
        for entry in entries:
            self.entries[entry.tunables] = entry
            result = entry.fault or entry.checked
            if result is not None:
                self._learn(entry, result)
            if entry.validated is not None:
                self._learn_validation(entry)
        for number, block in sorted(blocks.items()):
            self.replace_default(block.default)
            self.keep_block(number, block)
        self.replace_default(default)

    def be_patient(self, left_s: float) -> None:
        """Allow blocks to be thrown away again, in a cell that has so much time left."""
        self._patience_s = PATIENCE * left_s

    def block(self, entries: Sequence[Entry]) -> bool:
        """Time a paired repetition of every entry; False when the block could not be used and nothing was learned.

        Raises DefaultBroken after DEFAULT_ATTEMPTS blocks without a default. A disturbed block is thrown away and
        the caller repeats it; on a machine where that does not end, blocks count and the machine as loaded.
        """
        assert len(set(entries)) == len(entries), f"a plan twice in one block: {entries}"
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
        samples, faults = self._split(order, block)
        self._handle_faults(faults, timed)
        if self.default not in samples:
            self._default_faults += 1
            fault = faults.get(self.default, Fault("error", "gave no time"))
            if self._default_faults >= DEFAULT_ATTEMPTS:
                raise DefaultBroken(fault)
            return False
        self._default_faults = 0
        paired = PairedBlock(self.default, samples)
        self.keep_block(number, paired)
        self.record.block(number, paired)
        for entry in entries:
            if number in entry.log_ratios:
                self.record.reading(entry, number, entry.log_ratios[number])
        return True

    def _split(
        self, order: Sequence[Tunables], block: Block
    ) -> tuple[dict[Tunables, tuple[Sample, ...]], dict[Tunables, Fault]]:
        """Return the samples of each plan, and its fault."""
        samples: dict[Tunables, tuple[Sample, ...]] = {}
        faults: dict[Tunables, Fault] = {}
        for plan, result in zip(order, block.results, strict=True):
            if isinstance(result, Sample) and not is_a_time(result.ms):
                faults[plan] = no_time(result.ms)
            elif isinstance(result, Sample):
                samples[plan] = (*samples.get(plan, ()), result)
            else:
                faults[plan] = result
        return samples, faults

    def _accepts(self, block: Block, took_s: float) -> bool:
        """Return whether a disturbed block counts: not while there is time to repeat it."""
        self.disturbances.extend(block.disturbances)
        if took_s <= self._patience_s:
            self._patience_s -= took_s
            self.discarded += 1
            return False
        if not self.loaded:
            self.loaded = True
            self.record.under_load()
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
