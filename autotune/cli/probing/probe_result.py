"""Results of a probe as text on the terminal and as the document of ``--json``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from autotune.probe.request import CellReport, DryRun, ProbeResult


def print_result(result: ProbeResult, as_json: bool, device: str | None, ranks: int) -> None:
    """Print the profile on stdout, what could not be measured on stderr, and last where the profile is.

    With ``as_json`` the document alone is on stdout.
    """
    from ..console import emit_json, print_answer, warn

    if as_json:
        emit_json(probe_document(result))
    elif result.dry_run is not None:
        print_answer(dry_run_summary(result.dry_run))
        click.echo(f"The profile would be {result.profile_path}")
        if result.dry_run.verifies:
            click.echo(
                "It has all these cells: they would be verified, and only stale ones searched; --fresh searches all"
            )
    elif result.profile is not None:
        from autotune.report.terminal import terminal_summary

        print_answer(terminal_summary(result.profile))
    for line in trouble_lines(result):
        warn(line)
    if not as_json and result.profile is not None:
        from autotune.display_text import format_duration

        done = "verified" if result.verified else "written"
        click.echo(f"\nProfile {done} in {format_duration(result.elapsed_s)}: {result.profile_path}")
        assert result.profile_path is not None
        click.echo(f"{_how_to_use(result.profile_path, device, ranks)}.")
        click.echo(f"'ringtune show {result.profile_path}' prints it again, 'ringtune report' makes a web page of it.")


def trouble_lines(result: ProbeResult) -> tuple[str, ...]:
    """Return the noise of this machine, why cells could not be measured, and what became of all cells."""
    noise = noise_line(result)
    return (
        *([noise] if noise else []),
        *(f"inconclusive: {line}" for line in result.inconclusive),
        *([tally_line(result)] if result.inconclusive else []),
    )


def tally_line(result: ProbeResult) -> str:
    """Return how many cells this probe measured, and what the profile has for each of the others."""
    from collections import Counter

    from ringattn.wording import plural

    rows = {entry.workload: entry for entry in result.profile.plans} if result.profile is not None else {}

    def ending(cell: CellReport) -> str:
        if cell.status == "refused":
            return "refused"
        if cell.status != "inconclusive":
            return "measured now"
        row = rows.get(cell.workload)
        if row is None or row.choice is None:
            return "without a row, the default being over a limit or not checked"
        return "kept from an earlier probe" if row.evidence is not None else "at the default"

    counts = Counter(map(ending, result.cells))
    counts.setdefault("measured now", 0)
    told = ", ".join(
        f"{counts[name]} {name}" for name in sorted(counts, key=lambda name: (name != "measured now", name))
    )
    return (
        f"this probe, {plural(len(result.cells), 'cell')}: {told}; when the machine is quieter, the same command "
        "measures again, and what was measured stays"
    )


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
    from ringattn.wording import plural

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
        cells.add_row(described, str(cell.candidates), format_duration(cell.estimate_s))
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
