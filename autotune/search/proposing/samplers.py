"""Samplers by name: the search's own, Optuna's, or anybody's."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.exit_codes import UsageFailure

NAMES = ("auto", "tpe", "gp", "random", "grid")


def sampler_of(
    name: str, seed: int, distributions: Mapping[str, BaseDistribution], own: Callable[[], BaseSampler]
) -> BaseSampler:
    """The sampler of this name; UsageFailure where there is none."""
    if name == "auto":
        return own()
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)
    if name == "gp":
        if importlib.util.find_spec("scipy") is None:
            raise UsageFailure("--sampler gp: Optuna's needs scipy, which is not installed; pip install scipy")
        return optuna.samplers.GPSampler(seed=seed)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "grid":
        grid = {n: list(d.choices) for n, d in distributions.items() if isinstance(d, CategoricalDistribution)}
        return _Grid(grid, seed=seed)
    return foreign_sampler(name)


class _Grid(optuna.samplers.GridSampler):
    """Optuna's, which stops ``optimize`` when its grid is searched through; here the loop ends by its own rules."""

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        return


def foreign_sampler(name: str) -> BaseSampler:
    """An instance of ``package.module:Class``; UsageFailure where that is no sampler that needs no arguments."""
    module, colon, attribute = name.partition(":")
    try:
        if not colon:
            raise ValueError("it has no colon")
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageFailure(
            f"--sampler {name}: {error}; give one of {', '.join(NAMES)}, or package.module:Class"
        ) from error
    if not isinstance(made, BaseSampler):
        raise UsageFailure(f"--sampler {name}: is no optuna.samplers.BaseSampler")
    return made
