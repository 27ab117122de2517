"""Explains the plan for a workload on this machine: one value that holds the whole answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.display_text import format_bytes, format_factor, format_length, format_ms, plain
from autotune.report.wording.hanging import hanging
from autotune.report.wording.legend import legend, legend_table
from autotune.report.wording.plan_text import PlanText
from ringattn.hardware.facts import OPTIONAL_PACKAGES, HardwareFacts
from ringattn.kernels.registry import KERNELS
from ringattn.planning.module_setup import ModuleSetup
from ringattn.planning.plan import ORDINARY, kernel_need, kernel_needs, kernel_reasons
from ringattn.planning.table import PlanTable, Row
from ringattn.planning.unmeasured_workloads import call_options, remedy
from ringattn.profile.resolve import TraceLine, mismatch
from ringattn.profile.schema import Choice, Evidence, Failure, PlanEntry, Profile
from ringattn.wording import plural
from ringattn.workload import Tunables, Workload, describe, kernels_described

from .summary import (
    Speedup,
    first_call_text,
    kept_default,
    other_plans,
    over_torch,
    recorded_choices,
    relative_time,
    waiting_host_ms,
)

Direction = Literal["forward", "backward", "both"]


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """One kernel that is not in the plan for one direction. No reasons: it could run and was not chosen."""

    kernel: str
    direction: Direction
    reasons: tuple[str, ...]
    evidence: str = ""  # what the profile knows of it, for a kernel that could run
    relative_time: float | None = None  # of its fastest recorded plan over the chosen plan, where one was timed
    fastest: Tunables | None = None  # that plan


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decision and everything it rests on. ``tunables`` None: refused, and ``refusal`` says why."""

    workload: Workload
    device_name: str
    path: str
    tier: str
    trace: tuple[str, ...]
    bucket: int | None
    origin: str
    tunables: Tunables | None
    refusal: str
    evidence: Evidence | None
    gave_way: str  # plans of the profile that came first and cannot run here, with their reasons
    kernels: tuple[KernelVerdict, ...]
    failures: tuple[Failure, ...]
    why: str
    foreign: str = ""  # why the profile would not be used here; then all else is as on the machine it is of
    other_heads: str = ""  # that the plan was measured with other numbers of heads, and with which
    over_torch: float | None = None  # times as fast as F.scaled_dot_product_attention, where that was timed
    host_ms: float | None = None  # of a call, where the host takes longer than the device
    runners_up: tuple[str, ...] = ()  # the next plans in the order of time, with their times
    remedy: str = ""  # which probe measures it, or why none does, where no measured plan serves
    legend: tuple[tuple[str, str], ...] = ()  # words of all plans that are told, with their meaning


def why_foreign(profile: Profile, facts: HardwareFacts) -> str:
    """Return why a measured profile is of another kind of machine than this; empty for one that serves it."""
    return mismatch(profile, facts) if profile.source == "measured" else ""


def facts_of(profile: Profile) -> HardwareFacts:
    """Return the machine on which ``profile`` was measured, with the packages that it names or has timed."""
    made = {
        f.name: getattr(profile.fingerprint, f.name) for f in fields(profile.fingerprint) if f.name != "link_speeds"
    }
    choices = [choice for entry in profile.plans for choice in recorded_choices(entry)]
    used = {name for choice in choices for b in choice.tunables.branches for name in (b.forward, b.backward)}
    there = {name for name, _ in profile.software} | {KERNELS[name].package for name in used if name in KERNELS}
    packages = tuple(name for name in OPTIONAL_PACKAGES if name in there)
    return HardwareFacts(**made, software=profile.software, packages=packages)


