"""The product and its rivals: each tunes a problem with a seed and says what it chose."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import optuna

from autotune.journal.store import Store
from autotune.journal.study.cell_study import SAMPLER
from autotune.measure.simulated import SimulatedClock
from autotune.search.budget import EFFORTS, Budget
from autotune.search.loop import CellSearch
from autotune.search.settings import NoListener, SearchSettings
from ringattn.workload import Tunables

from .problems import CELL_BUDGET_S, HANG_S, Problem
from .rivals import Rival
from .table import Proposer


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan that a method would have run, the ratio to the default that it claims, and who proposed it."""

    plan: Tunables
    claimed: float = 1.0
    by: Proposer = "default"


def ringtune(problem: Problem, seed: int, clock: SimulatedClock) -> Choice:
    """Run the product's search of one cell; without an answer the default runs."""
    search = CellSearch(
        problem.space,
        problem.evaluator(clock, seed),
        Store(None),
        SearchSettings(
            EFFORTS["standard"], seed, hang_s=HANG_S, asynchronous=problem.asynchronous, graphs=problem.asynchronous
        ),
        NoListener(),
        clock,
        main_dtypes=(problem.space.default.dtype,),
    )
    budget = Budget(CELL_BUDGET_S, clock)
    fault = search.settle(budget.deadline(CELL_BUDGET_S))
    assert fault is None, fault
    result = search.run(budget.deadline(budget.available_s()))
    if result.choice is None:
        return Choice(problem.space.default)
    plan = result.choice.tunables
    if plan == problem.space.default:
        return Choice(plan, result.choice.gain.ratio)
    trial = search.study.study.get_trials(deepcopy=False)[search.study.number_of(plan)]
    by: Proposer = "sampler" if trial.user_attrs["proposed_by"] == SAMPLER else "queue"
    return Choice(plan, result.choice.gain.ratio, by)


def rival(problem: Problem, seed: int, clock: SimulatedClock, sampler: optuna.samplers.BaseSampler) -> Choice:
    plan, claimed = Rival(problem, seed, clock).run(sampler)
    if plan == problem.space.default:
        return Choice(plan, claimed)
    return Choice(plan, claimed, "queue" if plan in problem.space.kernel_plans else "sampler")


def tpe(problem: Problem, seed: int, clock: SimulatedClock) -> Choice:
    return rival(problem, seed, clock, optuna.samplers.TPESampler(seed=seed, multivariate=True))


def gp(problem: Problem, seed: int, clock: SimulatedClock) -> Choice:
    return rival(problem, seed, clock, optuna.samplers.GPSampler(seed=seed))


def at_random(problem: Problem, seed: int, clock: SimulatedClock) -> Choice:
    return rival(problem, seed, clock, optuna.samplers.RandomSampler(seed=seed))


def default(problem: Problem, seed: int, clock: SimulatedClock) -> Choice:
    return Choice(problem.space.default)


Method = Callable[[Problem, int, SimulatedClock], Choice]
METHODS: Mapping[str, Method] = {"ringtune": ringtune, "TPE": tpe, "GP": gp, "random": at_random, "default": default}


def be_quiet() -> None:
    """Silence Optuna, and torch's threads, whose time would all be charged."""
    import torch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    torch.set_num_threads(1)
