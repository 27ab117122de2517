"""What a plan must keep to, beside being right."""

from __future__ import annotations

from dataclasses import dataclass

from .evaluator import Checked


@dataclass(frozen=True, slots=True)
class Limits:
    """``peak_bytes`` counts beyond the inputs; ``error`` is the relative one against float64."""

    peak_bytes: int | None = None
    error: float | None = None

    def constraints(self, checked: Checked) -> dict[str, float]:
        """By name, how far over the limit (relative); 0 or less keeps it."""
        broken = {}
        if self.peak_bytes is not None:
            broken["memory"] = checked.peak_bytes / max(self.peak_bytes, 1) - 1.0
        if self.error is not None:
            broken["error"] = checked.error / self.error - 1.0
        return broken

    def keeps(self, checked: Checked) -> bool:
        return all(value <= 0 for value in self.constraints(checked).values())
