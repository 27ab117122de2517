"""``ringtune which``: print the profile this machine uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from autotune.exit_codes import ExitCode

from ..options import device_option, json_option, ranks_asked, world_option
from ..store.options import store_option

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts
    from ringattn.profile.resolve import Resolution


REPORT_S = 10.0  # a first connection to S3 takes 2 s


@click.command(short_help="Print the profile this machine uses.")
@click.option("--path-only", is_flag=True, help="Print the file and nothing else.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Print every measured profile that was found, with its tier and what differs."
)
@click.option("--report", is_flag=True, help="Leave a note in the first store, for `ringtune list --fleet`.")
@store_option
@device_option
@world_option
@json_option
def which(
    path_only: bool,
    verbose: bool,
    report: bool,
    stores: tuple[str, ...],
    device: str | None,
    nproc: str | None,
    as_json: bool,
) -> None:
    """Print which profile this machine uses, and how well it fits.

    Exit code 4 says that nothing measured fits, or nothing for so many ranks,
    and the heuristic decides, whose file is printed; --path-only then prints
    nothing. Shipped profiles for other devices are counted, and listed by -v
    where they were measured.

    \b
        ringtune which
        PROFILE=$(ringtune which --path-only) || ringtune probe
    """
    from autotune.display_text import plain
    from ringattn.wording import plural

    from ..console import emit_json, warn
    from ..locate import TIER_MEANINGS, resolve_here
    from ..store.candidates import candidate_lines, candidates

    if path_only and (as_json or verbose):
        raise click.UsageError(f"--path-only and {'--json' if as_json else '--verbose'} exclude each other")
    resolution, facts, skipped = resolve_here(device, lambda facts: ranks_asked(nproc, facts), stores)
    notes = list(skipped)
    measured = resolution.profile is not None and resolution.profile.covers(resolution.world)
    path, tier = (resolution.path, resolution.tier) if measured else (resolution.heuristic_path, "heuristic")
    found = candidates(facts, resolution.world, stores, notes) if verbose else []
    if report:
        _leave_beacon(resolution, facts, tier, skipped, stores)
    for note in notes:
        warn(f"warning: {note}")
    if as_json:
        told = {"candidates": found} if verbose else {}
        emit_json({"path": path, "tier": tier, "trace": resolution.trace, "notes": notes, **told})
    elif measured or not path_only:
        click.echo(path)
        if not path_only:
            lacking = resolution.profile is not None and not measured
            nothing = f"no plan was measured for {plural(resolution.world, 'rank')}; kernels are chosen by rule"
            click.echo(f"tier: {tier} ({nothing if lacking else TIER_MEANINGS[tier]})")
            for line in resolution.trace:
                click.echo(f"  {plain(line)}")
            for line in candidate_lines(found):
                click.echo(plain(line))
    if not measured:
        if not as_json:
            over = f" --nproc {nproc}" if nproc else ""
            if resolution.profile is None:
                warn(f"No measured profile serves this machine; `ringtune probe{over}` makes one.")
            else:
                warn(
                    f"{resolution.path}: holds no plans for {plural(resolution.world, 'rank')}, which a heuristic "
                    f"serves; `ringtune probe{over}` adds them."
                )
        raise click.exceptions.Exit(ExitCode.NO_PROFILE)


def _leave_beacon(
    resolution: Resolution, facts: HardwareFacts, tier: str, skipped: tuple[str, ...], stores: tuple[str, ...]
) -> None:
    """Write what this node runs into the first store; where it is the heuristic, why.

    That is a file or store that was skipped, if any was; else that there is nothing for it.
    """
    import datetime
    from functools import partial
    from pathlib import Path

    from ringattn.profile.schema import Fingerprint
    from ringattn.store.beacon import Beacon, this_node
    from ringattn.store.bounded import answered
    from ringattn.store.names import kind_of
    from ringattn.wording import plural

    from ..store.options import written_store

    serves = tier != "heuristic"
    lacks = f"no plans for {plural(resolution.world, 'rank')}" if resolution.profile else "no measured profile fits"
    beacon = Beacon(
        node=this_node(),
        kind=kind_of(Fingerprint.of(facts)),
        device_name=facts.device_name,
        world=resolution.world,
        tier=tier,
        profile=Path(resolution.path).name if serves else "",
        why="" if serves else "; ".join((lacks, *skipped[:1])),
        seen=datetime.datetime.now(tz=datetime.UTC),
    )
    backend = written_store(stores).backend
    answered(partial(beacon.leave, backend), backend.url, REPORT_S)
