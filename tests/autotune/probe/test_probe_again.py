"""A probe where something is there already: a profile of this machine or another, or an interrupted probe's journal."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL

import pytest
from machines import FACTS, row_of
from probed_machine import Machine, Watching, leave_probe, request_for, truth, winners

from autotune.exit_codes import DeviceBusy, ExitCode, NothingMeasured, ProbeFailure, UsageFailure
from autotune.measure.evaluator import Block, Checked, Fault, Interference, InterferenceKind, Killed, Sample
from autotune.measure.simulated import ReplayEvaluator, Trouble
from autotune.probe.output.earlier_profile import MOST_ROWS
from autotune.probe.request import ProbeRequest, ProbeResult
from autotune.probe.tuning import run_probe, verify_profile
from autotune.probe.workloads.grid import cells_for
from ringattn.errors import ProfileError
from ringattn.profile.schema import Choice, PlanEntry
from ringattn.profile.yaml_io import load_profile, save_profile
from ringattn.workload import Tunables, Workload

# --- what is there already -------------------------------------------------------------------------------------------


def test_a_second_probe_of_an_unchanged_machine_verifies(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path), Watching(), machine.environment)
    before = path.read_bytes()
    searched = machine.made[0].calls
    observer = Watching()
    result = run_probe(request_for(path), observer, machine.environment)
    assert result.verified
    assert path.read_bytes() == before
    assert machine.made[1].calls < searched / 2
    assert any("verifying" in note for note in observer.notes)
    assert {report.status for report in result.cells} == {"resumed"}


@pytest.mark.parametrize("dry_run", [False, True])
def test_more_rows_than_a_file_holds_are_refused_before_anything_is_measured(
    machine: Machine, tmp_path: Path, dry_run: bool
) -> None:
    path = tmp_path / "m.yaml"
    lengths = tuple(range(64, 64 + MOST_ROWS))
    with pytest.raises(UsageFailure, match=f"would hold {MOST_ROWS * 2} rows; {MOST_ROWS} is the most"):
        run_probe(request_for(path, seq_lens=lengths, dry_run=dry_run), Watching(), machine.environment)
    profile = load_profile(leave_probe(tmp_path))
    (entry, *_), there = profile.plans, len(profile.plans)
    more = tuple(replace(entry, workload=entry.workload.at(length)) for length in range(8192, 8192 + MOST_ROWS - there))
    save_profile(replace(profile, plans=(*profile.plans, *more)), path)
    made = len(machine.made)
    with pytest.raises(UsageFailure, match=f"{MOST_ROWS} of them there already"):
        run_probe(request_for(path, seq_lens=(96,), dry_run=dry_run), Watching(), machine.environment)
    assert len(machine.made) == made


def test_stale_winners_are_found_and_searched_again(machine: Machine, tmp_path: Path) -> None:
    path = leave_probe(tmp_path)
    machine.truth = lambda cell, tunables: truth(cell.at(4096), tunables)  # math is slow everywhere now
    outcome = verify_profile(path, ProbeRequest(effort="quick"), Watching(), machine.environment)
    assert {cell.workload.seq_len for cell in outcome.cells if cell.stale} == {512}
    assert all("of its time" in cell.note for cell in outcome.cells if cell.stale)
    assert len(outcome.stale) == 2
    before = load_profile(path)
    result = run_probe(request_for(path), Watching(), machine.environment)
    assert not result.verified
    assert result.profile is not None
    assert set(winners(result.profile).values()) == {"flash-cpu"}
    kept = {entry.workload: entry for entry in before.plans if entry.workload.seq_len == 4096}
    assert all(entry == kept[entry.workload] for entry in result.profile.plans if entry.workload in kept)


def test_verify_holds_on_an_unchanged_machine_even_with_noise(tmp_path: Path) -> None:
    machine = Machine(tmp_path, Trouble())
    path = tmp_path / "m.yaml"
    run_probe(request_for(path), Watching(), machine.environment)
    for seed in range(3):
        outcome = verify_profile(path, ProbeRequest(effort="quick", seed=seed), Watching(), machine.environment)
        assert outcome.stale == ()


class Disturbed(ReplayEvaluator):
    """Another process makes ``victim`` three times as slow, in all blocks or in the first so many."""

    left: float = math.inf
    victim = "math"

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        block = super().block(cell, order, timeout_s=timeout_s)
        if self.left <= 0:
            return block
        self.left -= 1
        results = [
            replace(result, ms=3 * result.ms) if isinstance(result, Sample) and self.victim in plan.kernels else result
            for plan, result in zip(order, block.results, strict=True)
        ]
        return Block(tuple(results), (Interference(InterferenceKind.FOREIGN_LOAD, 62.0),))


@pytest.mark.parametrize(("left", "certain"), [(math.inf, False), (200, True)])
def test_what_loses_beside_foreign_load_is_not_called_stale(
    machine: Machine, tmp_path: Path, left: float, certain: bool
) -> None:
    """One of eight rows was, beside busy loops. Where they end, blocks without them decide."""
    path = tmp_path / "m.yaml"
    run_probe(request_for(path, seq_lens=(512,)), Watching(), machine.environment)
    assert set(winners(load_profile(path)).values()) == {"math"}
    evaluator = Disturbed(row_of(truth), machine.clock)
    evaluator.left = left
    environment = replace(machine.environment, evaluator=lambda *_: evaluator)
    outcome = verify_profile(path, ProbeRequest(effort="standard"), Watching(), environment)
    assert outcome.stale == ()
    assert outcome.interference == ("other processes used 62 % of the CPUs",)
    assert len(outcome.cells) == (2 if certain else 0)
    for line in outcome.inconclusive:
        assert re.search(r"now takes \d+ % of its time, but other processes used 62 % of the CPUs; verify again", line)
    assert len(outcome.inconclusive) == (0 if certain else 2)


def test_a_winner_that_fails_while_it_is_timed_is_stale_whatever_the_load(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path, seq_lens=(512,)), Watching(), machine.environment)

    class Failing(Disturbed):
        def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
            block = super().block(cell, order, timeout_s=timeout_s)
            if self.calls < 200:
                return block
            failed = Fault("error", "no such kernel")
            results = [failed if "math" in p.kernels else r for p, r in zip(order, block.results, strict=True)]
            return replace(block, results=tuple(results))

    evaluator = Failing(row_of(truth), machine.clock)
    environment = replace(machine.environment, evaluator=lambda *_: evaluator)
    outcome = verify_profile(path, ProbeRequest(effort="standard"), Watching(), environment)
    assert outcome.inconclusive == ()
    assert len(outcome.stale) == 2
    assert all("the recorded plan fails here: error, no such kernel" in line for line in outcome.stale)


def test_what_is_slower_than_it_was_is_stale_also_after_a_disturbance(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path, seq_lens=(512,)), Watching(), machine.environment)
    evaluator = Disturbed(row_of(lambda cell, tunables: truth(cell.at(4096), tunables)), machine.clock)
    evaluator.left = 60
    environment = replace(machine.environment, evaluator=lambda *_: evaluator)
    outcome = verify_profile(path, ProbeRequest(effort="standard"), Watching(), environment)
    assert len(outcome.stale) == 2


def test_a_dry_run_says_that_cells_of_the_profile_would_be_verified(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    dry = request_for(path, dry_run=True)

    def verifies(request: ProbeRequest) -> bool:
        found = run_probe(request, Watching(), machine.environment).dry_run
        assert found is not None
        return found.verifies

    assert not verifies(dry)
    leave_probe(tmp_path)
    written = path.read_bytes()
    assert verifies(dry)
    assert not verifies(replace(dry, resume=False))
    assert not verifies(replace(dry, seq_lens=(512, 2048)))  # one length more than it has
    assert path.read_bytes() == written
    path.write_text("schema: [")
    with pytest.raises(ProfileError, match=r"m\.yaml"):
        run_probe(dry, Watching(), machine.environment)


def test_a_second_probe_searches_what_the_first_left(machine: Machine, tmp_path: Path) -> None:
    """As the README says; it began again with what it had measured, and a busy machine never came to the rest."""
    path = leave_probe(tmp_path)
    _forget(path, (512,))
    kept = {entry.workload: entry for entry in load_profile(path).plans if entry.workload.seq_len == 4096}
    dry = run_probe(request_for(path, dry_run=True), Watching(), machine.environment).dry_run
    assert dry is not None
    assert {(cell.workload.seq_len, cell.measured, cell.estimate_s > 0) for cell in dry.cells} == {
        (512, False, True), (4096, True, False)
    }  # fmt: skip
    observer = Watching()
    result = run_probe(request_for(path), observer, machine.environment)
    assert {cell.workload.seq_len for cell in result.cells} == {512}
    assert result.profile is not None
    assert all(entry.evidence is not None for entry in result.profile.plans)
    assert {entry.workload: entry for entry in result.profile.plans if entry.workload in kept} == kept
    assert observer.notes == ["m.yaml: 2 of 4 cells measured before: kept, --fresh measures them again"]
    _forget(path, (512,))
    for changes in ({"resume": False}, {"effort": "standard"}):  # rows of a quick probe are not what is asked for
        dry = run_probe(request_for(path, dry_run=True, **changes), Watching(), machine.environment).dry_run
        assert dry is not None
        assert not any(cell.measured for cell in dry.cells)


def _forget(path: Path, seq_lens: tuple[int, ...]) -> None:
    """Makes rows of these lengths what a probe writes of cells that it could not measure."""
    old = load_profile(path)
    plans = [
        PlanEntry(entry.workload, Choice(entry.choice.tunables))
        if entry.choice is not None and entry.workload.seq_len in seq_lens
        else entry
        for entry in old.plans
    ]
    save_profile(replace(old, plans=tuple(plans)), path)


def test_verify_leaves_out_rows_that_were_never_measured(machine: Machine, tmp_path: Path) -> None:
    path = leave_probe(tmp_path)
    _forget(path, (512,))
    observer = Watching()
    outcome = verify_profile(path, ProbeRequest(effort="quick"), observer, machine.environment)
    assert {cell.workload.seq_len for cell in outcome.cells} == {4096}
    assert (len(outcome.cells), outcome.inconclusive, outcome.left_out) == (2, (), 2)
    assert "m.yaml: 2 rows that could not be measured left out; probe again" in observer.notes
    _forget(path, (512, 4096))
    with pytest.raises(ProbeFailure, match="none of its plans was measured, so there is nothing to verify"):
        verify_profile(path, ProbeRequest(effort="quick"), Watching(), machine.environment)


def test_verify_leaves_out_rows_for_other_numbers_of_ranks_and_says_how_they_are_judged(
    machine: Machine, tmp_path: Path
) -> None:
    path = leave_probe(tmp_path)
    old = load_profile(path)
    spread = [replace(entry, workload=replace(entry.workload, world=2)) for entry in old.plans[:3]]
    save_profile(replace(old, plans=(*old.plans, *spread)), path)
    observer = Watching()
    outcome = verify_profile(path, ProbeRequest(effort="quick"), observer, machine.environment)
    assert {cell.workload.world for cell in outcome.cells} == {1}
    assert (len(outcome.cells), outcome.other_ranks, outcome.stale) == (len(old.plans), 3, ())
    assert f"m.yaml: 3 rows for 2 ranks left out; judged by: ringtune verify --nproc 2 {path}" in observer.notes


@pytest.mark.parametrize(
    "fault", [Fault("timeout", "no answer within 9.0 s"), Fault("crash", "the worker was killed", Killed(SIGKILL))]
)
def test_a_winner_that_the_machine_let_down_is_not_called_stale(machine: Machine, tmp_path: Path, fault: Fault) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path, seq_lens=(512,)), Watching(), machine.environment)
    limits_s: list[float] = []

    class LetDown(ReplayEvaluator):
        def check(
            self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
        ) -> Checked | Fault:
            limits_s.append(timeout_s)
            return fault

    environment = replace(machine.environment, evaluator=lambda *_: LetDown(row_of(truth), machine.clock))
    outcome = verify_profile(path, ProbeRequest(effort="quick", budget_s=10.0), Watching(), environment)
    assert outcome.stale == ()
    assert len(outcome.inconclusive) == 2
    assert all(fault.message in line for line in outcome.inconclusive)
    assert max(limits_s) < 5  # of a budget of ten


@pytest.mark.parametrize(("check_s", "starts_s"), [(0.5, 0.0), (3.0, 9.0), (6.0, 0.0), (7.5, 9.0)])
def test_verify_keeps_its_budget_whatever_a_check_takes(
    machine: Machine, tmp_path: Path, check_s: float, starts_s: float
) -> None:
    """A cell was begun as long as anything was left, and its check went on for as long as it took."""
    path = leave_probe(tmp_path)

    class Slow(ReplayEvaluator):
        started = False

        def check(
            self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
        ) -> Checked | Fault:
            if not self.started:
                self.started = True
                machine.clock.advance(starts_s)
            return super().check(cell, candidate, timeout_s=timeout_s, pace_ms=pace_ms)

    # A worker that was ended is started again for the next check only, and there is none.
    slow = Slow(row_of(truth), machine.clock, check_s=check_s, restart_s=0.0)
    environment = replace(machine.environment, evaluator=lambda *_: slow)
    outcome = verify_profile(path, ProbeRequest(effort="quick", budget_s=20.0), Watching(), environment)
    assert outcome.elapsed_s <= 20.0
    assert outcome.stale == ()
    assert outcome.cells
    assert len(outcome.cells) + len(outcome.inconclusive) == 4
    assert all("give a larger --budget" in line for line in outcome.inconclusive)


def test_starting_the_worker_leaves_time_for_every_default(tmp_path: Path) -> None:
    """It is started at the first check, and took what all defaults had."""
    machine = Machine(tmp_path)

    class Starting(ReplayEvaluator):
        started = False

        def check(
            self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
        ) -> Checked | Fault:
            if not self.started:
                self.started = True
                machine.clock.advance(4.0)
            return super().check(cell, candidate, timeout_s=timeout_s, pace_ms=pace_ms)

    environment = replace(
        machine.environment, evaluator=lambda *_: Starting(row_of(truth), machine.clock, check_s=0.02, prove_s=0.1)
    )
    request = request_for(tmp_path / "m.yaml", budget_s=10.0, seq_lens=(512,))
    result = run_probe(request, Watching(), environment)
    assert not [line for line in result.inconclusive if "to check its default" in line]
    assert result.elapsed_s <= 11


def test_a_profile_of_another_machine_is_not_verified_here(machine: Machine, tmp_path: Path) -> None:
    path = leave_probe(tmp_path)
    elsewhere = replace(machine.environment, facts=replace(FACTS, sm_count=64, device_name="Bigger"))
    with pytest.raises(ProbeFailure, match="was measured on Invented CPU") as caught:
        verify_profile(path, ProbeRequest(), Watching(), elsewhere)
    assert caught.value.exit_code == ExitCode.NO_PROFILE


def test_new_cells_join_the_rows_that_are_there(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path, seq_lens=(512,)), Watching(), machine.environment)
    run_probe(request_for(path, seq_lens=(4096,)), Watching(), machine.environment)
    assert {entry.workload.seq_len for entry in load_profile(path).plans} == {512, 4096}
    run_probe(request_for(path, seq_lens=(2048,), resume=False), Watching(), machine.environment)
    assert {entry.workload.seq_len for entry in load_profile(path).plans} == {512, 2048, 4096}


def test_other_software_replaces_the_profile(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path, seq_lens=(512,)), Watching(), machine.environment)
    newer = replace(machine.environment, facts=replace(FACTS, software=(("torch", "2.14.0"),)))
    observer = Watching()
    run_probe(request_for(path, seq_lens=(4096,)), observer, newer)
    assert {entry.workload.seq_len for entry in load_profile(path).plans} == {4096}
    assert any("other software" in note for note in observer.notes)


def test_a_broken_file_at_the_output_is_not_overwritten_unseen(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("schema: [")
    with pytest.raises(ProfileError, match=r"m\.yaml"):
        run_probe(request_for(path), Watching(), machine.environment)
    assert path.read_text() == "schema: ["
    observer = Watching()
    run_probe(request_for(path, resume=False), observer, machine.environment)
    assert any("it will be replaced" in note for note in observer.notes)
    assert load_profile(path).plans


# --- interrupted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 5, 17, 60])
def test_an_interrupted_probe_goes_on_where_it_stopped(tmp_path: Path, after: int) -> None:
    """Whatever moment it is stopped at: no finished trial is told twice, and the end is as if nothing had happened."""
    path = tmp_path / "m.yaml"
    machine = Machine(tmp_path)
    machine.interrupt_after = after
    first = Watching()
    with pytest.raises(KeyboardInterrupt):
        run_probe(request_for(path), first, machine.environment)
    assert not path.exists()
    machine.interrupt_after = None
    second = Watching()
    result = run_probe(request_for(path), second, machine.environment)
    assert result.profile is not None
    told = [(cell, name, outcome.stage) for cell, name, outcome in first.trials]
    again = [(cell, name, outcome.stage) for cell, name, outcome in second.trials]
    assert not set(told) & set(again)
    assert {k: v for k, v in winners(result.profile).items() if "S512" in k} == {
        k: "math" for k in winners(result.profile) if "S512" in k
    }


def test_many_interruptions_in_a_row_still_come_to_an_end(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    machine = Machine(tmp_path)
    machine.interrupt_after = 9
    for _ in range(60):
        try:
            result: ProbeResult | None = run_probe(request_for(path), Watching(), machine.environment)
            break
        except KeyboardInterrupt:
            result = None
    assert result is not None
    assert len(load_profile(path).plans) == 4


def test_fresh_forgets_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    machine = Machine(tmp_path)
    machine.interrupt_after = 40
    first = Watching()
    with pytest.raises(KeyboardInterrupt):
        run_probe(request_for(path), first, machine.environment)
    machine.interrupt_after = None
    second = Watching()
    run_probe(request_for(path, resume=False), second, machine.environment)
    told = {(cell, name, outcome.stage) for cell, name, outcome in first.trials}
    assert told <= {(cell, name, outcome.stage) for cell, name, outcome in second.trials}


def test_an_interruption_leaves_the_old_profile_alone(tmp_path: Path) -> None:
    path = leave_probe(tmp_path)
    machine = Machine(tmp_path)
    before = path.read_bytes()
    machine.interrupt_after = 10
    with pytest.raises(KeyboardInterrupt):
        run_probe(request_for(path, resume=False), Watching(), machine.environment)
    assert path.read_bytes() == before


def test_two_probes_of_one_device_do_not_run_at_once(machine: Machine, tmp_path: Path) -> None:
    inner: list[ProbeFailure] = []

    class Meddling(Watching):
        def plan(self, cells: Sequence[Workload], estimate_s: float) -> None:
            with pytest.raises(DeviceBusy) as caught:
                run_probe(request_for(tmp_path / "other.yaml"), Watching(), machine.environment)
            inner.append(caught.value)

    run_probe(request_for(tmp_path / "m.yaml", seq_lens=(512,)), Meddling(), machine.environment)
    assert [failure.exit_code for failure in inner] == [ExitCode.BUSY]


def test_a_resumed_probe_says_what_it_goes_on_from(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    machine.interrupt_after = 30
    with pytest.raises(KeyboardInterrupt):
        run_probe(request_for(path), None, machine.environment)
    machine.interrupt_after, heard = None, Watching()
    run_probe(request_for(path), heard, machine.environment)
    (said,) = [note for note in heard.notes if note.startswith("continues ")]
    found = re.fullmatch(rf"continues {re.escape(str(path))}.journal: (\d) of 4 cells done, (.*) used", said)
    assert found is not None, said
    assert int(found[1]) >= 1
    assert found[2] != "0 s"
    again = Watching()
    run_probe(request_for(path, resume=False), again, machine.environment)
    assert not [note for note in again.notes if note.startswith("continues ")]


def test_a_probe_that_measured_nothing_says_why_of_every_cell(machine: Machine, tmp_path: Path) -> None:
    """Each reason once, with its cells."""
    with pytest.raises(NothingMeasured) as caught:
        run_probe(request_for(tmp_path / "p.yaml", budget_s=0.01), None, machine.environment)
    told = str(caught.value)
    assert re.match(
        r"no cell could be measured, so no profile was written(; --budget \d+ would do for the first)?: ", told
    )
    assert told.count("give a larger --budget") < 4
    for cell in cells_for(request_for(tmp_path / "p.yaml"), FACTS):
        assert str(cell.workload) in told
    assert not (tmp_path / "p.yaml").exists()
