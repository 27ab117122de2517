"""A profile as text for the terminal: a few lines, and one table for workloads that differ in length alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from autotune.display_text import format_bytes, format_factor, format_length, format_ms, plain
from autotune.report.wording.fitting_tables import Cells, FittingTables, figures_table
from autotune.report.wording.hanging import hanging
from autotune.report.wording.legend import legend, legend_table
from autotune.report.wording.plan_text import PlanText, longest_piece
from ringattn.profile.schema import PlanEntry, Profile
from ringattn.wording import plural
from ringattn.workload import describe

from .summary import (
    IN_A_GRAPH,
    UNDER_LOAD,
    UNDER_LOAD_MEANS,
    Family,
    Speedup,
    families,
    headline,
    kept_default,
    machine_facts,
    machine_title,
    over_torch,
    plan_text,
    policy_facts,
    provenance_line,
    verdict,
    waiting_host_ms,
)

NOTES_SHOWN = 4
_PLAN_PADDING = 3  # columns around the plans in their table


def speedup_text(entry: PlanEntry) -> Text:
    """Return ``1.18x (1.15-1.21)``, ``default``, or that the plan was not measured; a dash where there is none."""
    if entry.evidence is None:
        return Text("-" if entry.choice is None else "not measured", style="dim")
    return Text("default", style="dim") if kept_default(entry) else Text(str(Speedup.of(entry.evidence)), style="green")


def terminal_summary(profile: Profile) -> RenderableType:
    """Return the profile as a few lines and one table per family, for ``show`` and the end of ``probe``."""
    facts = dict(machine_facts(profile))
    facts.pop("Device", None)
    facts.pop("CPU flags", None)
    details = "  ".join(
        f"{value}" if label in ("Class", "Architecture") else f"{label} {value}" for label, value in facts.items()
    )
    parts: list[RenderableType] = [Text(machine_title(profile), style="bold")]
    parts += [Text(line, style="dim") for line in (details, provenance_line(profile)) if line]
    parts += [Text(""), Text(plain(verdict(profile)))]
    for family in families(profile):
        parts += [Text(""), Text(plain(family.title), style="bold"), _FamilyTable(family, profile.fingerprint.vendor)]
    choices = [choice for entry in profile.plans for choice in (entry.choice, entry.captured) if choice is not None]
    if choices:
        parts += [Text(""), Text("Words of the plans", style="bold"), legend_table(legend(c.tunables for c in choices))]
    if any(entry.under_load for entry in profile.plans):
        parts += [Text(""), hanging(f"{UNDER_LOAD:<12}", UNDER_LOAD_MEANS)]
    if profile.policy is not None:
        parts += [Text(""), Text("Where nothing was measured:", style="bold")]
        parts += [hanging(f"  {label:<22}", plain(value)) for label, value in policy_facts(profile.policy)]
    failures = headline(profile).failures
    if failures:
        counts = ", ".join(f"{count} {kind}" for kind, count in failures)
        parts += [Text(""), Text(f"Candidates that failed and were left out: {plain(counts)}", style="yellow")]
    notes = profile.provenance.notes
    parts += [Text(f"Last probe: {plain(note)}", style="dim") for note in notes[:NOTES_SHOWN]]
    if len(notes) > NOTES_SHOWN:
        parts.append(Text(f"and {plural(len(notes) - NOTES_SHOWN, 'more note')}, see `ringtune report`", style="dim"))
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class _FamilyTable:
    """Table of a family; where its plans would not fit beside their figures, they follow in a table of their own."""

    family: Family
    vendor: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [row for entry in self.family.entries for row in _rows(entry, self.vendor)]
        columns = [name for name in rows[0] if any(row[name].plain for row in rows)]
        figures = [name for name in columns if name != "Plan"]
        needed = max(longest_piece(row["Plan"].plain) for row in rows)
        if Measurement.get(console, options, figures_table(rows, figures)).maximum + needed + _PLAN_PADDING <= (
            options.max_width
        ):
            yield _with_plans(rows, columns)
        else:
            yield FittingTables(rows, figures[1:], figures[:1])
            yield _with_plans(rows, ["Length", "Plan"])


def _rows(entry: PlanEntry, vendor: str) -> Iterator[dict[str, Text]]:
    """Return by column the cells of an entry's plan, and those of its plan in a CUDA graph if this is another one."""
    gain = over_torch(entry)
    host_ms = waiting_host_ms(entry.evidence, vendor) if entry.evidence is not None else None
    yield {
        "Length": Text(format_length(entry.workload.seq_len)),
        "Plan": PlanText(plain(plan_text(entry)), style="" if entry.choice is not None else "yellow"),
        "Time": Text(format_ms(entry.evidence.median_ms) if entry.evidence else "-"),
        "Host, if longer": Text(format_ms(host_ms) if host_ms else "", style="yellow"),
        "Faster than torch": Text(format_factor(gain), style="green" if gain > 1 else "yellow") if gain else Text(""),
        "Faster than default": speedup_text(entry),
        "Peak": Text(format_bytes(entry.evidence.peak_bytes) if entry.evidence else "-"),
        "Timed": Text(UNDER_LOAD if entry.under_load else "", style="yellow"),
    }
    if entry.captured is not None and (known := entry.captured.evidence) is not None:
        cells = {"Plan": f"{IN_A_GRAPH}: {plain(describe(entry.captured.tunables))}"}
        cells |= {"Time": format_ms(known.median_ms), "Faster than default": str(Speedup.of(known))}
        cells["Peak"] = format_bytes(known.peak_bytes)
        yield defaultdict(Text, {name: PlanText(text, style="dim") for name, text in cells.items()})


def _with_plans(rows: Sequence[Cells], columns: Sequence[str]) -> Table:
    """Return a table whose plans break into lines between their words."""
    table = figures_table(rows, columns, texts=("Plan",))
    table.columns[columns.index("Plan")].no_wrap = False
    return table
