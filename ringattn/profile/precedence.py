"""Order of measured profiles of one machine, wherever several lie together: higher effort first, then the newer."""

from __future__ import annotations

from .schema import Profile

_EFFORTS = ("quick", "standard", "full")


def effort_rank(effort: str) -> int:
    """Return where an effort stands among those that a probe knows; -1 for others, which say nothing."""
    return _EFFORTS.index(effort) if effort in _EFFORTS else -1


def effort_and_day(profile: Profile) -> tuple[int, str]:
    """Return what is compared of a profile; of two the larger counts."""
    return effort_rank(profile.provenance.effort), profile.provenance.date
