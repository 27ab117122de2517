"""What a probe's cells teach each other, on invented machines in simulated time: what is paid once is paid by all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from machines import environment_of, invented, plan, row_of, workload

from autotune.journal.store import Store
from autotune.measure.evaluator import Checked, Fault, KernelUnavailable, Proven
from autotune.measure.simulated import FirstCalls, ReplayEvaluator, SimulatedClock
from autotune.probe.request import ProbeObserver, ProbeRequest, ProbeResult
from autotune.probe.tuning import run_probe
from autotune.search.budget import EFFORTS, allot, spare_s
from autotune.search.cell import CellContext, NoListener, SearchSettings
from autotune.search.lessons import Lessons, Pupil, without
from autotune.search.nearby import Nearby, Timed
from autotune.space.space import build_space
from autotune.statistics import Interval
from ringattn.workload import Pattern, Tunables, Workload

CELL = workload(pattern=Pattern())
WHY = "kernel absent cannot be loaded: import absent: No module named 'absent'. Install it"
MISSING = Fault("error", f"KernelLoadError: {WHY}", KernelUnavailable("absent", WHY))


def kernels(tunables: Tunables) -> set[str]:
    return {name for branch in tunables.branches for name in (branch.forward, branch.backward) if name}


class Recording(ReplayEvaluator):
    """Remembers what was checked, in order."""

    seen: list[tuple[Workload, Tunables]]

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        self.seen.append((cell, candidate))
        return super().check(cell, candidate, timeout_s=timeout_s, pace_ms=pace_ms)


def probed(
    tmp_path: Path,
    log_ratio: Callable[[Workload, Tunables], float],
    *,
    names: tuple[str, ...],
    first_calls: FirstCalls | None = None,
    budget_s: float = 50.0,
    seq_lens: tuple[int, ...] = (512, 1024, 2048, 4096),
) -> tuple[ProbeResult, list[tuple[Workload, Tunables]]]:
    """A whole quick probe; plans of the kernel ``absent`` cannot be loaded."""
    clock = SimulatedClock()
    good = row_of(log_ratio)
    seen: list[tuple[Workload, Tunables]] = []

    def truth(cell: Workload, tunables: Tunables):  # type: ignore[no-untyped-def]
        row = good(cell, tunables)
        return replace(row, checked=None, times_ms=(), fault=MISSING) if "absent" in kernels(tunables) else row

    def evaluator() -> ReplayEvaluator:
        made = Recording(truth, clock, 0, first_calls=first_calls)
        made.seen = seen
        return made

    environment = environment_of(tmp_path, evaluator, clock, invented(names))
    request = ProbeRequest(output=tmp_path / "m.yaml", effort="quick", seq_lens=seq_lens, budget_s=budget_s)
    return run_probe(request, ProbeObserver(), environment), seen


def by_kernel(**logs: float) -> Callable[[Workload, Tunables], float]:
    def log_ratio(cell: Workload, tunables: Tunables) -> float:
        used = [name for branch in tunables.branches for name in (branch.forward, branch.backward) if name]
        frills = 0.05 * (tunables.checkpoint != "selective") + 0.05 * (tunables.pool_threshold_mib is not None)
        return sum(logs[name.replace("-", "_")] for name in used) / len(used) + frills

    return log_ratio


# --- a whole probe ---------------------------------------------------------------------------------------------------


def test_a_kernel_that_cannot_be_loaded_fails_once_in_a_probe(tmp_path: Path) -> None:
    truth = by_kernel(flash_cpu=0.0, math=0.3, absent=-1.0)
    result, seen = probed(tmp_path, truth, names=("flash-cpu", "absent", "math"))
    assert sum("absent" in kernels(tunables) for _, tunables in seen) == 1
    assert result.profile is not None
    assert sum(len(entry.failures) for entry in result.profile.plans) == 1
    assert [note for note in result.profile.provenance.notes if "kernel absent cannot be loaded" in note]
    assert {report.status for report in result.cells} <= {"default", "tuned"}


def test_compiling_once_starves_no_later_cell(tmp_path: Path) -> None:
    """Each direction of the fastest kernel takes 5 s to compile: more than a cell's share of this budget."""
    truth = by_kernel(flash_cpu=0.0, swift=-0.3, math=0.4)
    compiling = FirstCalls(one_off_s={("swift", "forward"): 5.0, ("swift", "backward"): 5.0})
    result, _ = probed(tmp_path, truth, names=("flash-cpu", "swift", "math"), first_calls=compiling, budget_s=60.0)
    assert result.elapsed_s <= 66.0
    assert [report.status for report in result.cells] == ["tuned"] * len(result.cells)
    # At best 0.74; a single kernel that was not exchanged in time leaves 0.78.
    assert all(report.default_ratio is not None and report.default_ratio < 0.8 for report in result.cells)


