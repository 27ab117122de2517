"""Samplers of any kind under the search's checks and budget, and the study that plain Optuna reads."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import optuna
import pytest
from machines import MIB, Setting, by_kernels, plan, workload
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.exit_codes import UsageFailure
from autotune.journal.store import Store
from autotune.measure.simulated import SimulatedClock, Trouble
from autotune.search.budget import Deadline
from autotune.search.loop import CellSearch
from autotune.search.proposing.samplers import Grid, foreign_sampler, sampler_of
from ringattn.workload import Pattern

DENSE = workload(pattern=Pattern())
CELL = workload()


@pytest.mark.parametrize("name", ["tpe", "gp", "random", "grid", "optuna.samplers:RandomSampler"])
def test_any_sampler_runs_under_the_same_checks_budget_and_validation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A Gaussian process takes seconds a plan, from the tenth trial on.
    monkeypatch.setattr("autotune.search.proposing.proposals.ASKS", 1)
    budget_s = 3.6 if name == "gp" else 12
    of_process: list[dict[str, Any]] = []
    real = optuna.samplers.GPSampler.sample_relative

    def watched(self: optuna.samplers.GPSampler, *given: Any) -> dict[str, Any]:
        of_process.append(real(self, *given))
        return of_process[-1]

    monkeypatch.setattr(optuna.samplers.GPSampler, "sample_relative", watched)
    setting = Setting(DENSE, by_kernels(quick=0.0, swift=-0.1, math=1.0), plan(DENSE), sampler=name, budget_s=budget_s)
    trial = setting.run()
    assert any(of_process) is (name == "gp")
    assert trial.clock.now() <= 1.1 * setting.budget_s
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")
    assert trial.result.choice.gain.count >= 6
    proposed = {t.user_attrs.get("proposed_by") for t in trial.search.study.study.trials}
    assert "sampler" in proposed


@pytest.mark.parametrize("name", ["nonsense", "optuna.samplers:Nothing", "no.such.module:Class", "json:JSONDecoder"])
def test_a_sampler_that_is_none_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageFailure, match=f"--sampler '{name}'"):
        foreign_sampler(name)


@pytest.mark.parametrize("name", ["optuna.samplers:", ":RandomSampler", ":", ""])
def test_half_a_name_of_a_sampler_is_refused_with_the_form(name: str) -> None:
    with pytest.raises(UsageFailure, match=f"^--sampler '{name}': is no sampler; give one of .*package.module:Class$"):
        foreign_sampler(name)


@pytest.mark.parametrize("name", ["tpe", "optuna.samplers:BruteForceSampler", "optuna.samplers:QMCSampler"])
def test_a_sampler_that_is_experimental_is_made_without_a_word(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(sampler_of(name, 0, {}, optuna.samplers.RandomSampler), BaseSampler)


class Raising(optuna.samplers.RandomSampler):
    """Raises at its third trial."""

    def sample_independent(self, study: Study, trial: FrozenTrial, *more: Any) -> Any:
        if len(study.trials) > 12:
            raise RuntimeError("no more\nideas")
        return super().sample_independent(study, trial, *more)


class RaisingAfter(optuna.samplers.RandomSampler):
    def after_trial(self, study: Study, trial: FrozenTrial, *more: Any) -> None:
        raise KeyError("state")


class Stopping(optuna.samplers.RandomSampler):
    """Ends the study at its first trial: that one is run, and no other."""

    def sample_independent(self, study: Study, trial: FrozenTrial, *more: Any) -> Any:
        study.stop()
        return super().sample_independent(study, trial, *more)


class Slow(optuna.samplers.RandomSampler):
    """Takes a second for each trial, and brings the same plan again and again."""

    clock: SimulatedClock

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, of: BaseDistribution) -> Any:
        assert isinstance(of, CategoricalDistribution)
        self.clock.advance(1.0 if name == "forward.0" else 0.0)
        return of.choices[0]


def with_sampler(sampler: type[BaseSampler], **more: Any) -> Setting:
    name = f"{sampler.__module__}:{sampler.__qualname__}"
    return Setting(CELL, by_kernels(quick=0.0, swift=-0.1, math=1.0), plan(CELL), sampler=name, **more)


@pytest.mark.parametrize(
    ("sampler", "why"), [(Raising, r"raised RuntimeError \(no more ideas\)"), (RaisingAfter, "raised KeyError")]
)
def test_a_sampler_that_raises_ends_the_probe_in_one_line_and_its_study_goes_on(
    sampler: type[BaseSampler], why: str
) -> None:
    store = Store(None)
    with pytest.raises(UsageFailure, match=f"--sampler '.*:{sampler.__name__}': {why}") as raised:
        with_sampler(sampler).run(store=store)
    assert "\n" not in str(raised.value)
    study = store.study(CELL)
    assert all("plan" in trial.user_attrs for trial in study.get_trials(states=(TrialState.RUNNING,)))
    assert with_sampler(optuna.samplers.RandomSampler).run(store=store).result.state == "tuned"
    assert not study.get_trials(states=(TrialState.RUNNING, TrialState.WAITING))


def test_a_sampler_that_stops_the_study_is_asked_for_no_more() -> None:
    trial = with_sampler(Stopping).run()
    asked = [t for t in trial.search.study.study.trials if t.user_attrs.get("proposed_by", "sampler") == "sampler"]
    assert len(asked) == 1
    assert trial.result.state == "tuned"


def test_a_sampler_may_not_take_more_time_than_its_cell_has(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimulatedClock.__init__

    def keep(self: SimulatedClock, *arguments: Any, **more: Any) -> None:
        made(self, *arguments, **more)
        Slow.clock = self

    monkeypatch.setattr(SimulatedClock, "__init__", keep)
    setting = with_sampler(Slow, budget_s=12.0)
    assert setting.run().clock.now() <= 1.1 * setting.budget_s


def test_a_grid_passes_every_combination_once_and_stops_whatever_the_size_of_the_space() -> None:
    def tried(choices: int, knobs: int, most: int) -> list[tuple[object, ...]]:
        space = {f"x{n}": optuna.distributions.CategoricalDistribution(range(choices)) for n in range(knobs)}
        study = optuna.create_study(sampler=Grid(space, 1))
        study.optimize(lambda trial: sum(trial.suggest_categorical(n, d.choices) for n, d in space.items()), most)
        return [tuple(trial.params.values()) for trial in study.trials]

    assert sorted(tried(3, 3, 40)) == sorted(itertools.product(range(3), repeat=3))
    assert len(set(tried(10, 20, 30))) == 30


@pytest.mark.parametrize("seed", range(3))
def test_the_best_trial_was_timed_beside_the_default(seed: int) -> None:
    """A first look that is lucky is not the study's best, and nothing is left running."""
    truth = by_kernels(quick=0.0, swift=-0.1, math=1.0)
    outliers = Trouble(sigma=0.02, outlier_share=0.15, outlier_low=2.0, outlier_high=20.0)
    study = Setting(CELL, truth, plan(CELL), trouble=outliers, budget_s=6).run(seed).search.study.study
    assert 0 in {step for t in study.trials for step in t.intermediate_values}
    for trial in study.trials:
        assert trial.state.is_finished()
        if trial.state == TrialState.COMPLETE and trial.value != 0.0:
            assert set(trial.intermediate_values) - {0}, trial
    assert set(study.best_trial.intermediate_values) - {0}


def test_a_cell_without_a_search_leaves_no_trial_running() -> None:
    setting = Setting(CELL, by_kernels(quick=0.0, swift=-0.1, math=1.0), plan(CELL))
    search = setting.run().search
    store = Store(None)
    other = CellSearch(
        search._whole_space, search.state.evaluator, store, search.settings, search.listener, SimulatedClock(),
        main_dtypes=("bf16",),
    )  # fmt: skip
    assert other.settle(Deadline(SimulatedClock(), 10.0)) is None
    assert other.inconclusive("no time was left for it").state == "inconclusive"
    assert all(trial.state.is_finished() for trial in other.study.study.trials)


def test_plain_optuna_reads_the_study_and_its_numbers() -> None:
    store = Store(None)
    trial = Setting(
        DENSE, by_kernels(quick=0.0, swift=-0.1, math=1.0), plan(DENSE), rows={"peak": lambda t: 5 * MIB}
    ).run(store=store)
    study = trial.search.study.study
    done = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
    assert study.best_params["forward.0"] == "swift"
    assert all(t.constraints["runs"] <= 0 for t in done)
    assert optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(), params=["forward.0", "backward.0"]
    )
    assert study.user_attrs["result"]["state"] == "tuned"
