"""A profile as one self-contained HTML page: no scripts, no network, every word of the profile escaped.

The page answers, from top to bottom: what was measured, what won and how surely, how the choice changes with length,
what it is worth against the default and every single backend, the time/memory front, and every failure. What it says
is gathered here, how it says it is in ``templates``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from autotune.formats import format_bytes, format_duration, format_factor, format_length, format_ms, plain
from ringattn.wording import plural
from ringattn.workload import BranchTunables, describe, kernels_described

from .charts import FrontPoint, Point, Series, front_chart, interval_bar, kernel_class, relative_chart
from .summary import (
    FAILURE_MEANINGS,
    Family,
    Speedup,
    failure_groups,
    families,
    headline,
    kept_default,
    machine_facts,
    provenance_line,
    relative_time,
    ruled_out,
    single_backends,
    verdict,
)

if TYPE_CHECKING:
    from ringattn.profile.schema import Choice, Evidence, PlanEntry, Policy, Profile

MIXED = "mixed"


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else plain(value),
    )
    made.filters |= {
        "bytes": format_bytes,
        "describe": describe,
        "factor": format_factor,
        "kernel_class": kernel_class,
        "kernels": _kernels,
        "length_text": format_length,
        "ms": format_ms,
        "plural": plural,
        "speedup": Speedup.of,
    }
    made.tests["kept_default"] = kept_default
    return made


def html_report(profile: Profile) -> str:
    """Return the whole page; that of a heuristic shows its policy alone."""
    grouped = families(profile)
    sections = {"machine": "The machine"}
    if grouped:
        sections = {
            "winners": "Winner in every cell",
            "lengths": "How the choice changes with length",
            "plans": "The plans and their evidence",
            "front": "Time against memory",
            "failures": "What failed",
            **sections,
        }
    if profile.policy is not None:
        sections["policy"] = "Where nothing was measured"
    entries = [entry for family in grouped for entry in family.entries]
    domain = _domain(entries)
    refused = ((f.candidate, f.message) for entry in profile.plans for f in entry.failures if f.kind == "rejected")
    return (
        _environment()
        .get_template("report.html")
        .render(
            profile=profile,
            device=profile.fingerprint.device_name or f"Any {profile.fingerprint.vendor} device",
            provenance=provenance_line(profile),
            verdict=verdict(profile),
            sections=sections,
            tiles=_tiles(profile),
            families=grouped,
            lengths=sorted({entry.workload.seq_len for entry in entries}),
            charts=_charts(grouped),
            bar=lambda evidence: _bar(evidence, domain),
            other_plans=_other_plans,
            fronts=_fronts(entries),
            failures=failure_groups(profile),
            meanings=FAILURE_MEANINGS,
            ruled_out=ruled_out(refused),
            machine=machine_facts(profile),
            spent=_spent(profile),
            policy=_policy(profile.policy) if profile.policy is not None else (),
        )
    )


def _tiles(profile: Profile) -> list[tuple[str, str, str]]:
    """Return name, value and small print of the few numbers that come first."""
    numbers = headline(profile)
    if not numbers.cells:
        return []
    without = f"{numbers.refused} without a plan" if numbers.refused else "all with a plan"
    tiles = [("Workloads", str(numbers.cells), without)]
    tiles.append(("Plan is not the default", str(numbers.changed), f"of {numbers.measured} measured"))
    if numbers.median_speedup is not None:
        tiles.append(("Median speed-up", format_factor(numbers.median_speedup), "over the default"))
    if numbers.best is not None:
        workload, best = numbers.best
        kind = "dense" if workload.pattern.dense else "dilated"
        where = f"{workload.mode}, {kind}, {format_length(workload.seq_len)}"
        tiles.append(("Best speed-up", format_factor(best.middle), where))
    failed = sum(count for _, count in numbers.failures)
    kinds = ", ".join(f"{count} {kind}" for kind, count in numbers.failures) or "none"
    return [*tiles, ("Failed candidates", str(failed), kinds)]


def _kernel(entry: PlanEntry, direction: Literal["forward", "backward"]) -> str:
    """Return the kernel of one direction of the plan, ``mixed`` when branches differ, "" where there is none."""
    if entry.choice is None:
        return ""

    def name_of(branch: BranchTunables) -> str:
        return branch.forward if direction == "forward" else branch.backward

    names = list(dict.fromkeys(name_of(branch) for branch in entry.choice.tunables.branches))
    return names[0] if len(names) == 1 else MIXED


def _kernels(entry: PlanEntry) -> tuple[str, ...]:
    """Return the kernel of the forward, and of the backward where it is another one."""
    forward, backward = _kernel(entry, "forward"), _kernel(entry, "backward")
    return (forward,) if backward in ("", forward) else (forward, backward)


@dataclass(frozen=True, slots=True)
class _Chart:
    """A chart and its numbers: by length the factor of every name, or a text in its place."""

    title: str
    picture: Markup
    names: tuple[str, ...]
    rows: tuple[tuple[int, tuple[tuple[float | None, str], ...]], ...]


def _charts(grouped: Sequence[Family]) -> list[_Chart]:
    charts = []
    for number, family in enumerate(grouped):
        measured = [e for e in family.entries if e.evidence is not None]
        if not measured:
            continue
        title = f"{family.title}: time relative to the tuned plan"
        picture = Markup(relative_chart(f"rel{number}", title, _series(measured), _strips(measured)))
        names = tuple(dict.fromkeys(name for entry in measured for name in _rivals(entry)))
        rows = tuple((entry.workload.seq_len, _rival_cells(entry, names)) for entry in measured)
        charts.append(_Chart(family.title, picture, names, rows))
    return charts


def _rivals(entry: PlanEntry) -> dict[str, Choice]:
    """Return the default and every kernel that has a recorded plan of its own."""
    rivals = {"default": entry.default} if entry.default is not None else {}
    return {**rivals, **single_backends(entry)}


def _rival_cells(entry: PlanEntry, names: Sequence[str]) -> tuple[tuple[float | None, str], ...]:
    rivals = _rivals(entry)
    failed = {kernels_described(failure.candidate): failure.kind for failure in entry.failures}
    return tuple(
        (
            relative_time(rivals[name], entry) if name in rivals else None,
            failed.get(frozenset({name}), "not recorded"),
        )
        for name in names
    )


def _series(entries: Sequence[PlanEntry]) -> list[Series]:
    found: dict[str, list[Point]] = {}
    for entry in entries:
        for name, choice in _rivals(entry).items():
            ratio = relative_time(choice, entry)
            assert entry.evidence is not None
            if ratio is None or not 0 < ratio < math.inf:
                continue
            low = high = ratio
            if name == "default":  # the profile's interval is of tuned against default
                speedup = Speedup.of(entry.evidence)
                low, high = max(min(speedup.low, ratio), ratio / 100), min(max(speedup.high, ratio), ratio * 100)
            found.setdefault(name, []).append(Point(entry.workload.seq_len, ratio, low, high))
    return [Series(name, tuple(points)) for name, points in found.items()]


def _strips(entries: Sequence[PlanEntry]) -> list[tuple[str, list[tuple[int, str]]]]:
    strips: list[tuple[str, list[tuple[int, str]]]] = []
    directions: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    for direction in directions:
        cells = [(entry.workload.seq_len, _kernel(entry, direction)) for entry in entries]
        if any(name for _, name in cells):
            strips.append((direction, cells))
    return strips


def _domain(entries: Sequence[PlanEntry]) -> tuple[float, float]:
    """Return the lowest and highest speed-up of a whole page."""
    speedups = [Speedup.of(entry.evidence) for entry in entries if entry.evidence is not None]
    finite = [v for s in speedups for v in (s.low, s.high) if 0 < v < math.inf]
    return max(min(finite, default=1.0), 0.05), min(max(finite, default=1.0), 1000.0)


def _bar(evidence: Evidence, domain: tuple[float, float]) -> Markup:
    speedup = Speedup.of(evidence)
    finite = all(0 < v < math.inf for v in (speedup.middle, speedup.low, speedup.high))
    bar = interval_bar(speedup.middle, speedup.low, speedup.high, domain) if finite else ""
    return Markup(bar)


def _other_plans(family: Family) -> list[tuple[int, str, Choice]]:
    """List the plans beside the chosen ones: length, kind with speed, and plan."""
    found = []
    for entry in family.entries:
        default = None if kept_default(entry) else entry.default
        listed = [("runner-up", choice) for choice in entry.runners_up]
        listed += [("default", default)] if default is not None else []
        listed += [('dtype="auto"', entry.auto)] if entry.auto is not None else []
        for kind, choice in listed if entry.choice is not None else ():
            speed = "not measured" if choice.evidence is None else format_factor(Speedup.of(choice.evidence).middle)
            found.append((entry.workload.seq_len, f"{kind}, {speed}", choice))
    return found


def _fronts(entries: Sequence[PlanEntry]) -> list[tuple[str, Markup, list[FrontPoint]]]:
    fronts = []
    for number, entry in enumerate(entries):
        points = [
            FrontPoint(
                c.evidence.peak_bytes,
                c.evidence.median_ms,
                describe(c.tunables),
                entry.choice is not None and c.tunables == entry.choice.tunables,
            )
            for c in entry.front
            if c.evidence is not None
        ]
        if len(points) < 2:
            continue
        title = str(entry.workload)
        points.sort(key=lambda p: (p.peak_bytes, p.median_ms))
        chart = Markup(front_chart(f"front{number}", f"{title}: time against peak memory", points))
        fronts.append((title, chart, points))
    return fronts


def _spent(profile: Profile) -> list[tuple[str, str]]:
    p = profile.provenance
    return [
        ("Tool", f"ringtune {p.tool_version}" if p.tool_version else ""),
        ("Date", p.date),
        ("Effort", p.effort),
        ("Budget", format_duration(p.budget_s) if p.budget_s is not None else ""),
        ("Took", format_duration(p.elapsed_s) if p.elapsed_s is not None else ""),
        ("Seed", str(p.seed) if p.seed is not None else ""),
        ("Source", profile.source),
    ]


def _policy(policy: Policy) -> list[tuple[str, str]]:
    dtypes = ", ".join(given if given == used else f"{given} in {used}" for given, used in policy.compute_dtype)
    rows = [
        ("Forward, best first", ", ".join(policy.forward)),
        ("Backward, best first", ", ".join(policy.backward)),
        ("Computes", dtypes),
        ("Dilated heads", f"read in place below rate {policy.copy_from_rate}, gathered by one copy from it on"),
    ]
    if policy.launch_bound is not None:
        few = policy.launch_bound
        pair = f"{', '.join(few.forward)} / {', '.join(few.backward)}"
        rows.append((f"Forward / backward below {few.below_gflop:g} GFLOP a launch", pair))
    return rows
