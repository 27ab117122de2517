"""``ringtune validate``: check that files are profiles, and that they can run here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.exit_codes import ExitCode

from ..options import device_option, json_option

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts
    from ringattn.profile.schema import Profile


@dataclass(frozen=True, slots=True)
class FileReport:
    """Report on one file: a fault of its form (one line), and with ``--here`` what cannot run on this machine.

    Of its ``plans`` so many are ``unmeasured``: no fault, but nobody knows what is fast there.
    """

    file: str
    ok: bool
    error: str = ""
    plans: int = 0
    unmeasured: int = 0
    tier: str = ""
    problems: tuple[str, ...] = ()


@click.command(short_help="Check profiles, with --here on this machine.")
@click.argument("profiles", nargs=-1, required=True, type=click.Path(path_type=Path, readable=False))
@click.option("--here", is_flag=True, help="Also check that every plan can run on this machine.")
@device_option
@json_option
def validate(profiles: tuple[Path, ...], here: bool, device: str | None, as_json: bool) -> None:
    """Check the form of PROFILES, and with --here whether they can run on this machine.

    Good files are named on stdout, with how many plans are defaults that were
    kept unmeasured; faults on stderr: one line with the file and the key inside
    it. Exit code 1 when any file has one.

    \b
        ringtune validate profiles/*.yaml
        ringtune validate --here this-machine.yaml
    """
    from autotune.display_text import plain
    from ringattn.wording import plural

    from ..console import emit_json, warn

    if device is not None and not here:
        raise click.UsageError("--device needs --here: the form of a file does not depend on a device")
    facts = None
    if here:
        from ringattn.hardware.facts import detect

        facts = detect(device)
    reports = [validate_file(path, facts) for path in profiles]
    if as_json:
        emit_json(reports)
    for report in reports if not as_json else ():
        if report.error:
            warn(f"Error: {report.error}")
        for problem in report.problems:
            warn(f"Error: {report.file}: {problem}")
        if report.ok:
            where = f", runs here (tier {report.tier})" if here else ""
            kept = f", {report.unmeasured} of them a default that was not measured" if report.unmeasured else ""
            click.echo(f"ok  {plain(report.file)}: {plural(report.plans, 'plan')}{kept}{where}")
    if not all(report.ok for report in reports):
        raise click.exceptions.Exit(ExitCode.ERROR)


def validate_file(path: Path, facts: HardwareFacts | None) -> FileReport:
    """Return the report on one file; ``facts`` None checks the form alone."""
    from ringattn.errors import ProfileError
    from ringattn.profile.yaml_io import load_profile

    try:
        profile = load_profile(path)
    except ProfileError as error:
        return FileReport(str(path), ok=False, error=str(error))
    unmeasured = sum(entry.choice is not None and entry.evidence is None for entry in profile.plans)
    if facts is None:
        return FileReport(str(path), ok=True, plans=len(profile.plans), unmeasured=unmeasured)
    tier, problems = problems_here(profile, str(path), facts)
    return FileReport(str(path), not problems, "", len(profile.plans), unmeasured, tier, problems)


def problems_here(profile: Profile, path: str, facts: HardwareFacts) -> tuple[str, tuple[str, ...]]:
    """Return the tier of a profile on a machine, and why it or which of its plans cannot run there."""
    from ringattn.errors import ProfileError
    from ringattn.planning.plan import rejection_reasons
    from ringattn.profile.locations import Located
    from ringattn.profile.resolve import resolve

    try:
        tier = resolve((Located(path, profile, "argument"),), facts).tier
    except ProfileError as error:
        return "", (error.problem,)
    problems = []
    for number, entry in enumerate(profile.plans):
        if entry.choice is None:
            continue
        reasons = rejection_reasons(entry.workload, entry.choice.tunables, facts)
        if reasons:
            problems.append(f"plans[{number}] ({entry.workload}) cannot run here: {'; '.join(reasons)}")
    return tier, tuple(problems)
