"""A profile as one self-contained HTML page: no scripts, no network, every word of the profile escaped.

The page answers, from top to bottom: what was measured, what won and how surely, how the choice changes with length,
what it is worth against the default and every single backend, the time/memory front, and every failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from ringattn.workload import BranchTunables, Workload, describe, kernels_described

from .report import (
    FAILURE_MEANINGS,
    FailureGroup,
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
from .report_svg import FrontPoint, Point, Series, front_chart, interval_bar, kernel_class, relative_chart
from .terminal import escape, format_bytes, format_duration, format_factor, format_length, format_ms, plural

if TYPE_CHECKING:
    from ringattn.profile import Choice, PlanEntry, Profile

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
MIXED = "mixed"


def html_report(profile: Profile) -> str:
    """The whole page. ``profile`` may be measured or a heuristic; a heuristic's page shows its policy alone."""
    grouped = families(profile)
    sections = [("machine", "The machine", _machine(profile))]
    if grouped:
        sections = [
            ("winners", "Winner in every cell", _winners(grouped)),
            ("lengths", "How the choice changes with length", _lengths(grouped)),
            ("plans", "The plans and their evidence", _evidence(grouped)),
            ("front", "Time against memory", _fronts(grouped)),
            ("failures", "What failed", _failures(failure_groups(profile)) + _ruled_out(profile)),
            *sections,
        ]
    if profile.policy is not None:
        sections.append(("policy", "Where nothing was measured", _policy(profile)))
    device = profile.fingerprint.device_name or f"Any {profile.fingerprint.vendor} device"
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-h"><h2 id="{key}-h">{title}</h2>{content}</section>'
        for key, title, content in sections
        if content
    )
    links = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, content in sections if content)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(device)}: attention profile</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n<main>\n"
        f'<header><p class="kicker">Attention profile</p><h1>{escape(device)}</h1>'
        f'<p class="soft">{escape(provenance_line(profile))}</p><p class="lead">{escape(verdict(profile))}</p>'
        f'{_tiles(profile)}<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n{body}\n</main>\n'
        f"<footer>{_reading(bool(grouped))}</footer>\n</body>\n</html>\n"
    )


def _style() -> str:
    return files("autotune").joinpath("report.css").read_text("utf-8")


def _tiles(profile: Profile) -> str:
    numbers = headline(profile)
    if not numbers.cells:
        return ""
    without = f"{numbers.refused} without a plan" if numbers.refused else "all with a plan"
    tiles = [("Workloads", str(numbers.cells), without)]
    tiles.append(("Plan is not the default", str(numbers.changed), f"of {numbers.measured} measured"))
    if numbers.median_speedup is not None:
        tiles.append(("Median speed-up", format_factor(numbers.median_speedup), "over the default"))
    if numbers.best is not None:
        workload, best = numbers.best
        where = (
            f"{workload.mode}, {'dense' if workload.pattern.dense else 'dilated'}, {format_length(workload.seq_len)}"
        )
        tiles.append(("Best speed-up", format_factor(best.middle), where))
    failed = sum(count for _, count in numbers.failures)
    kinds = ", ".join(f"{count} {kind}" for kind, count in numbers.failures) or "none"
    tiles.append(("Failed candidates", str(failed), kinds))
    inner = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(v)}<small>{escape(s)}</small></dd></div>" for k, v, s in tiles
    )
    return f'<dl class="tiles">{inner}</dl>'


def _winners(grouped: Sequence[Family]) -> str:
    """One row a family, one column a length: the kernels of each plan and what they gain."""
    lengths = sorted({entry.workload.seq_len for family in grouped for entry in family.entries})
    head = "".join(f'<th scope="col">{format_length(n)}</th>' for n in lengths)
    rows = []
    for family in grouped:
        at = {entry.workload.seq_len: entry for entry in family.entries}
        cells = "".join(f"<td>{_winner_cell(at[n]) if n in at else ''}</td>" for n in lengths)
        rows.append(f'<tr><th scope="row">{_two_lines(family)}</th>{cells}</tr>')
    intro = (
        "<p>The kernels of the plan for each workload: one name where forward and backward use the same kernel, "
        "otherwise forward, then backward. Below it the speed-up over the default plan with its 95 % interval.</p>"
    )
    caption = "Kernels and speed-up by workload (rows) and sequence length (columns)"
    return intro + _table(caption, f'<th scope="col">Workload</th>{head}', rows)


