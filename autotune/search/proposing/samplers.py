"""Samplers by name: the search's own, Optuna's, or anybody's."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.exit_codes import UsageFailure

NAMES = ("auto", "tpe", "gp", "random", "grid")


def sampler_of(
    name: str, seed: int, distributions: Mapping[str, BaseDistribution], own: Callable[[], BaseSampler]
) -> BaseSampler:
    """Return the sampler of this name; UsageFailure where there is none."""
    if name == "auto":
        return own()
    with warnings.catch_warnings():  # that it is experimental is news to nobody who names it
        warnings.simplefilter("ignore", ExperimentalWarning)
        return _named_sampler(name, seed, distributions)


def _named_sampler(name: str, seed: int, distributions: Mapping[str, BaseDistribution]) -> BaseSampler:
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)
    if name == "gp":
        if importlib.util.find_spec("scipy") is None:
            raise UsageFailure("--sampler gp: Optuna's needs scipy, which is not installed; pip install scipy")
        return optuna.samplers.GPSampler(seed=seed)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "grid":
        return Grid(distributions, seed)
    return foreign_sampler(name)


class Grid(BaseSampler):
    """Every combination of the parameters once, in an order of the seed's, then ``study.stop``.

    Optuna's GridSampler lists all of them first: 10^7 for a LongNet cell of three branches.
    """

    def __init__(self, distributions: Mapping[str, BaseDistribution], seed: int) -> None:
        self._distributions = {n: d for n, d in distributions.items() if isinstance(d, CategoricalDistribution)}
        self._size = math.prod(len(d.choices) for d in self._distributions.values())
        rng = random.Random(seed)
        self._place, self._step, self._left = rng.randrange(self._size), 0, self._size
        while math.gcd(self._step, self._size) != 1:  # so that every combination is passed before one comes again
            self._step = rng.randrange(1, self._size + 1)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all parameters, unless the trial has its own already."""
        return {} if "fixed_params" in trial.system_attrs else dict(self._distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if not search_space:
            return {}
        self._left -= 1
        if self._left <= 0:
            study.stop()
        rest, found = self._place, {}
        for name, distribution in self._distributions.items():
            rest, index = divmod(rest, len(distribution.choices))
            found[name] = distribution.choices[index]
        self._place = (self._place + self._step) % self._size
        return found

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{param_name}: not of the space the grid was made of")


class Foreign(BaseSampler):
    """A sampler of the user's: what it raises ends the probe in one line that names it."""

    def __init__(self, name: str, sampler: BaseSampler) -> None:
        self._name, self._sampler = name, sampler

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise _failure(self._name, error) from error

    def reseed_rng(self) -> None:
        with self._named():
            self._sampler.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        with self._named():
            return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        with self._named():
            return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        with self._named():
            return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        with self._named():
            self._sampler.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        with self._named():
            self._sampler.after_trial(study, trial, state, values)


def _failure(name: str, error: Exception) -> UsageFailure:
    why = " ".join(str(error).split())
    kind = type(error).__name__
    return UsageFailure(
        f"--sampler {name!r}: raised {kind}{f' ({why})' if why else ''}; mend it, or give one of {', '.join(NAMES)}"
    )


def foreign_sampler(name: str) -> BaseSampler:
    """Return an instance of ``package.module:Class``; UsageFailure where that is no sampler that needs no arguments."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageFailure(
            f"--sampler {name!r}: is no sampler; give one of {', '.join(NAMES)}, or package.module:Class"
        )
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise _failure(name, error) from error
    if not isinstance(made, BaseSampler):
        raise UsageFailure(f"--sampler {name!r}: is no optuna.samplers.BaseSampler")
    return Foreign(name, made)
