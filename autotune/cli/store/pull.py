"""``ringtune pull``: copy profiles out of stores into a folder."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..options import device_option, json_option
from .options import opened_stores, store_option


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

    Without NAME it is every profile of this kind of machine. Profiles of one
    machine and software are merged into one file. Exit code 4 says that the
    stores hold none.

    \b
        ringtune pull --store /shared/ringtune
    """
    from autotune.exit_codes import ExitCode, ProbeFailure
    from autotune.formats import plain
    from ringattn.profile.locations import home_folder, user_folder
    from ringattn.profile.yaml_io import dump_profile, save_profile
    from ringattn.store.merge import merge_profiles, same_machine_groups
    from ringattn.store.names import ProfileName
    from ringattn.wording import plural

    from ..console import emit_json, warn

    opened = opened_stores(stores)
    kinds = () if names else kinds_here(device)
    found: dict[ProfileName, object] = {}
    profiles = []
    for store in opened:
        wanted = [store.named(text) for text in names] if names else [n for kind in kinds for n in store.names(kind)]
        for name in wanted:
            if name not in found:
                found[name] = None
                profiles.append((name.world, store.profile(name)))
    if not profiles:
        urls = ", ".join(store.url for store in opened)
        raise ProbeFailure(
            f"{urls}: holds no profile of {' or '.join(kinds)}; `ringtune probe` makes one", ExitCode.NO_PROFILE
        )
    folder = output if output is not None else user_folder(os.environ, home_folder())
    written = []
    for world in sorted({world for world, _ in profiles}):
        for group in same_machine_groups(profile for over, profile in profiles if over == world):
            merged = merge_profiles(group)
            for conflict in merged.conflicts:
                warn(f"conflict: {conflict}")
            name = ProfileName.of(merged.profile.fingerprint, world, dump_profile(merged.profile).encode("utf-8"))
            path = folder / f"{name.kind}-x{world}-{name.digest[:12]}.yaml"
            save_profile(merged.profile, path)
            written.append((path, len(merged.profile.plans)))
    if as_json:
        emit_json({"written": [path for path, _ in written]})
        return
    for path, rows in written:
        click.echo(f"{plain(path)}: {plural(rows, 'row')}")


def kinds_here(device: str | None) -> tuple[str, ...]:
    """Return the names of this machine's kind: on a CPU also as ranks find it, with one thread each."""
    from autotune.probe.ranks_environment import facts_of_ranks
    from ringattn.hardware.facts import detect
    from ringattn.profile.schema import Fingerprint
    from ringattn.store.names import kind_of

    facts = detect(device)
    here = [facts_of_ranks(facts, ranks, os.environ) for ranks in (1, 2)]
    return tuple(dict.fromkeys(kind_of(Fingerprint.of(found)) for found in here))
