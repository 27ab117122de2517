"""The race as an Optuna pruner: what is surely behind the best is not timed again."""

from __future__ import annotations

import math
from collections.abc import Callable

from optuna.pruners import BasePruner
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.statistics import median, settled

FIRST_GATE = math.log(2.0)  # after its first reading a plan twice as slow as the best is out
# Standard errors by which a plan must be behind: with 2 of 100 plans that are as good as the best one or two are
# dropped by luck, which the surrogate may ask for again.
BEHIND = 2.0
MARGIN = 0.005  # log-ratio by which it must be, beside
MEDIAN_VARIANCE = math.pi / 2  # of a median of normal readings, times that of their mean


class RacePruner(BasePruner):
    """Prunes by readings of the same blocks where there are several, else by medians.

    Intermediate values are log(t / t_default), and what breaks a constraint is no measure for others. ``sigma`` is the
    noise of one of them.
    """

    def __init__(self, sigma: Callable[[], float]) -> None:
        self._sigma = sigma

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        readings = trial.intermediate_values
        if not readings:
            return False
        known = study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.COMPLETE))
        sigma = self._sigma()
        rivals = [
            (settled(list(other.intermediate_values.values()), sigma), other)
            for other in known
            if len(other.intermediate_values) >= 2 and all(value <= 0 for value in other.constraints.values())
        ]
        ahead, best = min(rivals, key=lambda rival: rival[0], default=(0.0, None))  # the default's log-ratio is 0
        if ahead >= 0.0 or best is None:
            ahead, shared = 0.0, list(readings.values())
        else:
            theirs = best.intermediate_values
            shared = [readings[block] - theirs[block] for block in readings.keys() & theirs.keys()]
        mine = settled(list(readings.values()), sigma) - ahead
        if len(readings) == 1:
            return mine > max(FIRST_GATE, 4 * sigma)
        fewest = min(len(readings), len(best.intermediate_values) if best is not None else len(readings))
        behind = median(shared) if len(shared) >= 2 else mine
        doubt = sigma * math.sqrt(2 * MEDIAN_VARIANCE / fewest)
        return min(behind, mine) > MARGIN + BEHIND * doubt
