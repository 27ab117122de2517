"""A whole probe on an invented machine in simulated time: from the request to the profile, through kills and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from machines import FACTS, edge_of, invented, row_of

from autotune.edge import Edge
from autotune.evaluator import Block, Checked, Fault
from autotune.exit_codes import DeviceBusy, ExitCode, Inconclusive, ProbeFailure, UsageFailure
from autotune.grid import LONGNET_CPU, cells_for
from autotune.probe import ProbeRequest, ProbeResult, SilentObserver, TrialOutcome
from autotune.replay import QUIET, ReplayEvaluator, SimulatedClock, Trouble
from autotune.tuning import run_probe, verify_profile
from ringattn.errors import ProfileError
from ringattn.profile import Choice, PlanEntry, Profile
from ringattn.profile_io import load_profile, save_profile
from ringattn.workload import Tunables, Workload


def truth(cell: Workload, tunables: Tunables) -> float:
    """math is faster up to 1024, flash-cpu from there on; every other change costs 5 %."""
    kernels = {(b.forward, b.backward or b.forward) for b in tunables.branches}
    flash = sum(name == "flash-cpu" for pair in kernels for name in pair) / (2 * len(kernels))
    kernel = (flash - 1) * (-0.4 if cell.seq_len > 1024 else 0.4)
    frills = 0.05 * sum(
        [tunables.checkpoint != "selective", tunables.pool_threshold_mib is not None, not tunables.pattern_cache]
    )
    return kernel + frills + (0.1 if tunables.dtype != "fp32" else 0.0)


class Machine:
    """One invented machine for one test; its evaluator is made anew for every probe, its clock goes on."""

    def __init__(self, tmp_path: Path, trouble: Trouble = QUIET) -> None:
        self.clock = SimulatedClock()
        self.truth = truth
        self.trouble = trouble
        self.made: list[ReplayEvaluator] = []
        self.interrupt_after: int | None = None
        self.edge: Edge = edge_of(tmp_path, self._evaluator, self.clock)

    def _evaluator(self) -> ReplayEvaluator:
        def log_ratio(cell: Workload, tunables: Tunables) -> float:
            return self.truth(cell, tunables)

        evaluator = Interrupting(row_of(log_ratio), self.clock, 0, self.trouble)
        evaluator.left = self.interrupt_after
        self.made.append(evaluator)
        return evaluator


class Interrupting(ReplayEvaluator):
    """Ctrl-C after so many blocks; None is never."""

    left: int | None = None

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return super().block(cell, order, timeout_s=timeout_s)


class Watching(SilentObserver):
    def __init__(self) -> None:
        self.cells: list[Workload] = []
        self.trials: list[tuple[Workload, str, TrialOutcome]] = []
        self.etas: list[tuple[float, float]] = []
        self.notes: list[str] = []
        self.results: list[object] = []

    def plan(self, cells: Sequence[Workload], estimate_s: float) -> None:
        self.cells = list(cells)

    def trial(self, cell: Workload, candidate: str, outcome: TrialOutcome) -> None:
        self.trials.append((cell, candidate, outcome))

    def eta(self, fraction: float, remaining_s: float) -> None:
        self.etas.append((fraction, remaining_s))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finished(self, result: object) -> None:
        self.results.append(result)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def request_for(path: Path, **changes: object) -> ProbeRequest:
    return replace(ProbeRequest(output=path, effort="quick", seq_lens=(512, 4096)), **changes)  # type: ignore[arg-type]


def winners(profile: Profile) -> dict[str, str]:
    return {str(e.workload): e.choice.tunables.branches[0].forward for e in profile.plans if e.choice is not None}


# --- what comes out --------------------------------------------------------------------------------------------------


def test_a_probe_writes_what_is_fastest_at_each_length(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    observer = Watching()
    result = run_probe(request_for(path), observer, machine.edge)
    profile = load_profile(path)
    assert profile == result.profile
    assert {entry.workload.seq_len for entry in profile.plans} == {512, 4096}
    for entry in profile.plans:
        assert entry.choice is not None
        wanted = "math" if entry.workload.seq_len == 512 else "flash-cpu"
        assert {branch.forward for branch in entry.choice.tunables.branches} == {wanted}
        assert entry.choice.evidence is not None
        assert entry.default is not None
        if wanted == "math":
            assert entry.choice.evidence.default_ratio == pytest.approx(math.exp(-0.4), rel=0.02)
    assert profile.provenance.date == "2026-01-02"
    assert profile.provenance.effort == "quick"
    assert observer.results == [result]
    assert set(observer.cells) == {entry.workload for entry in profile.plans}
    assert {report.status for report in result.cells} == {"tuned", "default"}


def test_each_kernel_used_alone_is_in_the_profile(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    run_probe(request_for(path), Watching(), machine.edge)
    for entry in load_profile(path).plans:
        assert entry.choice is not None
        alone = [entry.choice.tunables, *(single.tunables for single in entry.singles)]
        kernels = [{name for b in plan.branches for name in (b.forward, b.backward) if name} for plan in alone]
        assert {"flash-cpu"} in kernels
        assert all(len(names) == 1 for names in kernels[1:])
        assert all(single.evidence is not None for single in entry.singles)


def test_nothing_in_a_profile_says_where_it_was_made(machine: Machine, tmp_path: Path) -> None:
    run_probe(request_for(tmp_path / "machine.yaml"), Watching(), machine.edge)
    assert str(tmp_path) not in (tmp_path / "machine.yaml").read_text()


def test_the_default_output_lies_where_the_runtime_looks_first(machine: Machine, tmp_path: Path) -> None:
    result = run_probe(replace(request_for(tmp_path), output=None), Watching(), machine.edge)
    assert result.profile_path is not None
    assert result.profile_path.parent == tmp_path / "config" / "ringtune"
    assert result.profile_path.name.startswith("cpu-invented")


def test_the_budget_is_kept_and_the_eta_ends_right(tmp_path: Path) -> None:
    for budget_s in (20.0, 50.0):
        machine = Machine(tmp_path / str(budget_s), Trouble())
        observer = Watching()
        path = tmp_path / f"{budget_s}.yaml"
        result = run_probe(request_for(path, budget_s=budget_s, effort="standard"), observer, machine.edge)
        assert result.elapsed_s <= 1.1 * budget_s
        fractions = [fraction for fraction, _ in observer.etas]
        assert all(0 <= fraction <= 1 for fraction in fractions)
        middle, remaining_s = observer.etas[len(observer.etas) // 2]
        assert remaining_s <= budget_s
        assert fractions[-1] > middle


def test_a_request_that_leaves_nothing_is_a_usage_error(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(UsageFailure, match="ask for a shorter --seq-len"):
        run_probe(request_for(tmp_path / "m.yaml", seq_lens=(2**26,)), Watching(), machine.edge)


def test_a_workload_nothing_can_run_becomes_a_refusal_row(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    allowed = invented(("flash-cpu", "math"))

    def no_training(cell: Workload, tunables: Tunables) -> tuple[str, ...]:
        return (("no backward at all",) if cell.train else ()) + allowed.reasons(cell, tunables)

    edge = replace(machine.edge, machine=replace(allowed, reasons=no_training))
    result = run_probe(request_for(tmp_path / "m.yaml", seq_lens=(512,)), Watching(), edge)
    assert result.profile is not None
    refused = [entry for entry in result.profile.plans if entry.refusal]
    assert {entry.workload.mode for entry in refused} == {"train"}
    assert all("no backward at all" in entry.refusal for entry in refused)


def test_a_dry_run_measures_nothing_and_writes_nothing(machine: Machine, tmp_path: Path) -> None:
    observer = Watching()
    result = run_probe(request_for(tmp_path / "m.yaml", dry_run=True), observer, machine.edge)
    assert result.dry_run is not None
    assert len(result.dry_run.cells) == 8
    assert all(cell.candidates > 1 for cell in result.dry_run.cells)
    assert "flash-cpu/math" in result.dry_run.cells[0].kernels
    assert dict(result.dry_run.tunables)["forward.0"] == ("flash-cpu", "math")
    assert machine.made == []
    assert not (tmp_path / "m.yaml").exists()
    assert not list(tmp_path.glob("*.journal"))


def test_a_dry_run_says_where_the_profile_would_be_and_does_not_finish_a_probe(
    machine: Machine, tmp_path: Path
) -> None:
    observer = Unfinished()
    request = request_for(tmp_path / "m.yaml", dry_run=True)
    assert run_probe(request, observer, machine.edge).profile_path == tmp_path / "m.yaml"
    default = run_probe(replace(request, output=None), observer, machine.edge).profile_path
    assert default is not None
    assert default.parent == tmp_path / "config" / "ringtune"
    assert not default.parent.exists()


class Unfinished(SilentObserver):
    def finished(self, result: object) -> None:
        raise AssertionError("nothing was measured")


# --- what is there already -------------------------------------------------------------------------------------------


def test_a_second_probe_of_an_unchanged_machine_verifies(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path), Watching(), machine.edge)
    before = path.read_bytes()
    searched = machine.made[0].calls
    observer = Watching()
    result = run_probe(request_for(path), observer, machine.edge)
    assert result.verified
    assert path.read_bytes() == before
    assert machine.made[1].calls < searched / 2
    assert any("verifying" in note for note in observer.notes)
    assert {report.status for report in result.cells} == {"resumed"}


def test_stale_winners_are_found_and_searched_again(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path), Watching(), machine.edge)
    machine.truth = lambda cell, tunables: truth(cell.at(4096), tunables)  # math is slow everywhere now
    outcome = verify_profile(path, ProbeRequest(effort="quick"), Watching(), machine.edge)
    assert {cell.workload.seq_len for cell in outcome.cells if cell.stale} == {512}
    assert all("of its time" in cell.note for cell in outcome.cells if cell.stale)
    assert len(outcome.stale) == 4
    before = load_profile(path)
    result = run_probe(request_for(path), Watching(), machine.edge)
    assert not result.verified
    assert result.profile is not None
    assert set(winners(result.profile).values()) == {"flash-cpu"}
    kept = {entry.workload: entry for entry in before.plans if entry.workload.seq_len == 4096}
    assert all(entry == kept[entry.workload] for entry in result.profile.plans if entry.workload in kept)


def test_verify_holds_on_an_unchanged_machine_even_with_noise(tmp_path: Path) -> None:
    machine = Machine(tmp_path, Trouble())
    path = tmp_path / "m.yaml"
    run_probe(request_for(path), Watching(), machine.edge)
    for seed in range(3):
        outcome = verify_profile(path, ProbeRequest(effort="quick", seed=seed), Watching(), machine.edge)
        assert outcome.stale == ()


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
    path = tmp_path / "m.yaml"
    run_probe(request_for(path), Watching(), machine.edge)
    _forget(path, (512,))
    observer = Watching()
    outcome = verify_profile(path, ProbeRequest(effort="quick"), observer, machine.edge)
    assert {cell.workload.seq_len for cell in outcome.cells} == {4096}
    assert (len(outcome.cells), outcome.inconclusive, outcome.left_out) == (4, (), 4)
    assert "m.yaml: 4 rows that could not be measured left out; probe again" in observer.notes
    _forget(path, (512, 4096))
    with pytest.raises(ProbeFailure, match="none of its plans was measured, so there is nothing to verify"):
        verify_profile(path, ProbeRequest(effort="quick"), Watching(), machine.edge)


@pytest.mark.parametrize(
    "fault", [Fault("timeout", "no answer within 9.0 s"), Fault("crash", "the worker was killed by SIGKILL")]
)
def test_a_winner_that_the_machine_let_down_is_not_called_stale(machine: Machine, tmp_path: Path, fault: Fault) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path, seq_lens=(512,)), Watching(), machine.edge)
    limits_s: list[float] = []

    class LetDown(ReplayEvaluator):
        def check(
            self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
        ) -> Checked | Fault:
            limits_s.append(timeout_s)
            return fault

    edge = replace(machine.edge, evaluator=lambda *_: LetDown(row_of(truth), machine.clock))
    outcome = verify_profile(path, ProbeRequest(effort="quick", budget_s=10.0), Watching(), edge)
    assert outcome.stale == ()
    assert len(outcome.inconclusive) == 4
    assert all(fault.message in line for line in outcome.inconclusive)
    assert max(limits_s) < 5  # of a budget of ten


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

    edge = replace(machine.edge, evaluator=lambda *_: Starting(row_of(truth), machine.clock, check_s=0.02, prove_s=0.1))
    request = request_for(tmp_path / "m.yaml", budget_s=10.0, seq_lens=(512,))
    result = run_probe(request, Watching(), edge)
    assert not [line for line in result.inconclusive if "to check its default" in line]
    assert result.elapsed_s <= 11


def test_a_profile_of_another_machine_is_not_verified_here(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path), Watching(), machine.edge)
    elsewhere = replace(machine.edge, facts=replace(FACTS, sm_count=64, device_name="Bigger"))
    with pytest.raises(ProbeFailure, match="was measured on Invented CPU") as caught:
        verify_profile(path, ProbeRequest(), Watching(), elsewhere)
    assert caught.value.exit_code == ExitCode.NO_PROFILE


def test_new_cells_join_the_rows_that_are_there(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path, seq_lens=(512,)), Watching(), machine.edge)
    run_probe(request_for(path, seq_lens=(4096,)), Watching(), machine.edge)
    assert {entry.workload.seq_len for entry in load_profile(path).plans} == {512, 4096}
    run_probe(request_for(path, seq_lens=(2048,), resume=False), Watching(), machine.edge)
    assert {entry.workload.seq_len for entry in load_profile(path).plans} == {512, 2048, 4096}


def test_other_software_replaces_the_profile(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path, seq_lens=(512,)), Watching(), machine.edge)
    newer = replace(machine.edge, facts=replace(FACTS, software=(("torch", "2.14.0"),)))
    observer = Watching()
    run_probe(request_for(path, seq_lens=(4096,)), observer, newer)
    assert {entry.workload.seq_len for entry in load_profile(path).plans} == {4096}
    assert any("other software" in note for note in observer.notes)


def test_a_broken_file_at_the_output_is_not_overwritten_unseen(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("schema: [")
    with pytest.raises(ProfileError, match=r"m\.yaml"):
        run_probe(request_for(path), Watching(), machine.edge)
    assert path.read_text() == "schema: ["
    observer = Watching()
    run_probe(request_for(path, resume=False), observer, machine.edge)
    assert any("it will be replaced" in note for note in observer.notes)
    assert load_profile(path).plans


# --- interrupted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 5, 17, 40, 80])
def test_an_interrupted_probe_goes_on_where_it_stopped(tmp_path: Path, after: int) -> None:
    """Whatever moment it is stopped at: no finished trial is told twice, and the end is as if nothing had happened."""
    path = tmp_path / "m.yaml"
    machine = Machine(tmp_path)
    machine.interrupt_after = after
    first = Watching()
    with pytest.raises(KeyboardInterrupt):
        run_probe(request_for(path), first, machine.edge)
    assert not path.exists()
    machine.interrupt_after = None
    second = Watching()
    result = run_probe(request_for(path), second, machine.edge)
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
            result: ProbeResult | None = run_probe(request_for(path), Watching(), machine.edge)
            break
        except KeyboardInterrupt:
            result = None
    assert result is not None
    assert len(load_profile(path).plans) == 8


def test_fresh_forgets_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    machine = Machine(tmp_path)
    machine.interrupt_after = 40
    first = Watching()
    with pytest.raises(KeyboardInterrupt):
        run_probe(request_for(path), first, machine.edge)
    machine.interrupt_after = None
    second = Watching()
    run_probe(request_for(path, resume=False), second, machine.edge)
    told = {(cell, name, outcome.stage) for cell, name, outcome in first.trials}
    assert told <= {(cell, name, outcome.stage) for cell, name, outcome in second.trials}


def test_an_interruption_leaves_the_old_profile_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    machine = Machine(tmp_path)
    run_probe(request_for(path), Watching(), machine.edge)
    before = path.read_bytes()
    machine.interrupt_after = 10
    with pytest.raises(KeyboardInterrupt):
        run_probe(request_for(path, resume=False), Watching(), machine.edge)
    assert path.read_bytes() == before


def test_two_probes_of_one_device_do_not_run_at_once(machine: Machine, tmp_path: Path) -> None:
    inner: list[ProbeFailure] = []

    class Meddling(Watching):
        def plan(self, cells: Sequence[Workload], estimate_s: float) -> None:
            with pytest.raises(DeviceBusy) as caught:
                run_probe(request_for(tmp_path / "other.yaml"), Watching(), machine.edge)
            inner.append(caught.value)

    run_probe(request_for(tmp_path / "m.yaml", seq_lens=(512,)), Meddling(), machine.edge)
    assert [failure.exit_code for failure in inner] == [ExitCode.BUSY]


# --- what must not be written ----------------------------------------------------------------------------------------


def disobeying(evaluator: Callable[[], ReplayEvaluator], answer: Callable[[Tunables], Tunables | Fault]):  # type: ignore[no-untyped-def]
    class Disobeying(ReplayEvaluator):
        def obey(self, cell: Workload, profile_path: str, *, timeout_s: float) -> Tunables | Fault:
            planned = super().obey(cell, profile_path, timeout_s=timeout_s)
            assert isinstance(planned, Tunables)
            return answer(planned)

    def make() -> Disobeying:
        made = evaluator()
        return Disobeying(made.truth, made.clock)

    return make


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda planned: replace(planned, pattern_cache=not planned.pattern_cache), "where the search chose"),
        (lambda planned: Fault("crash", "killed by SIGSEGV"), "failed when the runtime ran it: crash"),
    ],
)
def test_a_profile_the_runtime_does_not_obey_is_never_written(
    machine: Machine, tmp_path: Path, answer: Callable[[Tunables], Tunables | Fault], message: str
) -> None:
    path = tmp_path / "m.yaml"
    make = disobeying(machine._evaluator, answer)
    edge = replace(machine.edge, evaluator=lambda facts, request, preset: make())
    with pytest.raises(ProbeFailure, match=message):
        run_probe(request_for(path), Watching(), edge)
    assert not path.exists()


def test_when_every_cell_is_inconclusive_nothing_is_written(tmp_path: Path) -> None:
    machine = Machine(tmp_path, Trouble(sigma=0.8))
    with pytest.raises(Inconclusive) as caught:
        run_probe(request_for(tmp_path / "m.yaml"), Watching(), machine.edge)
    assert caught.value.exit_code == ExitCode.INCONCLUSIVE
    assert not (tmp_path / "m.yaml").exists()
    quiet = Machine(tmp_path)
    run_probe(request_for(tmp_path / "m.yaml"), Watching(), quiet.edge)  # the same command measures anew
    assert len(load_profile(tmp_path / "m.yaml").plans) == 8


def test_too_small_a_budget_says_which_cells_were_not_measured(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    result = run_probe(request_for(tmp_path / "m.yaml", budget_s=4.0), Watching(), machine.edge)
    assert result.inconclusive
    assert result.profile is not None
    assert all(entry.refusal == "" for entry in result.profile.plans)  # a row without a plan would stop the runtime
    assert all("budget" in line or "no time" in line for line in result.inconclusive)
    assert result.elapsed_s <= 4.4


# --- anchors, grid ---------------------------------------------------------------------------------------------------


def test_anchors_are_refined_between_lengths_whose_winners_differ(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    request = ProbeRequest(output=tmp_path / "m.yaml", effort="standard", seq_lens=(512, 2048, 4096), modes=("infer",))
    result = run_probe(request, Watching(), machine.edge)
    assert result.profile is not None
    lengths = {entry.workload.seq_len for entry in result.profile.plans}
    assert 1024 in lengths  # between 512, where math wins, and 2048
    assert lengths <= {512, 1024, 2048, 4096}


@pytest.mark.parametrize("effort", ["quick", "standard", "full"])
def test_the_grid_covers_both_modes_dense_and_dilated_and_several_lengths(effort: str) -> None:
    cells = cells_for(ProbeRequest(effort=effort), FACTS)  # type: ignore[arg-type]
    workloads = [cell.workload for cell in cells]
    assert {w.mode for w in workloads} == {"train", "infer"}
    assert {w.pattern.dense for w in workloads} == {True, False}
    assert len({w.seq_len for w in workloads}) >= 2
    assert len(set(workloads)) == len(workloads)
    assert [w.seq_len for w in workloads] == sorted(w.seq_len for w in workloads)


def test_the_gpu_grid_of_a_standard_probe_has_five_lengths() -> None:
    gpu = dataclasses.replace(FACTS, vendor="nvidia", arch="sm_90", memory_mib=81559)
    cells = cells_for(ProbeRequest(effort="standard"), gpu)
    assert {cell.workload.seq_len for cell in cells} == {1024, 4096, 16384, 32768, 65536}
    assert {cell.workload.dtype for cell in cells} == {"bf16"}
    assert len(cells) == 20
    old = dataclasses.replace(gpu, arch="sm_61")
    assert {cell.workload.dtype for cell in cells_for(ProbeRequest(), old)} == {"fp32"}


def test_options_override_the_grid() -> None:
    request = ProbeRequest(
        modes=("train",), causal=False, seq_lens=(777,), batch_size=3, heads=8, kv_heads=2, head_dim=32,
        segment_lengths=(128,), dilation_rates=(2,), precision="fp16",
    )  # fmt: skip
    (cell,) = cells_for(request, FACTS)
    workload = cell.workload
    assert (workload.mode, workload.causal, workload.seq_len, workload.batch) == ("train", False, 777, 3)
    assert (workload.heads, workload.kv_heads, workload.head_dim, workload.dtype) == (8, 2, 32, "fp16")
    assert str(workload.pattern) == "[128]/[2]"
    assert cell.main_dtypes == ("fp16",)


@pytest.mark.parametrize(
    ("precision", "dtype", "main", "narrow"),
    [
        ("auto", "fp32", ("fp32",), ("tf32", "bf16", "fp16")),
        ("fp32", "fp32", ("fp32",), ()),
        ("tf32", "fp32", ("fp32",), ("tf32",)),
        ("bf16", "bf16", ("bf16",), ()),
    ],
)
def test_precision_says_what_may_win_and_what_may_only_serve_auto(
    precision: str, dtype: str, main: tuple[str, ...], narrow: tuple[str, ...]
) -> None:
    cell = cells_for(ProbeRequest(precision=precision), FACTS)[0]  # type: ignore[arg-type]
    assert (cell.workload.dtype, cell.main_dtypes, cell.narrow_dtypes) == (dtype, main, narrow)


def test_mismatched_options_are_usage_errors() -> None:
    for request in (
        ProbeRequest(heads=6, kv_heads=4),
        ProbeRequest(segment_lengths=(128, 256), dilation_rates=(1,)),
        ProbeRequest(segment_lengths=(128,)),
    ):
        with pytest.raises(UsageFailure):
            cells_for(request, FACTS)


def test_dense_alone_leaves_the_dilated_pattern_out() -> None:
    cells = cells_for(ProbeRequest(dense=True), FACTS)
    assert cells
    assert all(cell.workload.pattern.dense for cell in cells)


def test_the_dilated_pattern_of_the_grid_nests() -> None:
    widest = max(branch.segment for branch in LONGNET_CPU.branches)
    assert all(widest % branch.segment == 0 for branch in LONGNET_CPU.branches)


def test_an_old_profile_survives_a_disk_that_cannot_be_written(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.yaml"
    run_probe(request_for(path), Watching(), machine.edge)
    before = path.read_bytes()

    def full(profile: Profile, target: Path) -> None:
        if Path(target) == path:
            raise OSError(28, "No space left on device")
        save_profile(profile, target)

    monkeypatch.setattr("autotune.emit.save_profile", full)
    with pytest.raises(OSError, match="No space left"):
        run_probe(request_for(path, resume=False), Watching(), machine.edge)
    assert path.read_bytes() == before
