"""A search among plans that fail, on machines that disturb it: the right winner, or a word on why there is none."""

from __future__ import annotations

import itertools
import math
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from signal import SIGKILL, SIGSEGV
from typing import Any

import pytest
from machines import Setting, by_kernels, plan, workload

from autotune.journal.store import Store
from autotune.measure.evaluator import Block, Checked, Ended, Fault, InterferenceKind, Killed, Sample
from autotune.measure.simulated import ReplayEvaluator, Trouble
from ringattn.workload import Pattern, Tunables, Workload

CELL = workload()
DENSE = workload(pattern=Pattern.of([4096], [1]))  # one segment: no gathers or windows to choose, but pools
QUICK = plan(CELL)


@pytest.mark.parametrize("kind", ["crash", "oom", "timeout", "wrong", "compile", "error"])
def test_a_failing_candidate_costs_one_trial_and_is_told_apart(kind: str) -> None:
    bad = plan(DENSE, "swift", "quick")
    setting = Setting(
        DENSE,
        by_kernels(quick=0.0, swift=-0.1, math=1.0),
        plan(DENSE),
        rows={"faults": {bad: Fault(kind, "as injected")}},  # type: ignore[arg-type]
    )
    trial = setting.run()
    assert trial.result.failures[bad] == Fault(kind, "as injected")  # type: ignore[arg-type]
    assert trial.result.choice is not None
    given_up = kind in ("crash", "timeout")  # which cost a worker each: nobody asks for that forward kernel again
    assert trial.result.choice.tunables == plan(DENSE, "quick" if given_up else "swift", "swift")
    assert sum(fault.kind == kind for fault in trial.result.failures.values()) == 1
    assert trial.clock.now() <= setting.budget_s * 1.1


def test_a_candidate_that_is_wrong_at_ragged_lengths_cannot_win() -> None:
    best = plan(DENSE, "swift")
    trial = Setting(
        DENSE,
        by_kernels(quick=0.0, swift=-0.1, math=1.0),
        plan(DENSE),
        unproven={best: Fault("wrong", "out errs at S=3001, negative inputs, seed 0")},
    ).run()
    result = trial.result
    assert result.choice is not None
    assert result.choice.tunables != best
    assert result.failures[best].message.startswith("out errs at S=3001")
    everywhere = [result.choice, *result.runners_up, *result.front, result.default]
    assert all(measured is None or measured.tunables != best for measured in everywhere)


@pytest.mark.parametrize("fault", [Fault("wrong", "dq errs"), Fault("timeout", "no answer within 4.0 s")])
@pytest.mark.parametrize("every", [False, True], ids=["that plan", "its kernel"])
def test_a_default_that_fails_its_check_gives_way_to_another_plan(fault: Fault, every: bool) -> None:
    """The nearest whose kernels it does not have stands in, and the search goes on from there."""
    faulty = [plan(DENSE), *((plan(DENSE, "quick", "math"), plan(DENSE, "quick", "swift")) if every else ())]
    setting = Setting(
        DENSE,
        by_kernels(quick=-0.6, swift=0.2, math=0.0),
        plan(DENSE),
        rows={"faults": dict.fromkeys(faulty, fault)},
        budget_s=30,
    )
    trial = setting.run()
    assert trial.search.state.default == plan(DENSE, "swift")
    assert f"the default failed ({fault.kind}: {fault.message}); compared with another plan" in trial.result.note
    assert trial.result.state == "tuned"
    assert trial.result.choice is not None
    assert trial.result.choice.tunables not in faulty
    assert sum(found == fault for found in trial.result.failures.values()) <= 3
    assert trial.clock.now() <= setting.budget_s * 1.1


