"""The profile that a command is about: the one named, or the one this machine resolves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.exit_codes import ExitCode, ProbeFailure

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringattn.hardware.facts import HardwareFacts
    from ringattn.profile.resolve import Resolution
    from ringattn.profile.schema import Profile

TIER_MEANINGS = {
    "exact": "this very kind of machine with this software",
    "same-silicon": "this kind of machine, with other software versions",
    "same-sku": "the same class of card",
    "nearest": "the nearest machine of the same architecture",
    "heuristic": "nothing measured fits; kernels are chosen by rule",
}


def resolve_here(
    device: str | None, ranks: int | Callable[[HardwareFacts], int] = 1, stores: tuple[str, ...] = ()
) -> tuple[Resolution, HardwareFacts, tuple[str, ...]]:
    """Return what this machine resolves, its facts, and notes on files that were skipped. Imports torch for them.

    ``ranks`` may be made of them. ``stores`` are asked instead of those of RINGTUNE_STORE.
    """
    from autotune.probe.machine.ranks_environment import facts_of_ranks
    from ringattn.hardware.facts import detect
    from ringattn.profile.resolve import resolve
    from ringattn.store.lookup import find_profiles

    facts = detect(device)
    world = ranks if isinstance(ranks, int) else ranks(facts)
    facts = facts_of_ranks(facts, world, os.environ)
    located, notes = find_profiles(None, facts, world=world, places=stores or None)
    return resolve(located, facts, world=world), facts, notes


def chosen_profile_path(named: Path | None, device: str | None, ranks: int = 1) -> Path:
    """Return ``named``, or the file this machine resolves.

    Raises ProbeFailure with the exit code for "no matching profile" when nothing measured serves this machine.
    """
    if named is not None:
        return named
    resolution, _, skipped = resolve_here(device, ranks)
    if resolution.profile is None:
        over = f" --nproc {ranks}" if ranks > 1 else ""
        told = f" ({'; '.join(skipped)})" if skipped else ""
        raise ProbeFailure(
            f"no measured profile serves this machine{told}; run `ringtune probe{over}` first, or name a file",
            ExitCode.NO_PROFILE,
        )
    return Path(resolution.path)


def profile_document(profile: Profile) -> Any:
    """Return a profile as the data that its file holds, for --json."""
    import yaml

    from ringattn.profile.yaml_io import dump_profile

    return yaml.safe_load(dump_profile(profile))
