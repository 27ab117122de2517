"""``ringtune show``: print a profile as a table."""

from __future__ import annotations

from pathlib import Path

import click

from ..options import device_option, json_option, profile_argument


@click.command(short_help="Print what a profile says.")
@profile_argument
@device_option
@json_option
def show(profile: Path | None, device: str | None, as_json: bool) -> None:
    """Print what a profile says: the machine, every plan and its gain.

    PROFILE is the one this machine resolves unless given. --json prints the
    profile as it is in the file.

    \b
        ringtune show
        ringtune show this-machine.yaml
    """
    from autotune.report.terminal import terminal_summary
    from ringattn.profile.yaml_io import load_profile

    from ..console import emit_json, print_answer
    from ..locate import chosen_profile_path, profile_document

    loaded = load_profile(chosen_profile_path(profile, device))
    if as_json:
        emit_json(profile_document(loaded))
    else:
        print_answer(terminal_summary(loaded))