def explain_workload(workload: Workload, setup: ModuleSetup, table: PlanTable, foreign: str = "") -> Explanation:
    """Ask the runtime's own table for ``workload``, and take the answer apart; nothing is decided here.

    ``foreign`` is what ``why_foreign`` says of the profile.
    """
    row = table.row_of(workload)
    entry = _entry_of(setup.entries, row)
    tunables = row.plan.tunables if row.plan is not None else None
    chosen = _choice_of(entry, tunables)
    source = setup.source_of(entry) if entry is not None else setup.resolution
    kernels, runners_up = _kernel_verdicts(workload, tunables, setup, entry), _runners_up(entry, tunables)
    told = (tunables, *(plan for plan, _ in runners_up), *(verdict.fastest for verdict in kernels))
    return Explanation(
        workload=workload,
        device_name=setup.facts.device_name,
        path=source.path if source is not None else "",
        tier=source.tier if source is not None else "heuristic",
        trace=_trace(setup, foreign),
        bucket=row.bucket,
        origin=str(row.origin),
        tunables=tunables,
        refusal=str(row.refusal) if row.refusal is not None else "",
        evidence=chosen.evidence if chosen is not None else None,
        gave_way=row.note,
        kernels=kernels,
        failures=entry.failures if entry is not None else (),
        why=_why(workload, row, setup, entry, chosen),
        foreign=foreign,
        other_heads=_other_heads(workload, row, entry),
        over_torch=over_torch(entry) if entry is not None and chosen is entry.choice else None,
        host_ms=waiting_host_ms(chosen.evidence, setup.facts.vendor) if chosen and chosen.evidence else None,
        runners_up=tuple(text for _, text in runners_up),
        remedy=remedy(workload, *call_options(workload)) if row.origin.source == "heuristic" and not foreign else "",
        legend=legend(plan for plan in told if plan is not None),
    )


def _runners_up(entry: PlanEntry | None, tunables: Tunables | None) -> tuple[tuple[Tunables, str], ...]:
    """Return each runner-up of a row whose own plan is used, and as text with its time."""
    if entry is None or entry.choice is None or entry.choice.tunables != tunables:
        return ()
    found = []
    for which, choice in other_plans(entry):
        if "runner-up" in which and choice.evidence is not None:
            ratio = relative_time(choice, entry)
            times = f", {format_factor(ratio)} the time" if ratio is not None else ""
            text = f"{describe(choice.tunables)}: {format_ms(choice.evidence.median_ms)}{times}"
            found.append((choice.tunables, text))
    return tuple(found)


def _other_heads(workload: Workload, row: Row, entry: PlanEntry | None) -> str:
    """Return what to say of a row that was taken as the nearest in heads; empty for one of as many."""
    asked = (workload.heads, workload.kv_heads)
    if entry is None or row.origin.source == "heuristic":
        return ""
    theirs = (entry.workload.heads, entry.workload.kv_heads)
    if theirs == asked:
        return ""
    words = "{} query and {} key/value heads"
    return f"the row is for {words.format(*theirs)}, the nearest in the profile to {words.format(*asked)}"


def _trace(setup: ModuleSetup, foreign: str) -> tuple[str, ...]:
    """Return the trace; a foreign profile's line says what it is here, not what it would be there."""
    if not foreign or setup.resolution is None:
        return setup.trace
    path = setup.resolution.path
    own = f"{path}: explained as on its own machine, not used on this one: {foreign}"

    def is_own(line: str) -> bool:
        return isinstance(line, TraceLine) and (line.path, line.origin) == (path, "argument")

    return tuple(own if is_own(line) else line for line in setup.trace)


def _entry_of(entries: tuple[PlanEntry, ...], row: Row) -> PlanEntry | None:
    return next((entry for entry in entries if entry.workload == row.measured), None)


def _other_ranks(row: Row, setup: ModuleSetup) -> str:
    """Return the numbers of ranks that a profile has plans for, where it has none for the number asked for."""
    assert setup.resolution is not None
    assert setup.resolution.profile is not None
    worlds = sorted({entry.workload.world for entry in setup.resolution.profile.plans})
    if not worlds or setup.shape.world in worlds:
        return ""
    return f", its plans are for --nproc {' or '.join(map(str, worlds))}"


def _what_differs(workload: Workload, rows: tuple[PlanEntry, ...]) -> str:
    """Return what has to be equal for a row to serve, and is not in those that have the most in common."""
    kind = ("pattern", "causal", "head_dim", "mode", "dtype", "world")
    differing = [[name for name in kind if getattr(row.workload, name) != getattr(workload, name)] for row in rows]
    least = min(differing, key=len, default=[])
    return " and ".join("number of ranks" if name == "world" else name for name in least)


def _choice_of(entry: PlanEntry | None, tunables: Tunables | None) -> Choice | None:
    if entry is None:
        return None
    recorded = (entry.choice, entry.captured, *entry.runners_up, *entry.front, entry.auto, entry.default)
    return next((c for c in recorded if c is not None and c.tunables == tunables), None)