@pytest.mark.parametrize(
    "fault",
    [
        Fault("crash", "the worker was killed", Killed(SIGKILL)),
        Fault("crash", "the worker was ended before its work began", Ended()),
    ],
)
def test_a_default_whose_worker_another_process_ended_is_not_judged(fault: Fault) -> None:
    """That is no verdict on it: math, far slower, must not become the plan for that."""
    trial = Setting(
        DENSE,
        by_kernels(quick=0.0, swift=0.5, math=2.0),
        plan(DENSE),
        rows={"faults": {plan(DENSE): fault}},
    ).run()
    assert trial.search.state.default == plan(DENSE)
    assert trial.result.choice is None
    assert fault.message in trial.result.note


def test_where_every_plan_hangs_there_is_no_verdict() -> None:
    """A machine that answers nothing says nothing of its plans."""
    pairs = itertools.product(("quick", "swift", "math"), repeat=2)
    every = {plan(DENSE, forward, backward): Fault("timeout", "no answer") for forward, backward in pairs}
    setting = Setting(DENSE, by_kernels(quick=0.0, swift=0.0, math=0.0), plan(DENSE), rows={"faults": every})
    trial = setting.run()
    assert trial.fault is not None
    assert trial.fault.from_outside
    assert trial.clock.now() <= 2 * setting.budget_s


class AfterItsCheck(UserDict[Tunables, Fault]):
    """Faults that a plan has from the second time on that it is asked for."""

    def __init__(self, faults: Mapping[Tunables, Fault]) -> None:
        super().__init__(faults)
        self.checked: set[Tunables] = set()

    def get(self, tunables: Tunables, default: Any = None) -> Any:
        if tunables in self.checked:
            return super().get(tunables, default)
        self.checked.add(tunables)
        return default


@pytest.mark.parametrize(
    "fault", [Fault("crash", "not by SIGKILL", Killed(SIGSEGV)), Fault("timeout", "no answer within 4.0 s")]
)
def test_a_default_that_stops_working_gives_way_too(fault: Fault) -> None:
    """It passed its check and fails every time it is timed."""
    trial = Setting(
        DENSE,
        by_kernels(quick=0.0, swift=0.1, math=-0.5),
        plan(DENSE),
        rows={"faults": AfterItsCheck({plan(DENSE): fault})},
        effort="quick",
        budget_s=30,
    ).run()
    assert trial.search.state.default == plan(DENSE, "swift")
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "math")


def test_when_nothing_runs_the_cell_is_refused_with_the_reason() -> None:
    pairs = itertools.product(("quick", "swift", "math"), repeat=2)
    every = {plan(DENSE, forward, backward): Fault("oom", "out of memory") for forward, backward in pairs}
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=0.0, math=0.0), plan(DENSE), rows={"faults": every}).run()
    assert trial.result.state == "refused"
    assert trial.result.choice is None
    assert "out of memory" in trial.result.note


def test_a_candidate_a_hundred_times_too_slow_does_not_eat_the_budget() -> None:
    truth = by_kernels(quick=0.0, swift=-0.1, math=math.log(100))
    setting = Setting(DENSE, truth, plan(DENSE), rows={"base_ms": 40.0}, budget_s=30)
    trial = setting.run()
    assert trial.clock.now() <= setting.budget_s * 1.1
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")


@pytest.mark.parametrize("seed", range(4))
def test_random_kills_of_the_worker_leave_the_right_winner(seed: int) -> None:
    trial = Setting(
        DENSE,
        by_kernels(quick=0.0, swift=-0.1, math=1.0),
        plan(DENSE),
        trouble=Trouble(crash_share=0.005),
        budget_s=60,
    ).run(seed)
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")


