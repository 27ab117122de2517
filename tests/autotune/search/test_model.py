"""What is believed of many noisy readings, and what an ascent makes of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from machines import far_from, invented, plan, workload

from autotune.search.model import SLOW, CellModel
from autotune.search.propose import Walker
from autotune.space.space import build_space, decode
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


def model_of(readings: dict[Tunables, tuple[float, int]], sigma: float, **failed: list[Tunables]) -> CellModel:
    return CellModel(CELL, SPACE.knobs, readings, sigma=sigma, **failed)


def truth_of(tunables: Tunables) -> float:
    truth = far_from(CELL, TARGET, per_knob=0.05)
    return truth(CELL, tunables) - truth(CELL, DEFAULT)


def test_plans_that_were_never_timed_are_predicted_from_their_parts() -> None:
    readings = timed(80, 0.02)
    model = model_of(readings, 0.02)
    fresh = [tunables for tunables in timed(60, 0.0, seed=9) if tunables not in readings]
    predicted = [model.predict(tunables) for tunables in fresh]
    errors = np.array([mean - truth_of(t) for t, (mean, _) in zip(fresh, predicted, strict=True)])
    assert errors.std() < 0.03
    assert np.mean(np.abs(errors) < 2 * np.array([deviation for _, deviation in predicted])) > 0.85


def test_pairs_of_knobs_that_matter_together_are_seen() -> None:
    """Two branches that gather alike are fast: no sum over knobs says so."""

    def together(tunables: Tunables) -> float:
        return -0.2 if tunables.branches[1].gather == tunables.branches[2].gather else 0.2

    readings = {tunables: (together(tunables), 4) for tunables in timed(120, 0.0)}
    model = model_of(readings, 0.01)
    fresh = [tunables for tunables in timed(60, 0.0, seed=9) if tunables not in readings]
    assert float(np.std([model.predict(t)[0] - together(t) for t in fresh])) < 0.15  # the sum leaves 0.2


def test_the_luckiest_reading_is_believed_least() -> None:
    readings = timed(80, 0.03)
    lucky = sorted(readings, key=lambda t: readings[t][0])[40]
    true = readings[lucky][0]
    readings[lucky] = (true - 0.2, 1)
    once = model_of(readings, 0.03).believed(lucky)
    readings[lucky] = (true - 0.2, 400)
    assert once > model_of(readings, 0.03).believed(lucky) + 0.02
    assert model_of(readings, 0.03).believed(lucky) == pytest.approx(true - 0.2, abs=0.01)


def test_readings_stand_for_themselves_where_nothing_adds_up() -> None:
    rng = np.random.default_rng(1)
    readings = {tunables: (float(rng.normal(0, 0.5)), 4) for tunables in timed(40, 0.0)}
    model = model_of(readings, 0.01)
    assert all(abs(model.believed(t) - min(median, SLOW)) < 0.02 for t, (median, _) in readings.items())


def test_one_reading_makes_a_model_that_knows_nothing_else() -> None:
    model = model_of({DEFAULT: (0.0, 3)}, math.inf)
    assert model.believed(DEFAULT) == pytest.approx(0.0, abs=1e-6)
    assert model.predict(TARGET)[1] > 3 * model.predict(DEFAULT)[1]


def test_what_is_like_a_failure_is_avoided() -> None:
    readings = timed(30, 0.01)
    failed = [t for t in timed(60, 0.0, seed=5) if t.checkpoint == "offload" and t not in readings]
    like = next(t for t in timed(60, 0.0, seed=7) if t.checkpoint == "offload" and t not in failed)
    assert model_of(readings, 0.01, failed=failed).predict(like)[0] > model_of(readings, 0.01).predict(like)[0]


def test_walks_end_at_the_top_and_propose_nothing_twice() -> None:
    model = model_of(timed(120, 0.0), 0.001)
    tried = {SPACE.identity(tunables) for tunables in timed(120, 0.0)}
    walker = Walker(SPACE, model, tried, lambda tunables: True)
    proposed = walker.propose([DEFAULT], 6, least=0.0)
    assert truth_of(proposed[0]) == pytest.approx(truth_of(TARGET), abs=0.051)  # a knob away at most
    assert len({SPACE.identity(tunables) for tunables in proposed}) == len(proposed)
    assert not {SPACE.identity(t) for t in proposed} & {SPACE.identity(t) for t in timed(120, 0.0)}


def test_nothing_is_proposed_where_nothing_better_can_be_hoped_for() -> None:
    walker = Walker(SPACE, model_of(timed(120, 0.0), 0.001), set(), lambda tunables: True)
    assert walker.propose([DEFAULT], 4, least=2 * truth_of(TARGET)) == []
