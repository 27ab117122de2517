"""Seconds that a cell keeps of its time for its last blocks and for validations."""

from __future__ import annotations

import math

from autotune import statistics
from autotune.search.budget import Deadline
from autotune.search.cell import CellState

from .finalists import FINALISTS

FINAL_WIDTH = 0.015  # half-width (log-ratio) that the re-timing should reach, where the preset's maximum allows
LEAST_RESERVED, RESERVED = 1.5, 2  # times the least number of blocks kept for the final; it goes on while time is left
# What a cell keeps of its time for the validation of its choice, where the probe has time after it. Kernels that work
# out nothing per shape take a second for all their lengths; cuDNN takes 6 to 12 s for a LongNet plan, and a default
# whose validation is pending is validated in what is left of the probe when every cell has been searched.
VALIDATION_KEPT_S = 2.0
VALIDATION_MARGIN = 1.2  # a choice that misses its validation by a hair is lost
MOST_RESERVED = 0.5  # of what is left of a cell


def validation_kept_s(state: CellState, deadline: Deadline | None, count: int) -> float:
    """Return seconds that a cell ending at ``deadline`` keeps for validations: what will not fit after its end."""
    whole_s = VALIDATION_MARGIN * count * state.validation_s()
    after_s = whole_s if deadline is None else state.end.remaining_s() - deadline.remaining_s()
    if deadline is not None and not math.isfinite(state.end.remaining_s()):
        after_s = 0.0  # a cell searched alone
    return min(whole_s, max(VALIDATION_KEPT_S, whole_s - after_s))


def reserve_s(state: CellState, deadline: Deadline | None = None) -> float:
    """Return seconds that the final needs: re-timing, and validating what will be written."""
    preset = state.settings.preset
    needed = statistics.blocks_needed(state.sigma(), FINAL_WIDTH)
    blocks = min(max(needed, LEAST_RESERVED * preset.final_min_blocks), RESERVED * preset.final_min_blocks)
    # All finalists and the default twice in the first blocks; after them mostly the default, the best and one rival.
    samples = (FINALISTS + 1) * preset.final_min_blocks + 4 * (blocks - preset.final_min_blocks)
    unvalidated = any(entry.validated is None for entry in state.timed()) or not state.entries
    whole_s = state.transfer.pace.factor * samples * state.sample_s()
    whole_s += validation_kept_s(state, deadline, 1 + bool(unvalidated and state.settings.prefer == "time"))
    return whole_s
