"""Digest of a profile for every reader: the terminal's in ``report.terminal``, the page's in ``report.pages``.

Pure: a Profile in, plain data out.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.display_text import format_bytes, format_duration, format_factor, format_length, format_ms, plain
from autotune.probe.workloads.recorded import call_gflop
from ringattn.errors import KernelReason
from ringattn.profile.schema import Choice
from ringattn.wording import plural
from ringattn.workload import Tunables, Workload, describe

if TYPE_CHECKING:
    from ringattn.profile.schema import Evidence, Failure, KernelLists, LaunchBound, PlanEntry, Policy, Profile

IN_A_GRAPH = "in a CUDA graph"
UNDER_LOAD = "under load"
ORIGINS_TOLD = 3  # each, before a range of days stands for them
UNDER_LOAD_MEANS = (
    "other work ran on the machine while the row was timed; its interval is wider, and `ringtune probe --fresh` on a "
    "quieter machine measures it again"
)
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
        """Return batch or documents with heads, dtype, and ranks where there are several."""
        w = self.workload
        batch = f"{w.batch} documents in {w.packed_tokens} tokens" if w.packed else f"B{w.batch}"
        heads = f"H{w.heads}" + (f"/{w.kv_heads}" if w.kv_heads != w.heads else "")
        ranks = (f"world {w.world}",) if w.world > 1 else ()
        return (f"{batch} {heads} D{w.head_dim}", w.dtype, *ranks)


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
    unmeasured: int  # cells whose plan has none
    changed: int  # measured cells whose plan is not the default
    refused: int
    median_speedup: float | None
    over_torch: float | None  # median, where torch's own kernel was timed
    best: tuple[Workload, Speedup] | None
    failures: tuple[tuple[str, int], ...]  # kind and count, most frequent first; refused before running is no failure


def families(profile: Profile) -> tuple[Family, ...]:
    """Group the entries of a profile by everything but length, in the order of the file."""
    groups: dict[Workload, list[PlanEntry]] = {}
    for entry in profile.plans:
        groups.setdefault(entry.workload.at(1), []).append(entry)
    ordered = (sorted(group, key=lambda entry: entry.workload.seq_len) for group in groups.values())
    return tuple(Family(group[0].workload, tuple(group)) for group in ordered)


def kept_default(entry: PlanEntry) -> bool:
    """Return whether the plan of this entry is the default itself."""
    return entry.choice is not None and entry.default is not None and entry.choice.tunables == entry.default.tunables


def over_torch(entry: PlanEntry) -> float | None:
    """Return how many times as fast as torch's own kernel the plan of an entry is; None where that was not timed."""
    return None if entry.torch_ratio is None else _inverse(entry.torch_ratio)


def waiting_host_ms(evidence: Evidence, vendor: str) -> float | None:
    """Return the host's time for a call if it is the longer, so that an eager loop waits for it; None on a CPU."""
    host_ms = evidence.host_us / 1e3
    return host_ms if vendor != "cpu" and host_ms > evidence.median_ms else None


def first_call_text(evidence: Evidence) -> str:
    """Return the time of a first call; in one lucky reading it may be below the median, which says nothing of it."""
    return format_ms(evidence.first_call_ms) if evidence.first_call_ms > evidence.median_ms else "no longer"


def call_ms(evidence: Evidence, vendor: str) -> float:
    """Return what an eager loop waits for a call: the device, or the host where it takes longer."""
    return waiting_host_ms(evidence, vendor) or evidence.median_ms


@dataclass(frozen=True, slots=True)
class Rates:
    """Operations a second of a device in the unit of a page, without what a plan computes again; see ``call_gflop``."""

    unit: str
    per_tera: float

    @classmethod
    def of(cls, entries: Iterable[PlanEntry]) -> Rates:
        """Return the unit in which the fastest plan has at least one digit before the point."""
        tera = cls("TFLOP/s", 1.0)
        known = (tera.value(e.workload, e.evidence.median_ms) for e in entries if e.evidence is not None)
        return tera if max((value for value in known if value is not None), default=1.0) >= 1 else cls("GFLOP/s", 1e3)

    def value(self, workload: Workload, ms: float) -> float | None:
        """Return the rate of a call of ``workload`` that takes ``ms``; None where no device is so fast or so slow."""
        whole = replace(workload, seq_len=workload.total, world=1, total_length=0)
        rate = self.per_tera * call_gflop(whole) / workload.world / ms if ms > 0 else math.inf
        return rate if 1e-9 < rate < 1e9 else None

    def text(self, value: float | None) -> str:
        """Return three digits of a rate, or a dash."""
        return "-" if value is None else f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def plan_text(entry: PlanEntry) -> str:
    """Return the plan of an entry in one line, or why there is none."""
    return f"refused: {entry.refusal}" if entry.choice is None else describe(entry.choice.tunables)


