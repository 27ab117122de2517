"""Finds the trait that a plan fails by, as in group testing: what failed plans share, and no right one has."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from autotune.measure.evaluator import Direction
from ringattn.workload import Tunables

from .transfer import parts_of

Trait = tuple[str, Any]
GIVEN_UP = 0.1  # odds under which no plan is hoped for: two failed of one trait that it has
# How much likelier a kernel is to blame than a mode of the whole plan.
KERNEL_WEIGHT = 4.0
UNRELATED = 0.2  # odds that a failure is of no single trait, but of that plan alone


def traits_of(plan: Tunables) -> frozenset[Trait]:
    """Return what a failure may be of: kernels by direction, dtype, gathers, checkpoint, window, schedule, compile."""
    gathers = {("gather", branch.gather) for branch in plan.branches}
    whole = {(name, getattr(plan, name)) for name in ("dtype", "checkpoint", "window_tokens", "schedule", "compile")}
    return frozenset(parts_of(plan) | gathers | whole)


@dataclass(slots=True)
class _Group:
    """Failures that one trait would explain."""

    traits: frozenset[Trait]
    failures: int = 1


@dataclass(slots=True)
class Suspects:
    """Traits of plans that failed and of plans that passed, in one kind of test."""

    passed: set[Trait] = field(default_factory=set)
    _groups: list[_Group] = field(default_factory=list)

    def clear(self, plan: Tunables) -> None:
        """Clear the traits of a plan that passed: none of them is to blame alone."""
        self.passed |= traits_of(plan)
        for group in self._groups:
            group.traits -= self.passed

    def blame(self, plan: Tunables, direction: Direction | None = None) -> None:
        """Suspect what a failed plan shares with another failure's suspects, or all of its own traits.

        Of a failure in one ``direction`` the kernels of the other are not to blame.
        """
        others = {"forward", "backward"} - {direction} if direction is not None else set()
        traits = {trait for trait in traits_of(plan) - self.passed if trait[0] not in others}
        for group in self._groups:
            if shared := group.traits & traits:
                group.traits, group.failures = shared, group.failures + 1
                return
        self._groups.append(_Group(frozenset(traits)))

    def condemned(self) -> frozenset[Trait]:
        """Return traits that alone explain their failures, as often as it takes to give them up."""
        found = [g.traits for g in self._groups if len(g.traits) == 1 and UNRELATED**g.failures < GIVEN_UP]
        return frozenset().union(*found)

    def odds(self, plan: Tunables) -> float:
        """Return how likely the plan passes, as far as it is for what others failed of."""
        traits = traits_of(plan)
        return math.prod(
            1 - _weight(group.traits & traits) / _weight(group.traits) * (1 - UNRELATED**group.failures)
            for group in self._groups
            if group.traits
        )


def _weight(traits: frozenset[Trait]) -> float:
    return sum(KERNEL_WEIGHT if name in ("forward", "backward") else 1.0 for name, _ in traits)
