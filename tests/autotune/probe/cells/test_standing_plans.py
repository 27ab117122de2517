"""Nothing learned is forgotten: a probe starts from the plan that served a workload before, and keeps it if better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from machines import FACTS, invented, plan, row_of
from probed_machine import Machine, Watching, request_for

from autotune.exit_codes import NothingMeasured
from autotune.measure.evaluator import Fault
from autotune.measure.simulated import ReplayEvaluator, SimulatedClock, Trouble
from autotune.probe.machine.environment import Environment
from autotune.probe.request import ProbeResult
from autotune.probe.tuning import run_probe
from ringattn.hardware.facts import HardwareFacts
from ringattn.profile.locations import Located
from ringattn.profile.schema import Choice, Evidence, Fingerprint, PlanEntry, Profile
from ringattn.profile.yaml_io import save_profile
from ringattn.workload import Pattern, Tunables, Workload

CELL = Workload("train", True, 4096, 4, 64, "fp32")
# Nothing says that these knobs pay but together: no search of a few plans comes upon them.
GOOD = plan(CELL, "flash-cpu", "math", dtype="fp32", checkpoint="full", pattern_cache=True)
EVIDENCE = Evidence(3.5, 0.7, 0.69, 0.71, 1 << 20, 1e-3, 3.5, 20.0, 20)
STEADY = Trouble(sigma=0.004, outlier_share=0.0, drift=0.0)
OTHER_SOFTWARE = replace(FACTS, software=(("torch", "2.9.0"),))


def truth(_: Workload, tunables: Tunables) -> float:
    if tunables == GOOD:
        return -0.35
    first = tunables.branches[0]
    times = {"flash-cpu": 0.0, "math": 0.2, "efficient": 0.4}
    return times[first.forward] + times.get(first.backward, 0.0) + 0.1 * (tunables.checkpoint != "selective")


def profile_of(
    choices: Mapping[Workload, Tunables], facts: HardwareFacts = FACTS, evidence: Evidence = EVIDENCE
) -> Profile:
    return Profile(
        source="measured",
        fingerprint=Fingerprint.of(facts),
        software=facts.software,
        plans=tuple(PlanEntry(cell, Choice(tunables, evidence)) for cell, tunables in choices.items()),
    )


def environment(
    tmp_path: Path,
    shipped: Profile | None = None,
    trouble: Trouble = STEADY,
    faults: Mapping[Tunables, Fault] | None = None,
) -> Environment:
    machine = Machine(tmp_path)
    located = () if shipped is None else (Located("shipped.yaml", shipped, "shipped"),)
    made = ReplayEvaluator(row_of(truth, base_ms=5.0, faults=faults), machine.clock, 0, trouble)
    return replace(
        machine.environment,
        evaluator=lambda *_: made,
        profiles=located,
        machine=invented(("flash-cpu", "math", "efficient")),
    )


def probe(tmp_path: Path, surroundings: Environment, budget_s: float) -> tuple[ProbeResult, Watching]:
    observer = Watching()
    request = request_for(
        tmp_path / "new.yaml", seq_lens=(4096,), dense=True, precision="fp32", budget_s=budget_s, heads=4, head_dim=64
    )
    return run_probe(request, observer, surroundings), observer


def chosen(result: ProbeResult) -> Tunables:
    assert result.profile is not None
    (entry,) = result.profile.plans
    assert entry.choice is not None
    return entry.choice.tunables


@pytest.mark.parametrize("budget_s", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("facts", [FACTS, OTHER_SOFTWARE])
def test_the_winner_of_a_shipped_profile_is_found_at_once(
    tmp_path: Path, budget_s: float, facts: HardwareFacts
) -> None:
    """It is tried right after the default, so that what the search would miss is there with the smallest budget."""
    found, observer = probe(tmp_path, environment(tmp_path, profile_of({CELL: GOOD}, facts)), budget_s)
    assert chosen(found) == GOOD
    assert found.profile is not None
    assert found.profile.plans[0].evidence is not None
    assert found.profile.plans[0].evidence != EVIDENCE
    told = [name for _, name, outcome in observer.trials if outcome.stage == "search"]
    assert len(told) < 60


def test_the_shipped_row_stands_beside_a_profile_of_the_user_that_has_other_rows(tmp_path: Path) -> None:
    surroundings = environment(tmp_path)
    mine = profile_of({CELL.at(65536): plan(CELL, "flash-cpu", "flash-cpu", dtype="fp32")})
    shipped = profile_of({CELL: GOOD}, OTHER_SOFTWARE)
    both = (Located("mine.yaml", mine, "user"), Located("shipped.yaml", shipped, "shipped"))
    found, _ = probe(tmp_path, replace(surroundings, profiles=both), 2.0)
    assert chosen(found) == GOOD


def test_without_it_a_small_budget_does_not_find_it(tmp_path: Path) -> None:
    found, _ = probe(tmp_path, environment(tmp_path), 2.0)
    assert chosen(found) != GOOD


@pytest.mark.parametrize("seq_len", [4096, 3072, 5000, 16384])
def test_a_row_of_another_length_is_tried_first_too(tmp_path: Path, seq_len: int) -> None:
    found, _ = probe(tmp_path, environment(tmp_path, profile_of({CELL.at(seq_len): GOOD})), 4.0)
    assert chosen(found) == GOOD


def test_an_older_row_at_the_output_is_kept_where_a_small_budget_finds_nothing_better(tmp_path: Path) -> None:
    save_profile(profile_of({CELL: GOOD}, OTHER_SOFTWARE), tmp_path / "new.yaml")
    noisy = Trouble(sigma=0.15, outlier_share=0.0, drift=0.0)
    found, _ = probe(tmp_path, environment(tmp_path, trouble=noisy), 6.0)
    assert chosen(found) == GOOD


def test_a_probe_that_can_tell_nothing_leaves_the_older_file(tmp_path: Path) -> None:
    save_profile(profile_of({CELL: GOOD}, OTHER_SOFTWARE), tmp_path / "new.yaml")
    before = (tmp_path / "new.yaml").read_bytes()
    noisy = Trouble(sigma=0.15, outlier_share=0.0, drift=0.0)
    with pytest.raises(NothingMeasured):
        probe(tmp_path, environment(tmp_path, trouble=noisy), 1.0)
    assert (tmp_path / "new.yaml").read_bytes() == before


def test_a_cell_without_time_keeps_the_plan_that_served_it(tmp_path: Path) -> None:
    """Its row is written beside measured ones, and would take the place of the shipped profile's."""
    longer = CELL.at(65536)
    surroundings = environment(tmp_path, profile_of({CELL: GOOD, longer: GOOD}))
    slow = ReplayEvaluator(
        lambda cell, tunables: row_of(truth, base_ms=5.0 if cell == CELL else 700.0)(cell, tunables),
        SimulatedClock(),
        0,
        STEADY,
    )
    surroundings = replace(surroundings, evaluator=lambda *_: slow, clock=slow.clock)
    request = request_for(
        tmp_path / "new.yaml",
        seq_lens=(4096, 65536),
        dense=True,
        precision="fp32",
        budget_s=24.0,
        heads=4,
        head_dim=64,
    )
    result = run_probe(request, Watching(), surroundings)
    assert result.profile is not None
    row = {entry.workload: entry for entry in result.profile.plans}[longer]
    assert row.evidence is None
    assert row.choice is not None
    assert row.choice.tunables == GOOD


