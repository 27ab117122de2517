"""``ringtune push``: put profiles into a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..options import device_option, json_option
from .options import signing_key, store_option, written_store

if TYPE_CHECKING:
    from ringattn.store.store import SignedFile


@click.command(short_help="Put profiles into a store.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, readable=False), metavar="[FILE]...")
@store_option
@device_option
@json_option
def push(files: tuple[Path, ...], stores: tuple[str, ...], device: str | None, as_json: bool) -> None:
    """Put FILEs into the first store, one file for each number of ranks.

    Without FILE it is the profile that this machine resolves. What is in the
    store stays: whoever reads it merges the rows of one kind of machine. With a
    key in RINGTUNE_SIGNING_KEY it is signed. A Sigstore bundle that lies beside
    FILE, as FILE.sigstore.json, goes with it.

    \b
        ringtune push --store /shared/ringtune this-machine.yaml
    """
    from autotune.display_text import plain
    from ringattn.profile.yaml_io import load_profile

    from ..console import emit_json
    from ..locate import chosen_profile_path

    store = written_store(stores)
    chosen = files or (chosen_profile_path(None, device),)
    profiles = [(str(path), load_profile(path)) for path in chosen]  # all of them, before anything is written
    names = store.push_all(profiles, signing_key(), bundles_beside(chosen))
    pushed = [(path, name) for path, of_one in zip(chosen, names, strict=True) for name in of_one]
    if as_json:
        emit_json({"store": store.url, "pushed": [{"file": path, "name": str(name)} for path, name in pushed]})
        return
    for path, name in pushed:
        click.echo(f"{plain(path)}: {store.url}: {name.short}")


def bundles_beside(files: tuple[Path, ...]) -> dict[str, SignedFile]:
    """Return the files beside which a Sigstore bundle lies, with it, by their names; ProfileError for none that is."""
    from ringattn.errors import ProfileError
    from ringattn.profile.whole_file import read_regular
    from ringattn.profile.yaml_io import MAX_FILE_BYTES
    from ringattn.store.signatures.sigstore_bundle import MAX_BYTES, SUFFIX
    from ringattn.store.store import SignedFile

    found = {}
    for path in files:
        bundle = path.with_name(path.name + SUFFIX)
        if not os.path.lexists(bundle):
            continue
        try:
            found[str(path)] = SignedFile(read_regular(path, MAX_FILE_BYTES), read_regular(bundle, MAX_BYTES))
        except OSError as error:
            raise ProfileError(str(bundle), f"cannot be read: {error.strerror}; move it away to push without") from None
    return found
