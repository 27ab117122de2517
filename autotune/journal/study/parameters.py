"""Plans as parameters of an Optuna trial: readable names, and no value where a knob has no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import Trial

from autotune.space.space import Assignment, Value, decode, encode
from ringattn.planning.fused_steps import FUSED_STEPS
from ringattn.workload import Tunables, Workload

_EXCHANGING = ("ulysses", "ulysses-ring")
# A knob has an effect only beside these values of knobs that come before it.
_CONDITIONS: Mapping[str, Callable[[Mapping[str, Value]], bool]] = {
    "pool_strategy": lambda chosen: chosen.get("pool_threshold_mib") is not None,
    "window_tokens": lambda chosen: chosen.get("schedule", "local") == "local",
    "ulysses": lambda chosen: chosen.get("schedule") == "ulysses-ring",
    "exchange": lambda chosen: chosen.get("schedule") in _EXCHANGING,
    "grad_wire": lambda chosen: chosen.get("schedule") not in ("local", "ulysses"),
}


class Parameters:
    """Parameters of one workload's plans."""

    def __init__(self, workload: Workload, knobs: Mapping[str, tuple[Value, ...]]) -> None:
        self._workload = workload
        # A knob comes after those that decide whether it has an effect.
        order = sorted(knobs, key=lambda name: (name.startswith("param:"), name in _CONDITIONS, name == "exchange"))
        self._fixed: Assignment = {name: knobs[name][0] for name in order if len(knobs[name]) == 1}
        self.distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(knobs[name]) for name in order if len(knobs[name]) > 1
        }

    def _applies(self, name: str, chosen: Mapping[str, Value]) -> bool:
        if name.startswith("param:"):
            kernel = name.removeprefix("param:").rsplit(".", 1)[0]
            return kernel in FUSED_STEPS or kernel in chosen.values()
        condition = _CONDITIONS.get(name)
        return condition is None or condition(chosen)

    def of(self, plan: Tunables) -> Assignment:
        """Return the parameters of a plan."""
        chosen = encode(self._workload, plan)
        return {name: chosen.get(name) for name in self.distributions if self._applies(name, chosen)}

    def plan(self, params: Mapping[str, Any]) -> Tunables:
        """Return the plan of a trial's parameters; the inverse of ``of``."""
        return decode(self._workload, {**self._fixed, **params})

    def suggest(self, trial: Trial) -> Tunables:
        """Return the plan that a study's sampler gives a trial, one parameter after the other."""
        chosen: dict[str, Any] = dict(self._fixed)
        for name, distribution in self.distributions.items():
            if self._applies(name, chosen):
                assert isinstance(distribution, CategoricalDistribution)
                chosen[name] = trial.suggest_categorical(name, distribution.choices)
        return decode(self._workload, chosen)
