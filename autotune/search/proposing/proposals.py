"""New plans of a cell, checked: those that are queued first, then those of the study's sampler, whatever it is."""

from __future__ import annotations

import math
from collections.abc import Callable

from optuna.samplers import BaseSampler

from autotune.journal.study.cell_study import QUEUE, SAMPLER
from autotune.journal.study.entry import Entry
from autotune.search.budget import Deadline
from autotune.search.readings import Readings
from autotune.search.trials import Trials
from autotune.space.space import Space
from ringattn.workload import Tunables

from .beliefs import FAILED
from .sampler import SurrogateSampler

BATCH = 4  # new plans in one block: it holds the default twice, whatever else is in it
DISMISSED = math.log(3.0)  # a plan whose check already took so many times the best's is not timed at all
ASKS = 8  # of a foreign sampler for each plan it brings; then the cell is searched through


class Proposals:
    """Asks for plans and checks them; ``space`` is what is worth trying now."""

    def __init__(self, trials: Trials, space: Callable[[], Space], sampler: BaseSampler) -> None:
        self._trials, self._state, self._study = trials, trials.state, trials.study
        self._space, self._sampler = space, sampler
        self.queue: list[Tunables] = []
        self._stopped = False  # by the sampler
        self._ask_s = 0.0  # that its latest trial took
        optuna_study = self._study.study
        optuna_study.sampler = sampler
        optuna_study.stop = self._stop  # type: ignore[method-assign]  # Optuna's is for ``optimize`` alone

    def _stop(self) -> None:
        """Ask the sampler for no more plans."""
        self._stopped = True

    def check_s(self) -> float:
        """Estimate what the check of one plan takes."""
        return 0.05 + 5 * self._state.waited_s()

    def waits_for_compiler(self) -> bool:
        """Return whether a queued plan does, as a kernel of it is being compiled beside the probe."""
        return any(map(self._waits, self.queue))

    def _waits(self, plan: Tunables) -> bool:
        return self._state.transfer.waits_for_compiler(self._state.workload, plan)

    def next(self, deadline: Deadline, *, sampled: bool = True) -> list[Entry]:
        """Return up to BATCH new plans that may be timed; of the queue alone where none are to be ``sampled``."""
        state = self._state
        fresh: list[Entry] = []
        compiling: list[Tunables] = []
        before = len(state.entries)
        while (asked := len(state.entries) - before) < BATCH and deadline.allows(self.check_s()):
            if self.queue:
                plan = self.queue.pop(0)
                if state.knows(plan) or state.is_trap(plan):
                    continue
                if self._waits(plan):
                    compiling.append(plan)
                    continue
                entry = state.entry(plan)
                self._study.open(entry, QUEUE)
            else:
                found = self._of_sampler(BATCH - asked, deadline) if sampled else None
                if found is None:
                    break
                entry = found
            if state.check(entry) and self._may_be_timed(entry):
                fresh.append(entry)
        self.queue = [*compiling, *self.queue]
        state.measured += 1
        return fresh

    def _of_sampler(self, count: int, deadline: Deadline) -> Entry | None:
        """Return the entry of a plan nobody tried; None where the sampler brings no more, or took the time for it."""
        state, study = self._state, self._study
        if isinstance(self._sampler, SurrogateSampler):
            if not self._sampler.ahead and not self._sampler.look_ahead(count):
                return None
            entry = state.entry(study.propose(self._sampler))
            study.open(entry, SAMPLER)
            return entry
        for _ in range(ASKS * BATCH):
            if self._stopped or not deadline.allows(self._ask_s + self.check_s()):
                return None
            began_s = deadline.clock.now()
            trial, plan = study.ask()
            self._ask_s = deadline.clock.now() - began_s
            reasons = self._space().machine.reasons(state.workload, plan)
            if reasons or state.is_trap(plan):
                study.reject(trial, "; ".join(reasons) or "a kernel of it was given up")
            elif (entry := state.entry(plan)).is_known:
                value = self._trials.value(entry)
                study.repeat(trial, FAILED if value is None else value, paired=self._trials.is_paired(entry))
            else:
                study.adopt(trial, entry)
                return entry
        return None

    def _may_be_timed(self, entry: Entry) -> bool:
        """Return whether it keeps the limits and its check was not far slower than the best's; else it is told so."""
        state = self._state
        if entry.tunables == state.torch:  # what everything is held against has a paired reading
            return True
        if not state.keeps_limits(entry):
            self._trials.end(entry, "breaks a limit, not timed in pairs")
        elif all(self._is_far_slower(entry.tunables, readings) for readings in state.ways()):
            self._trials.end(entry, "far slower at its first look, not timed in pairs")
        else:
            return True
        return False

    def _is_far_slower(self, plan: Tunables, readings: Readings) -> bool:
        """Return whether its first look says so, as a program that launches as ``readings`` has it waits."""
        look = readings.first_look(readings.entry(plan))
        others = (e for e in readings.entries.values() if e.tunables != plan and readings.may_be_chosen(e))
        looks = [found for other in others if (found := readings.first_look(other)) is not None]
        return look is not None and look > min(looks, default=0.0) + DISMISSED
