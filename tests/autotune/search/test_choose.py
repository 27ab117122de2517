"""The choice among measured plans: pure functions of intervals and peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import MIB, plan, workload

from autotune.search.deciding.choose import Candidate, NothingAllowed, choose, pareto_front
from autotune.statistics import Interval
from ringattn.workload import Tunables

CELL = workload()
QUICK = plan(CELL)


def interval(centre: float, width: float = 0.005) -> Interval:
    return Interval(centre - width, centre, centre + width, 12)


def candidate(
    tunables: Tunables, centre: float, width: float = 0.005, peak: int = MIB, *, allowed: bool = True
) -> Candidate:
    return Candidate(tunables, interval(centre, width), peak, allowed)


DEFAULT = candidate(QUICK, 0.0, 0.0)


@pytest.mark.parametrize(
    ("centre", "width", "noisy", "leaves"),
    [
        (-0.02, 0.005, False, True),
        (-0.02, 0.012, False, False),  # the interval reaches 0.8 %
        (-0.008, 0.001, False, False),  # surely faster, by too little
        (-0.02, 0.005, True, False),  # a noisy machine needs 2 %
        (-0.03, 0.005, True, True),
        (0.05, 0.001, False, False),
    ],
)
def test_the_default_stays_unless_the_interval_excludes_the_margin(
    centre: float, width: float, noisy: bool, leaves: bool
) -> None:
    other = candidate(plan(CELL, "swift"), centre, width)
    chosen = choose(CELL, DEFAULT, [other], noisy=noisy)
    assert (chosen is other) is leaves


@pytest.mark.parametrize(
    ("behind", "sigma", "kept"),
    [(0.01, 0.03, True), (0.01, 0.002, False), (0.03, 0.03, False), (-0.002, 0.0, True)],
    ids=["noise may hide it", "surely slower", "too far", "the best itself"],
)
def test_what_won_nearby_stays_as_long_as_it_cannot_be_told_from_the_best(
    behind: float, sigma: float, kept: bool
) -> None:
    usual, best = candidate(plan(CELL, "swift"), -0.2 + behind), candidate(plan(CELL, "math", "swift"), -0.2)
    chosen = choose(CELL, DEFAULT, [usual, best], noisy=False, sigma=sigma, usual=[usual.tunables])
    assert (chosen is usual) == kept
    assert choose(CELL, DEFAULT, [best], noisy=False, sigma=sigma, usual=[usual.tunables]) is best


def test_what_is_not_allowed_is_not_chosen() -> None:
    fast = candidate(plan(CELL, "swift"), -0.5, allowed=False)
    slow = candidate(plan(CELL, "math"), 0.3)
    assert choose(CELL, DEFAULT, [fast, slow], noisy=False) is DEFAULT
    banned = replace(DEFAULT, allowed=False)
    assert choose(CELL, banned, [fast, slow], noisy=False) is slow
    with pytest.raises(NothingAllowed):
        choose(CELL, banned, [fast], noisy=False)


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    points = [(0.0, 100), (0.1, 50), (0.2, 60), (0.3, 20), (0.05, 99.9)]
    front = pareto_front([candidate(QUICK, t, peak=round(m * MIB)) for t, m in points])
    assert [(c.gain.median, c.peak_bytes // MIB) for c in front] == [(0.0, 100), (0.1, 50), (0.3, 20)]
