"""Probes that agree although neither is sure, samplers of any kind, and a study that goes on where it was."""

from __future__ import annotations

import itertools
from dataclasses import replace

import optuna
import pytest
from machines import MIB, Setting, by_kernels, far_from, plan, workload

from autotune.exit_codes import UsageFailure
from autotune.journal.store import Store
from autotune.measure.simulated import Trouble
from autotune.search.proposing.samplers import foreign_sampler
from ringattn.workload import Pattern, Tunables, Workload

DENSE = workload(pattern=Pattern())
CELL = workload()


@pytest.fixture(scope="module")
def of_seeds() -> list[tuple[float, str]]:
    """(true time, note) of what each seed chose of four kernel pairs within 0.4 %, under 3 % of noise."""
    truth = by_kernels(quick=0.3, swift=0.0, math=0.002)
    setting = Setting(DENSE, truth, plan(DENSE), trouble=Trouble(), budget_s=15)
    found = []
    for seed in range(6):
        result = setting.run(seed).result
        assert result.choice is not None
        found.append((truth(DENSE, result.choice.tunables), result.note))
    return found


def test_seeds_choose_the_same_of_what_cannot_be_told_apart(of_seeds: list[tuple[float, str]]) -> None:
    """Whichever reads best, the plainest of them is chosen."""
    times = [time for time, _ in of_seeds]
    agreeing = [abs(one - other) < 0.02 for one, other in itertools.combinations(times, 2)]
    assert sum(agreeing) >= 0.85 * len(agreeing)


def test_the_winner_nearby_stays_where_it_cannot_be_told_from_the_best() -> None:
    truth = by_kernels(quick=0.3, swift=0.0, math=0.001)
    usual = plan(DENSE, "math")
    setting = Setting(DENSE, truth, plan(DENSE), trouble=Trouble())
    chosen = []
    for seed in range(4):
        space_seeds = setting.run(seed, seeds=[usual]).result.choice
        assert space_seeds is not None
        chosen.append(space_seeds.tunables)
    assert chosen.count(usual) >= 3


def test_the_record_names_the_plan_that_could_not_be_told_from_the_choice(of_seeds: list[tuple[float, str]]) -> None:
    assert any("indistinguishable from " in note for _, note in of_seeds)


@pytest.mark.parametrize("name", ["tpe", "gp", "random", "grid", "optuna.samplers:RandomSampler"])
def test_any_sampler_runs_under_the_same_checks_budget_and_validation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.loop.ASKS", 1)  # a Gaussian process takes 0.2 s for each plan known already
    setting = Setting(DENSE, by_kernels(quick=0.0, swift=-0.1, math=1.0), plan(DENSE), sampler=name, budget_s=12)
    trial = setting.run()
    assert trial.clock.now() <= 1.1 * setting.budget_s
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")
    assert trial.result.choice.gain.count >= 6
    proposed = {t.user_attrs.get("proposed_by") for t in trial.search.study.study.trials}
    assert "sampler" in proposed


@pytest.mark.parametrize("name", ["nonsense", "optuna.samplers:Nothing", "no.such.module:Class", "json:JSONDecoder"])
def test_a_sampler_that_is_none_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageFailure, match=f"--sampler {name}"):
        foreign_sampler(name)


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


@pytest.mark.parametrize("blocks", [0, 1, 3, 7, 12])
def test_a_search_that_is_stopped_goes_on_from_its_study(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was checked is checked again, and no reading is lost."""
    from autotune.measure.simulated import ReplayEvaluator

    store, real, left = Store(None), ReplayEvaluator.block, blocks
    checked: list[Tunables] = []
    check = ReplayEvaluator.check

    def counting(self: ReplayEvaluator, cell: Workload, candidate: Tunables, **more: object) -> object:
        checked.append(candidate)
        return check(self, cell, candidate, **more)  # type: ignore[arg-type]

    def stopping(self: ReplayEvaluator, *arguments: object, **more: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ReplayEvaluator, "check", counting)
    monkeypatch.setattr(ReplayEvaluator, "block", stopping)
    target = replace(plan(CELL, "swift"), checkpoint="none")
    setting = Setting(CELL, far_from(CELL, target), plan(CELL), budget_s=20)
    with pytest.raises(KeyboardInterrupt):
        setting.run(store=store)
    monkeypatch.setattr(ReplayEvaluator, "block", real)
    trial = setting.run(store=store)
    assert len(checked) == len(set(checked))
    assert trial.search.state.default_ms.keys() >= set(range(1, blocks + 1))
    assert trial.result.state == "tuned"
