"""What a search spends its time on: the likely cells and plans first, and no more than an answer needs."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from machines import MIB, Setting, by_kernels, far_from, plan, workload

from autotune.measure.evaluator import Checked, Fault
from autotune.measure.simulated import Trouble
from autotune.probe.cells.runs import hang_s
from autotune.search.budget import Deadline
from autotune.search.climb import BATCH
from autotune.search.final import _finalists, _noise_hides_a_gain
from autotune.search.limits import Limits
from autotune.search.race import ALONE_PRECISION, FINAL_PRECISION, _is_settled
from autotune.search.search import CellSearch
from autotune.search.stages import race_plans
from autotune.statistics import Interval
from ringattn.planning.preference import Preference
from ringattn.workload import Pattern, Tunables, Workload

DENSE = workload(pattern=Pattern())


def test_a_default_that_was_checked_beside_something_else_is_timed_again() -> None:
    context = Setting(DENSE, by_kernels(quick=0.0, swift=-0.1, math=2.0), plan(DENSE)).run().context
    search = CellSearch(context)
    true_ms = context.checked(context.default).call_ms
    context.ledger.checked[context.default] = replace(context.checked(context.default), call_ms=3 * true_ms)
    before = search.need().total_s
    search.look_again()
    assert context.checked(context.default).call_ms == pytest.approx(true_ms, rel=0.1)
    assert search.need().total_s < before


@pytest.mark.parametrize(("prefer", "limit"), [("time", None), ("memory", None), ("time", 100 * MIB)])
def test_plans_that_recompute_are_tried_around_the_fastest_kernels_only_unless_memory_counts(
    prefer: Preference, limit: int | None
) -> None:
    setting = Setting(DENSE, by_kernels(quick=0.0, swift=-0.2, math=0.3), plan(DENSE), limits=Limits(limit))
    context = replace(setting, prefer=prefer).run().context
    plans = [
        plan(DENSE, name, checkpoint=kept) for name in ("quick", "swift", "math") for kept in ("selective", "full")
    ]
    race_plans(context, "again", plans, keep=6, deadline=Deadline(context.clock, math.inf), reach=10.0)
    tried = {entry.tunables for entry in context.record("again").entries()}
    recomputing = {branch.forward for p in tried if p.checkpoint == "full" for branch in p.branches}
    only_time = prefer == "time" and limit is None
    assert recomputing == ({"swift"} if only_time else {"quick", "swift", "math"})


def test_what_a_climb_had_no_time_to_time_is_a_finalist_if_its_first_look_was_the_fastest() -> None:
    context = Setting(DENSE, by_kernels(quick=0.0, swift=-0.1, math=2.0), plan(DENSE)).run().context
    unseen = plan(DENSE, "swift", "quick", pool_threshold_mib=16)
    fastest = context.checked(plan(DENSE, "swift"))
    for factor, wanted in ((0.9, True), (1.0, False)):
        context.ledger.checked[unseen] = replace(fastest, call_ms=factor * fastest.call_ms)
        assert (unseen in _finalists(context)) == wanted


def test_finalists_differ_in_more_than_housekeeping() -> None:
    """Two of the three beside an H100's default were its winner with another pool, and with no cache of patterns."""

    def truth(cell: Workload, tunables: Tunables) -> float:
        housekept = 0.001 * ((tunables.pool_threshold_mib is not None) + (not tunables.pattern_cache))
        return by_kernels(quick=0.0, swift=-0.2, math=-0.12)(cell, tunables) - housekept

    context = Setting(DENSE, truth, plan(DENSE), budget_s=40).run().context
    finalists = _finalists(context)
    bare = [replace(p, pattern_cache=True, pool_threshold_mib=None, pool_strategy="shape") for p in finalists]
    simplest = bare.count(plan(DENSE, "swift"))  # the best, and what is as good and plainer
    assert len(set(bare)) >= len(bare) - (simplest - 1)
    assert simplest <= 2


@pytest.mark.parametrize(("gain", "blocks"), [(-0.16, 8), (-0.03, 20)])
def test_one_plan_far_ahead_is_not_timed_for_the_last_digit(gain: float, blocks: int) -> None:
    interval = Interval(gain - 0.012, gain, gain + 0.012, blocks)
    assert _is_settled(interval, ALONE_PRECISION) == (gain < -0.1)
    assert not _is_settled(interval, FINAL_PRECISION)


def test_what_a_climb_has_checked_is_timed_also_where_its_block_was_disturbed() -> None:
    """Beside other work on an H200, 70 of 148 plans of a climb were checked, and dropped with the block thrown away."""
    cell = workload(8192)
    trouble = replace(Trouble(sigma=0.005, outlier_share=0.0, drift=0.0), disturbed_share=0.5)
    truth = far_from(cell, plan(cell, "swift"), per_knob=0.03)
    context = Setting(cell, truth, plan(cell), budget_s=60, trouble=trouble).run().context
    right = [known for known, result in context.ledger.checked.items() if isinstance(result, Checked)]
    assert context.ledger.discarded > 5
    assert len(right) > 20
    assert sum(known not in context.estimates for known in right) <= BATCH


def test_a_short_probe_over_ranks_gives_a_kernel_the_time_to_compile() -> None:
    """On one GPU helpers compile ahead, and three kernels that hang must not take all of a small budget."""
    assert hang_s("nvidia", 30.0, 4) > 11
    assert hang_s("nvidia", 10.0, 4) == 4.0
    assert hang_s("nvidia", 30.0, 1) == 3.0
    assert hang_s("nvidia", 1800.0, 4) == hang_s("nvidia", 1800.0, 1) == 25.0
    assert hang_s("cpu", 50.0, 2) == 5.0


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
    context = setting.run().context
    assert context.record("explore").entries()
    assert sum(known.dtype == "fp32" for known in context.ledger.checked) == 1


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
    rivals = [SimpleNamespace(tunables=plan(DENSE, name), log_ratios={0: -0.1, 1: -0.1}) for name in ("swift", "math")]
    gains = [Interval(low, low / 2, high, 6) for low, high in intervals]
    arena = SimpleNamespace(default=plan(DENSE), intervals=lambda entries: gains)
    context = SimpleNamespace(
        ledger=SimpleNamespace(noise_sigma=lambda: 0.1, loaded=False),
        may_be_chosen=lambda known: True,
    )
    assert _noise_hides_a_gain(context, arena, rivals) == hidden  # type: ignore[arg-type]


def test_blocks_are_expected_to_take_what_they_took() -> None:
    """1.1 times their samples on this machine, whether or not the default is an entry beside its two readings."""
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=0.01, math=0.02), plan(DENSE)).run()
    assert trial.context.ledger.pace.factor == pytest.approx(1.1, rel=0.01)


@pytest.mark.parametrize("undecided_s", [0.0, 30.0])
def test_where_noise_hides_a_gain_the_final_takes_time_that_nobody_needs(undecided_s: float) -> None:
    """swift is 11 % faster, and one reading is off by 20 %: with a few blocks nothing can be said."""
    trouble = Trouble(sigma=0.2, outlier_share=0.0, drift=0.0)
    setting = Setting(DENSE, by_kernels(quick=0.0, swift=-0.06, math=2.0), plan(DENSE), budget_s=3.0, trouble=trouble)
    trial = setting.run(undecided_s=undecided_s)
    blocks = len(trial.context.ledger.default_ms)
    assert trial.clock.now() <= 3.3 + undecided_s
    assert (blocks > 40) == (undecided_s > 0), blocks
    assert setting.run(undecided_s=undecided_s, end_s=3.0).clock.now() <= 3.3  # but never beyond the probe's
