"""Probes that agree although neither is sure, and a study that goes on where it was."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from machines import Setting, by_kernels, far_from, plan, workload

from autotune.journal.store import Store
from autotune.measure.simulated import Trouble
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
