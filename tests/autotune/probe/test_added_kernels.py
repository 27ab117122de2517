"""``probe --add-kernel``: a kernel is measured against the plans that stand, and nothing else is."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cli_runs import ringtune
from machines import FACTS, environment_of, invented, row_of
from probed_machine import Watching, leave_probe, request_for
from probed_machine import truth as without

from autotune.exit_codes import ExitCode, ProbeFailure, UsageFailure
from autotune.measure.evaluator import Block
from autotune.measure.simulated import QUIET, ReplayEvaluator, SimulatedClock
from autotune.probe.added_kernels import chained, using
from autotune.probe.machine.environment import Environment
from autotune.probe.request import ProbeResult
from autotune.probe.tuning import run_probe
from autotune.space.space import Machine
from ringattn.profile.row_origin import RowOrigin
from ringattn.profile.schema import Choice, Evidence, PlanEntry
from ringattn.profile.yaml_io import load_profile, save_profile
from ringattn.workload import BranchTunables, Tunables, Workload

NEW, SLOW = "efficient", "xformers"
GAIN = 0.3


def truth(cell: Workload, plan: Tunables) -> float:
    """The new kernel is faster than flash-cpu beyond 1024, and slower up to there; the slow one always."""
    used = [name for branch in plan.branches for name in (branch.forward, branch.backward) if name]
    share, slow = used.count(NEW) / len(used), used.count(SLOW) / len(used)
    old = replace(
        plan,
        branches=tuple(
            replace(
                branch,
                forward="flash-cpu" if branch.forward in (NEW, SLOW) else branch.forward,
                backward="flash-cpu" if branch.backward in (NEW, SLOW) else branch.backward,
            )
            for branch in plan.branches
        ),
    )
    return without(cell, old) + slow + share * (-GAIN if cell.seq_len > 1024 else 1.0)


class Listening(ReplayEvaluator):
    """Remembers what was timed."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.timed: list[tuple[Workload, Tunables]] = []

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        self.timed += [(cell, plan) for plan in order]
        return super().block(cell, order, timeout_s=timeout_s)


class House:
    """A machine on which a kernel is found later."""

    def __init__(self, tmp_path: Path) -> None:
        tmp_path.mkdir(exist_ok=True)
        self.path = tmp_path / "m.yaml"
        self._folder, self._clock = tmp_path, SimulatedClock()
        self.evaluator: Listening | None = None

    def environment(self, machine: Machine, software: dict[str, str]) -> Environment:
        def evaluator() -> Listening:
            self.evaluator = Listening(row_of(truth), self._clock, 0, QUIET)
            return self.evaluator

        facts = replace(FACTS, software=tuple((dict(FACTS.software) | software).items()))
        return environment_of(self._folder, evaluator, self._clock, machine, facts)

    def probe(self) -> None:
        """Leave the files of a probe of the machine without the kernel."""
        assert leave_probe(self._folder) == self.path

    def take_from(self, other: House) -> None:
        """Leave the files that another one has."""
        shutil.copytree(other._folder, self._folder, dirs_exist_ok=True)

    def add(
        self, *names: str, machine: Machine | None = None, software: dict[str, str] | None = None, **changes: object
    ) -> ProbeResult:
        request = replace(request_for(self.path, seq_lens=(), add_kernels=names), **changes)  # type: ignore[arg-type]
        found = machine or invented(("flash-cpu", "math", NEW))
        return run_probe(request, Watching(), self.environment(found, software or {}))


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@dataclass(frozen=True)
class Added:
    """What the same command does every time: the kernel is added to the plans of a probe."""

    house: House
    before: dict[Workload, PlanEntry]
    result: ProbeResult

    @property
    def timed(self) -> list[tuple[Workload, Tunables]]:
        assert self.house.evaluator is not None
        return self.house.evaluator.timed


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Added:
    """Not to be changed by a test."""
    house = House(tmp_path_factory.mktemp("added"))
    house.probe()
    return Added(house, rows(house.path), house.add(NEW))


def rows(path: Path) -> dict[Workload, PlanEntry]:
    return {entry.workload: entry for entry in load_profile(path).plans}


