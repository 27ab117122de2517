"""No choice is slower than torch or the default beyond noise, and bits that vary give way to ones that do not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from machines import Setting, Trial, by_kernels, plan, workload

from autotune.journal.store import Store
from autotune.measure.evaluator import Fault
from autotune.measure.simulated import Trouble
from autotune.search.budget import Deadline
from autotune.search.deciding.choose import Candidate, choose
from autotune.search.deciding.decision import Final
from autotune.search.deciding.launch_ways import LaunchWays
from autotune.statistics import Interval
from ringattn.workload import Pattern, Tunables

DENSE = workload(pattern=Pattern())
QUICK, SWIFT, MATH = (plan(DENSE, name) for name in ("quick", "swift", "math"))
NOISE = Trouble(sigma=0.002)


def searched(torch: str = "", store: Store | None = None, **log_times: float) -> Trial:
    """``log_times`` are those of a call, both directions."""
    truth = by_kernels(**{name: log / 2 for name, log in log_times.items()})
    return Setting(DENSE, truth, QUICK, trouble=NOISE, rows={"torch_kernel": torch}).run(store=store)


def candidate(kernel: str, gain: float, *, varies: bool = False, doubt: float = 0.001) -> Candidate:
    return Candidate(plan(DENSE, kernel), Interval(gain - doubt, gain, gain + doubt, 9), 2**20, varies=varies)


VARYING_DEFAULT = candidate("quick", 0.0, varies=True, doubt=0.0)


@pytest.mark.parametrize("behind", [-0.005, 0.0, 0.015])
def test_a_default_that_varies_gives_way_to_a_steady_plan_of_about_its_time(behind: float) -> None:
    steady = candidate("swift", behind)
    assert choose(DENSE, VARYING_DEFAULT, [steady], noisy=False) is steady


@pytest.mark.parametrize(
    "other",
    [
        candidate("swift", 0.03),
        candidate("swift", 0.0, doubt=0.05),
        candidate("swift", 0.0, varies=True),
        replace(candidate("swift", 0.0), allowed=False),
    ],
    ids=["slower", "perhaps slower", "varies", "over a limit"],
)
def test_a_default_that_varies_stays_before_any_other_plan(other: Candidate) -> None:
    assert choose(DENSE, VARYING_DEFAULT, [other], noisy=False) is VARYING_DEFAULT


@pytest.mark.parametrize(("winner_varies", "torch_varies", "stays"), [(False, True, True), (True, True, False)])
def test_a_steady_winner_stays_before_a_torch_that_varies_and_is_hardly_faster(
    winner_varies: bool, torch_varies: bool, stays: bool
) -> None:
    state = searched("swift", quick=0.0, swift=-0.011, math=2.0).search.state
    ways = LaunchWays(state, 0, state.end)
    winner, torch = candidate("quick", 0.0, varies=winner_varies), candidate("swift", -0.011, varies=torch_varies)
    assert ways.no_slower_than_torch(state, winner, [torch]) is (winner if stays else torch)


def test_a_steady_winner_gives_way_to_a_torch_that_is_faster_by_more() -> None:
    state = searched("swift", quick=0.0, swift=-0.05, math=2.0).search.state
    winner, torch = candidate("quick", 0.0), candidate("swift", -0.05, varies=True)
    assert LaunchWays(state, 0, state.end).no_slower_than_torch(state, winner, [torch]) is torch


@pytest.mark.parametrize(("log_time", "kept"), [(0.06, QUICK), (-0.002, SWIFT)])
def test_what_served_before_and_is_surely_slower_does_not_stay_without_evidence(
    log_time: float, kept: Tunables
) -> None:
    trial = searched(quick=0.0, swift=log_time, math=2.0)
    search, state = trial.search, trial.search.state
    state.standing = [SWIFT]
    final = Final(state, search.beliefs, search.study, trial.space, Deadline(state.end.clock, math.inf))
    result = final.inconclusive("noise hides a gain")
    assert result.choice is not None
    assert result.choice.tunables == kept


def test_a_cell_that_an_earlier_process_searched_knows_the_plan_of_torch() -> None:
    store = Store(None)
    searched("swift", store, quick=0.0, swift=-0.001, math=2.0)
    search = searched("swift", store, quick=0.0, swift=-0.001, math=2.0).search
    search.state.entry(QUICK).validated = Fault("wrong", "dq errs by 0.3")
    search.run_without_default(Deadline(search.end.clock, search.end.clock.now() + 9.0))
    assert search.state.torch == SWIFT
