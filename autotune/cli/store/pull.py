"""``ringtune pull``: copy profiles out of stores into a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..options import device_option, json_option
from .options import opened_stores, store_option, store_with

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ringattn.profile.schema import Profile
    from ringattn.store.names import ProfileName
    from ringattn.store.store import Store


@click.command(short_help="Copy profiles out of a store.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to write to, for RINGTUNE_PROFILE_PATH or /etc/ringtune/profiles.  [default: the user's folder]",
)
@store_option
@device_option
@json_option
def pull(
    names: tuple[str, ...], output: Path | None, stores: tuple[str, ...], device: str | None, as_json: bool
) -> None:
    """Copy profiles out of the stores into a folder, where no store is needed.

    Without NAME it is every profile of this kind of machine that can be read.
    Those of one machine and software are merged into one file, that of a probe
    there, with what it holds already. Exit code 4 says that the stores hold
    none.

    \b
        ringtune pull --store /shared/ringtune
    """
    from autotune.display_text import plain
    from autotune.exit_codes import ExitCode, ProbeFailure
    from ringattn.errors import RingAttentionError
    from ringattn.profile.locations import home_folder, user_folder
    from ringattn.profile.yaml_io import save_profile
    from ringattn.store.merge import merge_profiles, same_machine_groups
    from ringattn.wording import plural

    from ..console import emit_json, warn

    opened = opened_stores(stores)
    kinds = () if names else kinds_here(device)
    found: set[ProfileName] = set()
    profiles = []
    wanted: Iterable[tuple[Store, ProfileName]] = [store_with(opened, text) for text in names] or (
        (store, name) for store in opened for kind in kinds for name in store.names(kind)
    )
    for store, name in wanted:
        if name in found:
            continue
        try:
            profiles.append((name.world, store.profile(name)))
            found.add(name)  # one that is damaged here may be whole in the next store
        except FileNotFoundError:  # forgotten since it was listed
            continue
        except RingAttentionError as error:
            if names:
                raise
            warn(f"warning: {error} (skipped)")  # of another version's perhaps, beside many that can be read
    if not profiles:
        urls = ", ".join(store.url for store in opened)
        wanted_kinds = " or ".join(kinds or names)
        raise ProbeFailure(
            f"{urls}: holds no profile of {wanted_kinds} that can be read; `ringtune probe` makes one",
            ExitCode.NO_PROFILE,
        )
    folder = output if output is not None else user_folder(os.environ, home_folder())
    written = []
    for world in sorted({world for world, _ in profiles}):
        for group in same_machine_groups(profile for over, profile in profiles if over == world):
            path, there = file_of_machine(folder, group[0], world)
            merged = merge_profiles([*there, *group])
            for conflict in merged.conflicts:
                warn(f"conflict: {conflict}")
            save_profile(merged.profile, path)
            written.append((path, len(merged.profile.plans)))
    if as_json:
        emit_json({"written": [path for path, _ in written]})
        return
    for path, rows in written:
        click.echo(f"{plain(path)}: {plural(rows, 'row')}")


def file_of_machine(folder: Path, profile: Profile, world: int) -> tuple[Path, tuple[Profile, ...]]:
    """Return the one file in a folder for a machine, its software and a number of ranks, and what it holds already.

    It is that of a probe, so that what is measured later joins it and is not one of two that hold the same rows. Where
    that is of another machine or other software, or broken, it stays, and the name has a hash at its end. ProfileError
    where the file of that name is broken.
    """
    import hashlib
    from dataclasses import replace

    from autotune.folders import is_there
    from ringattn.errors import ProfileError
    from ringattn.profile.yaml_io import load_profile
    from ringattn.store.names import file_stem, kind_of

    machine = (replace(profile.fingerprint, link_speeds=()), profile.software)
    name = file_stem(kind_of(profile.fingerprint), world)
    usual = folder / f"{name}.yaml"
    own = folder / f"{name}-{hashlib.sha256(repr(machine).encode()).hexdigest()[:8]}.yaml"
    for path in (usual, own):
        if not is_there(path):
            return path, ()
        try:
            there = load_profile(path)
        except ProfileError:
            if path == own:
                raise
            continue
        if there.source == "measured" and (there.fingerprint, there.software) == (
            profile.fingerprint,
            profile.software,
        ):
            return path, (there,)
    return own, ()  # another profile was put there by hand


def kinds_here(device: str | None) -> tuple[str, ...]:
    """Return the names of this machine's kind: on a CPU also as ranks find it, with one thread each."""
    from autotune.probe.machine.ranks_environment import facts_of_ranks
    from ringattn.hardware.facts import detect
    from ringattn.profile.schema import Fingerprint
    from ringattn.store.names import kind_of

    facts = detect(device)
    here = [facts_of_ranks(facts, ranks, os.environ) for ranks in (1, 2)]
    return tuple(dict.fromkeys(kind_of(Fingerprint.of(found)) for found in here))