def _two_lines(family: Family) -> str:
    w = family.workload
    heads = f"H{w.heads}" + (f"/{w.kv_heads}" if w.kv_heads != w.heads else "")
    shape = f"B{w.batch} {heads} D{w.head_dim} {w.dtype}" + (f" world {w.world}" if w.world > 1 else "")
    name = f"{w.mode}, {'dense' if w.pattern.dense else 'dilated'}, {'causal' if w.causal else 'not causal'}"
    pattern = "" if w.pattern.dense else f'<span class="under">{escape(w.pattern)}</span>'
    return f'{escape(name)}<span class="under">{escape(shape)}</span>{pattern}'


def _winner_cell(entry: PlanEntry) -> str:
    if entry.choice is None:
        return f'<span class="bad">refused</span><span class="under wraps">{escape(entry.refusal)}</span>'
    forward, backward = _kernel(entry, "forward"), _kernel(entry, "backward")
    names = [forward] if backward in ("", forward) else [forward, backward]
    chips = "".join(f'<span class="chip {kernel_class(name)}">{escape(name)}</span>' for name in names)
    return f'<div class="chips">{chips}</div><span class="under">{_gain(entry)}</span>'


def _gain(entry: PlanEntry) -> str:
    if entry.evidence is None:
        return "not measured"
    if kept_default(entry):
        return "the default"
    speedup = Speedup.of(entry.evidence)
    kind = "good" if speedup.low > 1 else "bad" if speedup.high < 1 else "soft"
    middle, interval = str(speedup).split("x", 1)
    return f'<span class="{kind}">{middle}x</span>{interval.replace("-", "&ndash;")}'


def _kernel(entry: PlanEntry, direction: str) -> str:
    """The kernel of one direction of the chosen plan, ``mixed`` when branches differ, "" where there is none."""
    if entry.choice is None:
        return ""

    def name_of(branch: BranchTunables) -> str:
        return branch.forward if direction == "forward" else branch.backward

    names = list(dict.fromkeys(name_of(branch) for branch in entry.choice.tunables.branches))
    return names[0] if len(names) == 1 else MIXED


def _lengths(grouped: Sequence[Family]) -> str:
    charts, tables = [], []
    for number, family in enumerate(grouped):
        measured = [e for e in family.entries if e.evidence is not None]
        if not measured:
            continue
        chart = relative_chart(
            f"rel{number}", f"{family.title}: time relative to the tuned plan", _series(measured), _strips(measured)
        )
        charts.append(
            f"<figure><figcaption><b>{escape(family.title)}</b>time relative to the tuned plan, lower is better; "
            f"below, its kernels</figcaption>{chart}</figure>"
        )
        tables.append(_rivals_table(family.title, measured))
    if not charts:
        return "<p>No plan in this profile carries evidence.</p>"
    intro = (
        "<p>Every line is another way to run the same workload: the default plan, and each kernel used alone in every "
        "branch and direction. The tuned plan is the line at 1x; a line above it is slower by that factor.</p>"
    )
    details = f"<details><summary>The same numbers as tables</summary>{''.join(tables)}</details>"
    return f'{intro}<div class="charts">{"".join(charts)}</div>{details}'


def _rivals(entry: PlanEntry) -> dict[str, Choice]:
    """The default and every kernel that has a recorded plan of its own."""
    rivals = {"default": entry.default} if entry.default is not None else {}
    return {**rivals, **single_backends(entry)}


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
    strips = []
    for direction in ("forward", "backward"):
        cells = [(entry.workload.seq_len, _kernel(entry, direction)) for entry in entries]
        if any(name for _, name in cells):
            strips.append((direction, cells))
    return strips


def _rivals_table(title: str, entries: Sequence[PlanEntry]) -> str:
    names = list(dict.fromkeys(name for entry in entries for name in _rivals(entry)))
    rows = []
    for entry in entries:
        rivals = _rivals(entry)
        failed = {kernels_described(failure.candidate): failure.kind for failure in entry.failures}
        cells = []
        for name in names:
            ratio = relative_time(rivals[name], entry) if name in rivals else None
            text = format_factor(ratio) if ratio is not None else failed.get(frozenset({name}), "not recorded")
            cells.append(f'<td class="n{" soft" if ratio is None else ""}">{escape(text)}</td>')
        rows.append(f'<tr><th scope="row" class="n">{format_length(entry.workload.seq_len)}</th>{"".join(cells)}</tr>')
    head = '<th scope="col" class="n">Length</th>' + "".join(
        f'<th scope="col" class="n">{escape(name)}</th>' for name in names
    )
    return _table(f"{title}: time relative to the tuned plan (1.00x is as fast)", head, rows)


