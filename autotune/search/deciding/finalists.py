"""The few plans that the last blocks decide between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune.search.cell import CellState
from autotune.search.proposing.beliefs import Beliefs
from autotune.space.space import distance
from ringattn.planning.preference import TIE
from ringattn.workload import Tunables

FINALISTS = 4  # the default among them
CONTENDER = math.log(1.15)  # a plan this much slower than the best is no finalist


def finalists(state: CellState, beliefs: Beliefs) -> list[Tunables]:
    """Return at most FINALISTS - 1 beside the default: the best believed, its plainest equal, and the best narrow one.

    Beyond these the best for calls that are launched in the other way, and torch's own plan.
    """
    found = _finalists(state, beliefs)
    found += _of_the_other_way(state, found)
    torch = [plan for plan in (state.torch,) if plan is not None and plan not in (state.default, *found)]
    return found + [plan for plan in torch if state.entry(plan).failure is None]


def _finalists(state: CellState, beliefs: Beliefs) -> list[Tunables]:
    default = state.entry(state.default)
    believed = {plan: found for plan, found in beliefs.believed().items() if plan != state.default}
    narrow = _narrow(state, min([found[0] for found in believed.values()], default=0.0))
    if not believed:
        return narrow
    ranked = list(believed)
    best, doubt = believed[ranked[0]]
    near = [plan for plan in ranked if believed[plan][0] < min(best, 0.0) + CONTENDER]
    if not state.keeps_limits(default) or default.failure is not None or state.settings.prefer != "time":
        near = ranked
    equal = [p for p in near if believed[p][0] <= best + max(TIE, math.hypot(doubt, believed[p][1]))]
    plainest = sorted(equal, key=lambda plan: distance(state.workload, plan, state.default))[:1]
    standing = [plan for plan in state.standing if plan in near][:1]
    usual = [plan for plan in state.seeds if plan in equal][:1]
    lucky = [entry.tunables for entry in beliefs.surprising()[:1]]
    wanted = list(dict.fromkeys([*near[:1], *standing, *usual, *plainest, *lucky, *near]))
    if default.failure is not None:
        wanted.sort(key=lambda plan: -state.validations.odds(plan))
    return wanted[: FINALISTS - 1 - len(narrow)] + narrow


def _of_the_other_way(state: CellState, known: Sequence[Tunables]) -> list[Tunables]:
    """Return the best plan for calls that are launched in the other way, where none of ``known`` is as good."""
    found = []
    for readings in state.ways()[1:]:
        timed: dict[Tunables, float] = {}
        for entry in filter(lambda e: state.may_be_chosen(state.entry(e.tunables)), readings.timed()):
            # Inside another capture a graph's launches are what counts, which may never have been tried one by one.
            plan = entry.tunables if readings.suits(entry.tunables) else replace(entry.tunables, launch="eager")
            if plan != state.default:
                timed[plan] = min(readings.median(entry), timed.get(plan, math.inf))
        best = min(timed, key=timed.__getitem__, default=state.default)
        if timed.get(best, 0.0) < min([0.0, *(timed[plan] for plan in known if plan in timed)]) - TIE:
            found.append(best)
    return found


def _narrow(state: CellState, best: float) -> list[Tunables]:
    """Return the fastest allowed plan with a narrower dtype, if it may be faster than the main ones and the default."""
    default = state.entry(state.default)
    narrow = [entry for entry in state.timed() if not state.is_main(entry.tunables) and state.keeps_limits(entry)]
    first = min(narrow, key=state.median, default=None)
    rival = min(best, 0.0) if state.keeps_limits(default) else best
    return [first.tunables] if first is not None and state.median(first) < rival + CONTENDER else []
