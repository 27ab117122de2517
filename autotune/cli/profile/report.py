"""``ringtune report``: write a profile as one web page, or two side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.exit_codes import ProbeFailure

from ..options import check_page, device_option, json_option, profile_argument

if TYPE_CHECKING:
    from autotune.journal.history import SearchHistory
    from ringattn.profile.schema import Profile


@click.command(short_help="Make a web page of a profile, or of two.")
@profile_argument
@click.argument("other", required=False, type=click.Path(path_type=Path, readable=False))
@click.option(
    "--output",
    type=click.Path(path_type=Path, allow_dash=True),
    help="File to write, - for stdout.  [default: PROFILE's name with .html, in this folder]",
)
@click.option(
    "--storage",
    metavar="URL",
    help="Journal, or URL of the Optuna storage, of the probe: for the history of the search.  "
    "[default: PROFILE.journal, if there is one]",
)
@device_option
@json_option
def report(
    profile: Path | None,
    other: Path | None,
    output: Path | None,
    storage: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Make one self-contained web page of a profile, or of two side by side.

    The page shows what was measured, the plan of every workload with its
    gain over torch and over the default, speed over length, every other
    plan, the history of the search, what is not covered with the command
    that measures it, and every failure. It loads nothing from the network.
    PROFILE is the one this machine resolves unless given.

    With OTHER the page joins the workloads of both: OTHER's times over
    PROFILE's, and what only one has.

    \b
        ringtune report this-machine.yaml --output this-machine.html
        ringtune report before.yaml after.yaml --output both.html
    """
    from autotune.report.pages.comparison import comparison_page
    from autotune.report.pages.page import html_report
    from ringattn.profile.yaml_io import load_profile

    from ..console import emit_json
    from ..locate import chosen_profile_path

    to_stdout = str(output) == "-"
    if to_stdout and as_json:
        raise click.UsageError("--json and --output - both want stdout; name a file")
    if other is not None and storage is not None:
        raise click.UsageError("--storage is for the page of one profile; leave it or the second profile out")
    source = chosen_profile_path(profile, device)
    loaded = load_profile(source)
    if other is not None:
        page = comparison_page((loaded, load_profile(other)), names_apart(source, other))
    else:
        page = html_report(loaded, _histories(loaded, source, storage))
    if to_stdout:
        click.echo(page, nl=False)
        return
    name = source.stem if other is None else f"{source.stem}-{other.stem}"
    target = output if output is not None else Path(name + ".html")
    for read in filter(None, (source, other)):
        if target.exists() and target.samefile(read):
            raise ProbeFailure(f"{target}: is the profile itself; choose another --output")
    write_page(page, target)
    if as_json:
        paths = {"report_path": target, "profile_path": source}
        emit_json(paths if other is None else {**paths, "other_path": other})
    else:
        click.echo(f"Report written: {target}")


def names_apart(one: Path, other: Path) -> tuple[str, str]:
    """Return the names of two files, with as many of their folders as it takes to tell them apart."""
    parts = [path.absolute().with_suffix("").parts for path in (one, other)]
    most = max(map(len, parts))
    count = next((n for n in range(1, most) if parts[0][-n:] != parts[1][-n:]), 1)
    return "/".join(parts[0][-count:]), "/".join(parts[1][-count:])


def _histories(profile: Profile, source: Path, storage: str | None) -> tuple[SearchHistory, ...]:
    """Return the history in the storage that is named, else in the journal beside the profile, if it has one."""
    from autotune.journal.history import search_histories

    from ..console import warn

    if storage is not None:
        return search_histories(profile, storage)
    journal = source.with_name(source.name + ".journal")
    if not journal.exists():
        return ()
    try:
        return search_histories(profile, str(journal))
    except ProbeFailure as error:
        warn(f"no history of the search: {error}")
        return ()


def write_page(page: str, target: Path) -> None:
    """Put the page in place in one step; raise ProbeFailure (one line) when it cannot be, with nothing changed."""
    from ringattn.profile.whole_file import replace_file

    check_page(target)
    try:
        replace_file(target.resolve(), page.encode(), lasting=False)  # through a symbolic link, which stays one
    except OSError as error:
        raise ProbeFailure(f"{target}: cannot be written ({error.strerror}); choose another --output") from error
