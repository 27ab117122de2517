"""Writes the results of a search to a profile, and checks that the runtime takes its plans."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.exit_codes import ProbeFailure
from autotune.folders import readable_copy
from autotune.journal.study.result import CellResult, Measured
from autotune.measure.evaluator import Evaluator, Fault
from autotune.probe.request import CellReport, ProbeRequest
from ringattn import __version__
from ringattn.errors import ProfileError
from ringattn.hardware.facts import HardwareFacts
from ringattn.profile.precedence import rows_for, rows_with_origin
from ringattn.profile.resolve import tier_of
from ringattn.profile.schema import Choice, Evidence, Failure, Fingerprint, LinkSpeed, PlanEntry, Profile, Provenance
from ringattn.profile.yaml_io import dump_profile, save_profile
from ringattn.store.merge import merge_rows
from ringattn.workload import Tunables, Workload, describe

FAILURES_KEPT = 24  # per cell; the journal holds all of them


def choice_of(measured: Measured) -> Choice:
    """Return a plan with its evidence; without it where the plan was never timed against the default."""
    if measured.gain.count == 0:
        return Choice(measured.tunables)
    return Choice(
        measured.tunables,
        Evidence(
            median_ms=rounded(measured.median_ms),
            default_ratio=rounded(measured.gain.ratio),
            ratio_low=rounded(measured.gain.ratio_low),
            ratio_high=rounded(measured.gain.ratio_high),
            peak_bytes=measured.checked.peak_bytes,
            error=rounded(measured.checked.error),
            first_call_ms=rounded(measured.first_call_ms),
            host_us=rounded(measured.host_us),
            blocks=measured.gain.count,
            reproducible=not measured.checked.varies,
        ),
    )


def rounded(value: float) -> float:
    """Round to four digits: more than any of these numbers is known to."""
    return float(f"{value:.4g}")


def entry_of(result: CellResult) -> PlanEntry:
    """Return the profile's row, without candidates rejected before they ran: any machine can list those again."""
    failures = [_failure(plan, fault) for plan, fault in result.failures.items()]
    if result.choice is None:
        return PlanEntry(result.workload, failures=tuple(failures[:FAILURES_KEPT]), refusal=result.note or "refused")
    if result.state == "inconclusive":  # numbers that are not to be believed are no evidence
        return PlanEntry(
            result.workload, choice=Choice(result.choice.tunables), failures=tuple(failures[:FAILURES_KEPT])
        )
    leaner = any(measured.tunables != result.choice.tunables for measured in result.front)
    return PlanEntry(
        workload=result.workload,
        choice=choice_of(result.choice),
        captured=choice_of(result.captured) if result.captured is not None else None,
        runners_up=tuple(choice_of(m) for m in result.runners_up),
        auto=choice_of(result.auto) if result.auto is not None else None,
        front=tuple(choice_of(m) for m in result.front) if leaner else (),
        default=choice_of(result.default) if result.default is not None else None,
        torch=_torch_of(result),
        singles=tuple(choice_of(m) for m in result.singles if m.tunables != result.choice.tunables),
        failures=tuple(failures[:FAILURES_KEPT]),
        under_load=result.under_load,
    )


def _torch_of(result: CellResult) -> Choice | None:
    """Return torch's own plan, with its evidence unless the row has that as its choice or default."""
    if result.torch is None:
        return None
    known = {measured.tunables for measured in (result.choice, result.default) if measured is not None}
    return Choice(result.torch.tunables) if result.torch.tunables in known else choice_of(result.torch)


def _failure(plan: Tunables, fault: Fault) -> Failure:
    return Failure(describe(plan), fault.kind, fault.message)


