"""Seconds that the workers of a search have used, which each of them counts while it works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from autotune.journal.attributes import typed

from .lease import RUNS, Worker

_USED = "used_s"  # of a worker
_COUNTED_EVERY_S = 5.0


class UsedSeconds:
    """Seconds of a worker and of the others. Of one that was killed the last few are missing."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._elapsed_s: Callable[[], float] | None = None  # while they are counted
        self._counted_s = 0.0

    def of_others(self, since: int | None = None) -> float:
        """Return the seconds of the others of this run, or of all workers from the number ``since`` on."""
        used: list[float] = [
            typed(value, float, f"study {RUNS!r}") for value in self._worker.noted(_USED, own=False, since=since)
        ]
        return sum(used)

    @contextlib.contextmanager
    def counting(self, elapsed_s: Callable[[], float]) -> Iterator[None]:
        """Count the seconds of this worker until the block is left."""
        self._elapsed_s = elapsed_s
        try:
            yield
        finally:
            self.count()
            self._elapsed_s = None

    def count(self, *, often: bool = False) -> None:
        """Count the seconds up to now; when called ``often``, from time to time."""
        if self._elapsed_s is None:
            return
        now_s = self._elapsed_s()
        if not often or now_s - self._counted_s >= _COUNTED_EVERY_S:
            self._counted_s = now_s
            self._worker.note(_USED, round(now_s, 1))