def _evidence(grouped: Sequence[Family]) -> str:
    speedups = [Speedup.of(e.evidence) for f in grouped for e in f.entries if e.evidence is not None]
    finite = [v for s in speedups for v in (s.low, s.high) if 0 < v < math.inf]
    domain = (max(min(finite, default=1.0), 0.05), min(max(finite, default=1.0), 1000.0))
    return "".join(f"<h3>{escape(family.title)}</h3>{_evidence_table(family, domain)}" for family in grouped)


EVIDENCE_HEAD = (
    '<th scope="col" class="n">Length</th><th scope="col">Plan</th><th scope="col" class="n">Time</th>'
    '<th scope="col">Speed-up over the default</th><th scope="col" class="n">Peak memory</th>'
    '<th scope="col" class="n">Error</th><th scope="col" class="n">First call</th>'
    '<th scope="col" class="n">Host a call</th>'
)


def _evidence_table(family: Family, domain: tuple[float, float]) -> str:
    rows, others = [], []
    for entry in family.entries:
        length = f'<th scope="row" class="n">{format_length(entry.workload.seq_len)}</th>'
        if entry.choice is None:
            rows.append(f'<tr>{length}<td class="why bad" colspan="7">refused: {escape(entry.refusal)}</td></tr>')
            continue
        rows.append(f"<tr>{length}{_evidence_cells(entry.choice, _gain(entry), domain)}</tr>")
        for kind, choices in (
            ("runner-up", entry.runners_up),
            ("default", _one(entry.default)),
            ("dtype=&quot;auto&quot;", _one(entry.auto)),
        ):
            for choice in choices:
                if kind == "default" and kept_default(entry):
                    continue
                speed = (
                    format_factor(Speedup.of(choice.evidence).middle) if choice.evidence is not None else "not measured"
                )
                cells = _evidence_cells(choice, f"{kind}, {speed}", domain)
                others.append(f"<tr>{length}{cells}</tr>")
    lengths = plural(len(family.entries), "length")
    caption = f"{lengths}, peak memory beyond the inputs, error as relative 2-norm against float64"
    table = _table(caption, EVIDENCE_HEAD, rows)
    if others:
        more = _table('Runners-up, the default, and the plan for dtype="auto"', EVIDENCE_HEAD, others)
        table += f"<details><summary>{plural(len(others), 'other plan')}</summary>{more}</details>"
    return table


def _evidence_cells(choice: Choice, gain: str, domain: tuple[float, float]) -> str:
    """Seven cells; ``gain`` is markup."""
    plan = f'<td class="plan">{escape(describe(choice.tunables))}</td>'
    evidence = choice.evidence
    if evidence is None:
        return plan + f'<td class="n soft">-</td><td>{gain}</td>' + '<td class="n soft">-</td>' * 4
    speedup = Speedup.of(evidence)
    finite = all(0 < v < math.inf for v in (speedup.middle, speedup.low, speedup.high))
    bar = interval_bar(speedup.middle, speedup.low, speedup.high, domain) if finite else ""
    return (
        f'{plan}<td class="n">{format_ms(evidence.median_ms)}</td><td class="nowrap">{bar} {gain}</td>'
        f'<td class="n">{format_bytes(evidence.peak_bytes)}</td><td class="n">{evidence.error:.1e}</td>'
        f'<td class="n">{format_ms(evidence.first_call_ms)}</td><td class="n">{format_ms(evidence.host_us / 1e3)}</td>'
    )


def _fronts(grouped: Sequence[Family]) -> str:
    figures = []
    for number, entry in enumerate(entry for family in grouped for entry in family.entries):
        points = [
            FrontPoint(c.evidence.peak_bytes, c.evidence.median_ms, describe(c.tunables), _is_chosen(c, entry))
            for c in entry.front
            if c.evidence is not None
        ]
        if len(points) < 2:
            continue
        title = str(entry.workload)
        points.sort(key=lambda p: (p.peak_bytes, p.median_ms))
        legend = "".join(
            f'<li class="plan">{escape(p.label)}{" <b>chosen</b>" if p.chosen else ""}</li>' for p in points
        )
        chart = front_chart(f"front{number}", f"{title}: time against peak memory", points)
        figures.append(f"<figure><figcaption><b>{escape(title)}</b></figcaption>{chart}<ol>{legend}</ol></figure>")
    if not figures:
        return "<p>In every workload one plan was both the fastest and the leanest, or only one was measured.</p>"
    intro = (
        "<p>Plans that no other plan beats in both time and memory. The ringed one is the choice; "
        "<code>--prefer memory</code> asks for the lean end.</p>"
    )
    return f'{intro}<div class="charts">{"".join(figures)}</div>'


