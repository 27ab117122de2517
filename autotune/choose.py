"""From final measurements to a choice: pure functions, so that the rule can be read and tested on its own.

The default stays unless something is surely faster by a margin; among what cannot be told apart the plan nearest
to the default wins, so that two probes of one machine agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ringattn.preference import TIE, Preference, cost
from ringattn.workload import Tunables, Workload

from .space import candidate_key, encode
from .statistics import Interval

GAIN_MARGIN = 0.01  # the interval of the gain must exclude this much
NOISY_GAIN_MARGIN = 0.02
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


def distance(workload: Workload, plan: Tunables, default: Tunables) -> int:
    """The number of knobs in which a plan differs from the default."""
    here, there = encode(workload, plan), encode(workload, default)
    return sum(here.get(name) != there.get(name) for name in here.keys() | there.keys())


def choose(
    workload: Workload, default: Candidate, others: Sequence[Candidate], *, noisy: bool, prefer: Preference = "time"
) -> Candidate:
    """The plan to run; a ``noisy`` machine needs the wider margin.

    A default that breaks a limit does not stay. Raises NothingAllowed where nothing else is left.
    """
    allowed = [candidate for candidate in others if candidate.allowed]
    if not default.allowed:
        if not allowed:
            raise NothingAllowed
        return _preferred(workload, allowed, default, prefer)
    margin = math.log1p(-(NOISY_GAIN_MARGIN if noisy else GAIN_MARGIN))
    if prefer == "time":
        allowed = [candidate for candidate in allowed if candidate.gain.high < margin]
    else:
        # Leaner plans need not be faster than the default, but faster ones must be so beyond doubt.
        allowed = [c for c in allowed if c.gain.high < margin or c.peak_bytes < default.peak_bytes]
    return _preferred(workload, [default, *allowed] if prefer != "time" else allowed or [default], default, prefer)


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


def pareto_front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that nothing else beats in both time and memory, fastest first; near-ties in memory count as ties."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.gain.median, c.peak_bytes)):
        if all(candidate.peak_bytes < 0.99 * kept.peak_bytes for kept in front):
            front.append(candidate)
    return tuple(front)
