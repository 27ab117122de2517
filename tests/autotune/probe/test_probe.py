"""A whole probe on an invented machine in simulated time: from the request to the profile."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machines import invented, row_of
from probed_machine import Machine, Unfinished, Watching, leave_probe, request_for, truth

from autotune.exit_codes import ExitCode, NothingMeasured, ProbeFailure, UsageFailure
from autotune.measure.evaluator import Fault
from autotune.measure.simulated import ReplayEvaluator, Trouble
from autotune.probe.cells import runs
from autotune.probe.request import ProbeRequest
from autotune.probe.tuning import run_probe
from ringattn.errors import ProfileError
from ringattn.profile.schema import Profile
from ringattn.profile.yaml_io import load_profile, save_profile
from ringattn.workload import Tunables, Workload

# --- what comes out --------------------------------------------------------------------------------------------------


def test_a_probe_writes_what_is_fastest_at_each_length(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    observer = Watching()
    result = run_probe(request_for(path, modes=()), observer, machine.environment)
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


def test_each_kernel_used_alone_is_in_the_profile(tmp_path: Path) -> None:
    plans = load_profile(leave_probe(tmp_path)).plans
    assert all(entry.singles for entry in plans)
    for entry in plans:
        assert entry.choice is not None
        alone = [entry.choice.tunables, *(single.tunables for single in entry.singles)]
        kernels = [{name for b in plan.branches for name in (b.forward, b.backward) if name} for plan in alone]
        assert {"flash-cpu"} in kernels
        assert all(len(names) == 1 for names in kernels[1:])
        assert all(single.evidence is not None for single in entry.singles)


def test_nothing_in_a_profile_says_where_it_was_made(machine: Machine, tmp_path: Path) -> None:
    run_probe(request_for(tmp_path / "machine.yaml"), Watching(), machine.environment)
    assert str(tmp_path) not in (tmp_path / "machine.yaml").read_text()


def test_the_default_output_lies_where_the_runtime_looks_first(machine: Machine, tmp_path: Path) -> None:
    result = run_probe(replace(request_for(tmp_path), output=None), Watching(), machine.environment)
    assert result.profile_path is not None
    assert result.profile_path.parent == tmp_path / "config" / "ringtune"
    assert result.profile_path.name.startswith("cpu-invented")


def test_the_budget_is_kept_and_the_eta_ends_right(tmp_path: Path) -> None:
    for budget_s in (20.0, 50.0):
        machine = Machine(tmp_path / str(budget_s), Trouble())
        observer = Watching()
        path = tmp_path / f"{budget_s}.yaml"
        result = run_probe(request_for(path, budget_s=budget_s, effort="standard"), observer, machine.environment)
        assert result.elapsed_s <= 1.1 * budget_s
        fractions = [fraction for fraction, _ in observer.etas]
        assert all(0 <= fraction <= 1 for fraction in fractions)
        middle, remaining_s = observer.etas[len(observer.etas) // 2]
        assert remaining_s <= budget_s
        assert fractions[-1] > middle


def test_a_request_that_leaves_nothing_is_a_usage_error(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(UsageFailure, match="ask for a shorter --seq-len"):
        run_probe(request_for(tmp_path / "m.yaml", seq_lens=(2**26,)), Watching(), machine.environment)


def test_a_workload_nothing_can_run_becomes_a_refusal_row(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    allowed = invented(("flash-cpu", "math"))

    def no_training(cell: Workload, tunables: Tunables) -> tuple[str, ...]:
        return (("no backward at all",) if cell.train else ()) + allowed.reasons(cell, tunables)

    environment = replace(machine.environment, machine=replace(allowed, reasons=no_training))
    result = run_probe(request_for(tmp_path / "m.yaml", seq_lens=(512,), modes=()), Watching(), environment)
    assert result.profile is not None
    refused = [entry for entry in result.profile.plans if entry.refusal]
    assert {entry.workload.mode for entry in refused} == {"train"}
    assert all("no backward at all" in entry.refusal for entry in refused)


def test_a_dry_run_measures_nothing_and_writes_nothing(machine: Machine, tmp_path: Path) -> None:
    observer = Watching()
    result = run_probe(request_for(tmp_path / "m.yaml", dry_run=True, modes=()), observer, machine.environment)
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
    assert run_probe(request, observer, machine.environment).profile_path == tmp_path / "m.yaml"
    default = run_probe(replace(request, output=None), observer, machine.environment).profile_path
    assert default is not None
    assert default.parent == tmp_path / "config" / "ringtune"
    assert not default.parent.exists()


@pytest.mark.parametrize(("environ", "threads"), [({}, "-1t"), ({"OMP_NUM_THREADS": "2"}, "")])
def test_a_dry_run_over_ranks_names_the_file_that_they_would_write(
    environ: dict[str, str], threads: str, machine: Machine, tmp_path: Path
) -> None:
    """Each has one thread unless told otherwise; the name was of a machine with as many as this process has."""
    facts = replace(machine.environment.facts, sku="epyc", sm_count=2, threads=2)
    environment = replace(machine.environment, facts=facts, environ={**machine.environment.environ, **environ})
    request = replace(request_for(tmp_path, dry_run=True), output=None, ranks=2)
    path = run_probe(request, Watching(), environment).profile_path
    assert path is not None
    assert path.name == f"cpu-epyc-2c{threads}-x2.yaml"


def test_a_broken_profile_is_told_of_before_anything_is_started(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("schema: 1\n", "utf-8")
    with pytest.raises(ProfileError, match=r"m\.yaml"):
        run_probe(request_for(path, ranks=2), Watching())
    assert path.read_text("utf-8") == "schema: 1\n"


def test_a_length_of_which_a_rank_cannot_hold_two_chunks_is_refused_before_ranks_start(
    machine: Machine, tmp_path: Path
) -> None:
    request = request_for(tmp_path / "m.yaml", ranks=2, seq_lens=(1, 64))
    with pytest.raises(UsageFailure, match=r"^--seq-len 1: in zigzag layout each of 2 ranks holds 2"):
        run_probe(request, Watching(), machine.environment)
    assert machine.made == []
    narrow = replace(request, layout="contiguous", dry_run=True)
    assert run_probe(narrow, Watching(), machine.environment).dry_run is not None


# --- what must not be written ----------------------------------------------------------------------------------------


def disobeying(evaluator: Callable[[], ReplayEvaluator], answer: Callable[[Tunables], Tunables | Fault]):  # type: ignore[no-untyped-def]
    class Disobeying(ReplayEvaluator):
        def run_profile(self, cell: Workload, profile_path: str, *, timeout_s: float) -> Tunables | Fault:
            planned = super().run_profile(cell, profile_path, timeout_s=timeout_s)
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
    environment = replace(machine.environment, evaluator=lambda facts, request, preset: make())
    with pytest.raises(ProbeFailure, match=message):
        run_probe(request_for(path), Watching(), environment)
    assert not path.exists()


@pytest.fixture(scope="module")
def in_vain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NothingMeasured]:
    """The folder of a probe whose every cell was inconclusive, for noise, and how it ended."""
    folder = tmp_path_factory.mktemp("in_vain")
    with pytest.raises(NothingMeasured) as caught:
        run_probe(request_for(folder / "m.yaml"), Watching(), Machine(folder, Trouble(sigma=0.8)).environment)
    return folder, caught.value


def test_when_every_cell_is_inconclusive_nothing_is_written(
    in_vain: tuple[Path, NothingMeasured], tmp_path: Path
) -> None:
    left, ended = in_vain
    assert ended.exit_code == ExitCode.NOTHING_MEASURED
    assert not (left / "m.yaml").exists()
    shutil.copytree(left, tmp_path, dirs_exist_ok=True)
    quiet = Machine(tmp_path)
    run_probe(request_for(tmp_path / "m.yaml"), Watching(), quiet.environment)  # the same command measures anew
    assert len(load_profile(tmp_path / "m.yaml").plans) == 4


def test_a_default_that_is_too_slow_names_a_remedy(tmp_path: Path) -> None:
    class Slow(ReplayEvaluator):
        def check(self, *arguments: object, **more: object) -> Fault:  # type: ignore[override]
            return Fault("timeout", "no answer within 9.0 s")

    probed = Machine(tmp_path)
    environment = replace(probed.environment, evaluator=lambda *_: Slow(row_of(truth), probed.clock))
    with pytest.raises(NothingMeasured, match=r"within 9\.0 s; give a larger --budget or a shorter --seq-len"):
        run_probe(request_for(tmp_path / "m.yaml"), Watching(), environment)


@pytest.mark.parametrize("start_s", [0.0, 9.0])
@pytest.mark.parametrize("budget_s", [0.2, 0.6])
def test_too_small_a_budget_for_anything_says_which_would_do(tmp_path: Path, budget_s: float, start_s: float) -> None:
    class Slow(ReplayEvaluator):
        """Takes its time to start, as the worker of a busy machine does."""

        def check(self, *arguments: Any, **more: Any) -> Any:
            if not self.calls:
                probed.clock.advance(start_s)
            return super().check(*arguments, **more)

    probed = Machine(tmp_path)
    environment = replace(probed.environment, evaluator=lambda *_: Slow(row_of(truth), probed.clock))
    request = request_for(tmp_path / "m.yaml", modes=())
    with pytest.raises(NothingMeasured, match=r"no profile was written; --budget \d+ would do for the first") as caught:
        run_probe(replace(request, budget_s=budget_s), Watching(), environment)
    enough = re.search(r"--budget (\d+)", str(caught.value))
    assert enough is not None
    result = run_probe(replace(request, budget_s=float(enough[1])), Watching(), environment)
    assert any(report.status in ("tuned", "default") for report in result.cells)


def test_no_budget_is_named_that_is_hardly_more_than_one_that_was_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine 28 s were named after 26, and 27 after 28."""
    monkeypatch.setattr(runs, "AGAIN", 100.0)
    request = replace(request_for(tmp_path / "m.yaml", modes=()), budget_s=0.6)
    with pytest.raises(NothingMeasured, match=r"--budget 60 would do for the first"):
        run_probe(request, Watching(), Machine(tmp_path).environment)


