"""Readings of one cell's plans, and the numbers that are made of them.

Every reading is log(t / t_default) in a block that holds the default too (twice: the two readings give the noise for
nothing), so that drift of the clock and load that lasts longer than a block cancel. t is what a program waits for,
which depends on how it launches: of both ways there are readings, made of the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune import statistics
from autotune.journal.study.entry import Entry, PairedBlock
from autotune.measure.evaluator import Checked, Fault, Sample
from autotune.measure.launch_overhead import waited_ms
from autotune.statistics import Interval
from ringattn.planning.preference import Launch
from ringattn.workload import Tunables, Workload

from .settings import SearchSettings
from .transfer import Transfer

POLISHES = 3  # rounds of the median polish
# That a block was not misread, as its default says: it has two readings, and all plans are held against it. Said twice,
# intervals of 95 % held the truth for 79 % of plans in blocks of three beside the default, said three times for 88 %.
DEFAULT_SAYS = (0.0, 0.0, 0.0)
UNKNOWN_SIGMA = 0.05  # noise assumed before any was seen


class Readings:
    """Plans, and what was read of each."""

    def __init__(
        self,
        workload: Workload,
        default: Tunables,
        settings: SearchSettings,
        main_dtypes: Sequence[str],
        transfer: Transfer,
    ) -> None:
        """``main_dtypes`` may win (all, where there are none); others compete for ``auto`` only."""
        self.workload = workload
        self.default = default
        self.settings = settings
        self.main_dtypes = frozenset(main_dtypes)
        self.transfer = transfer
        self.entries: dict[Tunables, Entry] = {}
        self.blocks: dict[int, PairedBlock] = {}
        self.default_ms: dict[int, float] = {}  # by block
        self._usual_default_ms = math.inf  # their median; infinite where there are none
        self.repeated: list[float] = []  # log of one of the default's two readings over the other
        self.loaded = False  # foreign load did not end: what was timed under it counts, with a wider margin
        self.measured = 0  # counts whatever is learned, so that what is worked out of it is worked out once
        self._noise: tuple[int, float] | None = None  # of so many repeated readings
        self._other: Readings | None = None  # of the other way to launch

    # --- questions ----------------------------------------------------------------------------------------------

    def entry(self, plan: Tunables) -> Entry:
        """Return the entry of a plan, made when it is first asked for."""
        if plan not in self.entries:
            self.entries[plan] = Entry(plan)
        return self.entries[plan]

    def knows(self, plan: Tunables) -> bool:
        """Return whether the plan was checked, with or without success."""
        entry = self.entries.get(plan)
        return entry is not None and entry.is_known

    def is_main(self, plan: Tunables) -> bool:
        return not self.main_dtypes or plan.dtype in self.main_dtypes

    def keeps_limits(self, entry: Entry) -> bool:
        return entry.checked is not None and self.settings.limits.keeps(entry.checked)

    def may_be_chosen(self, entry: Entry) -> bool:
        """Return whether it is right as far as is known, within the limits, and of a dtype that may win."""
        plan = entry.tunables
        return self.suits(plan) and self.is_main(plan) and self.keeps_limits(entry) and entry.failure is None

    def suits(self, plan: Tunables) -> bool:
        """Return whether it is a plan of its own: a graph steps aside inside another capture."""
        return self.settings.launch == "eager" or plan.launch == "eager"

    def failures(self) -> dict[Tunables, Fault]:
        return {plan: entry.failure for plan, entry in self.entries.items() if entry.failure is not None}

    def timed(self) -> list[Entry]:
        """Return entries with readings that did not fail, the default aside."""
        return [
            entry
            for entry in self.entries.values()
            if entry.log_ratios and entry.failure is None and entry.tunables != self.default
        ]

    def is_noisy(self, bound: float) -> bool:
        return self.noise_sigma() > bound or self.loaded

    def noise_sigma(self) -> float:
        """Return the standard deviation of one paired log-ratio; infinite until two blocks were seen."""
        if self._noise is None or self._noise[0] != len(self.repeated):
            self._noise = len(self.repeated), statistics.noise_floor(self.repeated)
        return self._noise[1]

    def sigma(self) -> float:
        """Return that deviation; before it was seen that of other cells, or what is assumed."""
        sigma = self.noise_sigma()
        return sigma if math.isfinite(sigma) else self.transfer.usual_sigma(UNKNOWN_SIGMA)

    def checked_default(self) -> Checked | None:
        known = self.entries.get(self.default)
        return known.checked if known is not None and known.fault is None else None

    def next_block(self) -> int:
        """Return the number of the next block, from 1: reading 0 of a trial is that of its check."""
        return max(self.default_ms, default=0) + 1

    def keep_block(self, number: int, block: PairedBlock) -> None:
        """Take the samples of a block; of a default that ran twice both say how noisy it is here."""
        logs = [math.log(self._waited_ms(sample)) for sample in block.samples[block.default]]
        # A slow default makes everything else in its block look fast.
        default_log = statistics.settled(logs, self.noise_sigma())
        self.blocks[number] = block
        self.default_ms[number] = math.exp(default_log)
        self._usual_default_ms = statistics.median(self.default_ms.values())
        self.measured += 1
        if len(logs) == 2:
            self.repeated.append(logs[0] - logs[1])
        for plan, samples in block.samples.items():
            log = default_log if plan == block.default else math.log(self._waited_ms(samples[0]))
            self.entry(plan).log_ratios[number] = log - default_log

    def under(self, launch: Launch) -> Readings:
        """Return the same samples as a program that launches so waits for them; itself where there is one way."""
        if launch == self.settings.launch or not self.settings.asynchronous:
            return self
        if self._other is None:
            settings = replace(self.settings, launch=launch)
            self._other = Readings(self.workload, self.default, settings, tuple(self.main_dtypes), self.transfer)
        other = self._other
        other.replace_default(self.default)
        other.loaded = self.loaded
        for plan, entry in self.entries.items():
            there = other.entry(plan)
            there.checked, there.fault, there.validated = entry.checked, entry.fault, entry.validated
        for number in sorted(self.blocks.keys() - other.blocks.keys()):
            other.keep_block(number, self.blocks[number])
        return other

    def ways(self) -> tuple[Readings, ...]:
        """Return the readings of every way to launch, those that are searched by first."""
        found = (self.under("eager"), self.under("captured"))
        return tuple(dict.fromkeys((self, *found)))

    # --- another default --------------------------------------------------------------------------------------------

    def replace_default(self, plan: Tunables) -> None:
        """Pair with another plan from now on: every ratio so far was against one that is gone."""
        if plan == self.default:
            return
        self.default = plan
        self.blocks.clear()
        self.default_ms.clear()
        self._usual_default_ms = math.inf
        for entry in self.entries.values():
            entry.log_ratios.clear()

    # --- numbers ----------------------------------------------------------------------------------------------------

    def _waited_ms(self, sample: Sample) -> float:
        """Return what a call counts as: its own time where the host waits for all of it."""
        return waited_ms(sample.ms, sample.host_us, self.settings.launch) if self.settings.asynchronous else sample.ms

    def _looked_ms(self, checked: Checked) -> float:
        if not self.settings.asynchronous:
            return checked.call_ms
        return waited_ms(checked.call_ms, checked.host_us, self.settings.launch)

    def first_look(self, entry: Entry) -> float | None:
        """Return log(t / t_default) by the call of its check: unpaired, and good enough to doubt a single reading."""
        mine, other = entry.checked, self.checked_default()
        if mine is None or other is None or entry.tunables == self.default:
            return None
        # A default whose one call was disturbed would make every first look a promise; its blocks tell.
        return math.log(self._looked_ms(mine) / min(self._looked_ms(other), self._usual_default_ms))

    def median(self, entry: Entry, since: int = 0) -> float:
        """Return log(t / t_default) from a block on, see ``statistics.settled``; infinite before the first."""
        ratios = [ratio for block, ratio in entry.log_ratios.items() if block >= since]
        if not ratios:
            return math.inf
        look = self.first_look(entry) if len(ratios) == 1 else None  # it counts beside a single reading alone
        return statistics.settled(ratios, self.noise_sigma(), look)

    def typical(self, entry: Entry, since: int = 0) -> Sample:
        """Return the median times of device and host in the blocks that held a plan, from one on."""
        samples = [s for b in entry.log_ratios if b >= since for s in self.blocks[b].samples[entry.tunables]]
        return Sample(statistics.median([s.ms for s in samples]), statistics.median([s.host_us for s in samples]))

    def median_ms(self, entry: Entry, since: int = 0) -> float:
        return self._waited_ms(self.typical(entry, since))

    def intervals(self, entries: Iterable[Entry], since: int = 0) -> list[Interval]:
        """Return log(t / t_default) of each from a block on, the misreadings of the default taken out."""
        polished, sigma = self.polished(since), self.noise_sigma()
        return [
            statistics.interval_of(
                polished[entry], seed=self.settings.seed, sigma=sigma, first_look=self.first_look(entry)
            )
            for entry in entries
        ]

    def polished(self, since: int = 0) -> dict[Entry, list[float]]:
        """Return log(t / t_default) of every timed entry, misreadings of the default taken out of each block.

        A default that was slow by chance makes everything in its block look fast. What the other entries of the
        block, known from elsewhere, agree on is that misreading (median polish).
        """
        ratios = {
            entry: {block: ratio for block, ratio in entry.log_ratios.items() if block >= since}
            for plan, entry in self.entries.items()
            if entry.fault is None and plan != self.default
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
                residuals = (ratios[entry][block] - medians[entry] for entry in entries)
                offsets[block] = statistics.median([*DEFAULT_SAYS, *residuals])
            for entry, by_block in ratios.items():
                if len(by_block) > 1:
                    medians[entry] = statistics.median([r - offsets[b] for b, r in by_block.items()])
        return {entry: [r - offsets[b] for b, r in by_block.items()] for entry, by_block in ratios.items()}

    def difference(self, entry: Entry, other: Entry, since: int = 0) -> list[float]:
        """Return log(t_entry / t_other) in the blocks that held both."""
        blocks = [block for block in sorted(entry.log_ratios.keys() & other.log_ratios.keys()) if block >= since]
        return [entry.log_ratios[block] - other.log_ratios[block] for block in blocks]
