"""Time that passes only when something is said to take it, and while the tuner itself works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class SimulatedClock:
    """Seconds that pass when something is said to take time.

    ``own_s`` counts the seconds that this process has worked, such as ``time.process_time``: what passes there is
    charged too, except inside ``uncharged``, where the simulation works and not the tuner.
    """

    def __init__(self, start_s: float = 0.0, own_s: Callable[[], float] = lambda: 0.0) -> None:
        self._now = start_s
        self._own_s = own_s
        self._charged_to = own_s()
        self._depth = 0  # of nested uncharged parts
        self.charged_s = 0.0  # of the tuner's own work

    def now(self) -> float:
        self._charge()
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now += seconds

    @contextlib.contextmanager
    def uncharged(self) -> Iterator[None]:
        """Leave out the work of the block."""
        self._charge()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._charged_to = self._own_s()

    def _charge(self) -> None:
        if self._depth:
            return
        own_s = self._own_s()
        self.charged_s += own_s - self._charged_to
        self._now += own_s - self._charged_to
        self._charged_to = own_s
