"""The search on invented machines: the right winner, and the default kept where nothing is faster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from machines import Setting, by_kernels, far_from, invented, plan, workload

from autotune.journal.store import Store
from autotune.measure.simulated import Trouble
from autotune.space.space import distance
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload

CELL = workload()
DENSE = workload(pattern=Pattern.of([4096], [1]))  # one segment: no gathers or windows to choose, but pools
QUICK = plan(CELL)
NOISE = Trouble()  # lognormal 3 %, 5 % outliers of +20-100 %, 5 % drift


def branches(*triples: tuple[str, str, str]) -> tuple[BranchTunables, ...]:
    return tuple(BranchTunables(*triple) for triple in triples)


TARGET = Tunables(
    "bf16",
    branches(("swift", "quick", "view"), ("swift", "quick", "copy"), ("swift", "quick", "view")),
    checkpoint="none",
    pool_threshold_mib=16,
)


def test_without_noise_the_top_of_one_hill_is_found() -> None:
    trial = Setting(CELL, far_from(CELL, TARGET), QUICK, budget_s=30).run()
    assert trial.result.state == "tuned"
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == TARGET
    assert trial.result.choice.gain.ratio == pytest.approx(math.exp(-0.08 * distance(CELL, QUICK, TARGET)))


@pytest.mark.parametrize("seed", range(6))
def test_with_noise_most_of_the_hill_is_climbed_and_never_below_the_default(seed: int) -> None:
    truth = far_from(CELL, TARGET)
    base = truth(CELL, QUICK)
    trial = Setting(CELL, lambda cell, t: truth(cell, t) - base, QUICK, trouble=NOISE, budget_s=12).run(seed)
    assert trial.result.choice is not None
    gained = truth(CELL, trial.result.choice.tunables) - base
    assert gained <= 0.0
    assert gained <= -0.7 * base
    assert trial.clock.now() <= 12 * 1.1


@pytest.mark.parametrize("seed", range(8))
def test_the_default_stays_where_nothing_is_faster(seed: int) -> None:
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=0.004, math=1.0), plan(DENSE), trouble=NOISE).run(seed)
    assert trial.result.state == "default"
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE)


@pytest.mark.parametrize("seed", range(5))
def test_a_gain_below_the_margin_is_no_reason_to_leave_the_default(seed: int) -> None:
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=-0.003, math=1.0), plan(DENSE)).run(seed)
    assert trial.result.state == "default"


def test_forward_and_backward_kernels_are_chosen_apart() -> None:
    def truth(cell: Workload, tunables: Tunables) -> float:
        first = tunables.branches[0]
        return {"quick": 0.2, "swift": 0.0, "math": 1.0}[first.forward] + {"quick": 0.0, "swift": 0.2, "math": 1.0}[
            first.backward
        ]

    trial = Setting(DENSE, truth, plan(DENSE)).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables.branches == branches(("swift", "quick", "view"))


def test_each_branch_gets_its_own_kernel_and_gather() -> None:
    target = replace(
        QUICK, branches=branches(("quick", "quick", "view"), ("swift", "quick", "copy"), ("math", "swift", "copy"))
    )
    trial = Setting(CELL, far_from(CELL, target, per_knob=0.05), QUICK, budget_s=30).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == target


def test_the_same_seed_gives_the_same_result_and_small_spaces_the_same_plan_for_any_seed() -> None:
    setting = Setting(DENSE, by_kernels(quick=0.0, swift=-0.05, math=1.0), plan(DENSE), trouble=NOISE)
    first, again = setting.run(3).result, setting.run(3).result
    assert first.choice == again.choice
    chosen = {setting.run(seed).result.choice.tunables for seed in range(6)}  # type: ignore[union-attr]
    assert chosen == {plan(DENSE, "swift")}


def test_between_equals_the_plan_nearest_to_the_default_wins() -> None:
    """Many plans tie for the best time; two probes must not pick two of them."""
    trial = Setting(CELL, lambda cell, t: -0.1 if t.pool_threshold_mib else 0.0, QUICK, budget_s=20).run()
    assert trial.result.choice is not None
    assert distance(CELL, trial.result.choice.tunables, QUICK) == 1


@pytest.mark.parametrize("budget_s", [2.0, 5.0, 20.0])
def test_the_budget_of_a_cell_is_kept(budget_s: float) -> None:
    setting = Setting(CELL, far_from(CELL, TARGET), QUICK, trouble=NOISE, budget_s=budget_s)
    for seed in range(3):
        assert setting.run(seed).clock.now() <= 1.1 * budget_s + 0.3


def test_a_finished_cell_is_found_in_the_record_without_asking_the_machine() -> None:
    store = Store(None)
    setting = Setting(CELL, far_from(CELL, TARGET), QUICK, budget_s=20)
    first = setting.run(store=store)
    again = setting.run(store=store)
    assert first.evaluator.calls > 50
    assert again.evaluator.calls == 0
    assert again.result.choice is not None
    assert first.result.choice is not None
    assert again.result.choice.tunables == first.result.choice.tunables
    assert again.result.choice.gain == first.result.choice.gain


def test_only_a_full_probe_compiles_and_only_its_best_plan() -> None:
    truth = lambda _, t: -0.3 if t.compile else 0.0  # noqa: E731
    one_kernel = invented(("quick",))  # of whose plans each is tried, and then the best one is compiled
    for effort, compiled in (("standard", False), ("full", True)):
        trial = Setting(DENSE, truth, plan(DENSE), one_kernel, effort=effort, budget_s=10).run()
        assert trial.result.choice is not None
        assert trial.result.choice.tunables.compile is compiled
        assert sum(tunables.compile for tunables in trial.search.state.entries) == int(compiled)


def kernels_of(tunables: Tunables) -> set[str]:
    return {kernel for branch in tunables.branches for kernel in (branch.forward, branch.backward)}