def headline(profile: Profile) -> Headline:
    """Return the numbers for the first line of a report."""
    measured = [(entry.workload, Speedup.of(entry.evidence)) for entry in profile.plans if entry.evidence is not None]
    kept = {entry.workload for entry in profile.plans if kept_default(entry)}
    faster = [pair for pair in measured if pair[1].middle > 1]
    beside_torch = [gain for entry in profile.plans if (gain := over_torch(entry)) is not None]
    refused = sum(entry.choice is None for entry in profile.plans)
    failed = Counter(f.kind for entry in profile.plans for f in entry.failures if f.kind != "rejected")
    return Headline(
        cells=len(profile.plans),
        measured=len(measured),
        unmeasured=len(profile.plans) - len(measured) - refused,
        changed=sum(workload not in kept for workload, _ in measured),
        refused=refused,
        over_torch=statistics.median(beside_torch) if beside_torch else None,
        median_speedup=statistics.median(s.middle for _, s in measured) if measured else None,
        best=max(faster, key=lambda pair: pair[1].middle) if faster else None,
        failures=tuple(failed.most_common()),
    )


def sole_kernel(tunables: Tunables) -> str | None:
    """Return the kernel of a plan that uses one in every branch and direction, else None."""
    names = {name for branch in tunables.branches for name in (branch.forward, branch.backward) if name}
    return names.pop() if len(names) == 1 else None


def recorded_choices(entry: PlanEntry) -> tuple[Choice, ...]:
    """Return every plan with evidence that an entry records, each once, the chosen one first."""
    kept: dict[Tunables, Choice] = {}
    for choice in (entry.choice, entry.default, *entry.runners_up, entry.torch, *entry.front, *entry.singles):
        if choice is not None and choice.evidence is not None:
            kept.setdefault(choice.tunables, choice)
    return tuple(kept.values())


def single_backends(entry: PlanEntry) -> dict[str, Choice]:
    """Return the fastest recorded plan of every kernel that was used alone."""
    best: dict[str, Choice] = {}
    for choice in sorted(recorded_choices(entry), key=_ratio):
        if (name := sole_kernel(choice.tunables)) is not None:
            best.setdefault(name, choice)
    return best


def series_of(entry: PlanEntry) -> dict[str, Choice]:
    """Return what a plan is compared with, the plan itself first: torch, the default and every kernel used alone."""
    torch = entry.torch and Choice(entry.torch.tunables, entry.torch_evidence)
    named = {"tuned": entry.choice, "torch": torch, "default": entry.default, **single_backends(entry)}
    return {name: choice for name, choice in named.items() if choice is not None and choice.evidence is not None}


def other_plans(entry: PlanEntry) -> tuple[tuple[str, Choice], ...]:
    """Return the plans of an entry beside its own, each once with all that it is, in the order of time."""
    if entry.choice is None:
        return ()
    listed: list[tuple[str, Choice | None]] = [("runner-up", choice) for choice in entry.runners_up]
    listed += [("torch", entry.torch), ("default", entry.default), ('dtype="auto"', entry.auto)]
    listed += [("leaner", choice) for choice in entry.front]
    listed += [(f"{name} alone", choice) for name, choice in single_backends(entry).items()]
    listed.append((IN_A_GRAPH, entry.captured))  # last: ratios of the same plan to an eager default come first
    kinds: dict[Tunables, list[str]] = {}
    found: dict[Tunables, Choice] = {}
    for kind, choice in listed:
        if choice is not None and choice.tunables != entry.choice.tunables:
            kinds.setdefault(choice.tunables, []).append(kind)
            if choice.tunables not in found or found[choice.tunables].evidence is None:
                found[choice.tunables] = choice
    ordered = sorted(found.values(), key=lambda c: c.evidence.median_ms if c.evidence is not None else math.inf)
    return tuple((", ".join(kinds[choice.tunables]), choice) for choice in ordered)


def relative_time(choice: Choice, entry: PlanEntry) -> float | None:
    """Return the time of ``choice`` over that of the entry's plan, both paired with one default.

    None without evidence, and for ``captured``, whose ratios are those of the device alone.
    """
    if entry.choice is None or entry.choice.evidence is None or choice.evidence is None or choice is entry.captured:
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


def failure_groups(profile: Profile) -> dict[str, dict[Failure, list[Workload]]]:
    """Group recorded failures by kind, the same candidate and message once with all its workloads.

    What was refused before it ran is no failure, see ``ruled_out``.
    """
    grouped: dict[str, dict[Failure, list[Workload]]] = {kind: {} for kind in FAILURE_MEANINGS}
    for entry in profile.plans:
        for failure in entry.failures:
            if failure.kind != "rejected":
                grouped[failure.kind].setdefault(failure, []).append(entry.workload)
    return {kind: found for kind, found in grouped.items() if found}


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


