"""Proofs that a default owes: paid out of what the probe has left, told where they were not, never forgotten."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
from machines import MIB, Setting, by_kernels, environment_of, invented, plan, row_of, workload

from autotune.exit_codes import NothingMeasured
from autotune.journal.store import Store
from autotune.measure.evaluator import Checked, Fault, Proven
from autotune.measure.simulated import FirstCalls, ReplayEvaluator, SimulatedClock
from autotune.probe.request import VALIDATION_PENDING, ProbeObserver, ProbeRequest, ProbeResult
from autotune.probe.tuning import run_probe
from autotune.search.budget import EFFORTS, Budget
from autotune.search.deciding.reserve import VALIDATION_KEPT_S
from autotune.search.loop import CellSearch
from autotune.search.settings import NoListener, SearchSettings
from autotune.space.space import Machine, build_space
from ringattn.planning.fused_steps import FUSED_PARAMS
from ringattn.profile.yaml_io import load_profile
from ringattn.workload import Pattern, Tunables, Workload

NEW_SHAPE_S = 0.075  # what the tuner expects of a new length per branch and direction: no proof is a surprise here
PATTERN = Pattern.of([256, 512, 1024], [1, 2, 4])
TRAIN_S = 0.3 + 8 * (6 * NEW_SHAPE_S + 0.01)  # a proof in training
WRONG = Fault("wrong", "dq errs by 0.3; S=3001, negative inputs, seed 0")
Truth = Callable[[Workload, Tunables], float]
Verdict = Callable[[Workload, Tunables], bool]


def kernels(tunables: Tunables) -> set[str]:
    return {name for branch in tunables.branches for name in (branch.forward, branch.backward) if name}


def by_kernel(**logs: float) -> Truth:
    def log_ratio(cell: Workload, tunables: Tunables) -> float:
        used = [name for branch in tunables.branches for name in (branch.forward, branch.backward) if name]
        frills = 0.05 * (tunables.checkpoint != "selective") + 0.05 * (tunables.pool_threshold_mib is not None)
        return sum(logs[name.replace("-", "_")] for name in used) / len(used) + frills

    return log_ratio


STAYS = by_kernel(flash_cpu=0.0, swift=0.2, math=0.4)
GIVES_WAY = by_kernel(flash_cpu=0.0, swift=-0.3, math=0.4)


def with_flash(cell: Workload, tunables: Tunables) -> bool:
    return "flash-cpu" in kernels(tunables)


def costs_of(names: Sequence[str], new_shape_s: float) -> FirstCalls:
    return FirstCalls(new_length_s={(name, way): new_shape_s for name in names for way in ("forward", "backward")})


@dataclass(frozen=True, slots=True)
class Proof:
    """One that the evaluator was asked for, and how many checks and readings came before it."""

    cell: Workload
    plan: Tunables
    passed: bool
    after_calls: int


class Proving(ReplayEvaluator):
    """Remembers the plans and the proofs it was asked for; Ctrl-C at the proof after ``left`` others."""

    house: House

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        self.house.checked.append(candidate)
        return super().check(cell, candidate, timeout_s=timeout_s, pace_ms=pace_ms)

    def validate(self, cell: Workload, candidate: Tunables, *, timeout_s: float) -> Proven | Fault:
        if self.house.left is not None:
            self.house.left -= 1
            if self.house.left < 0:
                raise KeyboardInterrupt
        result = super().validate(cell, candidate, timeout_s=timeout_s)
        wrong = self.house.wrong(cell, candidate)
        self.house.proofs.append(Proof(cell, candidate, not wrong, self.calls))
        return WRONG if wrong else result


@dataclass(slots=True)
class House:
    """An invented machine whose kernels take long at every new length, for one or more probes of it."""

    tmp_path: Path
    truth: Truth = STAYS
    names: tuple[str, ...] = ("flash-cpu", "math")
    wrong: Verdict = lambda cell, tunables: False
    machine: Machine | None = None
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    proofs: list[Proof] = field(default_factory=list)
    checked: list[Tunables] = field(default_factory=list)
    left: int | None = None
    new_shape_s: float = NEW_SHAPE_S
    peak: Callable[[Tunables], int] = lambda tunables: MIB
    start_s: float = 0.0  # goes by before anything is measured
    made: list[Proving] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.tmp_path / "m.yaml"

    def _evaluator(self) -> ReplayEvaluator:
        made = Proving(
            row_of(self.truth, peak=self.peak),
            self.clock,
            check_s=0.02,
            prove_s=0.3,
            first_calls=costs_of(self.names, self.new_shape_s),
        )
        made.house = self
        self.made.append(made)
        self.clock.advance(self.start_s)
        return made

    def probe(self, budget_s: float | None = None, **changes: object) -> ProbeResult:
        request = ProbeRequest(
            output=self.path, effort="quick", budget_s=budget_s, seq_lens=(2048, 4096), modes=("train",),
            precision="fp32", segment_lengths=(256, 512, 1024), dilation_rates=(1, 2, 4),
        )  # fmt: skip
        environment = environment_of(self.tmp_path, self._evaluator, self.clock, self.machine or invented(self.names))
        return run_probe(replace(request, **changes), ProbeObserver(), environment)  # type: ignore[arg-type]

    def proven(self) -> set[tuple[Workload, Tunables]]:
        return {(proof.cell, proof.plan) for proof in self.proofs if proof.passed}


def told(result: ProbeResult) -> list[str]:
    """What the written profile says of proofs that are owed."""
    assert result.profile_path is not None
    return [note for note in load_profile(result.profile_path).provenance.notes if VALIDATION_PENDING in note]


def owing(result: ProbeResult) -> list[Workload]:
    return [report.workload for report in result.cells if report.validation_pending]


# --- one cell --------------------------------------------------------------------------------------------------------

CELL = workload(2048, pattern=PATTERN, dtype="fp32")
DEFAULT = plan(CELL, "flash-cpu", dtype="fp32")


def searched(budget_s: float, house: House) -> tuple[CellSearch, Budget]:
    """A settled search of one cell of the house."""
    space = build_space(CELL, invented(house.names), DEFAULT, ("fp32",))
    settings = SearchSettings(EFFORTS["quick"], 0, hang_s=5.0)
    search = CellSearch(
        space, house._evaluator(), Store(None), settings, NoListener(), house.clock, main_dtypes=("fp32",)
    )
    budget = Budget(budget_s, house.clock)
    assert search.settle(budget.deadline(budget_s)) is None
    assert search.state.validation_s() > VALIDATION_KEPT_S
    return search, budget


def test_a_cell_without_time_for_the_proof_of_its_default_says_so(tmp_path: Path) -> None:
    house = House(tmp_path)
    search, budget = searched(4.0, house)
    result = search.run(budget.deadline(4.0))
    assert (result.state, house.proofs, search.state.owes_validation) == ("default", [], True)
    assert result.choice is not None
    assert result.choice.tunables == DEFAULT
    assert budget.elapsed_s() <= 4.0
    assert search.validate_default() is None
    assert not search.state.owes_validation
    assert house.proven() == {(CELL, DEFAULT)}


def test_a_cell_with_time_for_it_owes_nothing(tmp_path: Path) -> None:
    house = House(tmp_path)
    search, budget = searched(60.0, house)
    search.run(budget.deadline(60.0))
    assert not search.state.owes_validation
    assert (CELL, DEFAULT) in house.proven()


def test_a_default_whose_paid_proof_fails_gives_way(tmp_path: Path) -> None:
    house = House(tmp_path, wrong=with_flash)
    search, budget = searched(40.0, house)
    search.run(budget.deadline(4.0))
    assert search.state.owes_validation
    assert search.validate_default() == WRONG
    result = search.run_without_default(budget.deadline(30.0))
    assert result.choice is not None
    assert kernels(result.choice.tunables) == {"math"}
    assert WRONG.message in result.note
    assert result.failures[DEFAULT] == WRONG
    assert (CELL, result.choice.tunables) in house.proven()
    assert budget.elapsed_s() <= 44.0


def test_what_took_its_place_may_owe_a_proof_too(tmp_path: Path) -> None:
    house = House(tmp_path, wrong=lambda cell, tunables: tunables == DEFAULT, names=("flash-cpu", "math"))
    house.truth = by_kernel(flash_cpu=0.0, math=0.005)
    search, budget = searched(40.0, house)
    search.run(budget.deadline(4.0))
    assert search.validate_default() == WRONG
    result = search.run_without_default(budget.deadline(2.5))
    assert result.choice is not None
    assert result.choice.tunables != DEFAULT
    assert search.state.owes_validation == ((CELL, result.choice.tunables) not in house.proven())


def test_where_every_plan_fails_a_failed_default_is_refused(tmp_path: Path) -> None:
    house = House(tmp_path, wrong=lambda cell, tunables: True)
    search, budget = searched(40.0, house)
    search.run(budget.deadline(4.0))
    assert search.validate_default() == WRONG
    result = search.run_without_default(budget.deadline(30.0))
    assert result.state in ("refused", "inconclusive")
    assert result.choice is None


def test_a_right_plan_stands_in_however_little_time_is_left(tmp_path: Path) -> None:
    house = House(tmp_path, wrong=with_flash, names=("flash-cpu", "swift"))
    search, budget = searched(40.0, house)
    search.run(budget.deadline(4.0))
    assert search.validate_default() == WRONG
    result = search.run_without_default(budget.deadline(0.0))
    assert result.choice is not None
    assert kernels(result.choice.tunables) == {"swift"}
    assert WRONG.message in result.note


def test_a_proof_that_fails_in_the_time_of_its_cell_does_the_same(tmp_path: Path) -> None:
    house = House(tmp_path, wrong=with_flash)
    search, budget = searched(60.0, house)
    result = search.run(budget.deadline(60.0))
    assert not search.state.owes_validation
    assert result.state == "default"
    assert result.choice is not None
    assert kernels(result.choice.tunables) == {"math"}
    assert result.choice == result.default
    assert result.failures[DEFAULT] == WRONG
    assert f"the default failed (wrong: {WRONG.message})" in result.note


def test_what_failed_or_is_not_preferred_leaves_no_doubt_about_the_default(tmp_path: Path) -> None:
    """It is surely faster; that is no gain which noise might hide."""
    house = House(tmp_path, by_kernel(flash_cpu=0.0, math=-0.4), wrong=lambda cell, plan: "math" in kernels(plan))
    search, budget = searched(60.0, house)
    result = search.run(budget.deadline(60.0))
    assert (result.state, result.note) == ("default", "")
    dense = workload(pattern=Pattern())
    lean = Setting(
        dense,
        lambda cell, tunables: -0.3 if tunables.branches[0].forward == "swift" else 0.0,
        plan(dense),
        prefer="memory",
        rows={"peak": lambda tunables: (100 if tunables.branches[0].forward == "swift" else 5) * MIB},
    ).run()
    assert (lean.result.state, lean.result.note) == ("default", "")


@pytest.mark.parametrize("budget_s", [4.0, 5.0])
def test_one_proof_at_most_is_made_after_the_end_of_a_cell(tmp_path: Path, budget_s: float) -> None:
    house = House(tmp_path, GIVES_WAY, ("flash-cpu", "swift", "math"))
    house.wrong = lambda cell, tunables: "swift" in kernels(tunables)
    search, budget = searched(budget_s, house)
    result = search.run(budget.deadline(budget_s))
    assert len(house.proofs) == 1
    assert budget.elapsed_s() <= budget_s + TRAIN_S
    assert result.choice is not None
    assert result.choice.tunables == DEFAULT
    assert search.state.owes_validation
    assert result.state != "inconclusive" or "no time was left to prove" in result.note


# --- a whole probe ---------------------------------------------------------------------------------------------------


def test_what_is_owed_is_paid_when_every_cell_was_searched(tmp_path: Path) -> None:
    house = House(tmp_path)
    result = house.probe(60.0)
    assert result.elapsed_s <= 60.0
    assert {report.status for report in result.cells} == {"default"}
    assert house.proven() == {(report.workload, report.chosen) for report in result.cells}
    assert {proof.after_calls for proof in house.proofs} == {house.made[0].calls}
    assert (told(result), owing(result)) == ([], [])


def test_what_could_not_be_paid_is_told_in_one_line(tmp_path: Path) -> None:
    house = House(tmp_path)
    result = house.probe(6.0)
    assert result.elapsed_s <= 6.0
    assert house.proofs == []
    assert told(result) == [f"2 cells: {VALIDATION_PENDING}"]
    assert len(owing(result)) == 2
    assert result.profile is not None
    for entry in result.profile.plans:
        assert entry.choice is not None
        assert entry.default is not None
        assert entry.choice.tunables == entry.default.tunables
        assert kernels(entry.choice.tunables) == {"flash-cpu"}
        assert entry.choice.evidence is not None


def test_the_cheapest_are_paid_first_as_far_as_the_time_goes(tmp_path: Path) -> None:
    shares = set()
    for budget_s in (8.0, 22.0, 60.0):
        house = House(tmp_path / str(budget_s))
        result = house.probe(budget_s, modes=("train", "infer"))
        assert result.elapsed_s <= budget_s
        paid = [proof.cell.mode for proof in house.proofs]
        assert paid == sorted(paid)  # infer, then train
        if "train" in paid:
            assert paid.count("infer") == 2
        assert len(paid) + len(owing(result)) == 4
        assert {proof.cell for proof in house.proofs}.isdisjoint(owing(result))
        assert [int(note.split()[0]) for note in told(result)] == ([4 - len(paid)] if len(paid) < 4 else [])
        shares.add(len(paid))
    assert {0, 4} < shares


def test_what_is_owed_is_paid_before_new_lengths_are_searched(tmp_path: Path) -> None:
    """2048 keeps its default and 4096 does not, so that 2880 is wanted, too; there is time for one of the two."""

    def truth(cell: Workload, tunables: Tunables) -> float:
        return (GIVES_WAY if cell.seq_len > 3000 else STAYS)(cell, tunables)

    house = House(tmp_path, truth, ("flash-cpu", "swift"), new_shape_s=0.13)
    result = house.probe(66.0, effort="standard")
    proven = [proof.cell.seq_len for proof in house.proofs]
    assert owing(result) == []
    assert 2048 in proven
    assert 2880 not in proven[: proven.index(2048)]


@pytest.mark.parametrize(("budget_s", "new_shape_s"), [(12.0, 0.0), (24.0, 0.0), (12.0, 0.13), (16.0, 0.13)])
def test_no_proof_goes_beyond_the_budget(tmp_path: Path, budget_s: float, new_shape_s: float) -> None:
    house = House(tmp_path, GIVES_WAY, ("flash-cpu", "swift"), new_shape_s=new_shape_s)
    result = house.probe(budget_s)
    assert result.elapsed_s <= 1.1 * budget_s
    tuned = {(report.workload, report.chosen) for report in result.cells if report.status == "tuned"}
    assert tuned
    assert tuned <= house.proven()
    assert all("no time was left" in report.note for report in result.cells if report.status != "tuned")


def test_nor_does_that_of_a_narrower_dtype(tmp_path: Path) -> None:
    def truth(cell: Workload, tunables: Tunables) -> float:
        return STAYS(cell, tunables) - 0.7 * (tunables.dtype == "bf16")

    house = House(tmp_path, truth, new_shape_s=0.13)
    for budget_s in (8.0, 12.0, 16.0):
        result = house.probe(budget_s, modes=("infer",), precision="auto", resume=False)
        assert result.elapsed_s <= 1.1 * budget_s


def test_without_time_for_a_plan_within_the_limits_nothing_is_refused(tmp_path: Path) -> None:
    """The default is over the limit, and what is within it fails its proof, or has no time left for it."""
    house = House(tmp_path, names=("flash-cpu", "math"), new_shape_s=0.13)
    house.peak = lambda tunables: 100 * MIB if "flash-cpu" in kernels(tunables) else MIB
    with pytest.raises(NothingMeasured, match="no time was left"):
        house.probe(4.0, memory_limit_mib=20)
    result = house.probe(60.0, memory_limit_mib=20, resume=False)
    assert all(report.chosen is not None and kernels(report.chosen) == {"math"} for report in result.cells)
    house.wrong = lambda cell, tunables: "math" in kernels(tunables)
    result = house.probe(60.0, memory_limit_mib=20, resume=False)
    assert result.elapsed_s <= 66.0
    for report in result.cells:
        assert (report.status, report.chosen) in (("refused", None), ("inconclusive", None))
        assert WRONG.message in report.note or "no time was left to prove a plan within the limits" in report.note


@pytest.mark.parametrize("budget_s", [12.0, 20.0])
def test_a_tuned_winner_is_proven_however_little_time_is_left(tmp_path: Path, budget_s: float) -> None:
    house = House(tmp_path, GIVES_WAY, ("flash-cpu", "swift", "math"))
    result = house.probe(budget_s)
    tuned = {(report.workload, report.chosen) for report in result.cells if report.status == "tuned"}
    assert tuned
    assert tuned <= house.proven()
    assert not {cell for cell, _ in tuned} & set(owing(result))


@pytest.mark.parametrize("budget_s", [17.0, 60.0])
def test_no_default_that_fails_stays_silently(tmp_path: Path, budget_s: float) -> None:
    house = House(tmp_path, wrong=with_flash)
    result = house.probe(budget_s)
    assert result.elapsed_s <= 1.1 * budget_s
    assert result.profile is not None
    failed = {proof.cell for proof in house.proofs if not proof.passed}
    rows = {entry.workload: entry for entry in result.profile.plans}
    for report in result.cells:
        if report.workload in failed:
            assert report.chosen is None or kernels(report.chosen) == {"math"}
            assert WRONG.message in report.note
            if report.workload in rows:  # a cell without a choice has a row where it is refused alone
                assert WRONG.message in {failure.message for failure in rows[report.workload].failures}
            else:
                assert (report.status, report.chosen) == ("inconclusive", None)
        if report.status in ("tuned", "default"):
            assert ((report.workload, report.chosen) in house.proven()) != (report.workload in owing(result))
    if budget_s == 60.0:
        assert len(failed) == 2
        assert {report.status for report in result.cells} == {"default"}
        assert all(entry.choice is not None for entry in rows.values())


# --- killed while it pays --------------------------------------------------------------------------------------------

Interrupted = Callable[[Path, int], House]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """``interrupted(folder, n)`` is a house there after a probe that was interrupted when ``n`` proofs were made."""

    @cache
    def once(after_proofs: int) -> House:
        house = House(tmp_path_factory.mktemp("interrupted"), left=after_proofs)
        with pytest.raises(KeyboardInterrupt):
            house.probe(60.0)
        assert not house.path.exists()
        assert len(house.proofs) == after_proofs
        return house

    def copy(folder: Path, after_proofs: int) -> House:
        first, clock = once(after_proofs), SimulatedClock()
        clock.advance(first.clock.now())
        shutil.copytree(first.tmp_path, folder, dirs_exist_ok=True)
        return House(folder, clock=clock, proofs=[*first.proofs], checked=[*first.checked], made=[*first.made])

    return copy


def test_a_resumed_probe_pays_what_the_killed_one_left_owing(tmp_path: Path, interrupted: Interrupted) -> None:
    house = interrupted(tmp_path, 1)
    result = house.probe(60.0)
    assert house.made[1].calls == 0  # nothing is checked or timed again
    assert len(house.proofs) == 2
    assert house.proven() == {(report.workload, report.chosen) for report in result.cells}
    assert (told(result), owing(result)) == ([], [])


@pytest.mark.parametrize("paid", [0, 1])
def test_a_resumed_probe_without_time_claims_nothing_that_was_not_proven(
    tmp_path: Path, interrupted: Interrupted, paid: int
) -> None:
    house = interrupted(tmp_path, paid)
    house.start_s = 60.0
    result = house.probe(60.0)
    assert len(house.proofs) == paid
    assert told(result) == [f"2 cells: {VALIDATION_PENDING}" if paid == 0 else f"1 cell: {VALIDATION_PENDING}"]
    assert {report.workload for report in result.cells} - set(owing(result)) == {proof.cell for proof in house.proofs}


def test_a_default_that_fails_when_the_resumed_probe_pays_gives_way(tmp_path: Path, interrupted: Interrupted) -> None:
    house = interrupted(tmp_path, 0)
    house.wrong = with_flash
    result = house.probe(60.0)
    assert all(report.chosen is not None and kernels(report.chosen) == {"math"} for report in result.cells)
    assert all(WRONG.message in report.note for report in result.cells)
    assert {(report.workload, report.chosen) for report in result.cells} <= house.proven()


# --- tile shapes -----------------------------------------------------------------------------------------------------


def tiled() -> Machine:
    """One of its kernels has a tile shape, and its steps between kernels have theirs."""
    return replace(
        invented(),
        kernels=("flash-cpu", "math"),
        params=lambda cell, kernel, dtype: {"tile": ("128", "64")} if kernel == "flash-cpu" else {},
        fuses=lambda dtype: True,
    )


def with_tiles(cell: Workload, tunables: Tunables) -> float:
    return STAYS(cell, tunables) - 0.2 * (("flash-cpu.tile", "64") in tunables.params)


@pytest.mark.parametrize("effort", ["quick", "standard", "full"])
def test_only_the_full_effort_tries_tile_shapes_and_a_dry_run_says_the_same(tmp_path: Path, effort: str) -> None:
    house = House(tmp_path, with_tiles, machine=tiled())
    asked = {"effort": effort, "seq_lens": (2048,), "modes": ("infer",)}
    dry = house.probe(12.0, dry_run=True, **asked).dry_run
    assert dry is not None
    knobs = {name.removeprefix("param:") for name, _ in dry.tunables if name.startswith("param:")}
    result = house.probe(12.0, **asked)
    tried = {name for tunables in house.checked for name, _ in tunables.params}
    (report,) = result.cells
    assert report.chosen is not None
    if effort == "full":
        assert knobs == {"flash-cpu.tile", *(name for name in FUSED_PARAMS if name != "sum.block")}
        assert "flash-cpu.tile" in tried <= knobs
        assert dict(report.chosen.params)["flash-cpu.tile"] == "64"
    else:
        assert (knobs, tried, report.chosen.params) == (set(), set(), ())


def test_what_is_left_of_a_probe_keeps_the_leanest_plans(tmp_path: Path) -> None:
    """Math takes seven times as long and half the memory: no search wants it, and ``prefer="memory"`` does."""

    def peak(tunables: Tunables) -> int:
        return (50 if {branch.backward for branch in tunables.branches} == {"math"} else 100) * MIB

    house = House(tmp_path, by_kernels(**{"flash-cpu": 0.0, "math": 1.0}), new_shape_s=0.01, peak=peak)
    result = house.probe(60.0)
    assert result.profile_path is not None
    for entry in load_profile(result.profile_path).plans:
        assert entry.evidence is not None
        assert entry.evidence.peak_bytes == 100 * MIB
        leanest = min(entry.front, key=lambda choice: choice.evidence.peak_bytes if choice.evidence else 2**60)
        assert leanest.evidence is not None
        assert leanest.evidence.peak_bytes == 50 * MIB
        assert (entry.workload, leanest.tunables) in house.proven()
