"""How far from the best the tuner ends, beside plain TPE and random search on the same budget.

    python benchmarks/tuner_regret.py --seeds 200 --output benchmarks/results/tuner-regret.json

Runs on recorded machines (every table in tests/data, its cells in turn) and on synthetic ones whose knobs interact, in
simulated time: checks, first calls, readings and proofs cost what they cost on the machine, with noise, outliers and
drift laid on top. Regret is t(chosen) / t(best) - 1 with true times, the medians of the tables; for a synthetic machine
the best is what many hill climbs on the truth find. Prints one table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import optuna

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autotune.journal.store import Store  # noqa: E402
from autotune.measure.evaluator import Checked, Sample  # noqa: E402
from autotune.measure.simulated import (  # noqa: E402
    FirstCalls,
    ReplayEvaluator,
    SimulatedClock,
    SyntheticMachine,
    Table,
    Trouble,
    TrueTime,
    first_calls_of,
    load_tables,
    truth_of,
)
from autotune.search.budget import EFFORTS, Budget  # noqa: E402
from autotune.search.loop import CellSearch  # noqa: E402
from autotune.search.settings import NoListener, SearchSettings  # noqa: E402
from autotune.space.space import Machine, Space, build_space, decode, encode  # noqa: E402
from ringattn import __version__  # noqa: E402
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload  # noqa: E402

NOISE = Trouble(sigma=0.03, outlier_share=0.05, outlier_low=0.2, outlier_high=1.0, drift=0.05)
CELLS = 20  # of a standard probe, which share its budget and what is loaded and compiled once
CELL_BUDGET_S = 8.0
NOISE_FLOOR = 1.02  # times the default's: a choice slower than that counts as worse than the default
AGREED = 0.02  # two seeds agree where their choices differ by no more
ASKS_IN_VAIN = 200
RIVAL_BLOCKS = 3  # paired repetitions of each plan a rival asks for
HILL_CLIMBS = 60


@dataclass(frozen=True)
class Problem:
    """One cell to tune: its space, its truth, its best plan's true ms, and the default's."""

    name: str
    space: Space
    truth: TrueTime
    best_ms: float
    first_calls: FirstCalls | None = None


@dataclass(frozen=True)
class Outcome:
    """What one method chose on one problem: both ratios are of true times."""

    regret: float
    to_default: float
    ms: float
    cell: str


# --- problems ----------------------------------------------------------------------------------------------------


def synthetic_problem(seed: int) -> Problem:
    """A dilated training cell on a machine nobody has; see SyntheticMachine."""
    workload = Workload("train", True, 16384, 16, 128, "bf16", pattern=Pattern.of([2048, 4096, 8192], [1, 2, 4]))
    machine = Machine(("cudnn", "flash", "efficient"), lambda cell, plan: (), lambda cell, plan: plan)
    default = Tunables("bf16", tuple(BranchTunables("cudnn", "cudnn") for _ in range(3)))
    space = build_space(workload, machine, default, ("bf16",))
    synthetic = SyntheticMachine(workload, space.knobs, seed, main=0.05, interaction=0.06)
    best = min(_climb(space, synthetic.log_ratio, np.random.default_rng((seed, n))) for n in range(HILL_CLIMBS))
    return Problem("synthetic", space, synthetic.row, synthetic.base_ms * math.exp(best))


def _climb(space: Space, log_ratio: Callable[[Tunables], float], rng: np.random.Generator) -> float:
    """The value at the end of a steepest descent from a random plan."""
    names = list(space.knobs)
    plan = decode(space.workload, {name: space.knobs[name][rng.integers(len(space.knobs[name]))] for name in names})
    here = log_ratio(plan)
    while True:
        values = {move.tunables: log_ratio(move.tunables) for move in space.neighbours(plan)}
        best = min(values, key=values.__getitem__)
        if values[best] >= here:
            return here
        plan, here = best, values[best]


def recorded_problems(path: Path) -> Iterator[Problem]:
    tables = load_tables(path)
    first_calls = first_calls_of(tables)
    for table in tables:
        yield Problem(path.name.partition(".")[0], table.space(), truth_of([table]), best_of(table), first_calls)


def best_of(table: Table) -> float:
    return table.best_ms({table.default.dtype})


def evaluator_of(problem: Problem, clock: SimulatedClock, seed: int) -> ReplayEvaluator:
    return ReplayEvaluator(problem.truth, clock, seed, NOISE, first_calls=problem.first_calls, one_off_share=1 / CELLS)


# --- methods -----------------------------------------------------------------------------------------------------


def tuned(problem: Problem, seed: int) -> Tunables:
    clock = SimulatedClock()
    evaluator = evaluator_of(problem, clock, seed)
    search = CellSearch(
        problem.space,
        evaluator,
        Store(None),
        SearchSettings(EFFORTS["standard"], seed),
        NoListener(),
        clock,
        main_dtypes=(problem.space.default.dtype,),
    )
    budget = Budget(CELL_BUDGET_S, clock)
    fault = search.settle(budget.deadline(CELL_BUDGET_S))
    assert fault is None, fault
    result = search.run(budget.deadline(budget.available_s()))
    assert clock.now() <= 1.15 * CELL_BUDGET_S, f"{problem.name}, seed {seed}: {clock.now():.2f} s"
    assert result.choice is not None
    return result.choice.tunables


def sampled(problem: Problem, seed: int, sampler: optuna.samplers.BaseSampler) -> Tunables:
    """An ordinary study: ask, check, time against the default, tell the median; the best told wins.

    It too keeps the time of one proof, and ends early where many asks in a row bring nothing new.
    """
    clock = SimulatedClock()
    evaluator = evaluator_of(problem, clock, seed)
    space, workload = problem.space, problem.space.workload
    study = optuna.create_study(sampler=sampler)
    distributions = {n: optuna.distributions.CategoricalDistribution(v) for n, v in space.knobs.items()}
    default = encode(workload, space.default)
    study.enqueue_trial({name: default.get(name) for name in space.knobs})
    values: dict[Tunables, float] = {}
    idle = 0
    while clock.now() < CELL_BUDGET_S - _proof_s(problem) and idle < ASKS_IN_VAIN:
        idle += 1
        trial = study.ask(distributions)
        plan = decode(workload, trial.params)
        if not space.valid(plan):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        if plan not in values:
            if not isinstance(evaluator.check(workload, plan, timeout_s=5.0), Checked):
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                continue
            idle = 0
            values[plan] = _timed(evaluator, workload, plan, space.default)
        study.tell(trial, values[plan])
    return min(values, key=values.__getitem__)


def _proof_s(problem: Problem) -> float:
    """What proving the default takes."""
    clock = SimulatedClock()
    evaluator_of(problem, clock, 0).prove(problem.space.workload, problem.space.default, timeout_s=60.0)
    return clock.now()


def _timed(evaluator: ReplayEvaluator, workload: Workload, plan: Tunables, default: Tunables) -> float:
    ratios = []
    for _ in range(RIVAL_BLOCKS):
        mine, theirs = evaluator.block(workload, [plan, default], timeout_s=5.0).results
        if isinstance(mine, Sample) and isinstance(theirs, Sample):
            ratios.append(math.log(mine.ms / theirs.ms))
    return float(np.median(ratios)) if ratios else math.inf


Method = Callable[[Problem, int], Tunables]
METHODS: Mapping[str, Method] = {
    "ringtune": tuned,
    "TPE": lambda problem, seed: sampled(problem, seed, optuna.samplers.TPESampler(seed=seed)),
    "random": lambda problem, seed: sampled(problem, seed, optuna.samplers.RandomSampler(seed=seed)),
}


def run_one(task: tuple[str, str | None, int, int]) -> tuple[str, str, Outcome]:
    """One method on one problem with one seed; tasks are plain so that processes can share them."""
    method, path, index, seed = task
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    problem = synthetic_problem(seed) if path is None else list(recorded_problems(Path(path)))[index]
    chosen = METHODS[method](problem, seed)
    workload = problem.space.workload
    ms = problem.truth(workload, chosen).median_ms
    default_ms = problem.truth(workload, problem.space.default).median_ms
    cell = str(workload) if path is not None else "synthetic"
    return problem.name, method, Outcome(ms / problem.best_ms - 1, ms / default_ms, ms, cell)


# --- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """What one method came to on one machine; ``agreeing`` is of pairs of seeds of one cell, where there are any."""

    machine: str
    method: str
    runs: int
    median: float
    p90: float
    worse_than_default: int
    worst_to_default: float
    agreeing: float | None


def line_of(machine: str, method: str, outcomes: Sequence[Outcome]) -> Line:
    regrets = [outcome.regret for outcome in outcomes]
    ratios = [outcome.to_default for outcome in outcomes]
    return Line(
        machine,
        method,
        len(outcomes),
        round(float(np.median(regrets)), 4),
        round(float(np.quantile(regrets, 0.9)), 4),
        sum(ratio > NOISE_FLOOR for ratio in ratios),
        round(max(ratios), 4),
        None if machine == "synthetic" else agreement(outcomes),
    )


def agreement(outcomes: Sequence[Outcome]) -> float | None:
    """The share of pairs of seeds, over all cells, whose choices take the same true time within AGREED."""
    by_cell: dict[str, list[float]] = {}
    for outcome in outcomes:
        by_cell.setdefault(outcome.cell, []).append(outcome.ms)
    pairs = [pair for of_cell in by_cell.values() for pair in itertools.combinations(of_cell, 2)]
    agreeing = sum(abs(math.log(one / other)) <= math.log1p(AGREED) for one, other in pairs)
    return round(agreeing / len(pairs), 4) if pairs else None


def report(lines: Sequence[Line]) -> str:
    header = (
        f"{'machine':<10} {'method':<9} {'runs':>5} {'regret: median':>15} {'p90':>7}"
        f" {'worse than default':>19} {'worst / default':>16} {'two seeds agree':>16}"
    )
    rows = [header]
    for line in lines:
        agreed = "" if line.agreeing is None else f"{line.agreeing:.1%}"
        rows.append(
            f"{line.machine:<10} {line.method:<9} {line.runs:>5} {line.median:>15.1%} {line.p90:>7.1%}"
            f" {line.worse_than_default:>19} {line.worst_to_default:>16.3f} {agreed:>16}"
        )
    return "\n".join(rows)


def document(lines: Sequence[Line], outcomes: Mapping[tuple[str, str], Sequence[Outcome]], seeds: int) -> str:
    """The table as JSON, with the cells of the recorded machines one by one."""
    cells = []
    for (machine, method), found in outcomes.items():
        for cell in dict.fromkeys(outcome.cell for outcome in found):
            if machine != "synthetic":
                cells.append(asdict(line_of(machine, method, [o for o in found if o.cell == cell])) | {"cell": cell})
    packages = {name: importlib.metadata.version(name) for name in ("numpy", "optuna")}
    versions = {"python": platform.python_version(), "ringtune": __version__} | packages
    return json.dumps(
        {
            "versions": versions,
            "seeds": seeds,
            "cell_budget_s": CELL_BUDGET_S,
            "noise": {name: value for name, value in asdict(NOISE).items() if math.isfinite(value)},
            "noise_floor": NOISE_FLOOR,
            "machines": [asdict(line) for line in lines],
            "cells": cells,
        },
        indent=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--output", type=Path, default=None, help="where the numbers go as JSON")
    options = parser.parse_args()
    tasks: list[tuple[str, str | None, int, int]] = []
    for method in options.methods:
        tasks += [(method, None, 0, seed) for seed in range(options.seeds)]
        for path in sorted((ROOT / "tests" / "data").glob("*.json.gz")):
            cells = len(load_tables(path))
            tasks += [(method, str(path), seed % cells, seed) for seed in range(options.seeds)]
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, method, outcome in pool.map(run_one, tasks, chunksize=4):
            outcomes.setdefault((name, method), []).append(outcome)
    outcomes = dict(sorted(outcomes.items()))
    lines = [line_of(name, method, found) for (name, method), found in outcomes.items()]
    print(report(lines))
    if options.output is not None:
        options.output.write_text(document(lines, outcomes, options.seeds) + "\n")


if __name__ == "__main__":
    main()