def test_rows_whose_plan_lost_change_and_the_others_stay_as_they_are(added: Added) -> None:
    before, after = added.before, rows(added.house.path)
    assert before.keys() == after.keys()
    assert {workload.seq_len for workload in before} == {512, 4096}
    for workload, old in before.items():
        new = after[workload]
        if workload.seq_len == 512:
            assert new == old
            continue
        assert old.choice is not None
        assert old.evidence is not None
        assert new.choice is not None
        assert new.evidence is not None
        assert NEW in new.choice.tunables.kernels
        assert new.runners_up[0] == old.choice
        assert new.default == old.default
        paired = next(report for report in added.result.cells if report.workload == workload)
        assert paired.default == old.choice.tunables
        assert paired.default_ratio is not None
        assert new.evidence.default_ratio == pytest.approx(paired.default_ratio * old.evidence.default_ratio, rel=1e-3)
        assert new.evidence.ratio_low <= new.evidence.default_ratio <= new.evidence.ratio_high
    (note,) = [note for note in load_profile(added.house.path).provenance.notes if NEW in note]
    assert note == "efficient added on 2026-01-02: 2 of 4 rows changed"


def test_only_rows_that_change_are_of_that_day(house: House) -> None:
    house.probe()
    old = load_profile(house.path)
    save_profile(replace(old, provenance=replace(old.provenance, effort="full", date="2026-01-01")), house.path)
    house.add(NEW)
    assert load_profile(house.path).provenance.date == "2026-01-02"
    assert {(workload.seq_len, entry.origin) for workload, entry in rows(house.path).items()} == {
        (512, RowOrigin("full", "2026-01-01")),
        (4096, None),
    }


def test_a_kernel_far_behind_at_one_length_is_measured_at_the_next(added: Added) -> None:
    """A whole search takes it for hopeless there."""
    timed = {workload.seq_len for workload, plan in added.timed if NEW in plan.kernels}
    assert timed == {512, 4096}


def test_nothing_but_the_standing_plan_and_plans_with_the_kernel_is_timed(added: Added) -> None:
    standing = {workload: entry.choice.tunables for workload, entry in added.before.items() if entry.choice}
    assert added.timed
    for workload, plan in added.timed:
        assert plan == standing[workload] or NEW in plan.kernels


def test_a_kernel_that_wins_nowhere_leaves_the_file_alone(house: House) -> None:
    house.probe()
    before = house.path.read_bytes()
    slow = house.add(SLOW, machine=invented(("flash-cpu", "math", SLOW)))
    assert house.path.read_bytes() == before
    assert [report.status for report in slow.cells] == ["default"] * 4


def test_a_mode_chooses_among_the_rows(house: House) -> None:
    house.probe()
    with pytest.raises(ProbeFailure, match="has no measured rows for this request"):
        house.add(NEW, modes=("infer",))


def test_nodes_add_a_kernel_together_and_one_that_comes_late_takes_what_they_found(tmp_path: Path) -> None:
    storage = f"{tmp_path}/shared.journal"
    first, late = House(tmp_path / "first"), House(tmp_path / "late")
    first.probe()
    late.path.write_bytes(first.path.read_bytes())
    first.add(NEW, storage=storage)
    late.add(NEW, storage=storage)
    assert late.evaluator is not None
    assert not late.evaluator.timed
    assert late.path.read_bytes() == first.path.read_bytes()
    assert any(NEW in entry.choice.tunables.kernels for entry in rows(late.path).values() if entry.choice)


def test_nodes_whose_plans_are_others_do_not_share_what_they_are_measured_against(tmp_path: Path, added: Added) -> None:
    storage = f"{tmp_path}/shared.journal"
    first, other = House(tmp_path / "first"), House(tmp_path / "other")
    first.probe()
    other.take_from(added.house)
    first.add(NEW, storage=storage)
    with pytest.raises(ProbeFailure, match="holds the studies of another machine, software or request"):
        other.add(NEW, storage=storage)