def test_costly_proofs_leave_time_for_the_longest_cells(tmp_path: Path) -> None:
    truth = by_kernel(flash_cpu=0.0, swift=-0.3, math=0.4)
    building = FirstCalls(new_length_s=dict.fromkeys([("swift", "forward"), ("swift", "backward")], 0.03))
    result, _ = probed(tmp_path, truth, names=("flash-cpu", "swift", "math"), first_calls=building, budget_s=60.0)
    assert result.elapsed_s <= 66.0
    longest = [report.chosen for report in result.cells if report.workload.seq_len == 4096]
    assert [chosen and kernels(chosen) for chosen in longest] == [{"swift"}] * 4


def test_what_was_hopeless_at_one_length_is_not_checked_at_the_next(tmp_path: Path) -> None:
    truth = by_kernel(flash_cpu=0.0, swift=-0.1, math=3.0)
    _, seen = probed(tmp_path, truth, names=("flash-cpu", "swift", "math"))
    uniform = [(cell, tunables) for cell, tunables in seen if len(set(tunables.branches)) == 1]
    assert {cell.seq_len for cell, tunables in uniform if "math" in kernels(tunables)} == {512}


def test_the_next_length_begins_with_what_won_and_what_was_close(tmp_path: Path) -> None:
    truth = by_kernel(flash_cpu=0.0, swift=-0.3, slow=0.3, math=0.35)
    result, seen = probed(tmp_path, truth, names=("flash-cpu", "math", "slow", "swift"), budget_s=120.0)
    won = {report.workload: report.chosen for report in result.cells}
    assert len(won) == 16
    for cell in won:
        order = [tunables for at, tunables in seen if at == cell]
        first_of_the_others = [kernels(tunables) <= {"flash-cpu", "swift"} for tunables in order].index(False)
        if cell.seq_len == 512:
            assert first_of_the_others <= 4
        else:
            before = max(
                (other for other in won if other.at(1) == cell.at(1) and other.seq_len < cell.seq_len), key=len_of
            )
            assert order[1] == won[before]  # the default came first
            assert first_of_the_others >= 8


def len_of(cell: Workload) -> int:
    return cell.seq_len


# --- the parts -------------------------------------------------------------------------------------------------------


def checked(call_ms: float, cold_ms: float) -> Checked:
    return Checked(call_ms, 1e-3, 2**20, cold_ms, 20.0)


def test_only_what_cannot_be_loaded_is_lost_and_a_later_run_knows() -> None:
    store = Store(None)
    lessons = Lessons(store)
    for fault in (Fault("error", "ValueError: kernel absent"), Fault("error", f"PlanError: {WHY}"), Fault("oom", "no")):
        lessons.failed(fault)
    assert lessons.lost == {}
    lessons.failed(MISSING)
    assert Lessons(store).lost == {"absent": WHY}
    assert lessons.has_lost(plan(CELL, "quick", "absent"))
    assert not lessons.has_lost(plan(CELL, "quick"))


def test_what_was_compiled_is_no_price_of_a_new_length() -> None:
    lessons, quick = Lessons(), plan(CELL)
    lessons.first_call(CELL, quick, checked(5.0, 9005.0))
    assert lessons.one_off_s == pytest.approx(9.0)
    assert lessons.proof_s(CELL, quick, 0.005, 8) < 2.0
    lessons.first_call(CELL.at(8192), quick, checked(10.0, 50.0))
    lessons.first_call(CELL.at(8192), quick, checked(10.0, 10.0))  # met before: says nothing
    assert lessons.proof_s(CELL, quick, 0.005, 8) == pytest.approx(0.3 + 8 * (0.04 + 0.01))
    assert lessons.one_off_s == pytest.approx(9.0)


