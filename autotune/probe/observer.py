"""Reports a search to the probe's observer, with the time left after every event."""

from __future__ import annotations

from autotune.measure.evaluator import Clock
from autotune.search.budget import CellNeed, Progress
from autotune.trial_outcome import TrialOutcome
from ringattn.workload import Tunables, Workload, describe

from .request import ProbeObserver


class SearchObserver:
    """Listens to every search. Before ``expect`` the time left is unknown and not reported."""

    def __init__(self, observer: ProbeObserver, clock: Clock) -> None:
        self._observer = observer
        self._clock = clock
        self._progress: Progress | None = None
        self._current: tuple[Workload, float] | None = None  # the cell at work, and since when

    def stage(self, cell: Workload, name: str) -> None:
        self._observer.stage(cell, name)
        self.time_left()

    def trial(self, cell: Workload, tunables: Tunables, outcome: TrialOutcome) -> None:
        self._observer.trial(cell, describe(tunables), outcome)
        self.time_left()

    def expect(self, progress: Progress) -> None:
        self._progress = progress
        self.time_left()

    def add(self, cell: Workload, need: CellNeed) -> None:
        """Expect one more cell."""
        assert self._progress is not None
        self._progress.add(cell, need)

    def begin(self, cell: Workload) -> None:
        self._current = (cell, self._clock.now())

    def end(self, cell: Workload, taken_s: float) -> None:
        assert self._progress is not None
        self._current = None
        self._progress.finish(cell, taken_s)

    def time_left(self) -> None:
        if self._progress is None:
            return
        current, taken_s = None, 0.0
        if self._current is not None:
            current, began = self._current
            taken_s = self._clock.now() - began
        fraction = self._progress.fraction(current, taken_s)
        self._observer.eta(fraction, self._progress.remaining_s(current, taken_s))
