"""Stage 2: from one plan uphill, a knob at a time, taking every step that is surely one as soon as it shows.

A few neighbours are timed against the incumbent in one block; the best is confirmed and taken at once, the rest is
remembered. What to try first comes from an additive model of everything timed in the cell. When nothing new is
left around the incumbent, the moves that one block could not decide are timed together until they are decided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ringattn.workload import Tunables

from .budget import Deadline
from .cell import CellContext
from .model import AdditiveModel
from .race import WORTH_TRYING, Arena, screen
from .space import candidate_key, from_key
from .store import Entry

BATCH = 4  # neighbours in one block
CONFIRMED = 2  # paired repetitions before a step is taken
SURENESS = 1.5  # a step must be this many standard errors below the incumbent


@dataclass(slots=True)
class Climb:
    """One ascent. ``undecided`` are moves around the present incumbent that one block could not tell from it."""

    context: CellContext
    arena: Arena
    deadline: Deadline
    incumbent: Entry
    tried: set[Tunables] = field(default_factory=set)
    undecided: list[Entry] = field(default_factory=list)

    def run(self) -> Tunables:
        self.tried.add(self.incumbent.tunables)
        while self.incumbent.fault is None and not self.deadline.passed():
            batch = self._next_batch()
            if batch:
                stepped = self._try(batch)
            elif self.undecided:
                stepped = self._decide()
            else:
                break
            if stepped is not None:
                self._step_to(stepped)
        return self.incumbent.tunables

    def _next_batch(self) -> list[Entry]:
        """The untried neighbours that promise most, checked."""
        moves = [
            move.tunables
            for move in self.context.space.neighbours(self.incumbent.tunables)
            if move.tunables not in self.tried and self.context.is_main(move.tunables) and move.knob != "dtype"
        ]
        model = self._model()
        moves.sort(key=model.predict)
        jump = self._jump(model)
        if jump is not None:
            moves = [jump, *(plan for plan in moves if plan != jump)]
        batch: list[Entry] = []
        for plan in moves:
            if len(batch) == BATCH or self.deadline.passed():
                break
            self.tried.add(plan)
            batch += self.arena.admit([plan], self.deadline)
        return batch

    def _model(self) -> AdditiveModel:
        timed = {plan: (interval.median, interval.count) for plan, interval in self.context.estimates.items()}
        timed |= {e.tunables: (float(np.median(r)), len(r)) for e, r in self.arena.polished().items()}
        return AdditiveModel(
            self.context.cell, self.context.default, timed, sigma=self._sigma(), around=self.incumbent.tunables
        )

    def _jump(self, model: AdditiveModel) -> Tunables | None:
        """The plan that would be best if effects just added up; None when it was tried or cannot run."""
        space = self.context.space
        best = self.incumbent.tunables
        for knob, values in space.knobs.items():
            if knob == "dtype":
                continue
            plans = [plan for value in values if (plan := space.combine(best, {knob: value})) is not None]
            best = min([best, *plans], key=model.predict)
        return None if best in self.tried or not self.context.is_main(best) else best

    def _try(self, batch: Sequence[Entry]) -> Entry | None:
        """One block of the batch beside the incumbent; the best is confirmed. The step to take, or None."""
        self._pair(batch, 1)
        met = [entry for entry in batch if entry.fault is None and self._differences(entry)]
        if not met:
            return None
        best = min(met, key=self._gain)
        if self._gain(best) < 0:
            self._pair([best], CONFIRMED)
        noise = self._sigma()
        for entry in met:
            if entry is not best and abs(self._gain(entry)) < 2 * noise:
                self.undecided.append(entry)
        if best.fault is None and self._surely_better(best):
            return best
        if best.fault is None and abs(self._gain(best)) < 2 * noise:
            self.undecided.append(best)
        return None

    def _pair(self, entries: Sequence[Entry], times: int) -> None:
        """Blocks until each of ``entries`` met the incumbent so often."""
        while not self.deadline.passed():
            short = [e for e in entries if e.fault is None and not e.finished and len(self._differences(e)) < times]
            if not short or self.incumbent.fault is not None or not self._affords(short):
                return
            self.arena.block([self.incumbent, *short])

    def _affords(self, entries: Sequence[Entry]) -> bool:
        return self.deadline.allows(self.arena.estimate_s([self.incumbent, *entries]))

    def _decide(self) -> Entry | None:
        """The undecided together, until each is surely better or hopeless."""
        pending = [entry for entry in self.undecided if entry.fault is None and not entry.finished]
        self.undecided = []
        good = screen(self.arena, self.incumbent, pending, self.context.preset.race_blocks, self.deadline)
        return good[0] if good and self._gain(good[0]) < -WORTH_TRYING else None

    def _step_to(self, entry: Entry) -> None:
        self.incumbent = entry
        # What could not be told from the old incumbent may well help the new one: it is tried again from there.
        self.undecided = []

    def _differences(self, entry: Entry) -> list[float]:
        return self.arena.difference(entry, self.incumbent)

    def _gain(self, entry: Entry) -> float:
        return float(np.median(self._differences(entry)))

    def _sigma(self) -> float:
        return self.context.sigma()

    def _surely_better(self, entry: Entry) -> bool:
        count = len(self._differences(entry))
        needed = max(WORTH_TRYING, SURENESS * self._sigma() / math.sqrt(max(count, 1)))
        return count >= CONFIRMED and self._gain(entry) < -needed


def climb(context: CellContext, start: Tunables, number: int, deadline: Deadline) -> Tunables:
    """The plan at the end of an ascent from ``start``; everything timed on the way is in the record."""
    stage = f"improve {number}"
    context.listener.stage(context.cell, stage)
    record = context.record(stage)
    arena = context.arena(stage, record)
    top = record.noted("top")
    if top is None:
        entries = arena.admit([start], deadline)
        reached = Climb(context, arena, deadline, entries[0]).run() if entries else start
        for entry in record.entries():
            arena.leave(entry, "climbed past")
        record.abandon_open("not timed: the stage was over")
        top = candidate_key(reached)
        record.note("top", top)
    context.learn(arena, record.entries())
    return from_key(top)
