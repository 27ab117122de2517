"""The plan to which torch dispatches: always timed, always recorded, and never surely faster than the choice."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from machines import Setting, Trial, by_kernels, plan, workload

from autotune.measure.simulated import Trouble
from autotune.probe.output.writer import entry_of
from autotune.search.deciding.choose import Candidate, choose
from autotune.statistics import Interval
from ringattn.profile.plain_data import from_plain, to_plain
from ringattn.profile.schema import PlanEntry
from ringattn.workload import Pattern

DENSE = workload(pattern=Pattern())
QUICK, SWIFT, MATH = (plan(DENSE, name) for name in ("quick", "swift", "math"))
NOISE = Trouble(sigma=0.002)


def searched(torch: str, seed: int = 0, default: str = "quick", **log_times: float) -> Trial:
    """``log_times`` are those of a call, both directions."""
    truth = by_kernels(**{name: log / 2 for name, log in log_times.items()})
    setting = Setting(DENSE, truth, plan(DENSE, default), trouble=NOISE, rows={"torch_kernel": torch})
    return setting.run(seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_default_that_torch_is_surely_faster_than_gives_way_within_the_margin(seed: int) -> None:
    trial = searched("swift", seed, quick=0.0, swift=-0.009, math=2.0)
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == SWIFT


@pytest.mark.parametrize("seed", range(3))
def test_nothing_but_torch_changes_where_it_is_the_default(seed: int) -> None:
    trial = searched("quick", seed, quick=0.0, swift=-0.009, math=2.0)
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == QUICK
    entry = entry_of(trial.result)
    assert entry.torch is not None
    assert (entry.torch.tunables, entry.torch.evidence) == (QUICK, None)
    assert entry.torch_evidence == entry.evidence
    assert entry.torch_ratio == 1.0


def test_a_plan_of_torch_that_looks_hopeless_is_timed_all_the_same() -> None:
    trial = searched("math", quick=0.0, swift=-0.3, math=2.0)
    entry = entry_of(trial.result)
    assert entry.choice is not None
    assert entry.choice.tunables == SWIFT
    assert entry.torch is not None
    assert entry.torch.tunables == MATH
    assert entry.torch.evidence is not None
    assert entry.torch.evidence.default_ratio == pytest.approx(math.exp(2.0), rel=0.05)
    assert entry.torch_ratio == pytest.approx(math.exp(-2.3), rel=0.05)
    assert from_plain(PlanEntry, to_plain(entry), "here") == entry


def test_a_torch_that_is_the_choice_is_recorded_without_a_second_copy() -> None:
    entry = entry_of(searched("swift", quick=0.0, swift=-0.3, math=2.0).result)
    assert entry.torch is not None
    assert (entry.torch.tunables, entry.torch.evidence) == (SWIFT, None)
    assert entry.torch_ratio == 1.0


def test_no_torch_is_recorded_of_what_torch_has_no_kernel_for() -> None:
    entry = entry_of(searched("", quick=0.0, swift=-0.3, math=2.0).result)
    assert (entry.torch, entry.torch_ratio) == (None, None)


# --- plans whose bits vary ----------------------------------------------------------------------------------------


def candidate(kernel: str, gain: float, *, varies: bool = False) -> Candidate:
    return Candidate(plan(DENSE, kernel), Interval(gain - 0.001, gain, gain + 0.001, 9), 2**20, varies=varies)


DEFAULT = candidate("quick", 0.0)


def test_a_plan_that_varies_gives_way_to_one_of_about_its_time_that_does_not() -> None:
    varying, steady = candidate("swift", -0.30, varies=True), candidate("math", -0.285)
    assert choose(DENSE, DEFAULT, [varying, steady], noisy=False) is steady


def test_a_plan_that_varies_stays_where_it_is_faster_by_more() -> None:
    varying, steady = candidate("swift", -0.30, varies=True), candidate("math", -0.27)
    assert choose(DENSE, DEFAULT, [varying, steady], noisy=False) is varying


def test_a_default_that_does_not_vary_stays_before_a_small_gain() -> None:
    varying = candidate("swift", -0.015, varies=True)
    assert choose(DENSE, DEFAULT, [varying], noisy=False) is DEFAULT
    assert choose(DENSE, DEFAULT, [replace(varying, varies=False)], noisy=False).tunables == SWIFT
    assert choose(DENSE, replace(DEFAULT, varies=True), [varying], noisy=False) is varying


def test_a_default_over_a_limit_does_not_come_back_for_its_bits() -> None:
    varying = candidate("swift", -0.015, varies=True)
    assert choose(DENSE, replace(DEFAULT, allowed=False), [varying], noisy=False) is varying
