"""The search's sampler: an Optuna sampler that asks for the plans from which the surrogate expects most.

Candidates are made of the best plans by turning knobs, one at a time or the same in every branch, by crossing them,
and at random. They are compared as rows of numbers; whether a plan can run is asked of the best alone, as that costs a
hundred times as much (95 us against 1 us on an H100's LongNet cell).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from autotune.space.space import Space, Value
from ringattn.planning.preference import TIE
from ringattn.workload import Tunables

from .design import Design
from .surrogate import Coder, Codes, Floats, Surrogate

STARTS = 6  # best plans from which candidates are made
SURPRISES = 3  # plans far faster than predicted, of which they are made, too
CROSSINGS, RANDOM = 32, 64
RANDOM_TURNS = 4  # of a random candidate, at most
DESIGNED = 0.75  # of the plans, until every three values were tried together
CLIMBS = 6  # times the best candidates are turned once more
LOOKED_AT = 6  # candidates that are asked whether they can run, beside those that cannot
MOST_LOOKED_AT = 60
WORTH_TRYING = 1e-4  # expected gain (log-ratio) under which no plan is worth its time
NEVER_TURNED = ("dtype", "compile")  # which the loop decides


@dataclass(frozen=True, slots=True)
class Known:
    """Knowledge of a sampler: the process, the plans to start from, best first, the log-ratio to beat, what was tried.

    ``tried`` are identities in ``space``, ``plans`` those tried that did not fail; with ``hopeless`` values nothing
    comes near the best. ``odds`` are those of passing check and validation; ``avoid`` says which plans are not to be
    asked for.
    """

    space: Space
    surrogate: Surrogate
    starts: list[Tunables]
    best: float
    tried: set[Hashable]
    plans: list[Tunables]
    hopeless: set[tuple[str, Value]]
    odds: Callable[[Tunables], float]
    avoid: Callable[[Tunables], bool]

    def is_new(self, plan: Tunables) -> bool:
        identity = self.space.identity(plan)
        return identity is not None and identity not in self.tried and not self.avoid(plan)


_erf = np.vectorize(math.erf, otypes=[float])


def expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """Return by how much (log-ratio) each is expected to be faster than ``best``; what is slower counts as nothing."""
    z = (best - mean) / deviation
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return np.asarray(deviation * (z * 0.5 * (1 + _erf(z / math.sqrt(2))) + density))


class SurrogateSampler(BaseSampler):
    """Samples all parameters of a plan at once, a few plans ahead: those of one block."""

    def __init__(
        self,
        known: Callable[[], Known],
        parameters: Callable[[Tunables], Mapping[str, Any]],
        distributions: Mapping[str, BaseDistribution],
        design: Design,
        seed: int,
    ) -> None:
        """``known`` is everything measured so far; ``parameters`` names a plan's."""
        self._design = design
        self._known, self._parameters, self._distributions = known, parameters, dict(distributions)
        self._rng = np.random.default_rng(seed)
        self._others = RandomSampler(seed=seed)
        self._asked: list[Tunables] = []

    def reseed_rng(self) -> None:
        self._rng = np.random.default_rng()
        self._others.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all parameters, unless the trial has its own already."""
        return {} if trial.params or "fixed_params" in trial.system_attrs else self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if not search_space or not (self._asked or self.look_ahead(1)):
            return {}
        return dict(self._parameters(self._asked.pop(0)))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._others.sample_independent(study, trial, param_name, param_distribution)

    @property
    def ahead(self) -> int:
        """Plans that are chosen and not asked for yet."""
        return len(self._asked)

    def look_ahead(self, count: int) -> int:
        """Choose the next plans out of everything known; returns how many are worth their time."""
        known = self._known()
        rows = self._candidates(known)
        self._asked = []
        while len(self._asked) < count:
            found = None if self._asked else _following(known)
            if found is None and len(self._asked) < DESIGNED * count:
                found = self._design.next(known.plans, known.hopeless, known.is_new, known.odds, self._rng)
            found = found or _most_promising(known, rows)
            if found is None:
                break
            known.plans.append(found)
            self._asked.append(found)
            known.tried.add(known.space.identity(found))
            known.surrogate.assume(known.surrogate.coder.row(found))
        return len(self._asked)

    def _candidates(self, known: Known) -> Codes:
        """Return distinct rows: around the best plans, and on from there as long as more is promised."""
        coder = known.surrogate.coder
        turns = turns_of(known.space, coder)
        plans = [*known.starts[:STARTS], *known.surrogate.surprises()[:SURPRISES]]
        own = coder.rows(replace(plan, compile=False) for plan in plans)  # seconds a plan, which the loop gives to one
        rows = np.concatenate([self._random(own, turns), self._crossed(own), _turned(own, turns)])
        seen, promised = [rows], 0.0
        for _ in range(CLIMBS):
            gains = expected_improvement(*known.surrogate.predict(rows), known.best - TIE)
            if gains.max() <= promised:
                break
            promised = float(gains.max())
            rows = _turned(rows[np.argsort(-gains, kind="stable")[:STARTS]], turns)
            seen.append(rows)
        return _distinct(np.concatenate(seen))

    def _random(self, own: Codes, turns: Codes) -> Codes:
        rows = own[self._rng.integers(len(own), size=RANDOM)]
        for number in range(RANDOM_TURNS if len(turns) else 0):
            chosen = turns[self._rng.integers(len(turns), size=RANDOM)]
            keeps = (chosen < 0) | (self._rng.random(RANDOM)[:, None] > 1 / (number + 1))
            rows = np.where(keeps, rows, chosen)
        return rows

    def _crossed(self, own: Codes) -> Codes:
        one, other = (own[self._rng.integers(len(own), size=CROSSINGS)] for _ in range(2))
        return np.where(self._rng.random(one.shape) < 0.5, one, other)


def turns_of(space: Space, coder: Coder) -> Codes:
    """Return every turn of one knob, and of the same knob in every branch, as rows: -1 leaves a knob as it is."""
    columns: dict[str, list[int]] = {}
    for column, name in enumerate(coder.names):
        columns.setdefault(name, []).append(column)
        stem = name.partition(".")[0]
        if stem in ("forward", "backward", "gather"):
            columns.setdefault(stem, []).append(column)
    turns = []
    for name, several in columns.items():
        if name in NEVER_TURNED:
            continue
        for value in dict.fromkeys(value for c in several for value in space.knobs[coder.names[c]]):
            turn = np.full(len(coder.names), -1)
            for column in several:
                if value in coder.values[column]:
                    turn[column] = coder.values[column].index(value)
            turns.append(turn)
    return _distinct(np.array(turns)) if turns else np.empty((0, len(coder.names)), dtype=np.int64)


def _distinct(rows: Codes) -> Codes:
    """Return each row once, in order: as ``np.unique`` over an axis, in a third of the time (3.4 ms of 2000 rows)."""
    rows = rows[np.lexsort(rows.T[::-1])] if rows.shape[1] else rows
    return np.asarray(rows[np.append(True, (rows[1:] != rows[:-1]).any(axis=1))])


def _turned(rows: Codes, turns: Codes) -> Codes:
    return np.where(turns[None] >= 0, turns[None], rows[:, None]).reshape(-1, rows.shape[1])


def _following(known: Known) -> Tunables | None:
    """Return the turn of a surprisingly fast plan that promises most; None where none may be the best.

    Three knobs that gain a fifth together came with others that cost as much. To the process, which has seen each knob
    cost time in other plans, no turn of that plan promised anything: it was followed in one of three searches.
    """
    space, surrogate = known.space, known.surrogate
    turns = turns_of(space, surrogate.coder)
    best: tuple[float, Tunables] | None = None
    for surprise in surrogate.surprises()[:SURPRISES]:
        if surprise.compile or known.avoid(surprise):  # no other plan is to be compiled
            continue
        rows = _turned(surrogate.coder.row(surprise)[None], turns)
        means = surrogate.carried(surprise, rows)
        for index in np.argsort(means, kind="stable")[:LOOKED_AT]:
            plan = surrogate.coder.plan(rows[index])
            if means[index] < min(best[0] if best else math.inf, known.best - TIE) and known.is_new(plan):
                best = float(means[index]), plan
    return best[1] if best is not None else None


def _most_promising(known: Known, rows: Codes) -> Tunables | None:
    """Return the plan that can run, was not tried, and promises most; None where none is worth its time."""
    surrogate = known.surrogate
    gains = expected_improvement(*surrogate.predict(rows), known.best - TIE)
    best: tuple[float, Tunables] | None = None
    looked_at = 0
    for index in np.argsort(-gains, kind="stable")[:MOST_LOOKED_AT]:
        if gains[index] < max(WORTH_TRYING, best[0] if best else 0.0) or looked_at == LOOKED_AT:
            break
        plan = surrogate.coder.plan(rows[index])
        if not known.is_new(plan):
            continue
        looked_at += 1
        # Spelled plainly, it may be like others in more than its row said.
        (gain,) = expected_improvement(*surrogate.predict(surrogate.coder.row(plan)[None]), known.best - TIE).tolist()
        gain *= known.odds(plan)
        if gain >= WORTH_TRYING and (best is None or gain > best[0]):
            best = gain, plan
    return best[1] if best is not None else None
