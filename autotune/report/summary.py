"""Digest of a profile for every reader: the terminal summary here, the page in ``report.page``.

Pure: a Profile in, plain data or a rich renderable out.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.formats import format_bytes, format_factor, format_length, format_ms, plain
from ringattn.errors import KernelReason
from ringattn.wording import plural
from ringattn.workload import Tunables, Workload, describe

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

    from ringattn.profile.schema import Choice, Evidence, Failure, PlanEntry, Profile

NOTES_SHOWN = 4
_PLAN_PADDING = 3  # columns around the plans in their table

FAILURE_MEANINGS = {
    "wrong": "the answer differed from float64 by more than the error bound",
    "crash": "the worker process died",
    "timeout": "it was stopped after its time limit",
    "oom": "it ran out of memory",
    "compile": "it did not compile",
    "error": "it raised an error",
}


@dataclass(frozen=True, slots=True)
class Family:
    """Entries that differ in nothing but the sequence length, shortest first."""

    workload: Workload  # of the shortest entry
    entries: tuple[PlanEntry, ...]

    @property
    def title(self) -> str:
        w = self.workload
        return ", ".join((w.mode, str(w.pattern), "causal" if w.causal else "not causal", *self.shape))

    @property
    def shape(self) -> tuple[str, ...]:
        """Return batch with heads, dtype, and ranks where there are several."""
        w = self.workload
        heads = f"H{w.heads}" + (f"/{w.kv_heads}" if w.kv_heads != w.heads else "")
        ranks = (f"world {w.world}",) if w.world > 1 else ()
        return (f"B{w.batch} {heads} D{w.head_dim}", w.dtype, *ranks)


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speed-up over the default: above 1 is faster. The interval is the 95 % one of the profile."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, evidence: Evidence) -> Speedup:
        return cls(*(_inverse(r) for r in (evidence.default_ratio, evidence.ratio_high, evidence.ratio_low)))

    @property
    def bounds(self) -> tuple[str, str]:
        """Return the ends of the interval as text."""
        return format_factor(self.low).removesuffix("x"), format_factor(self.high).removesuffix("x")

    def __str__(self) -> str:
        return f"{format_factor(self.middle)} ({'-'.join(self.bounds)})"


@dataclass(frozen=True, slots=True)
class Headline:
    """Numbers that come first. Speed-ups are over the cells with evidence, the default's own among them."""

    cells: int
    measured: int  # cells whose plan has evidence
    changed: int  # measured cells whose plan is not the default
    refused: int
    median_speedup: float | None
    best: tuple[Workload, Speedup] | None
    failures: tuple[tuple[str, int], ...]  # kind and count, most frequent first; refused before running is no failure


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """One candidate that failed in one way, and every workload where it did."""

    kind: str
    candidate: str
    message: str
    workloads: tuple[Workload, ...]


def families(profile: Profile) -> tuple[Family, ...]:
    """Group the entries of a profile by everything but length, in the order of the file."""
    groups: dict[Workload, list[PlanEntry]] = {}
    for entry in profile.plans:
        groups.setdefault(replace(entry.workload, seq_len=1), []).append(entry)
    ordered = (sorted(group, key=lambda entry: entry.workload.seq_len) for group in groups.values())
    return tuple(Family(group[0].workload, tuple(group)) for group in ordered)


def kept_default(entry: PlanEntry) -> bool:
    """Return whether the plan of this entry is the default itself."""
    return entry.choice is not None and entry.default is not None and entry.choice.tunables == entry.default.tunables


def headline(profile: Profile) -> Headline:
    """Return the numbers for the first line of a report."""
    measured = [(entry.workload, Speedup.of(entry.evidence)) for entry in profile.plans if entry.evidence is not None]
    kept = {entry.workload for entry in profile.plans if kept_default(entry)}
    faster = [pair for pair in measured if pair[1].middle > 1]
    return Headline(
        cells=len(profile.plans),
        measured=len(measured),
        changed=sum(workload not in kept for workload, _ in measured),
        refused=sum(entry.choice is None for entry in profile.plans),
        median_speedup=statistics.median(s.middle for _, s in measured) if measured else None,
        best=max(faster, key=lambda pair: pair[1].middle) if faster else None,
        failures=tuple(
            Counter(f.kind for e in profile.plans for f in e.failures if f.kind != "rejected").most_common()
        ),
    )


def sole_kernel(tunables: Tunables) -> str | None:
    """Return the kernel of a plan that uses one in every branch and direction, else None."""
    names = {name for branch in tunables.branches for name in (branch.forward, branch.backward) if name}
    return names.pop() if len(names) == 1 else None