def test_a_proof_is_expected_to_take_what_it_took_at_another_length() -> None:
    clock = SimulatedClock()
    lessons = Lessons()
    truth = row_of(lambda cell, tunables: 0.0)
    pupil = Pupil(ReplayEvaluator(truth, clock, prove_s=3.0), lessons, clock)
    assert isinstance(pupil.check(CELL, plan(CELL), timeout_s=9), Checked)
    assert isinstance(pupil.validate(CELL, plan(CELL), timeout_s=9), Proven)
    assert lessons.proof_s(CELL.at(8192), plan(CELL), 0.015, 8) == pytest.approx(3.0 + 8 * 0.005 + 8 * 2 * 0.01)


def test_what_a_proof_compiled_is_no_price_of_the_next_with_its_kernels() -> None:
    clock, lessons = SimulatedClock(), Lessons()
    quick, leaner = plan(CELL), replace(plan(CELL), window_tokens=CELL.seq_len // 2)
    pupil = Pupil(ReplayEvaluator(row_of(lambda cell, tunables: 0.0), clock, prove_s=9.0), lessons, clock)
    assert isinstance(pupil.validate(CELL, quick, timeout_s=9), Proven)
    assert lessons.has_proven(CELL, leaner)
    assert not lessons.has_proven(CELL, plan(CELL, "slow"))
    assert not lessons.has_proven(CELL.at(8192), leaner)  # where odd lengths may be compiled for again
    assert lessons.proof_s(CELL, leaner, 0.005, 8, compiled=True) < 2.0 < lessons.proof_s(CELL, leaner, 0.005, 8)


def test_how_long_blocks_take_in_one_cell_is_known_to_those_made_before() -> None:
    lessons, clock = Lessons(), SimulatedClock()
    settings = SearchSettings(EFFORTS["quick"], 0)
    evaluator = ReplayEvaluator(row_of(lambda cell, tunables: 0.0), clock)
    first, later = (
        CellContext(
            build_space(cell, invented(), plan(cell), ("bf16",)),
            evaluator,
            Store(None),
            settings,
            NoListener(),
            clock,
            main_dtypes=("bf16",),
            lessons=lessons,
        )
        for cell in (CELL, CELL.at(8192))
    )
    arenas = [context.arena("race", context.record("race")) for context in (first, later)]
    expected_s = arenas[1].estimate_s([])
    for _ in range(9):
        first.ledger.pace.learn(0.06, 0.02)
    assert arenas[1].estimate_s([]) > 2 * expected_s


def test_a_cell_may_borrow_from_later_ones_but_never_most_of_what_they_have() -> None:
    shares = (4.0, 10.0, 10.0)
    assert spare_s(shares, 24.0) == 5.0
    assert spare_s(shares, 30.0) == 11.0  # and all that nobody needs
    assert spare_s((4.0,), 4.0) == 0.0
    assert sum(allot([], 10.0)) == 0.0


def test_a_space_without_a_kernel_in_one_direction_keeps_the_other_and_the_default() -> None:
    space = build_space(CELL, invented(("quick", "swift", "math")), plan(CELL), ("bf16",))
    left = without(space, {("forward", "math")})
    assert left.knobs["forward.0"] == ("quick", "swift")
    assert left.knobs["backward.0"] == ("quick", "swift", "math")
    assert not any(tunables.branches[0].forward == "math" for tunables in left.kernel_plans)
    assert without(space, {("forward", "quick"), ("backward", "quick")}).kernel_plans[0] == space.default


def test_what_was_never_near_the_best_is_hopeless_in_its_direction() -> None:
    def known(median: float) -> Interval:
        return Interval(median, median, median, 4)

    nearest = {plan(CELL): known(0.0), plan(CELL, "swift"): known(-0.2), plan(CELL, "math", "quick"): known(0.4)}
    farther = {plan(CELL): known(0.0), plan(CELL, "math", "quick"): known(2.0), plan(CELL, "quick", "math"): known(1.5)}
    nearby = Nearby([Timed(CELL, nearest), Timed(CELL.at(512), farther)])
    assert nearby.behind(plan(CELL)) == pytest.approx(0.2)
    assert nearby.behind(plan(CELL, "math")) is None
    assert nearby.hopeless_parts(plan(CELL)) == {("backward", "math")}
    assert Nearby([]).behind(plan(CELL)) is None
