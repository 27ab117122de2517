"""Outcomes of runs, and what a method comes to over many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .problems import CELL_BUDGET_S

NOISE_FLOOR = 1.02  # times the default's: a choice slower than that counts as worse than the default
AGREED = 0.02  # two seeds agree where their choices differ by no more
OVERRUN = 1.1  # times the budget
ALL = "all"
Proposer = Literal["sampler", "queue", "default"]  # of a choice


@dataclass(frozen=True, slots=True)
class Outcome:
    """Choice of one method on one problem: ratios are of true times.

    A plan that is wrong, at its own length or at others, has no time: its regret is infinite. ``spent_s`` is simulated,
    ``own_s`` the part of it that the tuner itself worked. ``claimed`` is the ratio to the default that the method told,
    over the true one.
    """

    machine: str
    noise: str
    method: str
    cell: str
    seed: int
    regret: float
    to_default: float
    ms: float
    wrong: bool
    by: Proposer
    spent_s: float
    own_s: float
    claimed: float


@dataclass(frozen=True, slots=True)
class Line:
    """Result of one method on one machine under one noise; shares are of its runs, or of pairs of seeds."""

    machine: str
    noise: str
    method: str
    runs: int
    regret_median: float | None  # None is infinite
    regret_p90: float | None
    agreeing: float | None
    worse_than_default: int
    wrong: int
    overrun: int
    worst_to_default: float
    sampler: float  # of the choices, those that the study's sampler proposed
    queue: float  # that were enqueued
    default: float  # that are the default, which stayed
    claimed_median: float
    claimed_p10: float
    claimed_p90: float
    spent_s: float
    own_s: float

    @property
    def proposed(self) -> float | None:
        """The sampler's share of the choices that were not enqueued, kept defaults among them; None without any."""
        counted = self.sampler + self.default
        return self.sampler / counted if counted else None


def line_of(machine: str, noise: str, method: str, outcomes: Sequence[Outcome]) -> Line:
    regrets = [outcome.regret for outcome in outcomes]
    claimed = [outcome.claimed for outcome in outcomes if not outcome.wrong] or [1.0]
    return Line(
        machine=machine,
        noise=noise,
        method=method,
        runs=len(outcomes),
        regret_median=_rounded(_quantile(regrets, 0.5)),
        regret_p90=_rounded(_quantile(regrets, 0.9)),
        agreeing=agreement(outcomes),
        worse_than_default=sum(not o.wrong and o.to_default > NOISE_FLOOR for o in outcomes),
        wrong=sum(outcome.wrong for outcome in outcomes),
        overrun=sum(outcome.spent_s > OVERRUN * CELL_BUDGET_S for outcome in outcomes),
        worst_to_default=round(max(outcome.to_default for outcome in outcomes), 4),
        sampler=_share("sampler", outcomes),
        queue=_share("queue", outcomes),
        default=_share("default", outcomes),
        claimed_median=round(_quantile(claimed, 0.5), 4),
        claimed_p10=round(_quantile(claimed, 0.1), 4),
        claimed_p90=round(_quantile(claimed, 0.9), 4),
        spent_s=round(_quantile([outcome.spent_s for outcome in outcomes], 0.5), 2),
        own_s=round(_quantile([outcome.own_s for outcome in outcomes], 0.5), 3),
    )


def _share(by: Proposer, outcomes: Sequence[Outcome]) -> float:
    return round(sum(outcome.by == by for outcome in outcomes) / len(outcomes), 4)


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so many are not above; between infinities nothing can be interpolated."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def agreement(outcomes: Iterable[Outcome]) -> float | None:
    """Return the share of pairs of seeds of one cell whose choices take the same true time within AGREED.

    A plan that is wrong agrees with nothing. None where no two seeds tuned the same cell.
    """
    of_cell: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        of_cell.setdefault((outcome.machine, outcome.noise, outcome.cell), []).append(outcome)
    pairs = [pair for found in of_cell.values() for pair in itertools.combinations(found, 2)]
    agreeing = sum(
        not (one.wrong or other.wrong) and abs(math.log(one.ms / other.ms)) <= math.log1p(AGREED)
        for one, other in pairs
    )
    return round(agreeing / len(pairs), 4) if pairs else None


def lines_of(outcomes: Sequence[Outcome], together: Sequence[str]) -> list[Line]:
    """Return a line for each machine, noise and method, and for each method one over all machines ``together``."""
    lines = []

    def by(key: Callable[[Outcome], Any], found: Iterable[Outcome]) -> dict[Any, list[Outcome]]:
        grouped: dict[Any, list[Outcome]] = {}
        for outcome in found:
            grouped.setdefault(key(outcome), []).append(outcome)
        return grouped

    for (machine, noise, method), found in by(lambda o: (o.machine, o.noise, o.method), outcomes).items():
        lines.append(line_of(machine, noise, method, found))
    pooled = [outcome for outcome in outcomes if outcome.machine in together]
    for method, found in by(lambda o: o.method, pooled).items():
        lines.append(line_of(ALL, ALL, method, found))
    return lines


def printed(lines: Sequence[Line]) -> str:
    """Return the lines as one table of text."""
    rows = [
        f"{'machine':<13} {'noise':<9} {'method':<9} {'runs':>4} {'regret: median':>14} {'p90':>7}"
        f" {'two seeds agree':>15} {'worse than default':>18} {'wrong':>5} {'overrun':>7} {'sampler':>7}"
        f" {'queue':>5} {'default':>7} {'of not queued':>13} {'claimed/true':>12} {'own s':>6}"
    ]
    for line in lines:
        agreed = "" if line.agreeing is None else f"{line.agreeing:.0%}"
        proposed = "" if line.proposed is None else f"{line.proposed:.0%}"
        rows.append(
            f"{line.machine:<13} {line.noise:<9} {line.method:<9} {line.runs:>4} {_percent(line.regret_median):>14}"
            f" {_percent(line.regret_p90):>7} {agreed:>15} {line.worse_than_default:>18} {line.wrong:>5}"
            f" {line.overrun:>7} {line.sampler:>7.0%} {line.queue:>5.0%} {line.default:>7.0%} {proposed:>13}"
            f" {line.claimed_median:>12.3f} {line.own_s:>6.2f}"
        )
    return "\n".join(rows)


def _percent(value: float | None) -> str:
    return "wrong" if value is None else f"{value:.1%}"
