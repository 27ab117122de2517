"""Plans that hang, crash, or are wrong elsewhere: what they have is not paid for again, here or in other cells."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGKILL, SIGSEGV

import numpy as np
import optuna
import pytest
from machines import Setting, by_kernels, invented, plan, workload
from optuna.pruners import BasePruner

from autotune.journal.store import Store
from autotune.measure.evaluator import Checked, Fault, KernelUnavailable, Killed
from autotune.search.proposing.design import Design
from autotune.search.pruner import RacePruner
from autotune.search.suspects import Suspects
from autotune.search.transfer import Timed, Transfer, Traps, parts_of
from autotune.space.space import build_space
from ringattn.workload import Pattern, Tunables

DENSE = workload(pattern=Pattern())
CELL = workload()
RAN = Checked(5.0, 1e-3, 1000, 7.0, 20.0)
HUNG = Fault("timeout", "no answer within 2.0 s")


class ByKernel(dict[Tunables, Fault]):
    """Every plan with a kernel in one direction has this fault."""

    def __init__(self, part: tuple[str, str], fault: Fault) -> None:
        super().__init__()
        self._part, self._fault = part, fault

    def __len__(self) -> int:
        return 1

    def get(self, tunables: Tunables, default: object = None) -> Fault | None:  # type: ignore[override]
        return self._fault if self._part in parts_of(tunables) else None


@pytest.mark.parametrize("fault", [HUNG, Fault("crash", "the worker was killed by SIGSEGV", Killed(SIGSEGV))])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_kernel_that_hangs_or_crashes_costs_one_trial(fault: Fault, direction: str) -> None:
    rows = {"faults": ByKernel((direction, "swift"), fault)}
    for cell in (DENSE, CELL):
        trial = Setting(cell, by_kernels(quick=0.0, swift=-0.3, math=1.0), plan(cell), rows=rows, budget_s=20).run()
        assert sum(f == fault for f in trial.result.failures.values()) == 1
        assert trial.result.choice is not None
        assert (direction, "swift") not in parts_of(trial.result.choice.tunables)
        assert trial.result.state == "tuned"  # the other direction is as fast as it was


def test_what_hung_in_one_cell_is_not_tried_in_another_nor_after_a_kill() -> None:
    store = Store(None)
    transfer = Transfer(store)
    transfer.learn(plan(DENSE), RAN)
    transfer.learn(plan(DENSE, "quick", "swift"), HUNG)
    for later in (transfer, Transfer(store)):
        assert later.traps.holds(plan(DENSE.at(8192), "math", "swift"))
        assert not later.traps.holds(plan(DENSE, "swift", "quick"))


def test_somebody_elses_kill_and_a_wrong_answer_give_up_no_kernel() -> None:
    traps = Traps()
    assert not traps.learn(plan(DENSE, "swift"), Fault("crash", "killed", Killed(SIGKILL)))
    assert not traps.learn(plan(DENSE, "swift"), Fault("wrong", "out errs"))
    assert not traps.holds(plan(DENSE, "swift"))
    lost = Fault("error", "no module", KernelUnavailable("swift", "import swift: no"))
    assert traps.learn(plan(DENSE, "swift", "quick"), lost)
    assert traps.holds(plan(DENSE, "swift", "math"))


def test_a_hang_is_of_the_kernel_that_never_ran() -> None:
    traps = Traps()
    traps.learn(plan(DENSE, "swift", "quick"), RAN)
    traps.learn(plan(DENSE, "swift", "math"), HUNG)
    assert set(traps.lost) == {("backward", "math")}


def test_a_hang_of_two_new_kernels_is_of_the_pass_that_did_not_end() -> None:
    for direction, kernel in (("forward", "swift"), ("backward", "math")):
        traps, suspects = Traps(), Suspects()
        hung = replace(HUNG, direction=direction)  # type: ignore[arg-type]
        assert Fault.of(hung.plain()) == hung
        traps.learn(plan(DENSE, "swift", "math"), hung)
        suspects.blame(plan(DENSE, "swift", "math"), hung.direction)
        assert set(traps.lost) == {(direction, kernel)}
        spared = plan(DENSE, "swift", "quick") if direction == "backward" else plan(DENSE, "quick", "math")
        assert suspects.odds(spared) == suspects.odds(plan(DENSE)) > suspects.odds(plan(DENSE, "swift", "math"))
    assert ("forward", "swift") in traps.ran  # what hung after it was another's doing


def test_the_forward_kernel_of_a_default_whose_backward_hangs_is_still_tried() -> None:
    hung = replace(HUNG, direction="backward")
    truth = by_kernels(quick=0.0, swift=0.3, math=1.0)
    rows = {"faults": ByKernel(("backward", "quick"), hung)}
    trial = Setting(DENSE, truth, plan(DENSE), rows=rows, budget_s=20).run()
    assert trial.result.choice is not None
    assert parts_of(trial.result.choice.tunables) == {("forward", "quick"), ("backward", "swift")}


# --- which trait a failure is of --------------------------------------------------------------------------------------


def test_the_trait_that_failed_plans_share_and_right_ones_lack_is_found() -> None:
    suspects = Suspects()
    suspects.clear(plan(CELL))
    culprit = plan(CELL, "math", "swift", window_tokens=2048)
    suspects.blame(culprit)
    innocent = [plan(CELL, "math"), plan(CELL, window_tokens=2048), plan(CELL, "quick", "swift")]
    assert all(0.1 < suspects.odds(p) < 1.0 for p in innocent)
    suspects.blame(plan(CELL, "quick", "swift"))
    assert suspects.odds(plan(CELL, "quick", "swift")) < 0.1
    assert suspects.odds(plan(CELL, "math", "quick", window_tokens=2048)) == 1.0
    suspects.clear(plan(CELL, "swift", "swift"))  # it was those plans alone, then
    assert suspects.odds(plan(CELL, "quick", "swift")) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_finalists_that_fail_their_validation_make_way_for_one_without_their_kernel(seed: int) -> None:
    """swift is wrong at other lengths whatever else a plan has; math is right, and slower than it."""
    truth = by_kernels(quick=0.0, swift=-0.4, math=-0.2)
    unproven = ByKernel(("backward", "swift"), Fault("wrong", "dq errs; S=3001"))
    trial = Setting(CELL, truth, plan(CELL), unproven=unproven, budget_s=20).run(seed)
    assert trial.result.state == "tuned"
    assert trial.result.choice is not None
    assert ("backward", "swift") not in parts_of(trial.result.choice.tunables)
    assert trial.result.choice.gain.ratio < 0.8
    assert sum(f.kind == "wrong" for f in trial.result.failures.values()) <= 4


def test_a_right_plan_stands_in_for_a_default_that_fails_its_validation() -> None:
    truth = by_kernels(quick=0.0, swift=0.3, math=1.0)
    unproven = ByKernel(("forward", "quick"), Fault("wrong", "out errs; S=3001"))
    trial = Setting(DENSE, truth, plan(DENSE), unproven=unproven, budget_s=20).run()
    assert trial.result.choice is not None
    assert ("forward", "quick") not in parts_of(trial.result.choice.tunables)
    assert trial.result.choice == trial.result.default
    assert "out errs; S=3001" in trial.result.note


# --- the race ---------------------------------------------------------------------------------------------------------


def pruned(readings: list[float], rival: list[float], sigma: float = 0.02) -> bool:
    """Whether the pruner stops a plan with these readings beside one with those, in a plain study."""
    pruner: BasePruner = RacePruner(lambda: sigma)
    study = optuna.create_study(pruner=pruner)
    best, trial = study.ask(), study.ask()
    for step, value in enumerate(rival, 1):
        best.report(value, step)
    for step, value in enumerate(readings, 1):
        trial.report(value, step)
    return trial.should_prune()


@pytest.mark.parametrize(
    ("readings", "rival", "out"),
    [
        ([], [-0.2, -0.2], False),
        ([0.6], [-0.2, -0.2], True),  # twice as slow, once
        ([0.2], [-0.2, -0.2], False),
        ([0.2, 0.2], [-0.2, -0.2], True),
        ([-0.19, -0.18], [-0.2, -0.2], False),  # within the noise
        ([-0.3, -0.3], [-0.2, -0.2], False),
        ([0.2, 0.2, 0.2], [0.5, 0.5], True),  # the default, at 0, is the best then
    ],
)
def test_the_pruner_drops_what_is_surely_behind(readings: list[float], rival: list[float], out: bool) -> None:
    assert pruned(readings, rival) is out


def test_a_plan_over_a_limit_is_no_measure_for_others() -> None:
    study = optuna.create_study(pruner=RacePruner(lambda: 0.02))
    over, trial = study.ask(), study.ask()
    for step in (1, 2):
        over.report(-1.0, step)
        trial.report(-0.1, step)
    assert trial.should_prune()
    over.set_constraint("memory", 0.5)
    assert not trial.should_prune()


@pytest.mark.parametrize("stood", [False, True])
def test_a_default_that_hangs_is_not_waited_for_in_every_cell_also_where_it_stood(*, stood: bool) -> None:
    rows = {"faults": ByKernel(("forward", "quick"), HUNG)}
    state = (
        Setting(DENSE, by_kernels(quick=0.0, swift=0.0, math=1.0), plan(DENSE, "math"), rows=rows).run().search.state
    )
    state.transfer.traps.lost.clear()
    hangs = plan(DENSE, "quick")
    state.entries.pop(hangs, None)
    state.replace_default(hangs)
    state.standing = [hangs] if stood else []
    assert not state.check(state.entry(hangs))
    assert state.transfer.traps.holds(plan(DENSE, "quick", "swift"))


# --- what passes from cell to cell ------------------------------------------------------------------------------------


def test_kernels_far_slower_at_a_neighbouring_length_are_not_tried_again() -> None:
    truth = by_kernels(quick=0.0, swift=-0.1, math=1.5)
    done = Setting(DENSE, truth, plan(DENSE)).run()
    transfer = Transfer(finished=[done.search.beliefs.timed()])
    longer = build_space(DENSE.at(8192), invented(), plan(DENSE.at(8192)), ("bf16",))
    assert transfer.hopeless(longer) == {("forward", "math"), ("backward", "math")}
    assert plan(DENSE, "swift") in transfer.hints(longer, 3)
    assert transfer.hopeless(replace(longer, default=plan(DENSE.at(8192), "math"))) == set()  # the default's stay


def test_what_is_hopeless_at_a_length_nearby_is_no_part_of_the_design() -> None:
    """One call of math took 1.5 s of the last 3 s of a modelled H100's longest cell."""
    cell = CELL.at(2 * CELL.seq_len)
    search = Setting(cell, by_kernels(quick=0.0, swift=0.0, math=0.0), plan(cell)).run().search
    assert ("forward", "math") not in search.beliefs.known().hopeless
    search.transfer.finished.append(Timed(CELL, {plan(CELL): 0.0, plan(CELL, "math"): 3.0}))
    known = search.beliefs.known()
    assert {("forward", "math"), ("backward", "math")} <= known.hopeless
    design, rng = Design(build_space(cell, invented(), plan(cell), ("bf16",))), np.random.default_rng(0)
    found = [design.next((), known.hopeless, lambda _: True, lambda _: 1.0, rng) for _ in range(20)]
    assert any(found)
    assert not any("math" in each.kernels for each in found if each is not None)


