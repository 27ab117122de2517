"""The part of ``ringtune probe --if-missing`` that reads this machine and prints."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.display_text import plain
from autotune.folders import made_folder

from ..store.options import check_signing_key, places_of, signing_key, written_store
from .once import OncePerKind

if TYPE_CHECKING:
    from autotune.probe.request import ProbeRequest


def probe_if_missing(
    request: ProbeRequest,
    stores: tuple[str, ...],
    if_stale: bool,
    wait_s: float | None,
    notes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print the file of the profile that every node of this kind takes from the first store.

    With ``if_stale`` one of other software versions is renewed. It is measured into the cache folder: a file in the
    user's folder would come before the store's for ever.
    """
    from autotune.probe import tuning
    from autotune.probe.machine.ranks_environment import facts_of_ranks
    from ringattn.hardware.facts import detect
    from ringattn.profile.locations import cache_folder, home_folder
    from ringattn.profile.schema import Fingerprint
    from ringattn.profile.yaml_io import load_profile
    from ringattn.store.names import kind_of

    from ..console import emit_json, warn
    from .probe_result import same_command, trouble_lines
    from .progress import probe_observer
    from .renew import can_renew, renew

    place, store = places_of(stores)[0], written_store(stores)
    if store.trust.asks_for_signatures and signing_key() is None:
        raise click.UsageError(
            "RINGTUNE_TRUST is signed, so that nobody would believe what this node measures; set RINGTUNE_SIGNING_KEY"
        )
    facts = facts_of_ranks(detect(request.device), request.ranks, os.environ)
    cache = cache_folder(os.environ, home_folder())
    once = OncePerKind(store, place, cache, facts, request.ranks, warn, exact=if_stale)

    def measure(earlier: Path | None) -> Path:
        check_signing_key(store, believed=True)
        folder = made_folder(cache / "measured", "XDG_CACHE_HOME")
        output = folder / f"{kind_of(Fingerprint.of(facts))}-x{request.ranks}.yaml"
        with probe_observer() as observer:
            for note in notes:
                observer.note(note)
            if earlier is not None and can_renew(load_profile(earlier), facts):
                return renew(earlier, output, request, facts, observer)
            result = tuning.run_probe(replace(request, output=output), observer)
        for line in trouble_lines(result, same_command()):
            warn(line)
        assert result.profile_path is not None, "a probe that measured nothing raises"
        return result.profile_path

    path = once.run(measure, wait_s)
    if as_json:
        emit_json({"profile_path": path, "measured": once.measured, "store": once.store.url})
    elif path is None:
        click.echo("measured elsewhere now; the heuristic serves here until then")
    else:
        click.echo(f"{plain(path)}: {'measured here' if once.measured else 'taken from the store'}")
