"""What is believed of many noisy readings, and what an ascent makes of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from machines import far_from, invented, plan, workload

from autotune.model import AdditiveModel, changes_between
from autotune.space import build_space, decode
from ringattn.workload import Tunables

CELL = workload()
DEFAULT = plan(CELL)
SPACE = build_space(CELL, invented(), DEFAULT, ("bf16",))
TARGET = decode(
    CELL,
    {name: values[-1] for name, values in SPACE.knobs.items()} | {"checkpoint": "full", "window_tokens": 2048},
)


def timed(count: int, sigma: float, seed: int = 0) -> dict[Tunables, tuple[float, int]]:
    """Random plans of an additive machine, a reading each."""
    rng = np.random.default_rng(seed)
    truth = far_from(CELL, TARGET, per_knob=0.05)
    found = {DEFAULT: (0.0, 9)}
    while len(found) < count:
        assignment = {name: values[rng.integers(len(values))] for name, values in SPACE.knobs.items()}
        tunables = decode(CELL, assignment)
        ratio = truth(CELL, tunables) - truth(CELL, DEFAULT)
        found[tunables] = (ratio + rng.normal(0, sigma), 1)
    return found


def test_changes_are_the_knobs_that_differ_with_their_values() -> None:
    other = plan(CELL, "quick", "swift", checkpoint="full")
    assert changes_between(CELL, other, DEFAULT) == {
        ("backward.0", "swift"), ("backward.1", "swift"), ("backward.2", "swift"), ("checkpoint", "full"),
    }  # fmt: skip
    assert changes_between(CELL, DEFAULT, DEFAULT) == frozenset()


def test_plans_that_were_never_timed_are_predicted_from_their_parts() -> None:
    truth = far_from(CELL, TARGET, per_knob=0.05)
    model = AdditiveModel(CELL, DEFAULT, timed(80, 0.02), sigma=0.02)
    fresh = [tunables for tunables in timed(60, 0.0, seed=9) if tunables not in timed(80, 0.02)]
    errors = [model.predict(t) - (truth(CELL, t) - truth(CELL, DEFAULT)) for t in fresh]
    assert float(np.std(errors)) < 0.03
    assert model.predict(DEFAULT) == 0.0


def test_the_luckiest_reading_is_believed_least() -> None:
    readings = timed(80, 0.03)
    lucky = max(readings, key=lambda t: readings[t][0])
    readings[lucky] = (readings[lucky][0] - 0.5, 1)
    model = AdditiveModel(CELL, DEFAULT, readings, sigma=0.03)
    assert model.believed(lucky) > readings[lucky][0] + 0.2
    readings[lucky] = (readings[lucky][0], 400)
    assert AdditiveModel(CELL, DEFAULT, readings, sigma=0.03).believed(lucky) == pytest.approx(
        readings[lucky][0], abs=0.02
    )


def test_readings_stand_for_themselves_where_nothing_adds_up() -> None:
    rng = np.random.default_rng(1)
    readings = {tunables: (float(rng.normal(0, 0.5)), 4) for tunables in timed(40, 0.0)}
    model = AdditiveModel(CELL, DEFAULT, readings, sigma=0.01)
    assert model.misfit > 0.2
    assert all(abs(model.believed(t) - median) < 0.01 for t, (median, _) in readings.items())


def test_a_few_readings_make_no_model() -> None:
    model = AdditiveModel(CELL, DEFAULT, {DEFAULT: (0.0, 3)}, sigma=math.inf)
    assert model.predict(TARGET) == 0.0
    assert model.believed(DEFAULT) == 0.0
