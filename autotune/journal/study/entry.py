"""One plan of a cell's study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.measure.evaluator import Checked, Fault, Proven, Sample
from ringattn.workload import Tunables


@dataclass(frozen=True, slots=True)
class PairedBlock:
    """Samples of one block, by plan; of ``default``, against which the others are held, there are up to two."""

    default: Tunables
    samples: Mapping[Tunables, tuple[Sample, ...]]


@dataclass(slots=True, eq=False)
class Entry:
    """One plan and everything measured of it. ``log_ratios`` maps the number of a block to log(t / t_default)."""

    tunables: Tunables
    checked: Checked | None = None
    fault: Fault | None = None
    validated: Proven | Fault | None = None
    log_ratios: dict[int, float] = field(default_factory=dict)
    deaths: int = 0  # while timed, after it had been checked
    open: bool = False  # its trial is running
    told: bool = False  # a trial of it has ended

    @property
    def failure(self) -> Fault | None:
        """Return how it failed its check, a block, or its validation."""
        return self.fault or (self.validated if isinstance(self.validated, Fault) else None)

    @property
    def is_known(self) -> bool:
        """Return whether it was checked, with or without success."""
        return self.checked is not None or self.fault is not None
