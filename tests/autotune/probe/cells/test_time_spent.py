"""What a search spends its time on: the likely cells and plans first, and no more than an answer needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from machines import Setting, by_kernels, far_from, plan, row_of, workload
from probed_machine import Machine, truth

from autotune.measure.evaluator import Fault
from autotune.measure.simulated import ReplayEvaluator, SimulatedClock, Trouble
from autotune.probe.cells.needs import LEAST_OF_BASE, affordable
from autotune.probe.cells.runs import hang_s
from autotune.probe.request import ProbeRequest
from autotune.probe.tuning import run_probe
from autotune.probe.workloads.grid import FIRST_STEPS
from autotune.search.budget import Budget, CellNeed
from autotune.search.deciding.decision import Final
from autotune.search.deciding.launch_ways import LaunchWays
from autotune.search.deciding.retime import ALONE_PRECISION, FINAL_PRECISION, is_settled
from autotune.search.proposing.proposals import BATCH
from autotune.search.transfer import Transfer
from autotune.statistics import Interval
from ringattn.workload import Pattern, Tunables, Workload

DENSE = workload(pattern=Pattern())


def test_a_default_that_was_checked_beside_something_else_is_timed_again() -> None:
    search = Setting(DENSE, by_kernels(quick=0.0, swift=-0.1, math=2.0), plan(DENSE)).run().search
    entry = search.state.entry(search.state.default)
    assert entry.checked is not None
    true_ms = entry.checked.call_ms
    entry.checked = replace(entry.checked, call_ms=3 * true_ms)
    before = search.need().total_s
    search.look_again()
    assert entry.checked.call_ms == pytest.approx(true_ms, rel=0.1)
    assert search.need().total_s < before


@pytest.mark.parametrize(("gain", "blocks"), [(-0.16, 8), (-0.03, 20)])
def test_one_plan_far_ahead_is_not_timed_for_the_last_digit(gain: float, blocks: int) -> None:
    interval = Interval(gain - 0.012, gain, gain + 0.012, blocks)
    assert is_settled(interval, ALONE_PRECISION) == (gain < -0.1)
    assert not is_settled(interval, FINAL_PRECISION)


def test_what_was_checked_is_timed_also_where_its_block_was_disturbed() -> None:
    """Beside other work on an H200, 70 of 148 plans were checked, and dropped with the block thrown away."""
    cell = workload(8192)
    trouble = replace(Trouble(sigma=0.005, outlier_share=0.0, drift=0.0), disturbed_share=0.5)
    truth = far_from(cell, plan(cell, "swift"), per_knob=0.03)
    state = Setting(cell, truth, plan(cell), budget_s=60, trouble=trouble).run().search.state
    right = [entry for entry in state.entries.values() if entry.checked is not None]
    assert state.discarded > 5
    assert len(right) > 20
    assert sum(not entry.log_ratios for entry in right) <= BATCH + 1


def test_three_kernels_that_hang_do_not_take_all_of_a_small_budget() -> None:
    assert hang_s("nvidia", 30.0) == 3.0
    assert hang_s("nvidia", 1800.0) == 25.0
    assert hang_s("cpu", 50.0) == 5.0


@pytest.mark.parametrize("budget_s", [3.0, 6.0])
def test_a_default_that_hangs_does_not_take_more_than_its_cell_has(budget_s: float) -> None:
    hangs = {"faults": {plan(DENSE): Fault("timeout", "no answer")}}
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=0.1, math=0.2), plan(DENSE), rows=hangs, budget_s=budget_s).run()
    assert trial.clock.now() <= budget_s + trial.evaluator.restart_s + 0.1


def test_the_sampler_tries_no_dtype_that_is_far_behind() -> None:
    """On a CPU one plan in fp16, ten times the best's time, took ten of the seconds that the final lacked."""
    cell = workload(8192)

    def truth(_: Workload, tunables: Tunables) -> float:
        return 2.0 if tunables.dtype == "fp32" else far_from(cell, plan(cell, "swift"), per_knob=0.02)(_, tunables)

    both = ("bf16", "fp32")
    setting = Setting(cell, truth, plan(cell), dtypes=both, main_dtypes=both, budget_s=120, effort="standard")
    known = setting.run().search.state.entries
    assert len(known) > 40
    assert sum(tunables.dtype == "fp32" for tunables in known) == 1


@pytest.mark.parametrize(
    ("intervals", "hidden"),
    [
        ([(-0.17, 0.01)], True),
        ([(-0.17, -0.005)], True),  # it does not clear the margin of a noisy machine
        ([(-0.17, -0.05)], False),  # surely faster
        ([(-0.19, -0.09), (-0.17, 0.01)], False),  # the best one is, whatever the other
        ([(-0.28, 0.1), (-0.18, -0.08)], True),  # a slower one is
        ([(-0.05, 0.01)], False),  # nothing that matters
        ([], False),
    ],
)
def test_a_gain_is_hidden_by_noise_where_the_best_could_not_be_taken(
    intervals: list[tuple[float, float]], hidden: bool
) -> None:
    """An interval of 0.4 to 17 % was called a gain that there had been no time to prove."""
    rivals = [SimpleNamespace(tunables=plan(DENSE, name), log_ratios={1: -0.1, 2: -0.1}) for name in ("swift", "math")]
    gains = [Interval(low, low / 2, high, 6) for low, high in intervals]
    state = SimpleNamespace(
        default=plan(DENSE),
        intervals=lambda entries, since: gains,
        is_noisy=lambda bound: True,
        may_be_chosen=lambda entry: True,
        entry=lambda tunables: None,
        under=lambda launch: state,
    )
    study = SimpleNamespace(noted_final=lambda: 1)
    final = Final.__new__(Final)
    final.state, final.default, final.since = state, SimpleNamespace(), study.noted_final()  # type: ignore[assignment]
    final._ways = LaunchWays(state, final.since, None)  # type: ignore[arg-type]
    assert final._noise_hides_a_gain(rivals) == hidden  # type: ignore[arg-type]