def test_the_best_plan_may_die_in_the_first_block_of_its_climb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be said then of how much faster the turns beside it are."""
    real, best, deaths = ReplayEvaluator.block, plan(CELL, "swift"), 0

    def block(self: ReplayEvaluator, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        nonlocal deaths
        whole = real(self, cell, order, timeout_s=timeout_s)
        if deaths or best not in order or all(timed.pattern_cache for timed in order):
            return whole
        deaths += 1
        killed = Fault("crash", "the worker was killed", Killed(SIGKILL))
        results = zip(order, whole.results, strict=True)
        return Block(tuple(killed if timed == best else sample for timed, sample in results))

    monkeypatch.setattr(ReplayEvaluator, "block", block)
    trial = Setting(CELL, by_kernels(quick=0.0, swift=-0.1, math=1.0), QUICK, budget_s=20).run()
    assert deaths == 1
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == best


@pytest.mark.parametrize("at_s", [1.0, 3.0, 6.0])
def test_a_step_of_the_clock_rate_in_the_middle_changes_nothing(at_s: float) -> None:
    truth = by_kernels(quick=0.0, swift=-0.05, math=1.0)
    trial = Setting(DENSE, truth, plan(DENSE), trouble=Trouble(step=0.2, step_at_s=at_s)).run(1)
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")


def test_disturbed_blocks_are_repeated_and_reported() -> None:
    truth = by_kernels(quick=0.0, swift=-0.1, math=1.0)
    trial = Setting(DENSE, truth, plan(DENSE), trouble=Trouble(disturbed_share=0.1)).run()
    assert trial.search.state.discarded > 0
    assert [each.kind for each in trial.result.disturbances] == [InterferenceKind.FOREIGN_LOAD]
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")


def test_a_machine_that_is_never_left_alone_needs_the_wider_margin_and_says_so() -> None:
    truth = by_kernels(quick=0.0, swift=-0.0075, math=1.0)  # both: 1.5 %
    quiet = Setting(DENSE, truth, plan(DENSE)).run()
    store = Store(None)
    never_quiet = replace(Trouble(0, 0, drift=0), disturbed_share=1.0)
    loaded = Setting(DENSE, truth, plan(DENSE), trouble=never_quiet).run(store=store)
    assert quiet.result.state == "tuned"
    assert loaded.result.state == "default"
    assert "foreign load" in loaded.result.note
    assert (quiet.result.under_load, loaded.result.under_load) == (False, True)
    noted = loaded.search.study.noted_result()
    assert noted is not None
    assert noted.under_load
    again = Setting(DENSE, truth, plan(DENSE)).run(store=store)  # goes on with blocks that were disturbed
    assert again.search.state.loaded


def test_noise_beyond_all_bounds_is_inconclusive_and_keeps_the_default() -> None:
    truth = by_kernels(quick=0.0, swift=-0.1, math=1.0)
    trial = Setting(DENSE, truth, plan(DENSE), trouble=Trouble(sigma=0.6)).run()
    assert trial.result.state == "inconclusive"
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE)
    assert trial.result.choice.gain.count == 0


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf, 5e-324])
@pytest.mark.parametrize("where", ["check", "block"])
def test_what_is_no_time_is_a_fault_of_the_plan(ms: float, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = plan(DENSE, "swift")
    real_check, real_block = ReplayEvaluator.check, ReplayEvaluator.block

    def check(self: ReplayEvaluator, cell: Workload, asked: Tunables, **more: Any) -> Checked | Fault:
        result = real_check(self, cell, asked, **more)
        wrong = where == "check" and asked == odd and isinstance(result, Checked)
        return replace(result, call_ms=ms) if wrong else result  # type: ignore[arg-type]

    def block(self: ReplayEvaluator, cell: Workload, order: Sequence[Tunables], **more: Any) -> Block:
        block = real_block(self, cell, order, **more)
        results = [
            replace(result, ms=ms) if where == "block" and asked == odd and isinstance(result, Sample) else result
            for asked, result in zip(order, block.results, strict=True)
        ]
        return replace(block, results=tuple(results))

    monkeypatch.setattr(ReplayEvaluator, "check", check)
    monkeypatch.setattr(ReplayEvaluator, "block", block)
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=-0.1, math=1.0), plan(DENSE), budget_s=8).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables != odd
    assert math.isfinite(trial.result.choice.median_ms)
    assert "no time of a call" in trial.result.failures[odd].message
