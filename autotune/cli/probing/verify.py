"""``ringtune verify``: re-time the recorded winners on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.exit_codes import ExitCode

from ..options import (
    budget_option,
    device_option,
    effort_option,
    json_option,
    nproc_option,
    profile_argument,
    seed_option,
)

if TYPE_CHECKING:
    from autotune.probe.request import VerifyResult

FIELDS = (
    "stale",
    "cells",
    "elapsed_s",
    "inconclusive",
    "interference",
    "left_out",
    "other_ranks",
)  # of the result, that --json prints


@click.command(short_help="Check that recorded winners still win.")
@profile_argument
@effort_option("quick", "How long to re-time.")
@budget_option
@seed_option("Fixes order and inputs.")
@device_option
@nproc_option
@json_option
def verify(profile: Path | None, nproc: str | None, as_json: bool, **options: Any) -> None:
    """Re-time the recorded winners of PROFILE, without searching again.

    PROFILE is the one this machine resolves unless given, and is not changed.
    Exit code 5 says that some winner no longer wins: probe again; 6 that some
    could not be judged: verify again on a quieter machine.

    Rows for several ranks need as many: --nproc, or torchrun. Those for another
    number are left out, which is said and does not change the exit code; where
    PROFILE has none for this number it is exit code 4.
    """
    from autotune.display_text import format_duration
    from autotune.measure.evaluator import told
    from autotune.probe.machine.ranks_environment import follow_rank_0, is_follower, ranks_of
    from autotune.probe.request import ProbeRequest
    from autotune.probe.tuning import verify_profile
    from ringattn.wording import plural

    from ..console import emit_json, warn
    from ..locate import chosen_profile_path
    from .probe_result import not_judged_line, same_command
    from .progress import probe_observer

    ranks = ranks_of(nproc, options["device"])
    if is_follower():
        follow_rank_0()
        return
    path = chosen_profile_path(profile, options["device"], ranks)
    request = ProbeRequest(output=path, ranks=ranks, **options)
    with probe_observer() as observer:
        result = verify_profile(path, request, observer)
    if as_json:
        emit_json({"profile_path": path, **{name: getattr(result, name) for name in FIELDS}})
    else:
        for cell in result.cells:
            state = "stale" if cell.stale else "holds"
            click.echo(f"{state}  {cell.workload}" + (f"  ({cell.note})" if cell.note else ""))
        every = len(result.cells) + len(result.inconclusive) + result.left_out + result.other_ranks
        judged = f"{len(result.cells)} of {plural(every, 'cell')}"
        click.echo(f"{path}: {_verdict(result)} ({judged}, {format_duration(result.elapsed_s)})")
    if disturbed := told(result.interference):
        warn(disturbed)
    for line in result.stale:
        warn(f"stale: {line}")
    for line in result.inconclusive:
        warn(f"inconclusive: {line}")
    if result.stale:
        over = f" --nproc {nproc}" if nproc else ""
        warn(f"probe again: ringtune probe --fresh{over} --output {path}")
        raise click.exceptions.Exit(ExitCode.STALE)
    if result.inconclusive:
        warn(not_judged_line(len(result.cells), len(result.inconclusive), same_command()))
        raise click.exceptions.Exit(ExitCode.INCONCLUSIVE)


def _verdict(result: VerifyResult) -> str:
    from ringattn.wording import plural

    if not result.cells:
        return "nothing could be judged"
    if result.stale:
        return f"{plural(len(result.stale), 'winner')} no longer winning"
    if result.inconclusive:
        return "the winners that could be judged still win"
    return "every winner for these ranks still wins" if result.other_ranks else "every winner still wins"
