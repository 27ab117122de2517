"""Samplers by name: the search's own, Optuna's, or anybody's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler

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
        try:
            return optuna.samplers.GPSampler(seed=seed)
        except ImportError as error:
            raise UsageFailure(f"--sampler gp: {error}; pip install scipy") from error
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "grid":
        grid = {n: list(d.choices) for n, d in distributions.items() if isinstance(d, CategoricalDistribution)}
        return optuna.samplers.GridSampler(grid, seed=seed)
    return foreign_sampler(name)


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
