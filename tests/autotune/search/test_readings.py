"""Intervals of a cell's readings hold the truth about as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from machines import plan, workload

from autotune.journal.study.entry import PairedBlock
from autotune.measure.evaluator import Sample
from autotune.search.budget import EFFORTS
from autotune.search.readings import Readings
from autotune.search.settings import SearchSettings
from autotune.search.transfer import Transfer
from ringattn.workload import Pattern

DENSE = workload(pattern=Pattern())
PLANS = [plan(DENSE, forward, backward) for forward in ("quick", "swift") for backward in ("quick", "swift")]
RUNS, BLOCKS, SIGMA = 100, 14, 0.2


@pytest.mark.parametrize("rivals", [3, 4])
def test_intervals_hold_the_truth_whatever_number_of_plans_shares_the_blocks(rivals: int) -> None:
    """All plans take the same time here: what is taken out of a block as its default's misreading must be that."""
    rng = np.random.default_rng(rivals)
    default, *others = PLANS[: rivals + 1]

    def samples(count: int) -> tuple[Sample, ...]:
        return tuple(Sample(math.exp(SIGMA * rng.standard_normal()), 0.0) for _ in range(count))

    held = []
    for seed in range(RUNS):
        readings = Readings(DENSE, default, SearchSettings(EFFORTS["standard"], seed), (), Transfer())
        for number in range(1, BLOCKS + 1):
            read = {default: samples(2)} | {other: samples(1) for other in others}
            readings.keep_block(number, PairedBlock(default, read))
        held += [gain.low <= 0 <= gain.high for gain in readings.intervals(map(readings.entry, others))]
    assert sum(held) >= 0.86 * len(held), sum(held) / len(held)
