"""From what a search found to a profile on disk that the runtime provably obeys."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.exit_codes import ProbeFailure
from autotune.journal.result import CellResult, Measured
from autotune.measure.evaluator import Evaluator, Fault
from autotune.probe.request import CellReport, ProbeRequest
from ringattn import __version__
from ringattn.hardware.facts import HardwareFacts
from ringattn.profile.schema import Choice, Evidence, Failure, Fingerprint, LinkSpeed, PlanEntry, Profile, Provenance
from ringattn.profile.yaml_io import save_profile
from ringattn.workload import Tunables, Workload, describe

FAILURES_KEPT = 24  # per cell; the journal holds all of them


def choice_of(measured: Measured) -> Choice:
    """A plan with its evidence; none for a plan that was never timed against the default."""
    if measured.gain.count == 0:
        return Choice(measured.tunables)
    return Choice(
        measured.tunables,
        Evidence(
            median_ms=_rounded(measured.median_ms),
            default_ratio=_rounded(measured.gain.ratio),
            ratio_low=_rounded(measured.gain.ratio_low),
            ratio_high=_rounded(measured.gain.ratio_high),
            peak_bytes=measured.checked.peak_bytes,
            error=_rounded(measured.checked.error),
            first_call_ms=_rounded(measured.first_call_ms),
            host_us=_rounded(measured.checked.host_us),
            blocks=measured.gain.count,
        ),
    )


def _rounded(value: float) -> float:
    """Four digits: more than any of these numbers is known to."""
    return float(f"{value:.4g}")


def entry_of(result: CellResult) -> PlanEntry:
    """One row of the profile. What was ruled out before it ran is not in it: any machine can work that out again."""
    failures = [_failure(plan, fault) for plan, fault in result.failures.items()]
    if result.choice is None:
        return PlanEntry(result.workload, failures=tuple(failures[:FAILURES_KEPT]), refusal=result.note or "refused")
    if result.state == "inconclusive":  # numbers that are not to be believed are no evidence
        return PlanEntry(
            result.workload, choice=Choice(result.choice.tunables), failures=tuple(failures[:FAILURES_KEPT])
        )
    return PlanEntry(
        workload=result.workload,
        choice=choice_of(result.choice),
        runners_up=tuple(choice_of(m) for m in result.runners_up),
        auto=choice_of(result.auto) if result.auto is not None else None,
        front=tuple(choice_of(m) for m in result.front) if len(result.front) > 1 else (),
        default=choice_of(result.default) if result.default is not None else None,
        singles=tuple(choice_of(m) for m in result.singles if m.tunables != result.choice.tunables),
        failures=tuple(failures[:FAILURES_KEPT]),
    )


def _failure(plan: Tunables, fault: Fault) -> Failure:
    return Failure(describe(plan), fault.kind, fault.message)


def report_of(result: CellResult, elapsed_s: float) -> CellReport:
    """One cell as a probe's caller sees it."""
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
    """A measured profile of this machine; entries in a readable order."""
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
    return Profile(
        source="measured",
        fingerprint=replace(Fingerprint.of(facts), link_speeds=tuple(link_speeds)),
        software=facts.software,
        plans=tuple(ordered),
        provenance=Provenance(
            tool_version=__version__,
            date=today.isoformat(),
            effort=request.effort,
            budget_s=budget_s,
            elapsed_s=round(elapsed_s, 1),
            seed=request.seed,
            notes=tuple(notes),
        ),
    )


def same_machine(profile: Profile, facts: HardwareFacts) -> bool:
    """Whether a profile was measured on this very silicon with this very software."""
    return profile.fingerprint == Fingerprint.of(facts) and profile.software == tuple(sorted(facts.software))


def merged(old: Profile | None, entries: Mapping[Workload, PlanEntry]) -> dict[Workload, PlanEntry]:
    """New rows beside those of an older profile of the same machine; a new row replaces the old of its workload."""
    kept = {} if old is None else {entry.workload: entry for entry in old.plans}
    return kept | dict(entries)


def merged_speeds(old: Profile | None, new: LinkSpeed | None) -> tuple[LinkSpeed, ...]:
    """The newest reading for each number of ranks."""
    kept = {} if old is None else {speed.world: speed for speed in old.fingerprint.link_speeds}
    if new is not None:
        kept[new.world] = new
    return tuple(kept[world] for world in sorted(kept))


def save_obeyed(profile: Profile, path: Path, new: Iterable[PlanEntry], evaluator: Evaluator) -> None:
    """Let the runtime read the profile, run every new row once and compare; only then does it replace the old."""
    with tempfile.TemporaryDirectory(prefix="ringtune-") as folder:
        rehearsal = Path(folder) / path.name
        save_profile(profile, rehearsal)
        for entry in new:
            if entry.choice is not None:
                check_obeyed(entry, evaluator.obey(entry.workload, str(rehearsal), timeout_s=60.0))
    save_profile(profile, path)


def check_obeyed(entry: PlanEntry, planned: Tunables | Fault) -> None:
    """The runtime, reading the file, must plan what the search chose; anything else is a failure."""
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