def test_an_older_row_that_is_slower_by_now_gives_way(tmp_path: Path) -> None:
    slow = plan(CELL, "math", "math", dtype="fp32")
    found, _ = probe(tmp_path, environment(tmp_path, profile_of({CELL: slow})), 8.0)
    assert chosen(found).branches == plan(CELL, "flash-cpu", dtype="fp32").branches


@pytest.mark.parametrize(
    "wrong", ["crash", "wrong", "timeout", "oom", "narrow", "unknown kernel", "other branches", "parameters"]
)
def test_a_wrong_older_winner_does_no_harm(tmp_path: Path, wrong: str) -> None:
    """What it fails of is not blamed on its kernels, which are tried apart."""
    bad, faults = replace(GOOD, checkpoint="none"), {}
    cell = CELL
    if wrong in ("crash", "wrong", "timeout", "oom"):
        bad = replace(plan(CELL, "math", "flash-cpu", dtype="fp32"), checkpoint="full")
        faults = {bad: Fault(wrong, "as injected")}  # type: ignore[arg-type]
    elif wrong == "narrow":
        bad = replace(GOOD, dtype="bf16")
    elif wrong == "unknown kernel":
        bad = plan(CELL, "flash-attn-3", dtype="fp32")
    elif wrong == "other branches":
        cell = replace(CELL, pattern=Pattern.of([1024, 4096], [1, 2]))
        bad = plan(cell, "math", dtype="fp32")
    else:
        bad = replace(GOOD, params=(("flash-attn-4.forward_tile", "no tile"),))
    result, observer = probe(tmp_path, environment(tmp_path, profile_of({cell: bad}), faults=faults), 8.0)
    assert chosen(result) != bad
    assert result.profile is not None
    assert result.profile.plans[0].evidence is not None
    assert not any("not tried any further" in note for note in result.profile.provenance.notes)
    tried = {name for _, name, _ in observer.trials}
    assert any("math" in name for name in tried)
    assert result.elapsed_s <= 8.8