def _is_chosen(choice: Choice, entry: PlanEntry) -> bool:
    return entry.choice is not None and choice.tunables == entry.choice.tunables


def _failures(groups: dict[str, tuple[FailureGroup, ...]]) -> str:
    if not groups:
        return "<p>No candidate failed.</p>"
    parts = ["<p>Every candidate that did not make it, by what became of it. None of these is in a plan.</p>"]
    for kind, found in groups.items():
        count = sum(len(group.workloads) for group in found)
        meaning = FAILURE_MEANINGS.get(kind, "")
        parts.append(f'<h3>{escape(kind)} <span class="soft">&middot; {count}</span></h3>')
        rows = [
            f'<tr><th scope="row" class="plan">{escape(group.candidate)}</th>'
            f'<td class="why">{escape(group.message or "no message")}</td>'
            f'<td class="why">{_workload_list(group.workloads)}</td></tr>'
            for group in found
        ]
        head = '<th scope="col">Candidate</th><th scope="col">What happened</th><th scope="col">Where</th>'
        parts.append(_table(f"{kind}: {meaning}", head, rows))
    return "".join(parts)


def _ruled_out(profile: Profile) -> str:
    refused = ((f.candidate, f.message) for entry in profile.plans for f in entry.failures if f.kind == "rejected")
    found = ruled_out(refused)
    if not found:
        return ""
    rows = [
        f'<tr><th scope="row" class="plan">{escape(name)}</th><td class="why">{escape("; ".join(reasons))}</td></tr>'
        for name, reasons in found.items()
    ]
    head = '<th scope="col">Kernel</th><th scope="col">Why</th>'
    return f"<h3>Ruled out beforehand</h3>{_table('What could not run for at least one of the workloads', head, rows)}"


def _workload_list(workloads: Sequence[Workload]) -> str:
    if len(workloads) == 1:
        return escape(workloads[0])
    items = "".join(f"<li>{escape(workload)}</li>" for workload in workloads)
    return f"<details><summary>{plural(len(workloads), 'workload')}</summary><ul>{items}</ul></details>"


def _machine(profile: Profile) -> str:
    facts = _facts(machine_facts(profile))
    software = _facts(profile.software)
    notes = "".join(f"<li>{escape(note)}</li>" for note in profile.provenance.notes)
    p = profile.provenance
    spent = [
        ("Tool", f"ringtune {p.tool_version}" if p.tool_version else ""),
        ("Date", p.date),
        ("Effort", p.effort),
        ("Budget", format_duration(p.budget_s) if p.budget_s is not None else ""),
        ("Took", format_duration(p.elapsed_s) if p.elapsed_s is not None else ""),
        ("Seed", str(p.seed) if p.seed is not None else ""),
        ("Source", profile.source),
    ]
    return f"{facts}<h3>Software</h3>{software or '<p>None recorded.</p>'}<h3>Provenance</h3>{_facts(spent)}" + (
        f"<h3>Notes</h3><ul>{notes}</ul>" if notes else ""
    )


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    shown = [(label, value, "wide" if len(value) > 40 else "narrow") for label, value in rows if value]
    inner = "".join(f'<div class="{kind}"><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>' for k, v, kind in shown)
    return f'<dl class="facts">{inner}</dl>' if inner else ""


def _policy(profile: Profile) -> str:
    policy = profile.policy
    assert policy is not None
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
    return "<p>For lengths and shapes that this profile does not cover.</p>" + _facts(rows)


def _reading(measured: bool) -> str:
    text = (
        "Times are medians of paired blocks: each block runs every candidate and the default once, in random order, "
        "and ratios are taken inside a block, so drift cancels. Intervals are 95 % bootstrap intervals of the ratio. "
        "A plan replaces the default only when its interval excludes the noise margin. "
        if measured
        else ""
    )
    return f"<p>{text}Made by <code>ringtune report</code>; this page loads nothing from anywhere.</p>"


def _table(caption: str, head: str, rows: Iterable[str]) -> str:
    """``caption`` is text, ``head`` and ``rows`` are markup. Wide tables scroll in their own box, by keyboard too."""
    label = escape(caption)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table><caption>{label}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _one(choice: Choice | None) -> tuple[Choice, ...]:
    return () if choice is None else (choice,)
