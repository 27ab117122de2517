"""``ringtune report``: write a profile as one web page."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.exit_codes import ProbeFailure

from .options import check_writable, device_option, json_option, profile_argument


@click.command(short_help="Make a web page of a profile.")
@profile_argument
@click.option(
    "--output",
    type=click.Path(path_type=Path, allow_dash=True),
    help="File to write, - for stdout.  [default: PROFILE's name with .html, in this folder]",
)
@device_option
@json_option
def report(profile: Path | None, output: Path | None, device: str | None, as_json: bool) -> None:
    """Make one self-contained web page of a profile.

    The page shows what was measured, the winner of every cell with its
    interval, how the choice changes with length, time against memory, and
    every failure. It loads nothing from the network. PROFILE is the one this
    machine resolves unless given.

    \b
        ringtune report this-machine.yaml --output this-machine.html
    """
    from autotune.report.page import html_report
    from ringattn.profile.yaml_io import load_profile

    from .console import emit_json
    from .locate import chosen_profile_path

    to_stdout = str(output) == "-"
    if to_stdout and as_json:
        raise click.UsageError("--json and --output - both want stdout; name a file")
    source = chosen_profile_path(profile, device)
    page = html_report(load_profile(source))
    if to_stdout:
        click.echo(page, nl=False)
        return
    target = output if output is not None else Path(source.stem + ".html")
    write_page(page, target, source)
    if as_json:
        emit_json({"report_path": target, "profile_path": source})
    else:
        click.echo(f"Report written: {target}")


def write_page(page: str, target: Path, source: Path) -> None:
    """Put the page in place in one step; raise ProbeFailure (one line) when it cannot be, with nothing changed."""
    from ringattn.profile.whole_file import replace_file

    if target.exists() and target.samefile(source):
        raise ProbeFailure(f"{target}: is the profile itself; choose another --output")
    check_writable(target)
    try:
        replace_file(target.resolve(), page.encode(), lasting=False)  # through a symbolic link, which stays one
    except OSError as error:
        raise ProbeFailure(f"{target}: cannot be written ({error.strerror}); choose another --output") from error
