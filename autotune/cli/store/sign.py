"""``ringtune sign`` and ``ringtune verify-signature``: say who vouches for a profile in a store."""

from __future__ import annotations

import os
from pathlib import Path

import click

from autotune.exit_codes import ExitCode

from ..options import json_option
from .options import signing_key, store_option, written_store


@click.command(short_help="Sign profiles in a store.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Private Ed25519 key of OpenSSH, without a passphrase.  [default: RINGTUNE_SIGNING_KEY]",
)
@store_option
@json_option
def sign(names: tuple[str, ...], key: Path | None, stores: tuple[str, ...], as_json: bool) -> None:
    """Sign the profiles NAME in the first store, as `ringtune list KIND` prints them.

    Nodes with RINGTUNE_TRUST=signed believe only what is signed by a key in
    their allowed_signers file. The signature is that of ssh-keygen -Y sign -n
    ringtune, and lies beside the profile.

    \b
        ringtune sign --key release_key --store /shared/ringtune nvidia-h100
    """
    from ..console import emit_json

    key = key or signing_key()
    if key is None:
        raise click.UsageError("no key is named; give --key, or set RINGTUNE_SIGNING_KEY")
    store = written_store(stores)
    meant = [store.named(text) for text in names]
    for name in meant:
        store.sign(name, key)
    if as_json:
        emit_json({"store": store.url, "signed": [str(name) for name in meant]})
        return
    for name in meant:
        click.echo(f"signed  {name.short}")


@click.command("verify-signature", short_help="Print who signed profiles in a store.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@store_option
@json_option
def verify_signature(names: tuple[str, ...], stores: tuple[str, ...], as_json: bool) -> None:
    """Print who signed the profiles NAME in the first store.

    Signers are those of RINGTUNE_ALLOWED_SIGNERS, of allowed_signers in the
    user's folder, or of /etc/ringtune/allowed_signers, in the format of
    OpenSSH. Of Sigstore bundles they are those of allowed_identities in the
    same places, one SUBJECT ISSUER a line. Every signature of a profile must
    hold: exit code 1 when one does not, or when there is none.

    \b
        ringtune verify-signature --store /shared/ringtune nvidia-h100
    """
    from dataclasses import replace

    from autotune.display_text import plain
    from ringattn.profile.locations import home_folder
    from ringattn.store.signatures.ssh_signature import SignatureFault
    from ringattn.store.signatures.trust import CHECKSUM, signed_trust

    from ..console import emit_json, warn

    store = replace(written_store(stores), trust=CHECKSUM)
    trust = signed_trust(os.environ, home_folder())
    told = []
    for name in [store.named(text) for text in names]:
        try:
            told.append((name, trust.signer(store.content(name), store.signatures(name)), ""))
        except SignatureFault as fault:
            told.append((name, "", str(fault)))
    if as_json:
        emit_json([{"name": str(name), "signer": signer, "error": error} for name, signer, error in told])
    for name, signer, error in told if not as_json else ():
        if error:
            warn(f"Error: {name.short}: {error}")
        else:
            click.echo(f"ok  {name.short}: {plain(signer)}")
    if any(error for _, _, error in told):
        raise click.exceptions.Exit(ExitCode.ERROR)