def recorded_choices(entry: PlanEntry) -> tuple[Choice, ...]:
    """Return every plan with evidence that an entry records, each once, the chosen one first."""
    kept: dict[Tunables, Choice] = {}
    for choice in (entry.choice, entry.default, *entry.runners_up, *entry.front, *entry.singles):
        if choice is not None and choice.evidence is not None:
            kept.setdefault(choice.tunables, choice)
    return tuple(kept.values())


def single_backends(entry: PlanEntry) -> dict[str, Choice]:
    """Return the fastest recorded plan of every kernel that was used alone."""
    best: dict[str, Choice] = {}
    for choice in recorded_choices(entry):
        name = sole_kernel(choice.tunables)
        if name is None:
            continue
        rival = best.get(name)
        if rival is None or _ratio(choice) < _ratio(rival):
            best[name] = choice
    return best


def relative_time(choice: Choice, entry: PlanEntry) -> float | None:
    """Return the time of ``choice`` over that of the entry's plan, both paired with one default."""
    if entry.choice is None or entry.choice.evidence is None or choice.evidence is None:
        return None
    relative = _ratio(choice) * _inverse(_ratio(entry.choice))
    return relative if math.isfinite(relative) else None


def ruled_out(rejections: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Return why each kernel was refused before it ran, each reason once, from (candidate, reason) pairs.

    A reason that is no kernel's is filed under the candidate.
    """
    found: dict[str, dict[str, None]] = {}
    for candidate, reason in rejections:
        name, why = (reason.kernel, reason.why) if isinstance(reason, KernelReason) else (candidate, reason)
        found.setdefault(name, {})[why] = None
    return {name: tuple(reasons) for name, reasons in found.items()}


def failure_groups(profile: Profile) -> dict[str, tuple[FailureGroup, ...]]:
    """Group recorded failures by kind, the same candidate and message once with all its workloads.

    What was refused before it ran is no failure, see ``ruled_out``.
    """
    found: dict[Failure, list[Workload]] = {}
    for entry in profile.plans:
        for failure in entry.failures:
            if failure.kind != "rejected":
                found.setdefault(failure, []).append(entry.workload)
    grouped: dict[str, list[FailureGroup]] = {}
    for failure, workloads in found.items():
        group = FailureGroup(failure.kind, failure.candidate, failure.message, tuple(workloads))
        grouped.setdefault(failure.kind, []).append(group)
    order = list(FAILURE_MEANINGS)
    return {kind: tuple(grouped[kind]) for kind in sorted(grouped, key=lambda k: order.index(k) if k in order else 99)}


def machine_facts(profile: Profile) -> tuple[tuple[str, str], ...]:
    """Return the fingerprint as labels and values, without what a heuristic leaves open."""
    f = profile.fingerprint
    cpu = f.vendor == "cpu"
    rows = (
        ("Device", f.device_name),
        ("Class", f.sku),
        ("Architecture", f.arch),
        ("Cores" if cpu else "SMs", f"{f.sm_count}" if f.sm_count else ""),
        ("Memory", format_bytes(f.memory_mib * 2**20) if f.memory_mib else ""),
        ("Last-level cache" if cpu else "L2 cache", format_bytes(f.l2_mib * 2**20) if f.l2_mib else ""),
        ("MIG", f.mig),
        ("Power limit", f"{f.power_limit_w} W" if f.power_limit_w else ""),
        ("Devices", f"{f.device_count} ({f.link})" if f.device_count and f.device_count > 1 else ""),
        ("Threads", f"{f.threads}" if f.threads else ""),
        ("CPU flags", " ".join(f.isa) if f.isa else ""),
    )
    return tuple((label, plain(value)) for label, value in rows if value)


def provenance_line(profile: Profile) -> str:
    """Return date, versions and effort in one line."""
    p = profile.provenance
    parts = [f"{profile.source} {p.date}".strip(), f"ringtune {p.tool_version}" if p.tool_version else ""]
    if profile.source == "measured":
        parts += [f"effort {p.effort}" if p.effort else "", f"seed {p.seed}" if p.seed is not None else ""]
    return plain(", ".join(part for part in parts if part))


def verdict(profile: Profile) -> str:
    """Return the result in a sentence or two."""
    numbers = headline(profile)
    if not numbers.cells:
        return "A heuristic: no plan in it was measured; it says which kernels to prefer on such a machine."
    won = (
        f"; another plan than the default won in {numbers.changed}" if numbers.changed else "; the default stays in all"
    )
    total = f"{numbers.measured} of " if numbers.measured < numbers.cells else ""
    text = f"{total}{plural(numbers.cells, 'workload')} measured{won if numbers.measured else ''}."
    if numbers.refused:
        text += f" {numbers.refused} without a plan."
    if numbers.median_speedup is not None and numbers.changed:
        text += f" Median speed-up over the default {format_factor(numbers.median_speedup)}"
        if numbers.best is not None:
            workload, speedup = numbers.best
            where = f"{workload.mode}, {workload.pattern}, {format_length(workload.seq_len)}"
            text += f", at best {format_factor(speedup.middle)} ({where})"
        text += "."
    return text


def plan_text(entry: PlanEntry) -> str:
    """Return the plan of an entry in one line, or why there is none."""
    if entry.choice is None:
        return f"refused: {entry.refusal}"
    return describe(entry.choice.tunables)


def speedup_text(entry: PlanEntry) -> str:
    """Return ``1.18x (1.15-1.21)``, ``default``, or a dash without evidence."""
    if entry.evidence is None:
        return "-"
    return "default" if kept_default(entry) else str(Speedup.of(entry.evidence))


def terminal_summary(profile: Profile) -> RenderableType:
    """Return the profile as a few lines and one table per family, for ``show`` and the end of ``probe``."""
    from rich.console import Group
    from rich.text import Text

    facts = dict(machine_facts(profile))
    title = facts.pop("Device", "") or f"Any {profile.fingerprint.vendor} device"
    facts.pop("CPU flags", None)
    details = "  ".join(
        f"{value}" if label in ("Class", "Architecture") else f"{label} {value}" for label, value in facts.items()
    )
    parts: list[RenderableType] = [Text(title, style="bold")]
    parts += [Text(line, style="dim") for line in (details, provenance_line(profile)) if line]
    parts += [Text(""), Text(plain(verdict(profile)))]
    for family in families(profile):
        parts += [Text(""), Text(plain(family.title), style="bold"), _FamilyTable(family)]
    if profile.policy is not None:
        parts += [Text(""), *_policy_lines(profile)]
    failures = headline(profile).failures
    if failures:
        counts = ", ".join(f"{count} {kind}" for kind, count in failures)
        parts += [Text(""), Text(f"Candidates that failed and were left out: {plain(counts)}", style="yellow")]
    notes = profile.provenance.notes
    parts += [Text(f"Note: {plain(note)}", style="dim") for note in notes[:NOTES_SHOWN]]
    if len(notes) > NOTES_SHOWN:
        parts.append(Text(f"and {plural(len(notes) - NOTES_SHOWN, 'more note')}, see `ringtune report`", style="dim"))
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class _FamilyTable:
    """Table of a family; where its plans would not fit beside their figures, they follow in a table of their own."""

    family: Family

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.measure import Measurement

        from .plan_text import longest_piece

        narrow = self._figures(plans=False)
        needed = max(longest_piece(plain(plan_text(entry))) for entry in self.family.entries)
        if Measurement.get(console, options, narrow).maximum + needed + _PLAN_PADDING <= options.max_width:
            yield self._figures(plans=True)
        else:
            yield narrow
            yield self._plans()

    def _figures(self, *, plans: bool) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        table.add_column("Length", justify="right", no_wrap=True)
        if plans:
            table.add_column("Plan")
        table.add_column("Time", justify="right", no_wrap=True)
        table.add_column("Faster than default", justify="right", no_wrap=True)
        table.add_column("Peak", justify="right", no_wrap=True)
        for entry in self.family.entries:
            evidence = entry.choice.evidence if entry.choice is not None else None
            table.add_row(
                format_length(entry.workload.seq_len),
                *([_plan_of(entry)] if plans else []),
                format_ms(evidence.median_ms) if evidence else "-",
                Text(speedup_text(entry), style="dim" if evidence is None or kept_default(entry) else "green"),
                format_bytes(evidence.peak_bytes) if evidence else "-",
            )
        return table

    def _plans(self) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        table.add_column("Length", justify="right", no_wrap=True)
        table.add_column("Plan")
        for entry in self.family.entries:
            table.add_row(format_length(entry.workload.seq_len), _plan_of(entry))
        return table


def _plan_of(entry: PlanEntry) -> Text:
    from .plan_text import PlanText

    return PlanText(plain(plan_text(entry)), style="" if entry.choice is not None else "yellow")


def _policy_lines(profile: Profile) -> Iterable[RenderableType]:
    from rich.text import Text

    policy = profile.policy
    assert policy is not None
    dtypes = ", ".join(given if given == used else f"{given} in {used}" for given, used in policy.compute_dtype)
    yield Text("Where nothing was measured:", style="bold")
    yield Text(f"  forward   {plain(', '.join(policy.forward))}")
    yield Text(f"  backward  {plain(', '.join(policy.backward))}")
    yield Text(f"  computes  {plain(dtypes)}")


def _ratio(choice: Choice) -> float:
    return choice.evidence.default_ratio if choice.evidence is not None else math.inf


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio > 1e-300 else math.inf
