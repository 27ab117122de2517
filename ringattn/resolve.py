"""Which profile serves this machine, and why: pure functions over profiles already read. No torch, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .profile import Profile

Origin = Literal["argument", "env", "env-path", "user", "system", "shipped", "built-in"]
Tier = Literal["exact", "same-silicon", "same-sku", "nearest", "heuristic"]


@dataclass(frozen=True, slots=True)
class Located:
    """A profile with the file it came from and the way it was found, in search order."""

    path: str
    profile: Profile
    origin: Origin


@dataclass(frozen=True, slots=True)
class Resolution:
    """The profile to obey (None: nothing measured fits), the heuristic for what it does not cover, and the trace."""

    profile: Profile | None
    heuristic: Profile
    path: str
    tier: Tier
    trace: tuple[str, ...]