def test_a_kernel_that_was_slow_in_place_and_fast_on_copies_is_not_hopeless() -> None:
    swift = plan(CELL, "swift")
    copied = replace(swift, branches=tuple(replace(branch, gather="copy") for branch in swift.branches))
    timed = Timed(CELL.at(2048), {plan(CELL): 0.0, swift: 2.0, copied: 0.05})
    space = build_space(CELL, invented(), plan(CELL), ("bf16",))
    assert Transfer(finished=[timed]).hopeless(space) == set()


def test_a_plan_that_is_launched_slowly_is_a_hint_for_longer_calls() -> None:
    host_us = lambda t: 2000.0 if t.branches[0].forward == "swift" else 20.0  # noqa: E731
    trial = Setting(
        DENSE, by_kernels(quick=0.0, swift=-0.5, math=1.0), plan(DENSE), rows={"base_ms": 0.05, "host_us": host_us},
        asynchronous=True,
    ).run()  # fmt: skip
    swift = plan(DENSE, "swift")
    assert trial.result.choice is not None
    assert trial.result.choice.tunables.branches[0].forward == "quick"
    timed = trial.search.beliefs.timed()
    assert timed.behind[swift] == pytest.approx(0.0, abs=1e-6)
    assert timed.behind[plan(DENSE)] == pytest.approx(1.0, abs=0.01)
