"""From a search's result to a row of a profile, and the check that the runtime obeys it."""

from __future__ import annotations

import datetime
import math
from dataclasses import replace

import pytest
from machines import FACTS, MIB, plan, workload

from autotune.exit_codes import ProbeFailure
from autotune.journal.study.result import CellResult, Measured
from autotune.measure.evaluator import Checked, Fault, Interference, InterferenceKind, largest_of_each
from autotune.probe.output.writer import (
    FAILURES_KEPT,
    build_profile,
    check_loaded,
    choice_of,
    entry_of,
    merged,
    report_of,
    same_machine,
)
from autotune.probe.request import ProbeRequest
from autotune.statistics import Interval
from ringattn.errors import ProfileError
from ringattn.profile.precedence import origin_of
from ringattn.profile.row_origin import RowOrigin
from ringattn.profile.schema import PlanEntry, Profile
from ringattn.profile.yaml_io import dump_profile, parse_profile
from ringattn.workload import Pattern, Tunables, describe

CELL = workload(pattern=Pattern())
QUICK, SWIFT, MATH = (plan(CELL, name) for name in ("quick", "swift", "math"))


def measured(tunables: Tunables, log_ratio: float, count: int = 9) -> Measured:
    interval = Interval(log_ratio - 0.01, log_ratio, log_ratio + 0.02, count)
    return Measured(tunables, Checked(4.0, 2e-3, 3 * MIB, 80.0, 25.0), interval, 4.5, 25.0, 70.0)


RESULT = CellResult(
    CELL,
    "tuned",
    choice=measured(SWIFT, -0.2),
    default=measured(QUICK, 0.0),
    runners_up=(measured(QUICK, 0.0),),
    auto=measured(replace(SWIFT, dtype="fp16"), -0.5),
    front=(measured(SWIFT, -0.2), measured(QUICK, 0.0)),
    singles=(measured(SWIFT, -0.2), measured(MATH, 2.0)),
    failures={MATH: Fault("oom", "CUDA out of memory")},
    trials=17,
    note="noisy",
)


def profile_of(*entries: PlanEntry) -> Profile:
    return build_profile(
        FACTS,
        {entry.workload: entry for entry in entries},
        ProbeRequest(seed=7),
        budget_s=60,
        elapsed_s=31.26,
        notes=("one", "one"),
        today=datetime.date(2026, 3, 4),
    )


def test_a_row_carries_the_choice_its_evidence_and_every_failure() -> None:
    entry = entry_of(RESULT)
    assert entry.choice is not None
    evidence = entry.choice.evidence
    assert evidence is not None
    assert evidence.default_ratio == round(math.exp(-0.2), 4)
    assert (evidence.ratio_low, evidence.ratio_high) == (round(math.exp(-0.21), 4), round(math.exp(-0.18), 4))
    assert (evidence.median_ms, evidence.peak_bytes, evidence.error) == (4.5, 3 * MIB, 2e-3)
    assert (evidence.first_call_ms, evidence.host_us, evidence.blocks) == (70.0, 25.0, 9)
    assert [choice.tunables for choice in entry.singles] == [MATH]  # the winner is one of them already
    assert entry.auto is not None
    assert entry.auto.tunables.dtype == "fp16"
    assert [(f.candidate, f.kind, f.message) for f in entry.failures] == [
        (describe(MATH), "oom", "CUDA out of memory"),
    ]


def test_of_each_kind_of_interference_the_largest_is_told() -> None:
    foreign, steal, hot = InterferenceKind.FOREIGN_LOAD, InterferenceKind.STEAL, InterferenceKind.THERMAL
    found = [Interference(foreign, 9.4), Interference(hot), Interference(steal, 12.0), Interference(foreign, 52.3)]
    found += [Interference(hot), Interference(foreign, 20.0)]
    assert largest_of_each(found) == (Interference(foreign, 52.3), Interference(hot), Interference(steal, 12.0))
    assert str(largest_of_each(found)[0]) == "other processes used 52 % of the CPUs"
    assert len({str(Interference(kind, 7.0)) for kind in InterferenceKind}) == len(InterferenceKind)


def test_what_was_never_timed_has_no_evidence() -> None:
    assert choice_of(measured(QUICK, 0.0, count=0)).evidence is None


def test_numbers_that_are_not_believed_are_no_evidence() -> None:
    entry = entry_of(replace(RESULT, state="inconclusive"))
    assert RESULT.choice is not None
    assert entry.choice is not None
    assert (entry.choice.tunables, entry.choice.evidence) == (RESULT.choice.tunables, None)
    assert (entry.runners_up, entry.singles, entry.front) == ((), (), ())
    assert entry.failures


def test_a_refusal_is_a_row_with_its_reason() -> None:
    entry = entry_of(CellResult(CELL, "refused", note="nothing runs", failures=RESULT.failures))
    assert entry.choice is None
    assert entry.refusal == "nothing runs"
    assert entry.failures


