"""A profile as one self-contained HTML page: no scripts, no network, every word of the profile escaped.

What the page says is gathered here, how it says it is in ``templates``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jinja2 import Template
from markupsafe import Markup

from autotune.display_text import escape, format_bytes, format_factor, format_length, format_ms, plain
from autotune.journal.history import SearchHistory
from autotune.probe.request import usual_dtype
from autotune.report.summary import (
    FAILURE_MEANINGS,
    UNDER_LOAD_MEANS,
    Family,
    Rates,
    Speedup,
    call_ms,
    failure_groups,
    families,
    first_call_text,
    headline,
    kept_default,
    machine_facts,
    machine_title,
    other_plans,
    over_torch,
    policy_facts,
    provenance_line,
    relative_time,
    ruled_out,
    series_of,
    verdict,
    waiting_host_ms,
)
from autotune.report.wording.legend import legend
from autotune.report.wording.plan_text import pieces
from ringattn.planning.unmeasured_workloads import batch_options, length_option, probe_options
from ringattn.wording import plural
from ringattn.workload import Workload, describe

from .charts import CONFIRMED, Bar, bar_chart, color_class, environment, history_chart

if TYPE_CHECKING:
    from ringattn.profile.schema import Choice, PlanEntry, Profile


def template(name: str) -> Template:
    """Return a template of a page, which knows the formats of the report."""
    made = environment()
    made.filters |= {
        "breaks": _breaks,
        "bytes": format_bytes,
        "color_class": color_class,
        "describe": describe,
        "factor": format_factor,
        "first_call": first_call_text,
        "kernels": _kernels,
        "length_text": format_length,
        "ms": format_ms,
        "over_torch": over_torch,
        "plural": plural,
        "speedup": Speedup.of,
    }
    made.tests["kept_default"] = kept_default
    return made.get_template(name)


def html_report(profile: Profile, histories: Sequence[SearchHistory] = ()) -> str:
    """Return the whole page; that of a heuristic shows its policy alone."""
    grouped = families(profile)
    sections = {"machine": "The machine"}
    if grouped:
        searched = {"search": "How the search went"} if histories else {}
        sections = {
            "winners": "The plan for every workload",
            "speed": "Speed over length",
            "plans": "The plans and their evidence",
            **searched,
            "more": "What is not covered",
            "failures": "What failed",
            **sections,
        }
    if profile.policy is not None:
        sections["policy"] = "Where nothing was measured"
    rates = Rates.of(profile.plans)
    refused = ((f.candidate, f.message) for entry in profile.plans for f in entry.failures if f.kind == "rejected")
    return template("report.html").render(
        profile=profile,
        device=machine_title(profile),
        provenance=provenance_line(profile),
        verdict=verdict(profile),
        sections=sections,
        tiles=_tiles(profile),
        families=grouped,
        lengths=sorted({entry.workload.seq_len for entry in profile.plans}),
        rates=rates,
        has_torch=any(over_torch(entry) is not None for entry in profile.plans),
        waiting_host_ms=lambda evidence: waiting_host_ms(evidence, profile.fingerprint.vendor),
        call_ms=lambda evidence: call_ms(evidence, profile.fingerprint.vendor),
        relative_time=relative_time,
        charts=_charts(grouped, profile.fingerprint.vendor, rates),
        other_plans=lambda family: [(e, which, choice) for e in family.entries for which, choice in other_plans(e)],
        histories=[
            (history, history_chart(f"search{n}", f"{history.workload}: trials over time", history))
            for n, history in enumerate(history for history in histories if len(history.trials) > 1)
        ],
        untried=sum(len(history.trials) == 1 for history in histories),
        confirmed=CONFIRMED,
        legend=legend(choice.tunables for entry in profile.plans for choice in _listed(entry)),
        uncovered=uncovered(profile),
        failures=failure_groups(profile),
        meanings=FAILURE_MEANINGS,
        under_load_means=UNDER_LOAD_MEANS.replace("`", ""),
        ruled_out=ruled_out(refused),
        machine=machine_facts(profile),
        policy=policy_facts(profile.policy) if profile.policy is not None else (),
    )


def _tiles(profile: Profile) -> list[tuple[str, str, str]]:
    """Return name, value and small print of the few numbers that come first."""
    numbers = headline(profile)
    if not numbers.cells:
        return []
    without = f"{numbers.refused} refused" if numbers.refused else "every workload has one"
    tiles = [("With a plan", str(numbers.cells - numbers.refused), without)]
    kept = f"{numbers.unmeasured} at the default, not measured" if numbers.unmeasured else "every plan was"
    tiles.append(("Measured", str(numbers.measured), kept))
    tiles.append(("Not the default", str(numbers.changed), f"of {numbers.measured} measured"))
    if numbers.over_torch is not None:
        tiles.append(("Over torch", format_factor(numbers.over_torch), "median, where timed"))
    if numbers.median_speedup is not None and numbers.changed:
        tiles.append(("Over the default", format_factor(numbers.median_speedup), "median"))
    if numbers.best is not None:
        workload, best = numbers.best
        kind = "dense" if workload.pattern.dense else "dilated"
        where = f"{workload.mode}, {kind}, {format_length(workload.seq_len)}"
        tiles.append(("At best", format_factor(best.middle), where))
    if failed := sum(count for _, count in numbers.failures):
        tiles.append(("Failed candidates", str(failed), ", ".join(f"{n} {kind}" for kind, n in numbers.failures)))
    return tiles


def _listed(entry: PlanEntry) -> Iterator[Choice]:
    """Yield every choice of an entry whose plan the page names."""
    if entry.choice is not None:
        yield entry.choice
        yield from (choice for _, choice in other_plans(entry))


def _kernels(entry: PlanEntry) -> tuple[str, ...]:
    """Return the kernels of a plan, those of the forward first."""
    assert entry.choice is not None
    branches = entry.choice.tunables.branches
    names = [branch.forward for branch in branches] + [branch.backward for branch in branches]
    return tuple(dict.fromkeys(filter(None, names)))


def _breaks(text: object) -> Markup:
    """Return a plan or a pattern whose lines break between names and never inside one."""
    return Markup("<wbr>".join(f'<span class="nowrap">{escape(piece)}</span>' for piece in pieces(plain(text))))


def _charts(grouped: Sequence[Family], vendor: str, rates: Rates) -> list[tuple[str, Markup]]:
    charts = []
    for number, family in enumerate(grouped):
        groups = [
            (entry.workload, {n: call_ms(c.evidence, vendor) for n, c in series_of(entry).items() if c.evidence})
            for entry in family.entries
        ]
        if any(times for _, times in groups):
            charts.append((family.title, speed_chart(f"speed{number}", family.title, groups, rates)))
    return charts


def speed_chart(
    chart_id: str, title: str, groups: Sequence[tuple[Workload, Mapping[str, float]]], rates: Rates
) -> Markup:
    """Draw the rates of workloads that differ in length; of each, the times in ms by the name of the series."""
    drawn = []
    for workload, times in groups:
        length = format_length(workload.seq_len)
        values = {name: rates.value(workload, ms) for name, ms in times.items()}
        tips = {name: f"{name}, {length}: {format_ms(ms)}, {rates.text(values[name])}" for name, ms in times.items()}
        bars = [Bar(name, color_class(name), rate, tips[name]) for name, rate in values.items() if rate is not None]
        drawn.append((length, bars))
    return bar_chart(chart_id, f"{title}: {rates.unit} over length", drawn, rates.text)


def uncovered(profile: Profile) -> list[tuple[str, str]]:
    """Return workloads near those of the profile that it has no measured plan for, each with its command."""
    found = []
    f = profile.fingerprint
    shapes: dict[object, list[Family]] = {}
    for family in families(profile):
        both = family.workload if family.workload.decode else replace(family.workload, mode="train")
        shapes.setdefault(both.at(1), []).append(family)
    for siblings in shapes.values():
        w = siblings[0].workload
        shape = f"ringtune probe {probe_options(w)}"
        shape = " ".join((shape, *batch_options(w)))
        shape += f" --precision {w.dtype}" if w.dtype != usual_dtype(f.vendor, f.arch) else ""
        name = siblings[0].title.partition(", ")[2]
        for family in siblings:
            unmeasured = [entry.workload for entry in family.entries if entry.choice and not entry.evidence]
            if unmeasured:
                lengths = ", ".join(format_length(each.seq_len) for each in unmeasured)
                what = f"{family.workload.mode}, {name}, at {lengths}: could not be measured"
                found.append((what, f"{shape} --mode {family.workload.mode}{_lengths(unmeasured)}"))
        if len(siblings) == 1 and not w.decode:
            missing = "infer" if w.train else "train"
            options = _lengths([entry.workload for entry in siblings[0].entries])
            found.append((f"{missing}, {name}", f"{shape} --mode {missing}{options}"))
        longest = max(entry.workload.seq_len for family in siblings for entry in family.entries)
        mode = "both" if len(siblings) > 1 else w.mode
        beyond = f"{name}, longer than {int(longest * 2**0.5):,}"
        found.append((beyond, f"{shape} --mode {mode}{_lengths([w.at(2 * longest)])}"))
    return found


def _lengths(workloads: Sequence[Workload]) -> str:
    return "".join(f" {length_option(each)}" for each in workloads)
