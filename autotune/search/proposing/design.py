"""Plans that try every three values of different knobs together once, before anything is known of them.

What costs alone may pay together: a window, a checkpoint mode and a backward kernel. A surrogate that has seen each
alone expects the sum. Knobs of branches count as one here, with the same value in all of them; a dozen plans or two
hold every such three, as each plan holds many.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from autotune.space.space import Space, Value, decode, encode
from ringattn.workload import Tunables

BRANCH_KNOBS = ("forward", "backward", "gather")
WHOLE_KNOBS = ("checkpoint", "window_tokens", "schedule")
LOOKED_AT = 48  # random plans out of which the one is taken that tries most
Triple = frozenset[tuple[str, Value]]


class Design:
    """The three-way combinations of one space that no plan had yet."""

    def __init__(self, space: Space) -> None:
        self._workload, self._base = space.workload, encode(space.workload, space.default)
        self._columns: dict[str, list[str]] = {}
        for name, values in space.knobs.items():
            stem = name.partition(".")[0]
            if len(values) > 1 and stem in (*BRANCH_KNOBS, *WHOLE_KNOBS):
                self._columns.setdefault(stem, []).append(name)
        self._values: Mapping[str, tuple[Value, ...]] = {
            stem: tuple(dict.fromkeys(value for name in names for value in space.knobs[name]))
            for stem, names in self._columns.items()
        }
        self._plain = {stem: self._base[names[0]] for stem, names in self._columns.items()}
        self._covered: set[Triple] = set()
        self._seen: set[Tunables] = set()
        self._made: dict[tuple[Value, ...], tuple[Tunables, set[Triple]]] = {}  # a few hundred, drawn again and again

    def _triples(self, plan: Tunables) -> set[Triple]:
        there = encode(self._workload, plan)
        chosen: list[tuple[str, Any]] = []
        for stem, names in self._columns.items():
            values = {there.get(name) for name in names}
            if len(values) == 1:
                chosen.append((stem, values.pop()))
        # Forward and backward kernels meet in nothing but the rows they read.
        found = (frozenset(three) for three in itertools.combinations(chosen, min(3, len(self._columns))))
        return {three for three in found if not {"forward", "backward"} <= {stem for stem, _ in three}}

    def _plan_of(self, values: tuple[Value, ...]) -> tuple[Tunables, set[Triple]]:
        """Return the plan with these values, one a column, and its triples."""
        if values not in self._made:
            turned = dict(self._base)
            for names, value in zip(self._columns.values(), values, strict=True):
                turned |= dict.fromkeys(names, value)
            plan = decode(self._workload, turned)
            self._made[values] = plan, self._triples(plan)
        return self._made[values]

    def next(
        self,
        tried: Iterable[Tunables],
        hopeless: set[tuple[str, Value]],
        wanted: Callable[[Tunables], bool],
        odds: Callable[[Tunables], float],
        rng: np.random.Generator,
    ) -> Tunables | None:
        """Return a plan of three values that were never together, as many as may be; None where there are none left.

        ``tried`` are plans that did not fail; ``hopeless`` are values with which nothing comes near the best; ``odds``
        are that a plan does not fail.
        """
        for plan in tried:
            if plan not in self._seen:
                self._seen.add(plan)
                self._covered |= self._triples(plan)
        best: tuple[float, Tunables] | None = None
        choices = {
            stem: [value for value in values if (stem, value) not in hopeless] or list(values)
            for stem, values in self._values.items()
        }
        for _ in range(LOOKED_AT):
            drawn = [choices[stem][rng.integers(len(choices[stem]))] for stem in self._columns]
            plan, triples = self._plan_of(tuple(drawn))
            # Three that all differ from the default are what no turn of a good plan leads to.
            new = sum(
                sum(value != self._plain[stem] for stem, value in three) ** 2 for three in triples - self._covered
            )
            if new and (best is None or new * odds(plan) > best[0]) and wanted(plan):
                best = new * odds(plan), plan
        return best[1] if best is not None else None