def _why(workload: Workload, row: Row, setup: ModuleSetup, entry: PlanEntry | None, chosen: Choice | None) -> str:
    lengths = sorted(
        {e.workload.seq_len for e in setup.entries if (e.workload.dtype, e.workload.mode) == (row.dtype, row.mode)}
    )
    if row.plan is None:
        return "nothing that is allowed can run this workload"
    if row.origin.source == "heuristic":
        if row.bucket is not None:
            return "no plan of the profile can run here, so the rule of the heuristic decides"
        if lengths:
            measured = " to ".join(dict.fromkeys((format_length(lengths[0]), format_length(lengths[-1]))))
            return f"the profile measured {measured} of this kind, this length is outside; the heuristic decides"
        if setup.resolution is None or setup.resolution.profile is None:
            return "no measured profile serves this machine; the heuristic decides"
        other = _what_differs(workload, setup.resolution.profile.plans)
        kind = f" (its nearest rows differ in {other})" if other else ""
        return f"the profile measured nothing of this kind{kind}{_other_ranks(row, setup)}; the heuristic decides"
    assert row.bucket is not None
    if entry is not None and entry.choice is not None and entry.evidence is None:
        length = format_length(row.bucket)
        return f"the nearest length of the profile is {length}; this cell could not be measured, its default stays"
    near = f"the nearest measured length is {format_length(row.bucket)}"
    if entry is None or chosen is None or chosen.evidence is None:
        return near
    if chosen is entry.captured:
        return f"{near}; the plan there of least device time, {Speedup.of(chosen.evidence)} as fast as the default"
    if chosen.tunables != (entry.choice.tunables if entry.choice else None):
        return f"{near}; the first plan there cannot run here, this is the next"
    if kept_default(entry):
        return f"{near}; nothing beat the default there by more than the noise"
    return f"{near}; measured {Speedup.of(chosen.evidence)} as fast as the default there"


def _kernel_verdicts(
    workload: Workload, tunables: Tunables | None, setup: ModuleSetup, entry: PlanEntry | None
) -> tuple[KernelVerdict, ...]:
    """Return every kernel of the table and direction that the plan does not use."""
    directions: tuple[Direction, ...] = ("forward", "backward") if workload.train else ("forward",)
    verdicts = []
    for direction in directions:
        used = {getattr(branch, direction) for branch in tunables.branches} if tunables is not None else set()
        for name in KERNELS:
            if name in used:
                continue
            reasons = _reasons(name, direction, workload, tunables, setup)
            known = _UNKNOWN if reasons else _known_of(name, direction, entry)
            verdicts.append(KernelVerdict(name, direction, reasons, *known))
    # What could run comes first, the fastest at the top.
    return tuple(sorted(_merged(verdicts), key=lambda v: (bool(v.reasons), v.relative_time or math.inf)))


def _merged(verdicts: list[KernelVerdict]) -> tuple[KernelVerdict, ...]:
    """Merge the rows of a kernel for which both directions say the same."""
    merged: dict[KernelVerdict, KernelVerdict] = {}
    for verdict in verdicts:
        key = replace(verdict, direction="both")
        merged[key] = replace(verdict, direction="both") if key in merged else verdict
    return tuple(merged.values())


def _reasons(
    name: str, direction: Direction, workload: Workload, tunables: Tunables | None, setup: ModuleSetup
) -> tuple[str, ...]:
    """Return why a kernel cannot serve every branch in this direction, in the plan's dtype; each reason once."""
    facts, backward = setup.facts, direction == "backward"
    found: list[str] = []
    for number in range(len(workload.pattern.resolved(workload.seq_len))):
        if tunables is not None:
            needs = kernel_needs(workload, tunables, number, facts, backward=backward, conditions=ORDINARY)
        else:
            dtype = setup.policy.dtype_for(workload.dtype)
            needs = (kernel_need(workload, number, dtype, arch=facts.arch, vendor=facts.vendor, backward=backward),)
        found += [reason for need in needs for reason in kernel_reasons(name, need, facts)]
    return tuple(dict.fromkeys(found))


_Known = tuple[str, float | None, Tunables | None]
_UNKNOWN: _Known = ("", None, None)


