"""How far from the best the tuner ends, beside plain TPE and random search on the same budget.

    python benchmarks/tuner_regret.py --seeds 200

Runs on recorded machines (every table in tests/data) and on synthetic ones whose knobs interact, in simulated time,
with noise, outliers and drift laid on top. Regret is t(chosen) / t(best) - 1 with true times; for a synthetic
machine the best is what many hill climbs on the truth find. Prints one table.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autotune.budget import EFFORTS, Budget  # noqa: E402
from autotune.cell import CellContext, NoListener, SearchSettings  # noqa: E402
from autotune.evaluator import Checked, Sample  # noqa: E402
from autotune.replay import (  # noqa: E402
    ReplayEvaluator,
    SimulatedClock,
    SyntheticMachine,
    Table,
    Trouble,
    TrueTime,
    load_tables,
    truth_of,
)
from autotune.search import CellSearch  # noqa: E402
from autotune.space import Machine, Space, build_space, decode, encode  # noqa: E402
from autotune.store import Store  # noqa: E402
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload  # noqa: E402

NOISE = Trouble(sigma=0.03, outlier_share=0.05, outlier_low=0.2, outlier_high=1.0, drift=0.05)
CELL_BUDGET_S = 9.0  # a standard probe of twenty cells
RIVAL_BLOCKS = 3  # paired repetitions of each plan a rival asks for
HILL_CLIMBS = 60


@dataclass(frozen=True)
class Problem:
    """One cell to tune: its space, its truth, its best plan's true ms, and the default's."""

    name: str
    space: Space
    truth: TrueTime
    best_ms: float


@dataclass(frozen=True)
class Outcome:
    """What one method chose on one problem: both ratios are of true times."""

    regret: float
    to_default: float


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
    for table in load_tables(path):
        yield Problem(f"{path.name.split('.')[0]}", table.space(), truth_of([table]), best_of(table))


def best_of(table: Table) -> float:
    return table.best_ms({table.default.dtype})


# --- methods -----------------------------------------------------------------------------------------------------


def tuned(problem: Problem, seed: int) -> Tunables:
    clock = SimulatedClock()
    evaluator = ReplayEvaluator(problem.truth, clock, seed, NOISE)
    context = CellContext(
        problem.space,
        evaluator,
        Store(None),
        SearchSettings(EFFORTS["standard"], seed),
        NoListener(),
        clock,
        main_dtypes=(problem.space.default.dtype,),
    )
    search = CellSearch(context)
    budget = Budget(CELL_BUDGET_S, clock)
    fault = search.settle(budget.deadline(CELL_BUDGET_S))
    assert fault is None, fault
    result = search.run(budget.deadline(CELL_BUDGET_S))
    assert clock.now() <= 1.1 * CELL_BUDGET_S, clock.now()
    assert result.choice is not None
    return result.choice.tunables


def sampled(problem: Problem, seed: int, sampler: optuna.samplers.BaseSampler) -> Tunables:
    """An ordinary study: ask, check, time against the default, tell the median; the best told wins."""
    clock = SimulatedClock()
    evaluator = ReplayEvaluator(problem.truth, clock, seed, NOISE)
    space, workload = problem.space, problem.space.workload
    study = optuna.create_study(sampler=sampler)
    distributions = {n: optuna.distributions.CategoricalDistribution(v) for n, v in space.knobs.items()}
    default = encode(workload, space.default)
    study.enqueue_trial({name: default[name] for name in space.knobs})
    values: dict[Tunables, float] = {}
    while clock.now() < CELL_BUDGET_S:
        trial = study.ask(distributions)
        plan = decode(workload, trial.params)
        if not space.valid(plan):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        if plan not in values:
            if not isinstance(evaluator.check(workload, plan, timeout_s=5.0), Checked):
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                continue
            values[plan] = _timed(evaluator, workload, plan, space.default)
        study.tell(trial, values[plan])
    return min(values, key=values.__getitem__)


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
    return problem.name, method, Outcome(ms / problem.best_ms - 1, ms / default_ms)


# --- the table -----------------------------------------------------------------------------------------------------


def report(outcomes: Mapping[tuple[str, str], Sequence[Outcome]]) -> str:
    header = f"{'machine':<24} {'method':<10} {'runs':>5} {'regret: median':>15} {'p90':>8} {'worst vs default':>17}"
    lines = [header]
    for (name, method), found in outcomes.items():
        regrets = [outcome.regret for outcome in found]
        worst = max(outcome.to_default for outcome in found)
        median, p90 = np.median(regrets), np.quantile(regrets, 0.9)
        lines.append(f"{name:<24} {method:<10} {len(found):>5} {median:>15.1%} {p90:>8.1%} {worst:>17.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
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
    print(report(dict(sorted(outcomes.items()))))


if __name__ == "__main__":
    main()
