"""Invented machines of the benchmark: their best is the best, their traps are traps, and a number is one machine."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from regret.machines import INSTANCES, KINDS, InventedMachine, pays_together, slow_default, traps, two_optima
from regret.parts_machine import PartsMachine
from regret.problems import HANG_S, NOISES, RESTART_S, names, problem_of

from autotune.measure.evaluator import Checked, Fault, Proven, Sample
from autotune.measure.simulated import SimulatedClock
from autotune.space.space import Space, decode, distance, encode
from ringattn.workload import Tunables

EVERY = [(kind, number) for kind in KINDS for number in range(INSTANCES)]


def ms_of(machine: InventedMachine, plan: Tunables) -> float:
    return machine.row(machine.space.workload, plan).median_ms


def random_plans(space: Space, count: int, seed: int = 0) -> list[Tunables]:
    """Valid plans, each knob drawn apart."""
    rng = np.random.default_rng(seed)
    drawn = []
    while len(drawn) < count:
        plan = decode(space.workload, {name: values[rng.integers(len(values))] for name, values in space.knobs.items()})
        if space.valid(plan):
            drawn.append(plan)
    return drawn


def descent(machine: InventedMachine, plan: Tunables) -> Tunables:
    """The end of a steepest descent over right plans on the truth."""
    while True:
        moves = [move.tunables for move in machine.space.neighbours(plan) if machine.is_right(move.tunables)]
        best = min(moves, key=lambda move: ms_of(machine, move))
        if ms_of(machine, best) >= ms_of(machine, plan):
            return plan
        plan = best


# --- the best --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number"),
    [pair for pair in EVERY if KINDS[pair[0]](pair[1]).space.workload.pattern.dense],
)
def test_the_best_of_a_dense_cell_is_that_of_all_its_plans(kind: str, number: int) -> None:
    machine = KINDS[kind](number)
    plans = machine.space.all_plans()
    assert plans is not None
    assert machine.best_ms() == pytest.approx(min(ms_of(machine, plan) for plan in plans if machine.is_right(plan)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "two-optima"])
def test_the_best_of_a_small_dilated_cell_is_that_of_all_its_plans(kind: str) -> None:
    """Three kernels at most in each branch, so that descents from everywhere end at the best."""
    machine = KINDS[kind](2)
    assert isinstance(machine, PartsMachine)
    kept = {}
    for name, values in machine.space.knobs.items():
        if name.startswith(("forward.", "backward.")):
            default = machine.space.default.branches[0].forward
            values = tuple(dict.fromkeys([default, *(values[1:3] if name.endswith("2") else values[2:4])]))
        elif name.startswith("param:") or name in ("pool_threshold_mib", "pool_strategy"):
            values = values[:2]
        elif name in ("window_tokens", "checkpoint"):
            values = tuple(dict.fromkeys([values[0], *values[-3:]]))
        kept[name] = values
    space = replace(machine.space, knobs=kept)
    small = replace(machine, space=space)
    right = [plan for plan in random_plans(space, 1000) if small.is_right(plan)]
    best_ms = small.best_ms()
    assert best_ms <= min(ms_of(small, plan) for plan in right) * (1 + 1e-9)
    ended = [descent(small, plan) for plan in right[:20]]
    assert best_ms == pytest.approx(min(ms_of(small, plan) for plan in ended))


@pytest.mark.parametrize(("kind", "number"), EVERY)
def test_no_plan_beats_the_best(kind: str, number: int) -> None:
    machine = KINDS[kind](number)
    best_ms = machine.best_ms()
    plans = [*machine.space.kernel_plans, *random_plans(machine.space, 300)]
    assert min(ms_of(machine, plan) for plan in plans if machine.is_right(plan)) >= best_ms * (1 - 1e-9)
    assert machine.is_right(machine.space.default)


@pytest.mark.parametrize(("kind", "number"), EVERY)
def test_a_number_is_one_machine(kind: str, number: int) -> None:
    one, other = KINDS[kind](number), KINDS[kind](number)
    plans = random_plans(one.space, 20)
    assert [ms_of(one, plan) for plan in plans] == [ms_of(other, plan) for plan in reversed(plans)][::-1]
    assert one.best_ms() == other.best_ms()


# --- the kinds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(INSTANCES))
def test_the_host_hides_the_device_for_most_plans(number: int) -> None:
    machine = KINDS["launch-bound"](number)
    assert isinstance(machine, PartsMachine)
    hidden = [device_ms < host_us / 1e3 for device_ms, host_us in map(machine.total, random_plans(machine.space, 300))]
    assert np.mean(hidden) > 0.5


@pytest.mark.parametrize("number", range(INSTANCES))
def test_three_values_cost_alone_and_in_pairs_and_pay_together(number: int) -> None:
    machine = pays_together(number)
    cell, default = machine.space.workload, machine.space.default
    together = machine.together
    assert together is not None
    kernels = {f"backward.{n}": together.backward for n in range(len(default.branches))}
    turns = [{"window_tokens": together.window_tokens}, {"checkpoint": together.checkpoint}, kernels]

    def ratio(*turned: dict[str, object]) -> float:
        changes = {name: value for turn in turned for name, value in turn.items()}
        plan = decode(cell, encode(cell, default) | changes)  # type: ignore[operator]
        assert machine.space.valid(plan)
        return ms_of(machine, plan) / ms_of(machine, default)

    alone = [ratio(turn) for turn in turns]
    pairs = [ratio(one, other) for one, other in ((turns[0], turns[1]), (turns[0], turns[2]), (turns[1], turns[2]))]
    assert min(alone + pairs) > 1.03
    assert ratio(*turns) < 0.92


@pytest.mark.parametrize("number", range(INSTANCES))
def test_two_optima_are_one_percent_apart_and_far_from_each_other(number: int) -> None:
    machine = two_optima(number)
    cell = machine.space.workload
    assert ms_of(machine, machine.near) / ms_of(machine, machine.far) == pytest.approx(1.01)
    free = sum(len(values) > 1 for values in machine.space.knobs.values())
    assert distance(cell, machine.near, machine.far) >= 0.6 * free
    assert descent(machine, machine.space.default) == machine.near
    assert descent(machine, machine.far) == machine.far


@pytest.mark.parametrize("number", range(INSTANCES))
def test_a_slow_default_is_beaten_by_a_kernel_that_looks_hopeless_in_place(number: int) -> None:
    machine = slow_default(number)
    cell, default = machine.space.workload, machine.space.default
    assert 5 < ms_of(machine, default) / machine.best_ms() < 10
    hopeless = max(machine.strided, key=lambda kernel: machine.strided[kernel])
    copies = {f"gather.{n}": "copy" for n in range(len(default.branches))}
    uniform = next(
        plan
        for plan in machine.space.kernel_plans
        if {b.forward for b in plan.branches} == {hopeless} and {b.backward for b in plan.branches} <= {hopeless, ""}
    )
    copied = decode(cell, encode(cell, uniform) | copies)
    seen = [plan for plan in machine.space.kernel_plans if machine.is_right(plan)]
    assert ms_of(machine, uniform) > 2 * min(ms_of(machine, plan) for plan in seen)
    assert ms_of(machine, copied) < 1.3 * machine.best_ms()


@pytest.mark.parametrize("number", range(INSTANCES))
def test_the_fastest_plans_are_traps_and_behave_as_such(number: int) -> None:
    machine = traps(number)
    cell, default = machine.space.workload, machine.space.default
    problem = problem_of("traps", "drift", number)
    clock = SimulatedClock()
    evaluator = problem.evaluator(clock, 0)
    assert machine.hangs is not None
    assert machine.unproven is not None
    assert len({machine.wrong, machine.hangs[0], machine.unproven[0], default.branches[0].forward}) == 4

    def with_part(kernel: str, direction: str) -> Tunables:
        turned = {f"{direction}.{n}": kernel for n in range(len(default.branches))}
        return decode(cell, encode(cell, default) | turned)

    wrong = evaluator.check(cell, with_part(str(machine.wrong), "forward"), timeout_s=HANG_S)
    assert isinstance(wrong, Fault)
    assert wrong.kind == "wrong"

    began = clock.now()
    hung = evaluator.check(cell, with_part(*machine.hangs), timeout_s=HANG_S)
    assert isinstance(hung, Fault)
    assert hung.kind == "timeout"
    assert clock.now() - began >= HANG_S + RESTART_S
    if cell.train:  # it hangs in one direction only
        assert machine.hangs[1] == "backward"
        assert isinstance(evaluator.check(cell, with_part(machine.hangs[0], "forward"), timeout_s=HANG_S), Checked)

    unproven = with_part(*machine.unproven)
    assert isinstance(evaluator.check(cell, unproven, timeout_s=HANG_S), Checked)
    assert isinstance(evaluator.validate(cell, unproven, timeout_s=HANG_S), Fault)
    assert ms_of(machine, unproven) < machine.best_ms()
    assert isinstance(evaluator.validate(cell, default, timeout_s=HANG_S), Proven)
    assert not problem.is_right(unproven)


# --- problems and noises ---------------------------------------------------------------------------------------------


def test_every_machine_is_a_problem_whose_default_is_no_better_than_its_best() -> None:
    for name in names():
        problem = problem_of(name, "drift", 1)
        assert problem.best_ms <= problem.default_ms * 1.0001
        assert problem.cell == problem_of(name, "drift", 1 + 5 * INSTANCES).cell  # 5 and 8 instances, in turn


def logs_of(noise: str, count: int = 4000) -> np.ndarray:
    problem = problem_of("two-optima", noise, 0)
    plan = problem.space.default
    block = problem.evaluator(SimulatedClock(), 3).block(problem.space.workload, [plan] * count, timeout_s=1)
    return np.log([result.ms / problem.default_ms for result in block.results if isinstance(result, Sample)])


@pytest.mark.parametrize("noise", NOISES)
def test_outliers_come_with_every_noise(noise: str) -> None:
    share = float(np.mean(logs_of(noise) - np.median(logs_of(noise)) > math.log(1.3) + 0.05))
    assert 0.02 < share < 0.09


def test_bimodal_noise_has_two_states_that_last() -> None:
    logs = logs_of("bimodal")
    usual = logs[logs < 0.1]
    slower = usual > math.log(1.05) / 2
    assert 0.35 < np.mean(slower) < 0.65
    assert np.mean(usual[slower]) - np.mean(usual[~slower]) == pytest.approx(math.log(1.05), abs=0.006)
    assert np.mean(slower[1:] == slower[:-1]) > 0.85  # the state of one reading is that of the next, mostly


def test_periodic_noise_adds_30_percent_to_a_fifth_of_the_time() -> None:
    logs = logs_of("periodic")
    assert np.mean((logs > math.log(1.3) - 0.04) & (logs < math.log(1.3) + 0.04)) == pytest.approx(0.2, abs=0.03)
