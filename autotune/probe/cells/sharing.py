"""Cells as the workers of one search share them: each is one worker's at a time, and its time is everybody's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from autotune.journal.sharing.cell_status import CellStatus
from autotune.journal.sharing.lease import POLL_S
from autotune.journal.store import Store
from autotune.measure.evaluator import Clock
from autotune.search.budget import Budget, CellNeed
from ringattn.workload import Workload

from .search_outcome import outcome_of

REFRESHED_EVERY_S = 1.0


class SharedBudget(Budget):
    """Seconds of all workers together: what the others of this run have used is gone for this one, too.

    Of a worker alone it is a ``Budget``.
    """

    def __init__(self, store: Store, total_s: float, clock: Clock, **limits: float) -> None:
        super().__init__(total_s, clock, **limits)
        self._store = store
        self._idle_s = 0.0
        self._others_s, self._read_at = 0.0, -REFRESHED_EVERY_S

    def here_s(self) -> float:
        """Return the seconds since this worker began."""
        return super().elapsed_s()

    def own_s(self) -> float:
        """Return the seconds that this worker has used, without those in which it waited for others."""
        return self.here_s() - self._idle_s

    def elapsed_s(self) -> float:
        return self.own_s() + self._others_s

    def refresh(self) -> None:
        """Read anew what the others have used."""
        if self._store.shared:
            self._others_s = self._store.seconds.of_others()

    def idle(self) -> None:
        """Wait a little for other workers."""
        began_s = self.here_s()
        time.sleep(POLL_S)
        self._idle_s += self.here_s() - began_s
        self._store.sync()
        self.refresh()


class SharedCells:
    """Leases on the cells of a search and their states. A worker alone gets every lease."""

    def __init__(self, store: Store, budget: SharedBudget) -> None:
        self._store, self._worker, self._budget = store, store.worker, budget

    @property
    def run(self) -> int:
        """Return the number of this run of the search."""
        return self._worker.run

    def take(self, cell: Workload, *, reads: bool = False) -> bool:
        """Take the lease on a cell, with the time that is left by then; False where another worker has it.

        Also where the search has come to its end meanwhile, unless it only ``reads``.
        """
        if not self._worker.take(str(cell), reads=reads):
            return False
        if not reads and outcome_of(self._store) is not None:
            self._worker.free(str(cell))
            return False
        self._budget.refresh()
        return True

    def free(self, cell: Workload) -> None:
        """Give the lease back."""
        self._store.seconds.count()
        self._worker.free(str(cell))

    @contextmanager
    def lease(self, cell: Workload, *, reads: bool = False) -> Iterator[bool]:
        """Hold a cell until the block is left, if it is to be had, which is told; ``reads``: nothing is changed."""
        taken = self.take(cell, reads=reads)
        try:
            yield taken
        finally:
            if taken:
                self.free(cell)

    @contextmanager
    def lease_again(self, cell: Workload) -> Iterator[bool]:
        """Hold a cell as ``lease`` does, if nobody else has changed it since this worker held it."""
        with self.lease(cell) as taken:
            yield taken and self.untouched(cell)

    def untouched(self, cell: Workload) -> bool:
        """Return whether nobody else has worked on a cell since this worker freed it; the lease is held."""
        return self._worker.untouched(str(cell))

    def status(self, cell: Workload) -> CellStatus | None:
        """Return the state of a cell, None where no worker has met it."""
        return self._store.statuses().get(str(cell))

    def over(self) -> set[str]:
        """Return the names of the cells on which nobody works any more."""
        ended = outcome_of(self._store) is not None
        return {
            name
            for name, status in self._store.statuses().items()
            if status.over_in(self.run) or (ended and status.state == "left")
        }

    def settled(self) -> dict[str, CellNeed]:
        """Return what a search of the cells would take whose defaults a worker of this run knows, by name."""
        statuses = self._store.statuses().items()
        return {name: CellNeed(*status.need_s) for name, status in statuses if status.settled_in(self.run)}

    def is_settled(self, cell: Workload) -> bool:
        """Return whether another worker of this run knows the default of a cell, or has finished with it."""
        status = self.status(cell) if self._store.shared else None
        return status is not None and (status.settled_in(self.run) or status.over_in(self.run))

    def meet(self, cell: Workload, plans_before: Callable[[], tuple[Any, Any]]) -> CellStatus:
        """Return the state of a cell whose lease is held; the first worker that meets it says its earlier plans."""
        status = self.status(cell)
        if status is None:
            status = CellStatus(*plans_before())
            self._store.set_status(cell, status)
        return status

    def settle(self, cell: Workload, need: CellNeed) -> None:
        """Say what a search of a cell would take."""
        need_s = (need.base_s, need.improve_s, need.explore_s)
        self._set(cell, state="settled", need_s=need_s)

    def leave(self, cell: Workload) -> None:
        """Say that a cell gets no result in this run."""
        self._set(cell, state="left")

    def finish(self, cell: Workload) -> None:
        """Say that a cell has its result."""
        status = self.status(cell)
        if status is None or status.state != "done":
            self._set(cell, state="done")

    def _set(self, cell: Workload, **changes: Any) -> None:
        status = self.status(cell)
        assert status is not None, f"{cell} was never met"
        self._store.set_status(cell, replace(status, run=self.run, **changes))
