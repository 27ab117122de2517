"""``ringtune push``: put profiles into a store."""

from __future__ import annotations

from pathlib import Path

import click

from ..options import device_option, json_option
from .options import signing_key, store_option, written_store


@click.command(short_help="Put profiles into a store.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, readable=False), metavar="[FILE]...")
@store_option
@device_option
@json_option
def push(files: tuple[Path, ...], stores: tuple[str, ...], device: str | None, as_json: bool) -> None:
    """Put FILEs into the first store, one file for each number of ranks.

    Without FILE it is the profile that this machine resolves. What is in the
    store stays: whoever reads it merges the rows of one kind of machine. With a
    key in RINGTUNE_SIGNING_KEY it is signed.

    \b
        ringtune push --store /shared/ringtune this-machine.yaml
    """
    from autotune.formats import plain
    from ringattn.profile.yaml_io import load_profile

    from ..console import emit_json
    from ..locate import chosen_profile_path

    store = written_store(stores)
    chosen = files or (chosen_profile_path(None, device),)
    profiles = [(str(path), load_profile(path)) for path in chosen]  # all of them, before anything is written
    names = store.push_all(profiles, signing_key())
    pushed = [(path, name) for path, of_one in zip(chosen, names, strict=True) for name in of_one]
    if as_json:
        emit_json({"store": store.url, "pushed": [{"file": path, "name": str(name)} for path, name in pushed]})
        return
    for path, name in pushed:
        click.echo(f"{plain(path)}: {store.url}: {name.short}")
