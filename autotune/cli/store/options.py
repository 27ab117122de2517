"""Option --store, and the stores that a command is about."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..options import seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringattn.store.names import ProfileName
    from ringattn.store.store import Store


def store_place(value: str) -> str:
    """Parse a URL, or a folder, which may be relative here: a person types it in a folder of their own."""
    from ringattn.store.backends.backend import absolute_place

    if not value or "\0" in value:
        raise click.BadParameter(f"{value!r} is neither a folder nor a URL")
    return absolute_place(value)


store_option = click.option(
    "--store",
    "stores",
    type=store_place,
    metavar="STORE",
    multiple=True,
    help="A folder or URL (s3://..., gs://..., https://...) that holds profiles; repeatable, in order.  "
    "[default: RINGTUNE_STORE]",
)


if_missing_option = click.option(
    "--if-missing",
    is_flag=True,
    help="Measure only what the store lacks for this kind of machine, and on one node of all that start this at once.",
)

if_stale_option = click.option(
    "--if-stale",
    is_flag=True,
    help="As --if-missing; where software versions have changed since, verify the winners and search only those that "
    "lost.",
)

WAIT_S = 3600.0

wait_option = click.option(
    "--wait",
    "wait_s",
    is_flag=False,
    flag_value=str(int(WAIT_S)),
    type=seconds,
    metavar="[SECONDS]",
    help="With --if-missing or --if-stale: wait for the node that measures, an hour unless said.  "
    "[default: go on at once]",
)


def check_if_missing(if_missing: bool, wait_s: float | None, options: dict[str, Any]) -> None:
    """Raise UsageError where --wait, --if-missing or --if-stale come with what they cannot go with."""
    if wait_s is not None and not if_missing:
        raise click.UsageError("--wait is for what another node measures; it goes with --if-missing or --if-stale")
    if not if_missing:
        return
    from autotune.distributed.launcher import started_by_torchrun, torchrun_rank

    if options["output"] is not None or options["dry_run"]:
        other = "--dry-run" if options["dry_run"] else "--output"
        raise click.UsageError(f"--if-missing and --if-stale end with the store's profile; leave {other} out, or them")
    if started_by_torchrun(os.environ) or torchrun_rank(os.environ) is not None:
        raise click.UsageError("--if-missing and --if-stale start their ranks; use --nproc in place of torchrun")


def places_of(stores: tuple[str, ...]) -> tuple[str, ...]:
    """Return the stores given, or those of RINGTUNE_STORE; UsageError where there is none."""
    from ringattn.store.lookup import STORE_VARIABLE, store_places

    places = stores or store_places(os.environ)
    if not places:
        raise click.UsageError(f"no store is named; give --store, or set {STORE_VARIABLE} to a folder or URL")
    return places


def opened_stores(stores: tuple[str, ...]) -> tuple[Store, ...]:
    """Return every store that a command reads; a warning where others may change one, which signatures refuse."""
    from ..console import warn

    opened = tuple(_opened(place) for place in places_of(stores))
    for store in opened:
        if warning := store.exposure():
            warn(f"warning: {warning}")
    return opened


def store_with(opened: Sequence[Store], text: str) -> tuple[Store, ProfileName]:
    """Return the first store that has the profile a user means by ``text``, and its name; StoreError where none has."""
    from ringattn.store.store import NotInStore

    for store in opened[:-1]:
        try:
            return store, store.named(text)
        except NotInStore:
            continue  # the next one has it, or the last says that none has
    return opened[-1], opened[-1].named(text)


def written_store(stores: tuple[str, ...]) -> Store:
    """Return the store that a command writes: the first."""
    return _opened(places_of(stores)[0])


def _opened(place: str) -> Store:
    from ringattn.profile.locations import home_folder
    from ringattn.store.backends.backend import open_backend
    from ringattn.store.backends.endpoint import check_reachable
    from ringattn.store.signatures.trust import trust_of

    """Return a store; a warning where it seems not to be mounted."""
    from ringattn.profile.locations import cache_folder
    from ringattn.store.backends.bounded_backend import COMMAND_S, BoundedBackend
    from ringattn.store.lookup import LocalCopy
    from ringattn.store.store import Store

    from ..console import warn

    check_reachable(place)  # a client repeats what fails for minutes
    backend = BoundedBackend(open_backend(place), COMMAND_S)
    if why := LocalCopy(place, cache_folder(os.environ, home_folder())).missing(backend):
        warn(f"warning: {backend.url}: {why}")
    return Store(backend, trust_of(os.environ, home_folder()))


def signing_key() -> Path | None:
    """Return the key of RINGTUNE_SIGNING_KEY, with which what is pushed is signed."""
    from ringattn.store.signatures.trust import KEY_VARIABLE

    named = os.environ.get(KEY_VARIABLE)
    return Path(named) if named else None


def check_store_writable(store: Store) -> None:
    """Raise StoreError now rather than after minutes of measuring, when the store or its key cannot be used."""
    import secrets

    from ringattn.store.names import LEASES

    trial = f"{LEASES}/trial-{secrets.token_hex(8)}"
    check_signing_key(store)
    store.backend.put(trial, b"")
    store.backend.delete(trial)


def check_signing_key(store: Store, *, believed: bool = False) -> None:
    """Raise StoreError where a key is named with which nothing can be signed, or nothing that is ``believed`` here."""
    from ringattn.errors import StoreError
    from ringattn.store.signatures.ssh_signature import SignatureFault
    from ringattn.store.signatures.trust import Signatures

    if (key := signing_key()) is None:
        return
    made = store.signed(b"", key, "what is measured")
    if believed and store.trust.asks_for_signatures:
        try:
            store.trust.signer(b"", Signatures(made))
        except SignatureFault as fault:
            raise StoreError(str(key), f"this node would not believe what it measures, which {fault}") from None


def is_store_name(text: str) -> bool:
    """Tell whether an argument looks like ``KIND/x1-HASH`` or a hash, and not like a file."""
    return re.fullmatch(r"(?:profiles/)?[\w.+-]+/x\d+-[0-9a-f]+(?:\.yaml)?|[0-9a-f]{6,64}", text) is not None
