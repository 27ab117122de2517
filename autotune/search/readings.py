"""Readings of one cell's plans, and the numbers that are made of them.

Every reading is log(t / t_default) in a block that holds the default too (twice: the two readings give the noise for
nothing), so that drift of the clock and load that lasts longer than a block cancel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autotune import statistics
from autotune.journal.entry import Entry
from autotune.measure.evaluator import Checked, Fault
from autotune.measure.launch_overhead import judged_ms
from autotune.statistics import Interval
from ringattn.workload import Tunables, Workload

from .settings import SearchSettings
from .transfer import Transfer

POLISHES = 3  # rounds of the median polish
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
        self.default_ms: dict[int, float] = {}  # by block
        self.repeated: list[float] = []  # log of one of the default's two readings over the other
        self.loaded = False  # foreign load did not end: what was timed under it counts, with a wider margin
        self.measured = 0  # counts whatever is learned, so that what is worked out of it is worked out once
        self._noise: tuple[int, float] | None = None  # of so many repeated readings

    # --- questions ----------------------------------------------------------------------------------------------

    def entry(self, plan: Tunables) -> Entry:
        """The entry of a plan, made when it is first asked for."""
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
        if self._noise is None or self._noise[0] != len(self.repeated):
            self._noise = len(self.repeated), statistics.noise_floor(self.repeated)
        return self._noise[1]

    def sigma(self) -> float:
        """The same; before it was seen that of other cells, or what is assumed."""
        sigma = self.noise_sigma()
        return sigma if math.isfinite(sigma) else self.transfer.usual_sigma(UNKNOWN_SIGMA)

    def checked_default(self) -> Checked | None:
        known = self.entries.get(self.default)
        return known.checked if known is not None and known.fault is None else None

    def next_block(self) -> int:
        """Blocks count from 1: reading 0 of a trial is that of its check."""
        return max(self.default_ms, default=0) + 1

    def keep_block(self, number: int, default_ms: float, repeated: float | None) -> None:
        self.default_ms[number] = default_ms
        self.measured += 1
        if repeated is not None:
            self.repeated.append(repeated)

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

    def judged_ms_of(self, ms: float, host_us: float, default_ms: float, default_host_us: float) -> float:
        """Return what a call counts as: its own time where the host waits for all of it."""
        return judged_ms(ms, host_us, default_ms, default_host_us) if self.settings.asynchronous else ms

    def first_look(self, entry: Entry) -> float | None:
        """log(t / t_default) by the call of its check: unpaired, and good enough to doubt a single reading."""
        mine, other = entry.checked, self.checked_default()
        if mine is None or other is None or entry.tunables == self.default:
            return None
        # A default whose one call was disturbed would make every first look a promise; its blocks tell.
        known_ms = [statistics.median(self.default_ms.values())] if self.default_ms else []
        default_ms = min([other.call_ms, *known_ms])
        return math.log(self.judged_ms_of(mine.call_ms, mine.host_us, default_ms, other.host_us) / default_ms)

    def launches_too_long(self, entry: Entry) -> bool:
        """Return whether it was judged by how long the host takes to launch it, which says nothing of longer calls."""
        mine, other = entry.checked, self.checked_default()
        if mine is None or other is None:
            return False
        return self.judged_ms_of(mine.call_ms, mine.host_us, other.call_ms, other.host_us) > mine.call_ms

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
