"""Who gets how many seconds, and when it will be over; in simulated time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.measure.simulated import SimulatedClock
from autotune.search.budget import EFFORTS, Budget, CellNeed, Progress, allot
from ringattn.workload import Workload

NEEDS = st.builds(CellNeed, st.floats(0, 50), st.floats(0, 50), st.floats(0, 50))


def workload(seq_len: int) -> Workload:
    return Workload("train", True, seq_len, 2, 64, "fp32")


@given(st.lists(NEEDS, max_size=12), st.floats(0, 400))
def test_shares_never_exceed_what_there_is_nor_what_is_needed(needs: list[CellNeed], available: float) -> None:
    shares = allot(needs, available)
    assert sum(shares) <= available + 1e-6
    assert all(share <= need.total_s + 1e-6 for share, need in zip(shares, needs, strict=True))


def test_bases_and_improvement_are_served_before_any_exploration() -> None:
    needs = [CellNeed(5, 20, 50), CellNeed(5, 20, 0)]
    assert allot(needs, 10) == pytest.approx((5, 5))
    assert allot(needs, 50) == pytest.approx((25, 25))
    assert allot(needs, 60) == pytest.approx((35, 25))
    assert allot(needs, 1000) == pytest.approx((75, 25))


def test_a_dear_base_leaves_room_for_the_improvement_of_the_cheap_ones() -> None:
    shares = allot([CellNeed(50), *[CellNeed(2, 6)] * 8], 60)
    assert min(shares[1:]) > 5
    assert shares[0] > 12


def test_a_tier_that_cannot_be_served_whole_is_split_by_the_square_roots_of_the_needs() -> None:
    assert allot([CellNeed(90), CellNeed(10)], 12) == pytest.approx((9, 3))
    assert allot([CellNeed(90), CellNeed(10)], 60) == pytest.approx((50, 10))  # what the small one leaves goes on
    assert allot([CellNeed(0), CellNeed(4), CellNeed(4)], 2) == pytest.approx((0, 1, 1))


def test_one_dear_cell_leaves_the_cheap_ones_what_they_need() -> None:
    shares = allot([CellNeed(80), *[CellNeed(3)] * 12], 100)
    assert shares == pytest.approx((64, *[3] * 12))


@given(st.lists(NEEDS, max_size=12), st.floats(0, 400))
def test_all_is_handed_out_as_long_as_something_is_needed(needs: list[CellNeed], available: float) -> None:
    total = sum(need.total_s for need in needs)
    assert sum(allot(needs, available)) == pytest.approx(min(total, available), abs=1e-6)


def test_deadlines_never_reach_beyond_the_budget_and_its_reserve() -> None:
    clock = SimulatedClock(100.0)
    budget = Budget(60, clock, reserve_s=4)
    assert budget.deadline(1000).remaining_s() == pytest.approx(56)
    clock.advance(50)
    assert budget.available_s() == pytest.approx(6)
    assert budget.deadline(2).remaining_s() == pytest.approx(2)
    clock.advance(20)
    assert budget.available_s() == 0
    assert budget.deadline(2).passed()


def test_a_reserve_leaves_most_of_a_tiny_budget() -> None:
    assert Budget(4, SimulatedClock(), reserve_s=4).available_s() == pytest.approx(3)


def test_deadline_parts() -> None:
    clock = SimulatedClock()
    deadline = Budget(100, clock).deadline(40)
    assert deadline.part(0.25).remaining_s() == pytest.approx(10)
    assert deadline.earlier_by(15).remaining_s() == pytest.approx(25)
    assert deadline.allows(39.9)
    assert not deadline.allows(40.1)


def test_the_eta_follows_how_the_finished_cells_went() -> None:
    clock = SimulatedClock()
    cells = [workload(n) for n in (512, 1024, 2048)]
    progress = Progress(Budget(1000, clock), {cell: CellNeed(10) for cell in cells})
    assert progress.remaining_s() == pytest.approx(30)
    clock.advance(20)
    progress.finish(cells[0], 20)  # twice what was thought
    assert progress.remaining_s() == pytest.approx(2 * 10 * 22 / 12)
    assert progress.remaining_s(cells[1], 5.0) == pytest.approx(2 * 10 * 22 / 12 - 5)


def test_the_eta_is_capped_by_the_budget_and_ends_at_nothing() -> None:
    clock = SimulatedClock()
    cell = workload(512)
    progress = Progress(Budget(12, clock, reserve_s=2), {cell: CellNeed(500)})
    assert progress.remaining_s() == pytest.approx(12)
    clock.advance(10)
    progress.finish(cell, 10)
    assert progress.remaining_s() == pytest.approx(2)
    assert 0.8 < progress.fraction() < 1


def test_efforts_are_ordered_and_frozen() -> None:
    assert [EFFORTS[name].budget_s for name in ("quick", "standard", "full")] == sorted(
        preset.budget_s for preset in EFFORTS.values()
    )
    assert EFFORTS["quick"].budget_s <= 60
    assert EFFORTS["standard"].budget_s <= 180
    assert all(preset.ragged_lengths == 8 for preset in EFFORTS.values())
    assert EFFORTS["quick"].with_budget(17.0).budget_s == 17.0
    assert EFFORTS["quick"].with_budget(None) is EFFORTS["quick"]
    with pytest.raises(AttributeError):
        EFFORTS["quick"].budget_s = 1  # type: ignore[misc]


def test_what_failing_candidates_cost_is_made_up_for_out_of_what_nobody_needs() -> None:
    clock = SimulatedClock()
    budget = Budget(100.0, clock, reserve_s=10.0)
    lost_s = 5.0  # before
    deadline = budget.working_deadline(20.0, lambda: lost_s, spare_s=30.0)
    clock.advance(15.0)
    lost_s += 12.0
    assert deadline.remaining_s() == 17.0
    assert deadline.part(0.5).remaining_s() == 8.5
    lost_s += 100.0  # more than can be spared
    assert deadline.remaining_s() == 35.0
    clock.advance(36.0)
    assert deadline.passed()


def test_made_up_time_never_exceeds_the_budget() -> None:
    clock = SimulatedClock()
    budget = Budget(100.0, clock, reserve_s=10.0)
    deadline = budget.working_deadline(80.0, lambda: clock.now(), spare_s=1000.0)
    clock.advance(90.0)
    assert deadline.passed()