def report_of(result: CellResult, elapsed_s: float) -> CellReport:
    """Return one cell's report for the caller of a probe."""
    choice, default = result.choice, result.default
    return CellReport(
        workload=result.workload,
        status=result.state,
        chosen=choice.tunables if choice else None,
        default=default.tunables if default else None,
        default_ratio=choice.gain.ratio if choice and choice.gain.count else None,
        ratio_low=choice.gain.ratio_low if choice and choice.gain.count else None,
        ratio_high=choice.gain.ratio_high if choice and choice.gain.count else None,
        trials=result.trials,
        failures=len(result.failures),
        elapsed_s=elapsed_s,
        note=result.note,
        validation_pending=result.validation_pending,
        noise=result.noise_sigma if math.isfinite(result.noise_sigma) else None,
    )


def build_profile(
    facts: HardwareFacts,
    entries: Mapping[Workload, PlanEntry],
    request: ProbeRequest,
    *,
    budget_s: float,
    elapsed_s: float,
    notes: Sequence[str],
    today: datetime.date,
    link_speeds: Sequence[LinkSpeed] = (),
) -> Profile:
    """Build a measured profile of this machine; entries in a readable order."""
    ordered = sorted(
        entries.values(),
        key=lambda e: (
            e.workload.world,
            not e.workload.pattern.dense,
            str(e.workload.pattern),
            e.workload.mode,
            e.workload.seq_len,
        ),
    )
    provenance = Provenance(
        tool_version=__version__,
        date=today.isoformat(),
        effort=request.effort,
        budget_s=budget_s,
        elapsed_s=round(elapsed_s, 1),
        seed=request.seed,
        notes=tuple(notes),
    )
    return Profile(
        source="measured",
        fingerprint=replace(Fingerprint.of(facts), link_speeds=tuple(link_speeds)),
        software=facts.software,
        plans=rows_for(provenance, ordered),
        provenance=provenance,
    )


def same_machine(profile: Profile, facts: HardwareFacts) -> bool:
    """Return whether the runtime takes a profile for one of this very silicon and software."""
    world = max((entry.workload.world for entry in profile.plans), default=1)
    return tier_of(profile, facts, world)[0] == "exact"


def merged(old: Profile | None, entries: Mapping[Workload, PlanEntry]) -> dict[Workload, PlanEntry]:
    """Merge new rows into those of an older profile of the same machine, which keep their effort and day."""
    return merge_rows({} if old is None else {entry.workload: entry for entry in rows_with_origin(old)}, entries)


def merged_speeds(old: Profile | None, new: LinkSpeed | None) -> tuple[LinkSpeed, ...]:
    """Return the newest reading for each number of ranks."""
    kept = {} if old is None else {speed.world: speed for speed in old.fingerprint.link_speeds}
    if new is not None:
        kept[new.world] = new
    return tuple(kept[world] for world in sorted(kept))


def save_loaded(profile: Profile, path: Path, new: Iterable[PlanEntry], evaluator: Evaluator) -> None:
    """Save the profile once the runtime has read it, run every new row that was measured and planned the same."""
    with readable_copy(dump_profile(profile).encode("utf-8")) as rehearsal:
        for entry in new:
            if entry.evidence is not None:
                check_loaded(entry, evaluator.run_profile(entry.workload, str(rehearsal), timeout_s=60.0))
    try:
        save_profile(profile, path)
    except ProfileError as error:
        raise ProbeFailure(
            f"{error}. All that was measured is kept: when it can be, run the same command to go on"
        ) from error


def check_loaded(entry: PlanEntry, planned: Tunables | Fault) -> None:
    """Raise ProbeFailure where the runtime, reading the file, does not plan what the search chose."""
    assert entry.choice is not None
    if isinstance(planned, Fault):
        raise ProbeFailure(
            f"{entry.workload}: the written plan {describe(entry.choice.tunables)} failed when the runtime ran it: "
            f"{planned.kind}, {planned.message}"
        )
    if planned != entry.choice.tunables:
        raise ProbeFailure(
            f"{entry.workload}: the runtime reads {describe(planned)} out of the profile where the search chose "
            f"{describe(entry.choice.tunables)}"
        )