def test_failures_are_bounded() -> None:
    many = {replace(MATH, window_tokens=n): Fault("error", "x" * 5000) for n in range(1, 100)}
    entry = entry_of(replace_failures(many))
    assert len(entry.failures) == FAILURES_KEPT


def replace_failures(failures: dict[Tunables, Fault]) -> CellResult:
    return CellResult(CELL, "tuned", choice=RESULT.choice, default=RESULT.default, failures=failures)


def test_a_report_says_what_was_chosen_and_how_sure_it_is() -> None:
    report = report_of(RESULT, 12.5)
    assert (report.status, report.chosen, report.default) == ("tuned", SWIFT, QUICK)
    assert report.default_ratio == pytest.approx(math.exp(-0.2))
    assert (report.trials, report.failures, report.elapsed_s, report.note) == (17, 1, 12.5, "noisy")
    untimed = report_of(CellResult(CELL, "inconclusive", choice=measured(QUICK, 0.0, count=0)), 1.0)
    assert untimed.default_ratio is None


def test_a_profile_survives_its_own_text() -> None:
    profile = profile_of(entry_of(RESULT))
    assert parse_profile(dump_profile(profile), "here") == profile
    assert profile.provenance.date == "2026-03-04"
    assert profile.provenance.seed == 7
    assert profile.provenance.elapsed_s == 31.3


def test_a_row_timed_under_load_says_so_and_no_other_does() -> None:
    loaded = profile_of(entry_of(replace(RESULT, under_load=True)))
    dumped = dump_profile(loaded)
    assert parse_profile(dumped, "here").plans[0].under_load
    assert "under_load" not in dump_profile(profile_of(entry_of(RESULT)))
    assert not entry_of(replace(RESULT, under_load=True, state="inconclusive")).under_load  # without a number
    with pytest.raises(ProfileError, match=r"plans\[0\].under_load.*must be true or false"):
        parse_profile(dumped.replace("under_load: true", "under_load: 1"), "here")


def test_rows_are_in_a_readable_order() -> None:
    cells = [
        workload(n, mode, pattern)
        for n in (4096, 512)
        for mode in ("train", "infer")
        for pattern in (Pattern(), workload().pattern)
    ]
    profile = profile_of(*(PlanEntry(cell, refusal="none") for cell in cells))
    order = [(e.workload.pattern.dense, e.workload.mode, e.workload.seq_len) for e in profile.plans]
    assert order == sorted(order, key=lambda key: (not key[0], key[1], key[2]))


def test_new_rows_replace_old_ones_of_their_workload_only() -> None:
    old = profile_of(PlanEntry(CELL, refusal="old"), PlanEntry(CELL.at(64), refusal="kept"))
    rows = merged(old, {CELL: entry_of(RESULT)})
    assert rows[CELL].choice is not None
    assert rows[CELL.at(64)].refusal == "kept"
    assert merged(None, rows) == rows


def test_only_the_very_same_silicon_and_software_is_the_same_machine() -> None:
    profile = profile_of(entry_of(RESULT))
    assert same_machine(profile, FACTS)
    assert not same_machine(profile, replace(FACTS, sm_count=3))
    assert not same_machine(profile, replace(FACTS, software=(("torch", "2.12.0"),)))


def test_the_runtime_must_plan_what_the_search_chose() -> None:
    entry = entry_of(RESULT)
    check_loaded(entry, SWIFT)
    with pytest.raises(ProbeFailure, match=r"reads quick/quick bf16 .* chose swift/swift bf16"):
        check_loaded(entry, QUICK)
    with pytest.raises(ProbeFailure, match="failed when the runtime ran it: oom, no room"):
        check_loaded(entry, Fault("oom", "no room"))


def test_what_was_measured_stays_where_nothing_is_measured_now() -> None:
    recorded = entry_of(RESULT)
    unmeasured = replace(recorded, choice=replace(recorded.choice, evidence=None))
    refusal = PlanEntry(CELL, refusal="nothing runs it any more")
    old = profile_of(recorded)
    assert recorded.evidence is not None
    assert merged(old, {CELL: unmeasured}) == {CELL: replace(recorded, origin=origin_of(old, recorded))}
    assert merged(old, {CELL: refusal}) == {CELL: refusal}
    assert merged(profile_of(unmeasured), {CELL: recorded}) == {CELL: recorded}
    assert merged(None, {CELL: unmeasured}) == {CELL: unmeasured}


def test_rows_of_an_earlier_probe_keep_their_effort_and_day() -> None:
    old = profile_of(entry_of(RESULT))
    old = replace(old, provenance=replace(old.provenance, effort="quick", date="2026-01-01"))
    later = replace(entry_of(RESULT), workload=CELL.at(64))
    new = profile_of(*merged(old, {later.workload: later}).values())
    assert [entry.origin for entry in new.plans if entry.workload == CELL] == [RowOrigin("quick", "2026-01-01")]
    assert [entry.origin for entry in new.plans if entry.workload != CELL] == [None]
    assert new.provenance.date > "2026-01-01"
