"""What is believed of many noisy readings, and which plans are asked for because of it."""

from __future__ import annotations

import math

import numpy as np
import optuna
import pytest
from machines import far_from, invented, plan, workload

from autotune.journal.study.parameters import Parameters
from autotune.search.proposing.design import Design
from autotune.search.proposing.sampler import Known, SurrogateSampler, expected_improvement
from autotune.search.proposing.surrogate import SLOW, Coder, Surrogate
from autotune.space.space import build_space, decode, encode
from ringattn.workload import Tunables

CELL = workload()
DEFAULT = plan(CELL)
SPACE = build_space(CELL, invented(), DEFAULT, ("bf16",))
CODER = Coder(CELL, SPACE.knobs)
TARGET = decode(
    CELL,
    {name: values[-1] for name, values in SPACE.knobs.items()} | {"checkpoint": "full", "window_tokens": 2048},
)
Readings = dict[Tunables, float]


def truth_of(tunables: Tunables) -> float:
    truth = far_from(CELL, TARGET, per_knob=0.05)
    return truth(CELL, tunables) - truth(CELL, DEFAULT)


def random_plans(count: int, seed: int = 0) -> list[Tunables]:
    rng = np.random.default_rng(seed)
    found = {DEFAULT: None}
    while len(found) < count:
        assignment = {name: values[rng.integers(len(values))] for name, values in SPACE.knobs.items()}
        found[decode(CELL, assignment)] = None
    return list(found)


def timed(count: int, sigma: float, seed: int = 0) -> Readings:
    """Random plans of a machine whose knobs add up, a reading each."""
    rng = np.random.default_rng(seed + 100)
    return {p: truth_of(p) + (rng.normal(0, sigma) if sigma else 0.0) for p in random_plans(count, seed)}


def surrogate_of(readings: Readings, sigma: float) -> Surrogate:
    return Surrogate(CODER, list(readings), list(readings.values()), [sigma**2] * len(readings))


def predicted(surrogate: Surrogate, plans: list[Tunables]) -> tuple[np.ndarray, np.ndarray]:
    return surrogate.predict(CODER.rows(plans))


def test_plans_that_were_never_timed_are_predicted_from_their_parts() -> None:
    readings = timed(80, 0.02)
    fresh = [p for p in random_plans(60, seed=9) if p not in readings]
    means, deviations = predicted(surrogate_of(readings, 0.02), fresh)
    errors = means - np.array([truth_of(p) for p in fresh])
    assert errors.std() < 0.05
    assert np.mean(np.abs(errors) < 2 * deviations) > 0.85


def test_what_three_knobs_do_only_together_is_seen() -> None:
    """No sum over knobs, nor over their pairs, says so."""

    def together(p: Tunables) -> float:
        return -0.4 * (p.checkpoint == "full" and p.window_tokens == 2048 and not p.pattern_cache)

    plans = random_plans(120)
    base = [decode(CELL, encode(CELL, p) | {"checkpoint": "full", "window_tokens": 2048}) for p in plans[:20]]
    readings = {p: together(p) for p in [*plans, *base]}
    held = [p for p in random_plans(400, seed=5) if p not in readings and together(p) < 0]
    other = [p for p in random_plans(60, seed=6) if p not in readings and together(p) == 0]
    surrogate = surrogate_of(readings, 0.01)
    assert held
    assert predicted(surrogate, held)[0].mean() < predicted(surrogate, other)[0].mean() - 0.15


def test_the_luckiest_reading_is_believed_least() -> None:
    readings = timed(80, 0.03)
    lucky = sorted(readings, key=readings.__getitem__)[40]
    true = readings[lucky]
    readings[lucky] = true - 0.2

    def believed(variance: float) -> float:
        variances = [variance if p == lucky else 0.03**2 for p in readings]
        return Surrogate(CODER, list(readings), list(readings.values()), variances).believed()[lucky][0]

    assert believed(0.03**2) > believed(0.001**2) + 0.02
    assert believed(0.001**2) == pytest.approx(true - 0.2, abs=0.05)


def test_a_reading_that_is_far_slower_than_all_others_say_is_doubted_and_a_faster_one_is_not() -> None:
    readings = timed(80, 0.01)
    chosen = sorted(readings, key=readings.__getitem__)[40]
    true = readings[chosen]
    slower = surrogate_of(readings | {chosen: true + 0.5}, 0.01).believed()[chosen][0]
    faster = surrogate_of(readings | {chosen: true - 0.5}, 0.01)
    assert abs(slower - true) < 0.25
    assert faster.believed()[chosen][0] < true - 0.3
    assert chosen in faster.surprises()


