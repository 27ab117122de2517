"""Merges rows that several probes measured on one kind of machine: pure, the same whatever the order. Never averages.

A store keeps what was pushed as it is, so that nothing is lost to another writer; its readers merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from ringattn.profile.precedence import effort_and_day, effort_rank, origin_of, row_effort_and_day, rows_for
from ringattn.profile.schema import PlanEntry, Profile, Provenance
from ringattn.wording import plural
from ringattn.workload import Workload, describe


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two rows for one workload that noise does not explain: of which ``kept`` serves."""

    workload: Workload
    kept: PlanEntry
    other: PlanEntry

    def __str__(self) -> str:
        return f"{self.workload}: kept {row_text(self.kept)}; the other measured {row_text(self.other)}"


@dataclass(frozen=True, slots=True)
class Merged:
    """One profile made of several, the conflicts between their rows, and which of them gave none of the rows."""

    profile: Profile
    conflicts: tuple[Conflict, ...]
    superseded: tuple[Profile, ...]


def row_text(entry: PlanEntry) -> str:
    """Return what a row says, for people: its plan, and its time relative to the default with the interval."""
    if entry.choice is None:
        return f"refused: {entry.refusal}"
    text = describe(entry.choice.tunables)
    if entry.evidence is None:
        return f"{text} (not measured)"
    seen = entry.evidence
    return f"{text}, {seen.default_ratio:.3g} of the default's time ({seen.ratio_low:.3g} to {seen.ratio_high:.3g})"


def disagree(one: PlanEntry, other: PlanEntry) -> bool:
    """Tell whether two rows for one workload differ by more than noise.

    They do where only one of them is a refusal, and where the 95 % intervals of their ratios do not meet.
    """
    if (one.choice is None) != (other.choice is None):
        return True
    mine, theirs = one.evidence, other.evidence
    if mine is None or theirs is None:
        return False
    return mine.ratio_low > theirs.ratio_high or theirs.ratio_low > mine.ratio_high


def merge_rows(kept: Mapping[Workload, PlanEntry], rows: Mapping[Workload, PlanEntry]) -> dict[Workload, PlanEntry]:
    """Merge later rows into earlier ones, which they replace.

    But what was measured before stays where the later probe measured nothing, as on a machine that has become busy.
    """
    measured = {workload for workload, entry in kept.items() if entry.evidence is not None}
    return dict(kept) | {
        workload: entry
        for workload, entry in rows.items()
        if entry.evidence is not None or entry.choice is None or workload not in measured
    }


def same_machine_groups(profiles: Iterable[Profile]) -> list[list[Profile]]:
    """Return profiles in groups of one fingerprint and software; the last of each, and the last group, go first."""
    groups: dict[object, list[Profile]] = {}
    for profile in sorted(profiles, key=_precedence):
        groups.setdefault((profile.fingerprint, profile.software), []).append(profile)
    return sorted(groups.values(), key=lambda group: _precedence(group[-1]), reverse=True)


def merge_profiles(profiles: Sequence[Profile]) -> Merged:
    """Merge profiles of one fingerprint and software: for each workload the row of higher effort, then the newer.

    Of one effort and day it is the row whose winner saved more: the other probe did not find that plan. Each row keeps
    its effort and day, so that results of merging may be merged again; the result as a whole claims the least effort
    and the oldest day of those that gave it rows.
    """
    ordered = [profile for profile, _ in groupby(sorted(profiles, key=_precedence))]
    assert len({(profile.fingerprint, profile.software) for profile in ordered}) == 1
    dated = [(row_effort_and_day(profile, entry), entry) for profile in ordered for entry in profile.plans]
    dated.sort(key=lambda row: (row[0], repr(replace(row[1], origin=None))))  # the row's own text, in whichever file
    rows: dict[Workload, PlanEntry] = {}
    for _, equals in groupby(dated, key=itemgetter(0)):
        rows = merge_rows(rows, _of_equals(entry for _, entry in equals))
    # By identity: of two equal rows the one that was kept is the later profile's.
    givers = [profile for profile in ordered if any(rows[entry.workload] is entry for entry in profile.plans)]
    superseded = tuple(profile for profile in ordered if profile not in givers)
    if len(givers) == 1:
        return Merged(givers[0], _conflicts(ordered, rows), superseded)
    origins = {id(entry): origin_of(profile, entry) for profile in givers for entry in profile.plans}
    rows = {workload: replace(entry, origin=origins[id(entry)]) for workload, entry in rows.items()}
    provenance = _joint_provenance(givers)
    speeds = {speed.world: speed for profile in ordered for speed in profile.fingerprint.link_speeds}
    merged = Profile(
        source="measured",
        fingerprint=replace(ordered[-1].fingerprint, link_speeds=tuple(speeds[world] for world in sorted(speeds))),
        software=ordered[-1].software,
        plans=rows_for(provenance, sorted(rows.values(), key=lambda entry: str(entry.workload))),
        provenance=provenance,
    )
    return Merged(merged, _conflicts(ordered, {entry.workload: entry for entry in merged.plans}), superseded)


def _conflicts(profiles: Iterable[Profile], kept: Mapping[Workload, PlanEntry]) -> tuple[Conflict, ...]:
    return tuple(
        Conflict(entry.workload, kept[entry.workload], entry)
        for profile in profiles
        for entry in profile.plans
        if disagree(kept[entry.workload], entry)
    )


def _joint_provenance(profiles: Sequence[Profile]) -> Provenance:
    origins = [profile.provenance for profile in profiles]
    return Provenance(
        tool_version=min(origin.tool_version for origin in origins),
        date=min(origin.date for origin in origins),
        effort=min((origin.effort for origin in origins), key=effort_rank),
        notes=(f"merged from {plural(len(origins), 'profile')}",),
    )


def _precedence(profile: Profile) -> tuple[tuple[int, str], str]:
    """Return a total order: effort, day, and between equals the content, which takes 117 ms to write as YAML."""
    return effort_and_day(profile), repr(profile)


def _of_equals(entries: Iterable[PlanEntry]) -> dict[Workload, PlanEntry]:
    """Return each workload's row with the lowest time relative to the default; refusals come after, guesses last."""
    rows: dict[Workload, PlanEntry] = {}
    for entry in entries:
        other = rows.get(entry.workload)
        if other is None or _cost(entry) <= _cost(other):
            rows[entry.workload] = entry
    return rows


def _cost(entry: PlanEntry) -> tuple[int, float]:
    if entry.evidence is not None:
        return 0, entry.evidence.default_ratio
    return (1, 0.0) if entry.choice is None else (2, 0.0)