def test_no_budget_is_named_where_noise_is_the_reason(in_vain: tuple[Path, NothingMeasured]) -> None:
    assert "--budget" not in str(in_vain[1])


def test_too_small_a_budget_says_which_cells_were_not_measured(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    result = run_probe(request_for(tmp_path / "m.yaml", budget_s=2.5, modes=()), Watching(), machine.environment)
    assert result.inconclusive
    assert result.profile is not None
    assert all(entry.refusal == "" for entry in result.profile.plans)  # a row without a plan would stop the runtime
    assert all("budget" in line or "no time" in line for line in result.inconclusive)
    assert result.elapsed_s <= 2.75


def test_anchors_are_refined_between_lengths_whose_winners_differ(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    request = ProbeRequest(output=tmp_path / "m.yaml", effort="standard", seq_lens=(512, 2048, 4096), modes=("infer",))
    result = run_probe(request, Watching(), machine.environment)
    assert result.profile is not None
    lengths = {entry.workload.seq_len for entry in result.profile.plans}
    assert 1024 in lengths  # between 512, where math wins, and 2048
    assert lengths <= {512, 1024, 2048, 4096}


def test_an_old_profile_survives_a_disk_that_cannot_be_written(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = leave_probe(tmp_path)
    before = path.read_bytes()

    def full(profile: Profile, target: Path) -> None:
        if Path(target) == path:
            raise OSError(28, "No space left on device")
        save_profile(profile, target)

    monkeypatch.setattr("autotune.probe.output.writer.save_profile", full)
    with pytest.raises(OSError, match="No space left"):
        run_probe(request_for(path, resume=False), Watching(), machine.environment)
    assert path.read_bytes() == before
