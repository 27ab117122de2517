"""``ringtune which``: the profile this machine uses."""

from __future__ import annotations

import click

from ..exit_codes import ExitCode
from .options import device_option, json_option, ranks_asked, world_option


@click.command(short_help="Print the profile this machine uses.")
@click.option("--path-only", is_flag=True, help="Print the file and nothing else.")
@device_option
@world_option
@json_option
def which(path_only: bool, device: str | None, nproc: str | None, as_json: bool) -> None:
    """Print which profile this machine uses, and how well it fits.

    Exit code 4 says that nothing measured fits, or nothing for so many ranks,
    and the heuristic decides; --path-only then prints nothing.

    \b
        ringtune which
        PROFILE=$(ringtune which --path-only) || ringtune probe
    """
    from ringattn.profile_paths import shipped_folder
    from ringattn.wording import plural

    from ..terminal import emit_json, plain, warn
    from .locate import TIER_MEANINGS, resolve_here

    if path_only and as_json:
        raise click.UsageError("--path-only and --json exclude each other")
    resolution, notes = resolve_here(device, lambda facts: ranks_asked(nproc, facts))
    measured = resolution.profile is not None and resolution.profile.covers(resolution.world)
    for note in notes:
        warn(f"warning: {note}")
    if as_json:
        emit_json({"path": resolution.path, "tier": resolution.tier, "trace": resolution.trace, "notes": notes})
    elif measured or not path_only:
        click.echo(resolution.path)
        if not path_only:
            click.echo(f"tier: {resolution.tier} ({TIER_MEANINGS[resolution.tier]})")
            for line in resolution.trace:
                if not line.startswith(str(shipped_folder())):  # what comes with the package fits few machines
                    click.echo(f"  {plain(line)}")
    if not measured:
        if not as_json:
            over = f" --nproc {nproc}" if nproc else ""
            if resolution.profile is None:
                warn(f"No measured profile serves this machine; `ringtune probe{over}` makes one.")
            else:
                warn(
                    f"It holds no plans for {plural(resolution.world, 'rank')}, which a heuristic serves; "
                    f"`ringtune probe{over}` adds them."
                )
        raise click.exceptions.Exit(ExitCode.NO_PROFILE)
