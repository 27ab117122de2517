"""Two profiles side by side as one page: their workloads joined, the ratio of times, and what only one has."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.display_text import format_factor, format_length
from autotune.report.summary import (
    Family,
    Rates,
    call_ms,
    families,
    machine_facts,
    machine_title,
    plan_text,
    provenance_line,
)
from ringattn.profile.schema import PlanEntry, Profile
from ringattn.wording import plural
from ringattn.workload import Workload

from .page import speed_chart, template


@dataclass(frozen=True, slots=True)
class _Row:
    """One workload that both profiles have. ``ratio`` is B's time over A's, None where either was not measured."""

    workload: Workload
    plans: tuple[str, str]
    ms: tuple[float | None, float | None]

    @property
    def times(self) -> dict[str, float]:
        return {side: ms for side, ms in zip("AB", self.ms, strict=True) if ms is not None}

    @property
    def ratio(self) -> float | None:
        mine, other = self.ms
        return other / mine if mine and other is not None else None


def comparison_page(profiles: tuple[Profile, Profile], names: tuple[str, str]) -> str:
    """Return the page of two profiles, A and B; ``names`` tell their files apart."""
    a, b = profiles
    entries = [{entry.workload: entry for entry in profile.plans} for profile in profiles]
    rates = Rates.of([*a.plans, *b.plans])
    joined = [(family.title, _joined(family, entries[1], profiles)) for family in families(a)]
    joined = [(title, rows) for title, rows in joined if rows]
    all_rows = [row for _, rows in joined for row in rows]
    ratios = [row.ratio for row in all_rows if row.ratio is not None]
    tiles = [("In both", str(len(all_rows)), f"{len(a.plans)} in A, {len(b.plans)} in B")]
    verdict = f"{plural(len(all_rows), 'workload')} in both, {len(ratios)} of them measured in both."
    if ratios:
        faster, middle = sum(ratio < 1 for ratio in ratios), format_factor(statistics.median(ratios))
        verdict += f" B is faster in {faster}; its median time is {middle} that of A."
        extremes = f"{format_factor(min(ratios))} to {format_factor(max(ratios))}"
        tiles += [("Median B / A", middle, "below 1: B is faster"), ("Range of B / A", extremes, "least and most")]
        tiles.append(("B is faster", str(faster), f"of {len(ratios)} measured in both"))
    sides = [
        {
            "letter": letter,
            "name": name,
            "provenance": provenance_line(profile),
            "only": _only(profile, others),
        }
        for letter, name, profile, others in zip("AB", names, profiles, entries[::-1], strict=True)
    ]
    titles = [machine_title(profile) for profile in profiles]
    return template("compare.html").render(
        titles=titles if titles[0] != titles[1] else [f"{titles[0]}: {names[0]}", names[1]],
        sides=sides,
        verdict=verdict,
        tiles=tiles,
        families=joined,
        charts=[
            (title, speed_chart(f"both{n}", title, [(row.workload, row.times) for row in rows], rates))
            for n, (title, rows) in enumerate(joined)
        ],
        rates=rates,
        differences=[("Profile", *names), ("Probe", *map(provenance_line, profiles)), *_differences(a, b)],
        sections={"both": "Workloads of both", "one": "Workloads of one", "machines": "The machines"},
    )


def _joined(
    family: Family, others: Mapping[Workload, PlanEntry], profiles: tuple[Profile, Profile]
) -> tuple[_Row, ...]:
    def ms(entry: PlanEntry, profile: Profile) -> float | None:
        return call_ms(entry.evidence, profile.fingerprint.vendor) if entry.evidence is not None else None

    pairs = [(entry, others[entry.workload]) for entry in family.entries if entry.workload in others]
    return tuple(
        _Row(one.workload, (plan_text(one), plan_text(two)), (ms(one, profiles[0]), ms(two, profiles[1])))
        for one, two in pairs
    )


def _only(profile: Profile, others: Mapping[Workload, PlanEntry]) -> list[str]:
    """Return a line for each family with workloads that the other profile lacks."""
    only = replace(profile, plans=tuple(entry for entry in profile.plans if entry.workload not in others))
    return [f"{f.title}, at {', '.join(format_length(e.workload.seq_len) for e in f.entries)}" for f in families(only)]


def _differences(a: Profile, b: Profile) -> list[tuple[str, str, str]]:
    """Return label and both values of all that is recorded of the two machines."""
    mine, other = ({**dict(machine_facts(profile)), **dict(profile.software)} for profile in (a, b))
    return [(label, mine.get(label, "-"), other.get(label, "-")) for label in dict.fromkeys([*mine, *other])]