def _known_of(name: str, direction: Direction, entry: PlanEntry | None) -> _Known:
    """Return what the profile recorded of a kernel in one direction, with its best plan, if any, and its relative time.

    The order is text, time, plan.
    """
    if entry is None:
        return "could run; nothing was measured for this workload", None, None
    best: tuple[float, Choice] | None = None
    for choice in recorded_choices(entry):
        ratio = relative_time(choice, entry)
        if ratio is None or name not in {getattr(branch, direction) for branch in choice.tunables.branches}:
            continue
        if best is None or ratio < best[0]:
            best = (ratio, choice)
    if best is not None:
        told = f"could run; measured {format_factor(best[0])} the time of the chosen plan"
        return f"{told} ({describe(best[1].tunables)})", best[0], best[1].tunables
    failures = [f for f in entry.failures if f.kind != "rejected" and name in kernels_described(f.candidate)]
    failed = min(failures, key=lambda f: len(kernels_described(f.candidate)), default=None)
    if failed is not None:
        return f"could run, but failed when measured: {failed.kind}: {failed.message}", None, None
    if entry.choice is not None and entry.evidence is None:
        return "could run; not measured here", None, None
    return "could run; slower when measured, and not kept in the profile", None, None


def explanation_summary(explanation: Explanation) -> RenderableType:
    """Return the explanation as tables for the terminal."""
    e = explanation
    plan = describe(e.tunables) if e.tunables is not None else f"refused: {e.refusal}"
    rows = [
        ("Workload", str(e.workload)),
        *([("Other heads", e.other_heads)] if e.other_heads else []),  # first: it is another workload's answer
        ("Machine", e.device_name),
        ("Profile", f"{e.path or 'built in'} ({'of another machine' if e.foreign else f'tier {e.tier}'})"),
    ]
    if e.foreign:
        rows.append(("Not here", f"the profile would not be used on this machine: it was {e.foreign}"))
    rows += [("Plan", f"{plan}  [{e.origin}]"), ("Why", e.why)]
    if e.evidence is not None:
        v = e.evidence
        measured = f"{format_ms(v.median_ms)} (first call {first_call_text(v)}), {plural(v.blocks, 'paired block')}"
        rows.append(("Evidence", f"{measured}, peak {format_bytes(v.peak_bytes)}, error {v.error:.1e}"))
    if e.over_torch is not None:
        rows.append(("Over torch", f"{format_factor(e.over_torch)} as fast as F.scaled_dot_product_attention"))
    if e.host_ms is not None:
        rows.append(("Host", f"{format_ms(e.host_ms)} a call, longer than the device: an eager loop waits for it"))
    rows += [("Runner-up", text) for text in e.runners_up]
    if e.gave_way:
        rows.append(("Gave way", e.gave_way))
    if e.remedy:
        rows.append(("Unmeasured", e.remedy))
    head = Table.grid(padding=(0, 2))
    for label, value in rows:
        # A path is no use cut off.
        shown = PlanText(plain(value)) if label in ("Plan", "Runner-up") else Text(plain(value), overflow="fold")
        head.add_row(Text(label, style="bold"), shown)
    parts: list[RenderableType] = [head]
    if e.legend:
        parts += [Text(""), Text("Words of the plans", style="bold"), legend_table(e.legend)]
    parts += [Text(""), Text("Which profile, and why", style="bold")]
    trace = Table.grid(padding=(0, 1))  # so that long lines hang
    for line in filter(None, e.trace):
        trace.add_row(" -", Text(plain(line), overflow="fold"))
    parts.append(trace)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("Direction")
    table.add_column("Kernel", no_wrap=True)
    table.add_column("Why not", overflow="fold")
    for verdict in e.kernels:
        text = "; ".join(verdict.reasons) or verdict.evidence
        table.add_row(verdict.direction, verdict.kernel, Text(plain(text), style="dim" if verdict.reasons else ""))
    parts += [Text(""), Text("Kernels not in the plan", style="bold"), table]
    failures = [f for f in e.failures if f.kind != "rejected"]  # those are among the kernels above, with the reason
    if failures:
        parts.append(Text("Candidates that failed when this was measured", style="bold"))
        parts += [hanging(f"  {f.kind:<9} ", plain(f"{f.candidate}: {f.message}"), "yellow") for f in failures]
    return Group(*parts)