def test_blocks_are_expected_to_take_what_they_took() -> None:
    """1.1 times their samples on this machine, whether or not the default is an entry beside its two readings."""
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=0.01, math=0.02), plan(DENSE)).run()
    assert trial.search.transfer.pace.factor == pytest.approx(1.1, rel=0.01)


@pytest.mark.parametrize("undecided_s", [0.0, 30.0])
def test_where_noise_hides_a_gain_the_final_takes_time_that_nobody_needs(undecided_s: float) -> None:
    """swift is 11 % faster, and one reading is off by 20 %: with a few blocks nothing can be said."""
    trouble = Trouble(sigma=0.2, outlier_share=0.0, drift=0.0)
    setting = Setting(DENSE, by_kernels(quick=0.0, swift=-0.06, math=2.0), plan(DENSE), budget_s=3.0, trouble=trouble)
    trial = setting.run(undecided_s=undecided_s)
    blocks = len(trial.search.state.default_ms)
    assert trial.clock.now() <= 3.3 + undecided_s
    assert (blocks > 40) == (undecided_s > 0), blocks
    assert setting.run(undecided_s=undecided_s, end_s=3.0).clock.now() <= 3.3  # but never beyond the probe's


def needs(*base_s: float) -> dict[Workload, CellNeed]:
    return {DENSE.at(number + 1): CellNeed(seconds, 100.0) for number, seconds in enumerate(base_s)}


@pytest.mark.parametrize(
    ("base_s", "available_s", "lengths"),
    [
        ([4.0, 2.0, 1.0], 7.0, [1, 2, 3]),  # all, in their order
        ([4.0, 2.0, 1.0], 7.0 * LEAST_OF_BASE, [1, 2, 3]),
        ([4.0, 2.0, 1.0], 3.1 * LEAST_OF_BASE, [3, 2]),  # the cheapest
        ([4.0, 2.0, 1.0], 0.0, [3]),
        ([], 5.0, []),
    ],
)
def test_where_time_is_short_the_cheapest_cells_share_it(
    base_s: list[float], available_s: float, lengths: list[int]
) -> None:
    """Split among the 20 cells of a busy CPU it was too little for any but three."""
    assert [cell.seq_len for cell in affordable(needs(*base_s), available_s)] == lengths


def test_where_time_is_short_the_first_steps_come_before_what_is_cheaper(tmp_path: Path) -> None:
    """Of 20 cells a busy CPU had time for four: the README's was none, nor had it so much as a default."""
    machine = Machine(tmp_path)
    slow = lambda *_: ReplayEvaluator(row_of(truth, base_ms=20.0), machine.clock, check_s=0.2, prove_s=0.5)  # noqa: E731
    request = ProbeRequest(output=tmp_path / "m.yaml", budget_s=12.0)
    result = run_probe(request, None, replace(machine.environment, evaluator=slow))
    assert result.profile is not None
    measured = {entry.workload for entry in result.profile.plans if entry.evidence is not None}
    assert {*FIRST_STEPS} < measured
    assert len(measured) < len(result.cells) / 2
    spent = {FIRST_STEPS[0]: CellNeed(9.0), **needs(1.0)}
    assert affordable(spent, 0.5) == [DENSE.at(1)]  # what there is no time for lets others go before


def test_a_validation_takes_the_references_of_its_lengths() -> None:
    """A CPU began one of 52.9 s, 39.5 of them references, where it expected a few calls."""
    transfer = Transfer()
    alone_s = transfer.validation_s(DENSE, plan(DENSE), 0.01, 9)
    assert transfer.validation_s(DENSE, plan(DENSE), 0.01, 9, 4.0) == pytest.approx(alone_s + 9 * 4.0)
    transfer.validated(DENSE, plan(DENSE), 0.01, 2.0)
    assert transfer.validation_s(DENSE, plan(DENSE), 0.01, 9, 4.0) == pytest.approx(alone_s)


def test_no_plan_is_given_up_before_half_of_what_a_new_worker_takes() -> None:
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=0.1, math=0.2), plan(DENSE)).run()
    state = trial.search.state
    short_s = state.timeout_s()
    state.evaluator = SimpleNamespace(start_s=30.0)  # type: ignore[assignment]
    assert state.timeout_s() == pytest.approx(short_s - 2.5 + 15.0, abs=0.6)


def test_what_is_kept_for_the_end_grows_up_to_a_quarter() -> None:
    budget = Budget(60.0, SimulatedClock(), reserve_s=4.0)
    budget.keep(1.0)
    assert budget.available_s() == 56.0
    budget.keep(9.0)
    assert budget.available_s() == 51.0
    budget.keep(40.0)
    assert budget.available_s() == 45.0
