"""Makes a choice of final measurements: pure functions, so that the rule can be read and tested on its own.

The default stays unless something is surely faster by a margin; among what cannot be told apart the plan nearest
to the default wins, so that two probes of one machine agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autotune.space.space import candidate_key, distance
from autotune.statistics import Interval
from ringattn.planning.preference import TIE, Preference, cost
from ringattn.workload import Tunables, Workload

T = TypeVar("T")

GAIN_MARGIN = 0.01  # the interval of the gain must exclude this much
NOISY_GAIN_MARGIN = 0.02
STANDARD_ERROR = 1.25  # of a median of normal readings, times their deviation over the root of their number
REPRODUCIBLE = math.log(1.02)  # what a plan may be slower that gives the same bits in every call
MOST_DOUBT = 0.02  # log-ratio by which a plan may seem slower than the best, and be kept
NOISY_SIGMA = 0.03  # standard deviation of one paired log-ratio from which a machine counts as noisy


class NothingAllowed(Exception):
    """No plan keeps the limits."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finalist: the interval of log(t / t_default), and what it holds beyond the inputs."""

    tunables: Tunables
    gain: Interval
    peak_bytes: int
    allowed: bool = True  # keeps the limits on memory and error
    varies: bool = False  # from call to call, in some bit


def gain_margin(*, noisy: bool) -> float:
    """Return the log-ratio under which the whole interval of a plan must be that takes the default's place."""
    return math.log1p(-(NOISY_GAIN_MARGIN if noisy else GAIN_MARGIN))


def choose(
    workload: Workload,
    default: Candidate,
    others: Sequence[Candidate],
    *,
    noisy: bool,
    prefer: Preference = "time",
    sigma: float = 0.0,
    usual: Sequence[Tunables] = (),
    standing: Tunables | None = None,
) -> Candidate:
    """Return the plan to run; a ``noisy`` machine needs the wider margin.

    A plan whose results vary from call to call gives way to one of about its time whose do not.

    ``usual`` are the winners of cells nearby, nearest first. One of them stays as long as it cannot be told from the
    best, where one log-ratio has a noise of ``sigma``. ``standing`` is the plan that served here before: it stays where
    it seems faster than the default, sure or not, until something faster is found. A default that breaks a limit does
    not stay. Raises NothingAllowed where nothing else is left.
    """
    within_limits = [candidate for candidate in (*others, default) if candidate.allowed]
    allowed = [candidate for candidate in others if candidate.allowed]
    margin = gain_margin(noisy=noisy)
    if not default.allowed:
        if not allowed:
            raise NothingAllowed
    elif prefer == "time":
        stands = [c for c in allowed if c.tunables == standing and c.gain.median < 0]
        surely = [candidate for candidate in allowed if candidate.gain.high < margin]
        allowed = [*surely, *(c for c in stands if c not in surely)] if surely else [default, *stands]
    else:
        # Leaner plans need not be faster than the default, but faster ones must be so beyond doubt.
        leaner = [c for c in allowed if c.gain.high < margin or c.peak_bytes < default.peak_bytes]
        allowed = [default, *leaner]

    def best_of(candidates: Sequence[Candidate]) -> Candidate:
        stays = _usual(candidates, sigma, usual) if prefer == "time" else None
        return stays or _preferred(workload, candidates, default, prefer)

    best = best_of(allowed)
    if not best.varies:
        return best
    most = cost(prefer, best.gain.median, best.peak_bytes) + REPRODUCIBLE
    steady = []
    for candidate in within_limits:
        # What is not surely faster than the default has to be surely no slower than this.
        gain = candidate.gain.median if candidate in allowed else candidate.gain.high
        if not candidate.varies and cost(prefer, gain, candidate.peak_bytes) <= most:
            steady.append(candidate)
    return best_of(steady) if steady else best


def _usual(candidates: Sequence[Candidate], sigma: float, usual: Sequence[Tunables]) -> Candidate | None:
    """Return the winner of a cell nearby, if it may well be the best here, too.

    Eight blocks of an H100's longest cell, 3 % of noise each, put a plan level with one that was 3.5 % slower.
    """
    best = min(candidates, key=lambda candidate: candidate.gain.median)
    known = {candidate.tunables: candidate for candidate in candidates}
    for candidate in (known[plan] for plan in usual if plan in known):
        fewest = min(candidate.gain.count, best.gain.count)
        doubt = min(STANDARD_ERROR * sigma * math.sqrt(2 / fewest), MOST_DOUBT) if fewest else 0.0
        if doubt > TIE and candidate.gain.median <= best.gain.median + doubt:
            return candidate
    return None


def _preferred(
    workload: Workload, candidates: Sequence[Candidate], default: Candidate, prefer: Preference
) -> Candidate:
    def cost_of(candidate: Candidate) -> float:
        return cost(prefer, candidate.gain.median, candidate.peak_bytes)

    best = min(map(cost_of, candidates))
    tied = [candidate for candidate in candidates if cost_of(candidate) <= best + TIE]
    return min(
        tied, key=lambda c: (distance(workload, c.tunables, default.tunables), cost_of(c), candidate_key(c.tunables))
    )


def pareto_front(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return what nothing else beats in both time and memory, fastest first; near-ties in memory count as ties."""
    return undominated(candidates, lambda c: (c.gain.median, c.peak_bytes))


def undominated(items: Iterable[T], time_and_bytes: Callable[[T], tuple[float, int]]) -> tuple[T, ...]:
    """Return the items that no other beats in both, as ``pareto_front`` does."""
    front: list[T] = []
    least = math.inf
    for item in sorted(items, key=time_and_bytes):
        _, peak_bytes = time_and_bytes(item)
        if peak_bytes < 0.99 * least:
            front.append(item)
            least = peak_bytes
    return tuple(front)
