"""Which plans to try next: short walks over a cell's model, from the best known plans to what it promises most.

A walk turns one knob at a time and costs no measurement; only the plan at its end is checked and timed. Neighbours
are compared as rows of numbers, and whether a plan can run is asked of the best of them alone: that question costs
a hundred times as much (95 us against 1 us on an H100's LongNet cell).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence

import numpy as np

from autotune.space.space import Space, decode, encode
from ringattn.workload import Tunables

from .model import CellModel, Codes, Floats, PairModel

CURIOSITY = 1.0  # standard deviations that a plan may be better than predicted; 0 ends in the next valley
HOPE = 2.5  # standard deviations of luck with which a plan still must look worth a block
STEPS = 20  # of one walk, at most
LOOKED_AT = 6  # best neighbours that are asked whether they can run


def promise(process: PairModel, codes: Codes) -> Floats:
    """The log-ratio that each coded plan may turn out to have, if things go well."""
    mean, deviation = process.predict(codes)
    return mean - CURIOSITY * deviation


class Walker:
    """Walks over one space. ``tried`` are identities that nobody wants to see again; it grows by what is proposed."""

    def __init__(
        self,
        space: Space,
        model: CellModel,
        tried: set[Hashable],
        wanted: Callable[[Tunables], bool],
        fixed: Collection[str] = (),
    ) -> None:
        """``fixed`` are knobs that are not turned; nor is the dtype, which races decide."""
        self._space, self._coder, self._process = space, model.coder, model.process
        self._tried, self._wanted = tried, wanted
        self._turns = [
            (column, name, value, self._coder.number(column, value))
            for column, name in enumerate(self._coder.names)
            for value in space.knobs.get(name, ())
            if name != "dtype" and name not in fixed
        ]

    def propose(self, starts: Sequence[Tunables], count: int, least: float) -> list[Tunables]:
        """Up to ``count`` plans, each from the walk that came furthest; none that promises no more than ``least``."""
        found: list[Tunables] = []
        while len(found) < count:
            ends = [end for start in starts if (end := self._walk(start)) is not None]
            promised, plan = min(ends, key=lambda end: end[0], default=(math.inf, None))
            if plan is None or self._at_best(plan) >= least:
                break
            found.append(plan)
            self._tried.add(self._space.identity(plan))
            self._process.assume(self._coder.row(plan))
        return found

    def _at_best(self, plan: Tunables) -> float:
        mean, deviation = self._process.predict(self._coder.row(plan)[None])
        return float(mean[0] - HOPE * deviation[0])

    def _walk(self, start: Tunables) -> tuple[float, Tunables] | None:
        """The last plan of a walk over untried ones and what it promises; None where no neighbour is left."""
        here, promised, end = start, math.inf, None
        for _ in range(STEPS):
            step = self._step(here)
            if step is None or step[0] >= promised:
                break
            promised, here = step
            end = here
        return None if end is None else (promised, end)

    def _step(self, here: Tunables) -> tuple[float, Tunables] | None:
        """The most promising untried neighbour that can run."""
        row = self._coder.row(here)
        turns = [turn for turn in self._turns if row[turn[0]] != turn[3]]
        if not turns:
            return None
        codes = np.repeat(row[None], len(turns), axis=0)
        codes[np.arange(len(turns)), [turn[0] for turn in turns]] = [turn[3] for turn in turns]
        order = np.argsort(promise(self._process, codes), kind="stable")
        assignment = encode(self._space.workload, here)
        best: tuple[float, Tunables] | None = None
        looked_at = 0
        for number in order:
            _, name, value, _ = turns[number]
            plan = decode(self._space.workload, assignment | {name: value})
            identity = self._space.identity(plan)
            if identity is None or identity in self._tried or not self._wanted(plan):
                continue
            # Spelled plainly, the plan may agree with others in more knobs than its row said.
            promised = float(promise(self._process, self._coder.row(plan)[None])[0])
            if best is None or promised < best[0]:
                best = promised, plan
            looked_at += 1
            if looked_at == LOOKED_AT:
                break
        return best