def test_a_surprise_is_followed_by_the_plan_without_what_costs_beside_it() -> None:
    """Three knobs gain 0.3 together and cost alone; the one plan that had them had a slow kernel, too."""
    together = {"checkpoint": "full", "window_tokens": 2048, "pattern_cache": False}

    def has(p: Tunables) -> int:
        return sum(encode(CELL, p).get(name) == value for name, value in together.items())

    def truth(p: Tunables) -> float:
        return 0.1 * has(p) - (0.6 if has(p) == 3 else 0.0) + 0.1 * sum(b.forward == "math" for b in p.branches)

    slow = decode(CELL, encode(CELL, DEFAULT) | together | {f"forward.{n}": "math" for n in range(3)})
    good = decode(CELL, encode(CELL, DEFAULT) | together)
    others = [p for p in random_plans(120) if has(p) < 3][:60]
    surrogate = surrogate_of({p: truth(p) for p in [*others, slow]}, 0.01)
    assert predicted(surrogate, [good])[0][0] > truth(good) + 0.2  # it has seen each of the three cost time
    assert surrogate.surprises()[:1] == [slow]
    carried = surrogate.carried(slow, CODER.rows([slow, good]))
    assert carried == pytest.approx([truth(slow), truth(good)], abs=0.1)


def test_what_is_very_slow_counts_as_that() -> None:
    readings = timed(20, 0.0) | {TARGET: math.log(100.0)}
    assert surrogate_of(readings, 0.01).believed()[TARGET][0] <= SLOW + 0.01


def test_a_prediction_taken_for_a_reading_moves_nothing_and_leaves_nothing_to_learn() -> None:
    surrogate = surrogate_of(timed(40, 0.01), 0.01)
    fresh = [p for p in random_plans(30, seed=4) if p not in surrogate.plans]
    before, _ = predicted(surrogate, fresh)
    assumed = surrogate.copy()
    assumed.assume(CODER.row(fresh[0]))
    after, deviations = predicted(assumed, fresh)
    assert after == pytest.approx(before, abs=1e-6)
    assert deviations[0] < 0.1 * predicted(surrogate, fresh)[1][0] + 0.02


def test_expected_improvement_is_the_mean_gain() -> None:
    rng = np.random.default_rng(0)
    draws = rng.normal(0.1, 0.2, 400_000)
    found = expected_improvement(np.array([0.1]), np.array([0.2]), 0.0)
    assert found[0] == pytest.approx(np.maximum(0.0, -draws).mean(), rel=0.02)


# --- the sampler in a plain study -------------------------------------------------------------------------------------


def search(objective: object, trials: int, seed: int = 0) -> tuple[Readings, optuna.Study]:
    """An ordinary loop of ask and tell around the sampler."""
    readings: Readings = {DEFAULT: objective(DEFAULT)}  # type: ignore[operator]
    parameters = Parameters(CELL, SPACE.knobs)

    def known() -> Known:
        surrogate = surrogate_of(readings, 0.01)
        ranked = sorted(readings, key=readings.__getitem__)
        tried = {SPACE.identity(p) for p in readings}
        return Known(
            SPACE, surrogate, ranked, readings[ranked[0]], tried, list(readings), set(), lambda p: 1.0, lambda p: False
        )

    sampler = SurrogateSampler(known, parameters.of, parameters.distributions, Design(SPACE), seed)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler)
    while len(readings) < trials and sampler.look_ahead(4):
        while sampler.ahead:
            trial = study.ask()
            asked = parameters.suggest(trial)
            assert asked not in readings
            assert SPACE.valid(asked)
            readings[asked] = objective(asked)  # type: ignore[operator]
            study.tell(trial, readings[asked])
    return readings, study


@pytest.mark.parametrize("seed", range(3))
def test_the_sampler_ends_near_the_top_of_a_hill(seed: int) -> None:
    readings, _ = search(truth_of, 90, seed)
    assert min(readings.values()) <= truth_of(TARGET) + 0.11


@pytest.mark.parametrize("seed", range(3))
def test_the_sampler_finds_what_only_pays_together(seed: int) -> None:
    """Each alone costs: no step from the default leads there."""

    def needle(p: Tunables) -> float:
        backward = {branch.backward for branch in p.branches} == {"swift"}
        window, kept = p.window_tokens == 4096 // 2, p.checkpoint == "full"
        kernels = 0.1 * sum(branch.forward != "quick" for branch in p.branches)
        if backward and window and kept:
            return kernels - 0.4
        return kernels + 0.06 * window + 0.1 * kept + 0.03 * sum(b.backward != "quick" for b in p.branches)

    readings, _ = search(needle, 70, seed)
    assert min(readings.values()) < -0.25


def test_every_three_values_are_tried_together_by_a_few_dozen_plans() -> None:
    design, rng = Design(SPACE), np.random.default_rng(0)
    tried = [DEFAULT]
    while (
        found := design.next(tried, set(), lambda p: p not in tried and SPACE.valid(p), lambda p: 1.0, rng)
    ) is not None:
        tried.append(found)
    seen = {
        (p.branches[0].backward, p.checkpoint, p.window_tokens)
        for p in tried
        if len({branch.backward for branch in p.branches}) == 1
    }
    assert len(tried) < 60
    wanted = {(b, c, w) for b in ("quick", "swift", "math") for c in ("full", "offload") for w in (None, 2048)}
    assert len(wanted - seen) <= 1
