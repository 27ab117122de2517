"""Trials of a cell's study that end without a failure, and what they are told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.journal.study.cell_study import CellStudy
from autotune.journal.study.entry import Entry
from autotune.trial_outcome import TrialOutcome

from .cell import CellState


@dataclass(frozen=True, slots=True)
class Trials:
    """Ends the trials of one cell."""

    state: CellState
    study: CellStudy

    def value(self, entry: Entry) -> float | None:
        """Return the median log-ratio of a plan, before its first block that of its check; None without either."""
        value = self.state.median(entry)
        return value if math.isfinite(value) else self.state.first_look(entry)

    def is_paired(self, entry: Entry) -> bool:
        """Return whether its value is of readings beside the default, or by definition."""
        return entry.tunables == self.state.default or (bool(entry.log_ratios) and entry.fault is None)

    def end(self, entry: Entry, reason: str) -> None:
        """Tell what an open entry came to: its median, or what its check said."""
        state = self.state
        if entry.fault is not None:
            return
        value = 0.0 if entry.tunables == state.default and not entry.log_ratios else self.value(entry)
        if value is None:
            self.study.abandon(entry, reason)
            return
        checked = entry.checked
        assert checked is not None
        constraints = state.settings.limits.constraints(checked)
        told_before = entry.told
        over = next((name for name, by in constraints.items() if by > 0), None)
        self.study.complete(entry, value, constraints, reason, paired=over is not None or self.is_paired(entry))
        if told_before:  # these are further readings of it
            return
        state.tell(
            entry,
            TrialOutcome(
                "over-memory" if over == "memory" else "over-error" if over == "error" else "ok",
                "search",
                median_ms=state.median_ms(entry) if entry.log_ratios else checked.call_ms,
                default_ratio=math.exp(value),
                error=checked.error,
                peak_bytes=checked.peak_bytes,
                message=reason,
            ),
        )

    def end_all(self) -> None:
        """End every trial that is running."""
        for entry in list(self.state.entries.values()):
            if entry.open:
                self.end(entry, "stood to the end")
