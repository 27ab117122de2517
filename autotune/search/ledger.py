"""What one cell knows of its candidates and of the machine around them: every stage adds to it, and plans with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autotune import statistics
from autotune.measure.evaluator import Checked, Fault, Interference, Proven
from autotune.measure.launch_overhead import judged_ms, sample_ms
from ringattn.workload import Tunables

PATIENCE = 0.15  # of a cell's time may go into blocks thrown away for foreign load; then the machine counts as loaded
BLOCK_PACE = 1.15  # times its samples a block takes, until it is known: random order, flushes, messages, the record
LONGEST_PACE = 4.0  # a block that took longer was held up
LATEST_BLOCK = 0.2  # weight of the latest block in how long they take


@dataclass(slots=True)
class Pace:
    """Times its samples a block takes; one for all cells of a probe, as all have the same machine around them."""

    factor: float = BLOCK_PACE

    def learn(self, taken_s: float, samples_s: float) -> None:
        self.factor += LATEST_BLOCK * (min(taken_s / samples_s, LONGEST_PACE) - self.factor)


@dataclass(slots=True)
class Ledger:
    """One for all stages of a cell, whose arenas write in it."""

    checked: dict[Tunables, Checked | Fault] = field(default_factory=dict)
    proven: dict[Tunables, Proven | Fault] = field(default_factory=dict)
    repeated_default: list[float] = field(default_factory=list)  # log of one default reading over the other
    default_ms: list[float] = field(default_factory=list)  # of every block
    deaths: dict[Tunables, int] = field(default_factory=dict)  # while timed, after it had been checked
    disturbances: list[Interference] = field(default_factory=list)
    discarded: int = 0
    patience_s: float = 0.0  # left for blocks that are thrown away
    loaded: bool = False  # foreign load did not end: what was timed under it counts, with a wider margin
    asynchronous: bool = False  # the device works while the host goes on, and is timed with a head start
    host_us: dict[Tunables, list[float]] = field(default_factory=dict)  # of every block
    pace: Pace = field(default_factory=Pace)

    def be_patient(self, cell_s: float) -> None:
        """Blocks may be thrown away again, in a cell that has so much time left."""
        self.patience_s = PATIENCE * cell_s

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
