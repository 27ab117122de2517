"""``ringtune forget``: remove profiles from a store."""

from __future__ import annotations

import click

from ..options import json_option
from .options import store_option, written_store


@click.command(short_help="Remove profiles from a store.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@store_option
@json_option
def forget(names: tuple[str, ...], stores: tuple[str, ...], as_json: bool) -> None:
    """Remove the profiles NAME from the first store, as `ringtune list KIND` prints them.

    The start of a name or of its hash will do, where it means one profile.
    Nodes that copied one drop their copy when they next ask the store.

    \b
        ringtune forget --store /shared/ringtune nvidia-h100-sxm-80g/x1-1f0c3a5e9b7d
    """
    from ..console import emit_json

    store = written_store(stores)
    meant = [store.named(text) for text in names]  # all of them, before anything is removed
    store.forget(meant)
    if as_json:
        emit_json({"store": store.url, "removed": [str(name) for name in meant]})
        return
    for name in meant:
        click.echo(f"removed  {name.short}")
