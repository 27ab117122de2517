"""Beliefs about a cell's plans: every reading drawn towards what the surrogate makes of all the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping

import numpy as np

from autotune import statistics
from autotune.journal.study.entry import Entry
from autotune.search.cell import CellState
from autotune.search.suspects import GIVEN_UP
from autotune.search.transfer import HOPELESS, Timed
from autotune.space.space import Space, Value, encode
from ringattn.planning.preference import TIE, cost
from ringattn.workload import Tunables

from .sampler import Known
from .surrogate import OWN_VARIANCE, Coder, Surrogate, Weights

FAILED, FAILED_SIGMA = math.log(1.5), 0.1  # what is like a plan that failed is tried later, and not never
SEEN_AGAIN = 3  # readings
AMONG_EQUALS = 0.05  # weight of time where memory is preferred: of equally lean plans the fastest
LOOK_SIGMA = 0.05  # of a single unpaired call, beside the noise of a pair


class Beliefs:
    """The surrogate of a cell's state, fitted anew when something was measured."""

    def __init__(self, state: CellState, coder: Coder, space: Callable[[], Space]) -> None:
        """``coder`` is of the cell's whole space, ``space`` what of it is worth trying now."""
        self._state, self.coder, self._space = state, coder, space
        self._weights: Weights | None = None
        self._surrogate: Surrogate | None = None
        self._believed: tuple[Surrogate, dict[Tunables, tuple[float, float]]] | None = None
        self._fitted = -1  # the number of things measured that it is of

    def objective(self, entry: Entry, log_ratio: float) -> float:
        """Return what is minimised, 0 at the default: log(t / t_default), or as the preference has it."""
        prefer, default = self._state.settings.prefer, self._state.entry(self._state.default).checked
        if prefer == "time" or entry.checked is None or default is None:
            return log_ratio
        found = cost(prefer, log_ratio, entry.checked.peak_bytes) - cost(prefer, 0.0, default.peak_bytes)
        return found + AMONG_EQUALS * log_ratio

    def surrogate(self) -> Surrogate:
        """Return the process of everything measured so far."""
        state, sigma = self._state, self._state.sigma()
        measured = state.measured
        if self._surrogate is not None and self._fitted == measured:
            return self._surrogate
        self._fitted = measured
        plans: list[Tunables] = []
        values: list[float] = []
        variances: list[float] = []
        polished = state.polished()
        failed: list[Tunables] = []
        for plan, entry in state.entries.items():
            if entry.failure is not None or (entry.checked is not None and not state.keeps_limits(entry)):
                failed.append(plan)
                continue
            look = state.first_look(entry)
            if entry in polished:
                ratios = polished[entry]
                value = statistics.settled(ratios, sigma, look)
                variance = sigma**2 * (math.pi / 2 if len(ratios) > 2 else 1.0) / len(ratios)
            elif plan == state.default:
                value, variance = 0.0, sigma**2 / 4
            elif look is not None:
                value, variance = look, 4 * sigma**2 + LOOK_SIGMA**2
            else:
                continue
            plans.append(plan)
            values.append(self.objective(entry, value))
            variances.append(variance if plan != state.default else 1e-6)
        bad = max([FAILED, *([float(np.median(values)) + FAILED] if values else [])])
        plans += failed
        values += [bad] * len(failed)
        variances += [FAILED_SIGMA**2] * len(failed)
        self._surrogate = Surrogate(self.coder, plans, values, variances, self._weights)
        self._weights = self._surrogate.weights
        return self._surrogate

    def believed(self) -> dict[Tunables, tuple[float, float]]:
        """Return objective and standard deviation of every plan that was checked and may be chosen, best first."""
        surrogate = self.surrogate()
        if self._believed is None or self._believed[0] is not surrogate:
            timed = {}
            for plan, found in surrogate.believed().items():
                entry = self._state.entry(plan)
                if self._state.may_be_chosen(entry) and self._state.validations.odds(plan) >= GIVEN_UP:
                    timed[plan] = found
            hope = self._state.hope
            self._believed = surrogate, dict(sorted(timed.items(), key=lambda item: hope(item[0], item[1][0])))
        return self._believed[1]

    def surprising(self) -> list[Entry]:
        """Return plans that read faster than the best is believed to be, fastest first, before they were read often.

        The surrogate takes what knobs do only together for luck until it is seen again.
        """
        state, ahead = self._state, self.best_value()
        found: list[tuple[float, Entry]] = []
        for plan in self.believed():
            entry = state.entry(plan)
            look = state.first_look(entry)
            if plan != state.default and look is not None and len(entry.log_ratios) < SEEN_AGAIN:
                value = state.median(entry) if entry.log_ratios else look
                value = state.hope(plan, self.objective(entry, value))
                if value < ahead - TIE:
                    found.append((value, entry))
        return [entry for _, entry in sorted(found, key=lambda each: each[0])]

    def best(self) -> Tunables:
        return next(iter(self.believed()), self._state.default)

    def best_value(self) -> float:
        """Return the objective of the best plan; infinite where none may be chosen."""
        return next((self._state.hope(plan, found[0]) for plan, found in self.believed().items()), math.inf)

    def plainer(self, plan: Tunables) -> Tunables | None:
        """Return the plan with as many of its turns undone as may well cost nothing; None where it is that.

        Where all seem to cost something, one of them: what good plans all have was never tried without it.
        """
        state, space, surrogate = self._state, self._space(), self.surrogate()
        default, here = encode(space.workload, state.default), encode(space.workload, plan)
        most = float(surrogate.predict(self.coder.row(plan)[None])[0][0]) + TIE
        found, first = plan, None
        turned = [name for name in default if here.get(name) != default[name]]
        while turned:
            undone = [(name, space.combine(found, {name: default[name]})) for name in turned]
            can = [(name, other) for name, other in undone if other is not None and other != found]
            if not can:
                break
            means, deviations = surrogate.predict(self.coder.rows(other for _, other in can))
            if first is None:
                order = [can[index][1] for index in means.argsort().tolist()]
                first = next((other for other in order if not state.knows(other)), None)
            index = int(means.argmin())
            # It is tried, so that a doubt is enough.
            if means[index] - math.hypot(deviations[index], math.sqrt(OWN_VARIANCE)) > most:
                break
            turned.remove(can[index][0])
            found = can[index][1]
        return found if found != plan and not state.knows(found) else first

    def known(self) -> Known:
        """Return what the sampler asks its proposals of."""
        space, state = self._space(), self._state
        surrogate = self.surrogate().copy()
        believed = surrogate.believed()
        usable = [plan for plan in self.believed() if plan in believed]
        starts = sorted(usable, key=lambda plan: state.hope(plan, believed[plan][0])) or [state.default]
        best = min([state.hope(plan, believed[plan][0]) for plan in usable], default=0.0)
        looks: dict[tuple[str, Value], float] = {}
        for plan, entry in state.entries.items():
            look = state.first_look(entry) if plan != state.default else 0.0
            if look is not None:
                there = encode(state.workload, plan)
                for name, value in there.items():
                    key = name.partition(".")[0], value
                    looks[key] = min(look, looks.get(key, math.inf))
        fastest = min(looks.values(), default=0.0)
        hopeless = {key for key, look in looks.items() if look > fastest + HOPELESS}
        # And what was given up, or is at another length: on an H100 one call of math took 1.5 s of a cell's last 3.
        hopeless |= _values(dict(zip(self.coder.names, self.coder.values, strict=True))) - _values(space.knobs)
        tried: set[Hashable] = {space.identity(p) for p, e in state.entries.items() if e.checked or e.fault}
        return Known(
            space,
            surrogate,
            starts,
            best,
            tried,
            [plan for plan, entry in state.entries.items() if entry.failure is None],
            hopeless,
            lambda plan: state.checks.odds(plan) * state.validations.odds(plan),
            lambda plan: (
                state.is_trap(plan)
                or not state.is_main(plan)
                or state.transfer.waits_for_compiler(state.workload, plan)
            ),
        )

    def timed(self) -> Timed:
        """Return what this cell says to others: the device's times, as launches say nothing of longer calls."""
        state = self._state.under("captured")
        medians = {
            entry.tunables: state.median(entry)
            for entry in [*state.timed(), state.entry(state.default)]
            if entry.log_ratios
        }
        looks = {
            plan: look
            for plan, entry in state.entries.items()
            if plan not in medians and entry.failure is None and (look := state.first_look(entry)) is not None
        }
        every = {**looks, **medians}
        main = [m for plan, m in every.items() if state.may_be_chosen(state.entry(plan))]
        best = min(main, default=0.0)
        narrow = min([m for p, m in every.items() if not state.is_main(p)], default=best)
        return Timed(
            state.workload,
            {plan: m - (best if state.is_main(plan) else min(best, narrow)) for plan, m in every.items()},
        )


def _values(knobs: Mapping[str, tuple[Value, ...]]) -> set[tuple[str, Value]]:
    """Return each value of each knob, those of branches together."""
    return {(name.partition(".")[0], value) for name, values in knobs.items() for value in values}
