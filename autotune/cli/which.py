"""``ringtune which``: print the profile this machine uses."""

from __future__ import annotations

import click

from autotune.exit_codes import ExitCode

from .options import device_option, json_option, ranks_asked, world_option


@click.command(short_help="Print the profile this machine uses.")
@click.option("--path-only", is_flag=True, help="Print the file and nothing else.")
@device_option
@world_option
@json_option
def which(path_only: bool, device: str | None, nproc: str | None, as_json: bool) -> None:
    """Print which profile this machine uses, and how well it fits.

    Exit code 4 says that nothing measured fits, or nothing for so many ranks,
    and the heuristic decides, whose file is printed; --path-only then prints
    nothing. Shipped profiles for other devices are counted, not listed.

    \b
        ringtune which
        PROFILE=$(ringtune which --path-only) || ringtune probe
    """
    from autotune.formats import plain
    from ringattn.wording import plural

    from .console import emit_json, warn
    from .locate import TIER_MEANINGS, resolve_here

    if path_only and as_json:
        raise click.UsageError("--path-only and --json exclude each other")
    resolution, notes = resolve_here(device, lambda facts: ranks_asked(nproc, facts))
    measured = resolution.profile is not None and resolution.profile.covers(resolution.world)
    path, tier = (resolution.path, resolution.tier) if measured else (resolution.heuristic_path, "heuristic")
    for note in notes:
        warn(f"warning: {note}")
    if as_json:
        emit_json({"path": path, "tier": tier, "trace": resolution.trace, "notes": notes})
    elif measured or not path_only:
        click.echo(path)
        if not path_only:
            click.echo(f"tier: {tier} ({TIER_MEANINGS[tier]})")
            for line in resolution.trace:
                click.echo(f"  {plain(line)}")
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