def test_a_kernel_that_is_measured_already_changes_nothing(house: House, added: Added) -> None:
    house.take_from(added.house)
    before = house.path.read_bytes()
    again = house.add(NEW)
    assert house.path.read_bytes() == before
    assert {report.status for report in again.cells} == {"default"}


def one_line(caught: pytest.ExceptionInfo[ProbeFailure], code: ExitCode) -> str:
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_kernel_is_one_line(house: House) -> None:
    house.probe()
    with pytest.raises(UsageFailure) as caught:
        house.add("flsh")
    assert one_line(caught, ExitCode.USAGE) == (
        "--add-kernel flsh: is no kernel; it may be one of flash-cpu, math, efficient"
    )


def test_a_kernel_that_cannot_run_here_is_one_line(house: House) -> None:
    house.probe()
    found = invented(("flash-cpu", "math", NEW))

    def reasons(workload: Workload, plan: Tunables) -> tuple[str, ...]:
        return (*found.reasons(workload, plan), *(["efficient needs a GPU"] if NEW in plan.kernels else []))

    with pytest.raises(UsageFailure) as caught:
        house.add(NEW, machine=replace(found, reasons=reasons))
    assert one_line(caught, ExitCode.USAGE) == "--add-kernel efficient: cannot run here: efficient needs a GPU"


def test_no_profile_is_one_line(house: House) -> None:
    with pytest.raises(ProbeFailure) as caught:
        house.add(NEW)
    assert "there is no profile, so there is nothing to add a kernel to; run: ringtune probe" in one_line(
        caught, ExitCode.NO_PROFILE
    )
    assert not house.path.exists()


def test_a_package_that_came_with_the_kernel_keeps_the_rows(house: House) -> None:
    house.probe()
    before = rows(house.path)
    house.add(SLOW, machine=invented(("flash-cpu", "math", SLOW)), software={"xformers": "0.0.35"})
    assert ("xformers", "0.0.35") in load_profile(house.path).software
    assert rows(house.path) == before


@pytest.mark.parametrize("software", [{"torch": "2.14.0"}, {"xformers": "0.0.35"}])
def test_rows_of_other_software_are_no_measure(house: House, software: dict[str, str]) -> None:
    house.probe()
    before = house.path.read_bytes()
    with pytest.raises(
        ProbeFailure, match=r"it is of other software \((torch 2.13.0, here 2.14.0|xformers none, here)"
    ):
        house.add(NEW, software=software)
    assert house.path.read_bytes() == before


def test_an_option_that_says_what_to_probe_is_refused_beside_it() -> None:
    for option in (("--seq-len", "512"), ("--dense",), ("--dry-run",), ("--if-missing",), ("--like", "x.jsonl")):
        result = ringtune("probe", "--add-kernel", "math", *option)
        assert result.exit_code == ExitCode.USAGE
        assert f"--add-kernel says what to probe; leave {option[0]} out" in result.output


def test_the_further_constraint_leaves_the_plan_that_stands(house: House) -> None:
    house.probe()
    (workload, entry), *_ = rows(house.path).items()
    assert entry.choice is not None
    machine = using(invented(("flash-cpu", "math", NEW)), (NEW,), entry.choice.tunables)
    other = replace(entry.choice.tunables, checkpoint="full")
    assert not machine.reasons(workload, entry.choice.tunables)
    assert machine.reasons(workload, other) == ("uses none of the added kernels, efficient",)


def test_evidence_against_one_that_was_paired_itself_is_chained() -> None:
    def choice(ratio: float, low: float, high: float, blocks: int) -> Choice:
        return Choice(
            Tunables("fp32", (BranchTunables(NEW),)),
            Evidence(
                median_ms=1.0, default_ratio=ratio, ratio_low=low, ratio_high=high, peak_bytes=1, error=0.0,
                first_call_ms=1.0, host_us=1.0, blocks=blocks,
            ),
        )  # fmt: skip

    made = chained(choice(0.8, 0.8, 0.8, 9), choice(0.5, 0.4, 0.625, 5)).evidence
    assert made is not None
    assert (made.default_ratio, made.ratio_low, made.ratio_high, made.blocks) == (0.4, 0.32, 0.5, 5)
