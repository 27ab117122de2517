"""``ringtune merge``: join profiles of one machine, or remove from a store those that no longer count."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.exit_codes import ProbeFailure

from ..options import check_writable, json_option
from .options import store_option, written_store

if TYPE_CHECKING:
    from ringattn.profile.schema import Profile
    from ringattn.store.merge import Merged
    from ringattn.store.store import Store


@click.command(short_help="Join profiles of one machine.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, readable=False), metavar="[FILE]...")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write the joined FILEs to.")
@store_option
@json_option
def merge(files: tuple[Path, ...], output: Path | None, stores: tuple[str, ...], as_json: bool) -> None:
    """Join FILEs of one machine and software into --output, or tidy the first store.

    For each workload the row of higher effort counts, then the newer; rows are
    never averaged. Two that noise does not explain are printed as a conflict.
    Without FILE the profiles in the store that give no row are removed.

    \b
        ringtune merge one.yaml other.yaml --output both.yaml
        ringtune merge --store /shared/ringtune
    """
    from autotune.display_text import plain
    from ringattn.profile.yaml_io import load_profile, save_profile
    from ringattn.wording import plural

    from ..console import emit_json, warn

    if bool(files) != (output is not None):
        raise click.UsageError("FILEs and --output go together; without both the store is tidied")
    if files and stores:
        raise click.UsageError("FILEs are joined without a store; leave --store out, or the FILEs")
    removed: tuple[str, ...] = ()
    if output is not None:
        check_writable(output)
        joined: tuple[Merged, ...] = (merged_files([(path, load_profile(path)) for path in files]),)
        save_profile(joined[0].profile, output)
    else:
        joined, removed = tidied(written_store(stores))
    conflicts = [conflict for result in joined for conflict in result.conflicts]
    if as_json:
        emit_json({"output": output, "removed": removed, "conflicts": [str(conflict) for conflict in conflicts]})
        return
    for name in removed:
        click.echo(f"removed  {name}")
    if output is not None:
        click.echo(f"{plain(output)}: {plural(len(joined[0].profile.plans), 'row')} of {plural(len(files), 'profile')}")
    elif not removed:
        click.echo("every profile gives some row; nothing to remove")
    for conflict in conflicts:
        warn(f"conflict: {conflict}")


def merged_files(profiles: list[tuple[Path, Profile]]) -> Merged:
    """Return the profiles of files as one; ProbeFailure where they are not of one machine and software."""
    from ringattn.store.merge import merge_profiles

    first_path, first = profiles[0]
    for path, profile in profiles:
        if profile.source != "measured":
            raise ProbeFailure(f"{path}: holds no measured plans; only measured profiles are merged")
        if profile.fingerprint != first.fingerprint or profile.software != first.software:
            raise ProbeFailure(
                f"{path}: is of another machine or other software than {first_path}; `ringtune diff` says in what"
            )
    return merge_profiles([profile for _, profile in profiles])


def tidied(store: Store) -> tuple[tuple[Merged, ...], tuple[str, ...]]:
    """Remove from a store the profiles that give no row to what its readers merge; return the results and names.

    One that is signed goes only where signed ones give its rows: there are readers who believe no others. A profile
    that cannot be read is left where it is.
    """
    from ringattn.errors import RingAttentionError
    from ringattn.store.merge import merge_profiles, same_machine_groups

    from ..console import warn

    results: list[Merged] = []
    removed = []
    of_one: dict[tuple[str, int], list[tuple[Profile, object]]] = {}
    names = {}
    for name in store.names():
        try:
            profile = store.profile(name)
        except FileNotFoundError:
            continue
        except RingAttentionError as error:
            warn(f"warning: {error}")
            continue
        names[id(profile)] = name
        of_one.setdefault((name.kind, name.world), []).append((profile, name))
    signed = store.signed_names()
    for found in of_one.values():
        for group in same_machine_groups(profile for profile, _ in found):
            results.append(merge_profiles(group))
            superseded = {names[id(profile)] for profile in results[-1].superseded}
            if own := [profile for profile in group if names[id(profile)] in signed]:
                needless = {names[id(profile)] for profile in merge_profiles(own).superseded}
                superseded -= signed - needless
            removed += sorted(superseded)
    store.forget(removed)
    return tuple(results), tuple(name.short for name in removed)
