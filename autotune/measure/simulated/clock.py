"""Time that passes only when it is said to."""

from __future__ import annotations


class SimulatedClock:
    """Seconds that pass only when something is said to take time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now += seconds
