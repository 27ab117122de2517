"""Medians, intervals and noise: what the search believes of its timings."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import statistics


def drawn(count: int, sigma: float, centre: float = 0.0, seed: int = 0) -> list[float]:
    return list(np.random.default_rng(seed).normal(centre, sigma, size=count))


def test_interval_holds_the_median_and_is_the_same_for_the_same_seed() -> None:
    samples = drawn(20, 0.03, centre=-0.1)
    interval = statistics.interval_of(samples, seed=5)
    assert interval.low <= interval.median <= interval.high
    assert interval.median == pytest.approx(float(np.median(samples)))
    assert interval == statistics.interval_of(samples, seed=5)
    assert interval.count == 20


def test_one_sample_has_no_known_width() -> None:
    interval = statistics.interval_of([0.2], seed=0)
    assert (interval.low, interval.median, interval.high) == (-math.inf, 0.2, math.inf)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    covered = 0
    for seed in range(300):
        interval = statistics.interval_of(drawn(16, 0.05, centre=-0.07, seed=seed), seed=seed)
        covered += interval.low <= -0.07 <= interval.high
    assert 0.90 <= covered / 300 <= 0.99


def test_outliers_move_neither_median_nor_noise_floor_much() -> None:
    clean = drawn(40, 0.02, seed=3)
    spoiled = [*clean[:-4], 0.7, 0.6, 0.5, 0.9]
    assert abs(statistics.interval_of(spoiled, seed=0).median - statistics.interval_of(clean, seed=0).median) < 0.01
    assert statistics.noise_floor(spoiled) == pytest.approx(statistics.noise_floor(clean), rel=0.4)


def test_one_disturbed_reading_of_two_does_not_make_a_plan_slow() -> None:
    assert statistics.settled([0.6, -0.1], sigma=0.01) == -0.1
    assert statistics.settled([0.01, -0.01], sigma=0.01) == 0.0
    assert statistics.settled([0.6, -0.1, -0.08], sigma=0.01) == -0.08
    assert statistics.interval_of([0.6, -0.1], seed=0, sigma=0.01).median == -0.1


def test_a_first_look_only_says_that_a_single_reading_was_disturbed() -> None:
    assert statistics.settled([0.6], sigma=0.01, first_look=-0.1) == -0.1
    assert statistics.settled([0.02], sigma=0.01, first_look=0.0) == 0.02
    assert statistics.settled([0.6, 0.59], sigma=0.01, first_look=-0.1) == pytest.approx(0.595)


def test_noise_floor_estimates_the_standard_deviation_around_zero() -> None:
    assert statistics.noise_floor(drawn(2000, 0.03)) == pytest.approx(0.03, rel=0.1)
    assert statistics.noise_floor([0.01]) == math.inf


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30), st.floats(-1, 1))
def test_moving_every_sample_moves_the_interval_by_as_much(samples: list[float], shift: float) -> None:
    here = statistics.interval_of(samples, seed=1)
    there = statistics.interval_of([value + shift for value in samples], seed=1)
    assert there.median == pytest.approx(here.median + shift, abs=1e-9)
    assert there.low == pytest.approx(here.low + shift, abs=1e-9)
    assert there.high == pytest.approx(here.high + shift, abs=1e-9)


def test_blocks_needed_grows_with_the_square_of_noise_over_precision() -> None:
    few, many = statistics.blocks_needed(0.01, 0.01), statistics.blocks_needed(0.02, 0.01)
    assert few >= 2
    assert many / few == pytest.approx(4, rel=0.2)
    assert statistics.blocks_needed(math.inf, 0.01) == 2
