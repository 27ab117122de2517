"""Results of a probe as text on the terminal and as the document of ``--json``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringattn.wording import plural

if TYPE_CHECKING:
    from autotune.probe.request import CellReport, DryRun, ProbeResult
    from ringattn.profile.schema import PlanEntry

ARGUMENTS = "ringtune.arguments"  # of the whole command line, in the context's meta
_NOT_AGAIN = ("--fresh", "--if-missing", "--if-stale")
_QUIETER = "when the machine is quieter,"


def print_result(result: ProbeResult, as_json: bool, device: str | None, ranks: int, again: str) -> None:
    """Print the profile on stdout, what could not be measured on stderr, and last where the profile is.

    With ``as_json`` the document alone is on stdout.
    """
    from ..console import emit_json, print_answer, warn

    if as_json:
        emit_json(probe_document(result))
    elif result.dry_run is not None:
        print_answer(dry_run_summary(result.dry_run))
        click.echo(f"The profile would be {result.profile_path}")
        there = sum(cell.measured for cell in result.dry_run.cells)
        if result.dry_run.verifies:
            click.echo(
                "It has all these cells: they would be verified, and only stale ones searched; --fresh searches all"
            )
        elif there:
            of = plural(len(result.dry_run.cells), "cell")
            click.echo(f"It has {there} of {of}, which would be kept and not measured; --fresh searches all")
    elif result.profile is not None:
        from autotune.report.terminal import terminal_summary

        print_answer(terminal_summary(result.profile))
    for line in trouble_lines(result, again):
        warn(line)
    if not as_json and result.profile is not None:
        from autotune.display_text import format_duration

        done = "verified" if result.verified else "written"
        click.echo(f"\nProfile {done} in {format_duration(result.elapsed_s)}: {result.profile_path}")
        assert result.profile_path is not None
        click.echo(f"{_how_to_use(result.profile_path, device, ranks)}.")
        click.echo(f"'ringtune show {result.profile_path}' prints it again, 'ringtune report' makes a web page of it.")


def trouble_lines(result: ProbeResult, again: str) -> tuple[str, ...]:
    """Return the noise of this machine, why cells could not be measured, and what became of all cells.

    ``again`` names the command for those that are left.
    """
    noise = noise_line(result)
    return (
        *([noise] if noise else []),
        *(f"inconclusive: {line}" for line in result.inconclusive),
        *(tally_lines(result, again) if result.inconclusive else []),
    )


def same_command() -> str:
    """Name the command that goes on with what the one that was given has left."""
    from autotune.distributed.launcher import started_by_torchrun

    given = click.get_current_context().meta[ARGUMENTS]
    return "the same command" if started_by_torchrun(os.environ) else command_again(given)


def command_again(arguments: Sequence[str]) -> str:
    """Return the command line with these arguments that measures what it left: not all anew, nor only for a store."""
    words, is_wait = [], False
    for word in arguments:
        of_wait, is_wait = is_wait and not word.startswith("-"), word == "--wait"
        if not (of_wait or is_wait or word in _NOT_AGAIN or word.startswith("--wait=")):
            words.append(word)
    return f"`{shlex.join(['ringtune', *words])}`"


def tally_lines(result: ProbeResult, again: str) -> Iterator[str]:
    """Yield which cells ended alike, where they did not all, and how many did; ``again`` measures those that are left.

    The last line says what the profile has for them.
    """
    if result.verified:
        yield not_judged_line(len(result.cells), len(result.inconclusive), again)
        return
    rows = {entry.workload: entry for entry in result.profile.plans} if result.profile is not None else {}
    endings: dict[str, list[str]] = {"measured now": []}
    for cell in result.cells:
        endings.setdefault(_ending(cell, rows.get(cell.workload)), []).append(str(cell.workload))
    left = {name: cells for name, cells in endings.items() if name not in ("measured now", "refused")}
    if len(left) > 1:
        yield from (f"{name}: {', '.join(cells)}" for name, cells in sorted(left.items()))
    told = ", ".join(
        f"{len(endings[name])} {name}" for name in sorted(endings, key=lambda name: (name != "measured now", name))
    )
    every = plural(len(result.cells), "cell")
    yield f"this probe, {every}: {told}; {_QUIETER} {again} measures those that are left, and what was measured stays"


def not_judged_line(judged: int, left: int, again: str) -> str:
    """Return how many cells a verification could not judge, and that ``again`` verifies them."""
    every = plural(judged + left, "cell")
    told = f"{judged} verified, {left} not judged; nothing was written, their rows stay"
    return f"this verification, {every}: {told}; {_QUIETER} {again} verifies them"


def _ending(cell: CellReport, row: PlanEntry | None) -> str:
    if cell.status == "refused":
        return "refused"
    if cell.status != "inconclusive":
        return "measured now"
    if row is None or row.choice is None:
        return "without a row, the default being over a limit or not checked"
    return "kept from an earlier probe" if row.evidence is not None else "at the default"


def noise_line(result: ProbeResult) -> str:
    """Return how much two timings of one plan differ here, in the median cell and in the worst; "" where unknown."""
    import statistics

    known = [(cell.noise, cell.workload) for cell in result.cells if cell.noise is not None]
    if not known:
        return ""
    worst, where = max(known, key=lambda pair: pair[0])
    middle = statistics.median(noise for noise, _ in known)
    return f"noise of one timing against the default's: {middle:.1%} in the median cell, at most {worst:.1%} ({where})"


def _how_to_use(path: Path, device: str | None = None, ranks: int = 1) -> str:
    """Return how the runtime finds the file: by itself, in part, or named; as this machine resolves now."""
    from ringattn.profile.locations import home_folder, search_paths

    from ..locate import resolve_here

    found = {place.resolve() for _, place in search_paths(os.environ, home_folder())}
    if not found & {path.resolve(), path.resolve().parent}:
        return f"RINGTUNE_PROFILE={path} or RingAttention(profile='{path}') uses it"
    resolution, _, _ = resolve_here(device, ranks)
    serving = [Path(source.path).resolve() for source in resolution.sources]
    if path.resolve() in serving[:1]:
        return "RingAttention(profile='auto') uses it from now on"
    part = "for what that has not measured" if path.resolve() in serving else f"only as RINGTUNE_PROFILE={path}"
    return f"{resolution.path} comes before it, so that RingAttention(profile='auto') uses it {part}"


def probe_document(result: ProbeResult) -> dict[str, object]:
    """Return what ``probe --json`` prints: where the profile is and how every cell ended."""
    return {
        "profile_path": result.profile_path,
        "verified": result.verified,
        "elapsed_s": result.elapsed_s,
        "cells": result.cells,
        "inconclusive": result.inconclusive,
        "dry_run": result.dry_run,
    }


def dry_run_summary(dry_run: DryRun) -> Any:
    """Return the cells, the space and the estimate as tables."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from autotune.display_text import format_duration, plain
    from autotune.report.wording.plan_text import PlanText

    def table(*columns: str) -> Table:
        made = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            made.add_column(column, overflow="fold")
        return made

    cells = table("Workload, kernels raced", "Plans", "Estimate")
    for column in cells.columns[1:]:
        column.justify = "right"
    for cell in dry_run.cells:
        kernels = ", ".join(cell.kernels) or "none"
        workload = f"{cell.workload} {cell.layout}" if cell.layout else str(cell.workload)
        described = Group(Text(plain(workload)), PlanText(plain(kernels), style="dim"))
        estimate = format_duration(cell.estimate_s) if dry_run.verifies or not cell.measured else "kept"
        cells.add_row(described, str(cell.candidates), f"verify, {estimate}" if dry_run.verifies else estimate)
    space = table("Tunable", "Values")
    for name, values in dry_run.tunables:
        space.add_row(plain(name), plain(", ".join(values)))
    title = f"{plural(len(dry_run.cells), 'cell')}, about {format_duration(dry_run.estimate_s)}"
    parts: list[Any] = [Text(title, style="bold"), cells, Text("Searched", style="bold"), space]
    ruled_out = rejected_kernels(dry_run)
    if ruled_out:
        rejected = table("Kernel", "Reason")
        for name, reasons in ruled_out.items():
            rejected.add_row(plain(name), plain("; ".join(reasons)))
        parts += [Text("Ruled out beforehand", style="bold"), rejected]
    return Group(*parts)


def rejected_kernels(dry_run: DryRun) -> dict[str, tuple[str, ...]]:
    """Return why each kernel that no cell races is ruled out, each reason once."""
    from autotune.report.summary import ruled_out
    from ringattn.workload import kernels_described

    raced = {name for cell in dry_run.cells for pair in cell.kernels for name in kernels_described(pair)}
    found = ruled_out((name, why) for cell in dry_run.cells for name, reasons in cell.rejected for why in reasons)
    return {name: reasons for name, reasons in found.items() if name not in raced}
