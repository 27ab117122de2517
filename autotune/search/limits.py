"""Limits that a plan must keep, beside being right."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from autotune.measure.evaluator import Checked
from ringattn.wording import plural

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """``peak_bytes`` counts beyond the inputs; ``error`` is the relative one against float64."""

    peak_bytes: int | None = None
    error: float | None = None

    def constraints(self, checked: Checked) -> dict[str, float]:
        """Return by name how far over the limit (relative) it is; 0 or less keeps it."""
        broken = {}
        if self.peak_bytes is not None:
            broken["memory"] = checked.peak_bytes / max(self.peak_bytes, 1) - 1.0
        if self.error is not None:
            broken["error"] = checked.error / self.error - 1.0
        return broken

    def keeps(self, checked: Checked) -> bool:
        return all(value <= 0 for value in self.constraints(checked).values())

    def missed(self, checked: Collection[Checked]) -> str:
        """Say in one line that none of these plans keeps to it: each limit, how near the nearest comes, the remedy."""
        limits = []
        if self.peak_bytes is not None:
            mib = math.ceil(min(each.peak_bytes for each in checked) / _MIB)
            remedy = f"give --memory-limit {mib} or a shorter --seq-len"
            limits.append(f"memory limit of {self.peak_bytes / _MIB:g} MiB (the smallest peak is {mib} MiB; {remedy})")
        if self.error is not None:
            error, remedy = min(each.error for each in checked), "give a larger --max-error or a wider --precision"
            limits.append(f"error limit of {self.error:.1e} (the smallest error is {error:.1e}; {remedy})")
        return f"none of {plural(len(checked), 'plan')} keeps the {' and the '.join(limits)}"
