"""Order of profiles of one machine, and of their rows, wherever several meet: higher effort first, then the newer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .row_origin import RowOrigin
from .schema import PlanEntry, Profile, Provenance

_EFFORTS = ("quick", "standard", "full")


def effort_rank(effort: str) -> int:
    """Return where an effort stands among those that a probe knows; -1 for others, which say nothing."""
    return _EFFORTS.index(effort) if effort in _EFFORTS else -1


def effort_and_day(profile: Profile) -> tuple[int, str]:
    """Return what is compared of a profile; of two the larger counts."""
    return effort_rank(profile.provenance.effort), profile.provenance.date


def origin_of(profile: Profile, entry: PlanEntry) -> RowOrigin:
    """Return the effort and day of a row of a profile."""
    return entry.origin or RowOrigin(profile.provenance.effort, profile.provenance.date)


def row_effort_and_day(profile: Profile, entry: PlanEntry) -> tuple[int, str]:
    """Return what is compared of a row of a profile; of two the larger counts."""
    origin = origin_of(profile, entry)
    return effort_rank(origin.effort), origin.date


def rows_with_origin(profile: Profile) -> tuple[PlanEntry, ...]:
    """Return the rows of a profile, each with its effort and day, to be put into another profile."""
    return tuple(replace(entry, origin=origin_of(profile, entry)) for entry in profile.plans)


def rows_for(provenance: Provenance, rows: Iterable[PlanEntry]) -> tuple[PlanEntry, ...]:
    """Return rows for a profile of that provenance: without an origin where it says the same."""
    own = RowOrigin(provenance.effort, provenance.date)
    return tuple(replace(entry, origin=None) if entry.origin == own else entry for entry in rows)