def machine_title(profile: Profile) -> str:
    """Return the device, with how many GPUs hold one sequence where it is not one: ``4x NVIDIA H200``."""
    f = profile.fingerprint
    worlds = sorted({entry.workload.world for entry in profile.plans})
    many = "" if worlds in ([], [1]) or f.vendor == "cpu" else f"{' and '.join(f'{world}x' for world in worlds)} "
    return plain(many + (f.device_name or f"Any {f.vendor} device"))


def provenance_line(profile: Profile) -> str:
    """Return date, version, effort and time of the last probe in one line, and of which other probes it kept rows."""
    p = profile.provenance
    when = f"{'last probe ' if profile.source == 'measured' else ''}{p.date}" if p.date else ""
    parts = [f"{profile.source}; {when}" if when else profile.source]
    parts.append(f"ringtune {p.tool_version}" if p.tool_version else "")
    if profile.source == "measured":
        parts += [f"effort {p.effort}" if p.effort else "", f"seed {p.seed}" if p.seed is not None else ""]
        parts.append(f"took {format_duration(p.elapsed_s)}" if p.elapsed_s is not None else "")
    return plain("; ".join(filter(None, (", ".join(part for part in parts if part), _rows_of_others(profile)))))


def _rows_of_others(profile: Profile) -> str:
    """Return how many rows are of other probes than the last one, and of which efforts and days; "" where none is."""
    origins = Counter(entry.origin for entry in profile.plans if entry.origin is not None)
    if not origins:
        return ""
    days = sorted({origin.date for origin in origins})
    if len(origins) > ORIGINS_TOLD:
        which = f"from {days[0] or 'an unknown day'} to {days[-1]}"
    else:
        each = sorted(origins.items(), key=lambda pair: (pair[0].date, pair[0].effort))
        which = ", ".join(" ".join(filter(None, (str(count), origin.effort, origin.date))) for origin, count in each)
    return f"{origins.total()} of {plural(len(profile.plans), 'row')} of other probes: {which}"


def policy_facts(policy: Policy) -> tuple[tuple[str, str], ...]:
    """Return the rules of a policy as labels and values."""
    dtypes = ", ".join(given if given == used else f"{given} in {used}" for given, used in policy.compute_dtype)
    rows = [
        ("Forward, best first", ", ".join(policy.forward)),
        ("Backward, best first", ", ".join(policy.backward)),
        ("Computes", dtypes),
        ("Dilated heads", f"read in place below rate {policy.copy_from_rate}, gathered by one copy from it on"),
    ]
    if policy.launch_bound is not None:
        rows.append((f"Below {policy.launch_bound.below_gflop:g} GFLOP", _both_lists(policy.launch_bound)))
    if policy.packed is not None:
        rows.append(("Packed documents", _both_lists(policy.packed)))
    return tuple(rows)


def _both_lists(lists: LaunchBound | KernelLists) -> str:
    return f"{', '.join(lists.forward)} / {', '.join(lists.backward)}"


def verdict(profile: Profile) -> str:
    """Return the result in a sentence or two."""
    numbers = headline(profile)
    if not numbers.cells:
        return "A heuristic: no plan in it was measured; it says which kernels to prefer on such a machine."
    won = (
        f"; another plan than the default won in {numbers.changed}" if numbers.changed else "; the default stays in all"
    )
    some = f"{numbers.measured} of them" if numbers.measured < numbers.cells else "all"
    text = f"{plural(numbers.cells, 'workload')}, {some} measured{won if numbers.measured else ''}."
    if numbers.unmeasured:
        keep = "keeps" if numbers.unmeasured == 1 else "keep"
        text += f" {numbers.unmeasured} could not be measured and {keep} the default."
    if numbers.refused:
        text += f" {numbers.refused} without a plan."
    if numbers.over_torch is not None:
        text += f" Median speed-up over torch's own dispatch {format_factor(numbers.over_torch)}."
    if numbers.median_speedup is not None and numbers.changed:
        text += f" Median speed-up over the default {format_factor(numbers.median_speedup)}"
        if numbers.best is not None:
            workload, speedup = numbers.best
            text += f", at best {format_factor(speedup.middle)} ({workload.mode}, {workload.pattern}, "
            text += f"{format_length(workload.seq_len)})"
        text += "."
    return text


def _ratio(choice: Choice) -> float:
    return choice.evidence.default_ratio if choice.evidence is not None else math.inf


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio > 1e-300 else math.inf
