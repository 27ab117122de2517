"""The search on invented machines: the right winner, the default kept, whatever goes wrong on the way."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import MIB, Setting, by_kernels, far_from, invented, plan, workload

from autotune.budget import Deadline
from autotune.choose import Candidate, NothingAllowed, choose, distance, pareto_front
from autotune.climb import Climb
from autotune.evaluator import Block, Checked, Fault
from autotune.head_start import judged_ms
from autotune.limits import Limits
from autotune.model import CellModel
from autotune.nearby import Nearby, Timed
from autotune.replay import ReplayEvaluator, Trouble
from autotune.statistics import Interval
from autotune.store import Entry, Store
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload

CELL = workload()
DENSE = workload(pattern=Pattern())
QUICK = plan(CELL)
NOISE = Trouble()  # lognormal 3 %, 5 % outliers of +20-100 %, 5 % drift


def branches(*triples: tuple[str, str, str]) -> tuple[BranchTunables, ...]:
    return tuple(BranchTunables(*triple) for triple in triples)


TARGET = Tunables(
    "bf16",
    branches(("swift", "quick", "view"), ("swift", "quick", "copy"), ("swift", "quick", "view")),
    checkpoint="none",
    pool_threshold_mib=16,
)


def lossy(tunables: Tunables) -> float:
    return 1e-2 if tunables.branches[0].forward == "swift" else 1e-3


# --- the winner ------------------------------------------------------------------------------------------------------


def test_without_noise_the_top_of_one_hill_is_found() -> None:
    trial = Setting(CELL, far_from(CELL, TARGET), QUICK, budget_s=30).run()
    assert trial.result.state == "tuned"
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == TARGET
    assert trial.result.choice.gain.ratio == pytest.approx(math.exp(-0.08 * distance(CELL, QUICK, TARGET)))


@pytest.mark.parametrize("seed", range(6))
def test_with_noise_most_of_the_hill_is_climbed_and_never_below_the_default(seed: int) -> None:
    truth = far_from(CELL, TARGET)
    base = truth(CELL, QUICK)
    trial = Setting(CELL, lambda cell, t: truth(cell, t) - base, QUICK, trouble=NOISE, budget_s=12).run(seed)
    assert trial.result.choice is not None
    gained = truth(CELL, trial.result.choice.tunables) - base
    assert gained <= 0.0
    assert gained <= -0.7 * base
    assert trial.clock.now() <= 12 * 1.1


@pytest.mark.parametrize("seed", range(8))
def test_the_default_stays_where_nothing_is_faster(seed: int) -> None:
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=0.004, math=1.0), plan(DENSE), trouble=NOISE).run(seed)
    assert trial.result.state == "default"
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE)


@pytest.mark.parametrize("seed", range(5))
def test_a_gain_below_the_margin_is_no_reason_to_leave_the_default(seed: int) -> None:
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=-0.003, math=1.0), plan(DENSE)).run(seed)
    assert trial.result.state == "default"


def test_forward_and_backward_kernels_are_chosen_apart() -> None:
    def truth(cell: Workload, tunables: Tunables) -> float:
        first = tunables.branches[0]
        return {"quick": 0.2, "swift": 0.0, "math": 1.0}[first.forward] + {"quick": 0.0, "swift": 0.2, "math": 1.0}[
            first.backward
        ]

    trial = Setting(DENSE, truth, plan(DENSE)).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables.branches == branches(("swift", "quick", "view"))


def test_each_branch_gets_its_own_kernel_and_gather() -> None:
    target = replace(
        QUICK, branches=branches(("quick", "quick", "view"), ("swift", "quick", "copy"), ("math", "swift", "copy"))
    )
    trial = Setting(CELL, far_from(CELL, target, per_knob=0.05), QUICK, budget_s=30).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == target


def test_the_same_seed_gives_the_same_result_and_small_spaces_the_same_plan_for_any_seed() -> None:
    setting = Setting(DENSE, by_kernels(quick=0.0, swift=-0.05, math=1.0), plan(DENSE), trouble=NOISE)
    first, again = setting.run(3).result, setting.run(3).result
    assert first.choice == again.choice
    chosen = {setting.run(seed).result.choice.tunables for seed in range(6)}  # type: ignore[union-attr]
    assert chosen == {plan(DENSE, "swift")}


def test_between_equals_the_plan_nearest_to_the_default_wins() -> None:
    """Many plans tie for the best time; two probes must not pick two of them."""
    trial = Setting(CELL, lambda cell, t: -0.1 if t.pool_threshold_mib else 0.0, QUICK, budget_s=20).run()
    assert trial.result.choice is not None
    assert distance(CELL, trial.result.choice.tunables, QUICK) == 1


# --- trouble ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["crash", "oom", "timeout", "wrong", "compile", "error"])
def test_a_failing_candidate_costs_one_trial_and_is_told_apart(kind: str) -> None:
    bad = plan(DENSE, "swift", "quick")
    setting = Setting(
        DENSE,
        by_kernels(quick=0.0, swift=-0.1, math=1.0),
        plan(DENSE),
        rows={"faults": {bad: Fault(kind, "as injected")}},  # type: ignore[arg-type]
    )
    trial = setting.run()
    assert trial.result.failures[bad] == Fault(kind, "as injected")  # type: ignore[arg-type]
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")
    assert trial.clock.now() <= setting.budget_s * 1.1


def test_a_candidate_that_is_wrong_at_ragged_lengths_cannot_win() -> None:
    best = plan(DENSE, "swift")
    trial = Setting(
        DENSE,
        by_kernels(quick=0.0, swift=-0.1, math=1.0),
        plan(DENSE),
        unproven={best: Fault("wrong", "out errs at S=3001, negative inputs, seed 0")},
    ).run()
    result = trial.result
    assert result.choice is not None
    assert result.choice.tunables != best
    assert result.failures[best].message.startswith("out errs at S=3001")
    everywhere = [result.choice, *result.runners_up, *result.front, result.default]
    assert all(measured is None or measured.tunables != best for measured in everywhere)


def test_a_default_that_fails_its_gate_gives_way_to_math() -> None:
    trial = Setting(
        DENSE,
        by_kernels(quick=0.2, swift=-0.5, math=0.0),
        plan(DENSE),
        rows={"faults": {plan(DENSE): Fault("wrong", "dq errs")}},
    ).run()
    assert trial.context.default == plan(DENSE, "math")
    assert "default failed" in trial.result.note
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")


@pytest.mark.parametrize(
    "fault", [Fault("timeout", "no answer within 20.0 s"), Fault("crash", "the worker was killed by SIGKILL")]
)
def test_a_default_that_the_machine_let_down_is_not_judged(fault: Fault) -> None:
    """A busy machine makes anything time out: math, far slower, must not become the plan for that."""
    trial = Setting(
        DENSE,
        by_kernels(quick=0.0, math=2.0),
        plan(DENSE),
        rows={"faults": {plan(DENSE): fault}},
    ).run()
    assert trial.context.default == plan(DENSE)
    assert trial.result.choice is None
    assert fault.message in trial.result.note or "no answer" in trial.result.note


def test_a_default_that_stops_working_gives_way_too() -> None:
    """It passed its check and fails every time it is timed."""

    class Breaking(Setting):
        pass

    setting = Breaking(DENSE, by_kernels(quick=0.0, swift=-0.5, math=0.1), plan(DENSE))
    trial_ok = setting.run()
    rows = trial_ok.evaluator.truth
    checks = 0

    def truth(cell: Workload, tunables: Tunables):  # type: ignore[no-untyped-def]
        nonlocal checks
        row = rows(cell, tunables)
        if tunables == plan(DENSE):
            checks += 1
            if checks > 1:
                return dataclasses.replace(row, fault=Fault("crash", "killed by SIGSEGV"))
        return row

    from autotune.budget import EFFORTS, Budget
    from autotune.cell import CellContext, NoListener, SearchSettings
    from autotune.replay import ReplayEvaluator, SimulatedClock
    from autotune.search import CellSearch

    clock = SimulatedClock()
    context = CellContext(
        trial_ok.space,
        ReplayEvaluator(truth, clock, restart_s=0.5),
        Store(None),
        SearchSettings(EFFORTS["quick"], 0, hang_s=1.0),
        NoListener(),
        clock,
        main_dtypes=("bf16",),
    )
    search = CellSearch(context)
    budget = Budget(30, clock)
    assert search.settle(budget.deadline(30)) is None
    result = search.run(budget.deadline(30))
    assert context.default == plan(DENSE, "math")
    assert result.choice is not None
    assert result.choice.tunables == plan(DENSE, "swift")


def test_when_nothing_runs_the_cell_is_refused_with_the_reason() -> None:
    pairs = itertools.product(("quick", "swift", "math"), repeat=2)
    every = {plan(DENSE, forward, backward): Fault("oom", "out of memory") for forward, backward in pairs}
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=0.0, math=0.0), plan(DENSE), rows={"faults": every}).run()
    assert trial.result.state == "refused"
    assert trial.result.choice is None
    assert "out of memory" in trial.result.note


def test_a_candidate_a_hundred_times_too_slow_does_not_eat_the_budget() -> None:
    truth = by_kernels(quick=0.0, swift=-0.1, math=math.log(100))
    setting = Setting(DENSE, truth, plan(DENSE), rows={"base_ms": 40.0}, budget_s=30)
    trial = setting.run()
    assert trial.clock.now() <= setting.budget_s * 1.1
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")


@pytest.mark.parametrize("seed", range(4))
def test_random_kills_of_the_worker_leave_the_right_winner(seed: int) -> None:
    trial = Setting(
        DENSE,
        by_kernels(quick=0.0, swift=-0.1, math=1.0),
        plan(DENSE),
        trouble=Trouble(crash_share=0.005),
        budget_s=60,
    ).run(seed)
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")


def test_the_best_plan_may_die_in_the_first_block_of_its_climb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be said then of how much faster the turns beside it are."""
    real, best, deaths = ReplayEvaluator.block, plan(CELL, "swift"), 0

    def block(self: ReplayEvaluator, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        nonlocal deaths
        whole = real(self, cell, order, timeout_s=timeout_s)
        if deaths or best not in order or all(timed.pattern_cache for timed in order):
            return whole
        deaths += 1
        killed = Fault("crash", "the worker was killed by signal 9")
        results = zip(order, whole.results, strict=True)
        return Block(tuple(killed if timed == best else sample for timed, sample in results))

    monkeypatch.setattr(ReplayEvaluator, "block", block)
    trial = Setting(CELL, by_kernels(quick=0.0, swift=-0.1, math=1.0), QUICK, budget_s=20).run()
    assert deaths == 1
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == best


@pytest.mark.parametrize("house", ["none", "useless", "failing", "gaining"])
def test_a_climb_turns_housekeeping_with_the_rest_only_where_one_turn_gained(
    house: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a dense cell there is none of it, and nothing is left for a second search to turn."""
    real, searches = Climb._until, []

    def until(self: Climb, deadline: Deadline, wanted: Callable[[CellModel], list[Entry]]) -> None:
        searches.append(wanted.__name__)  # type: ignore[attr-defined]
        real(self, deadline, wanted)

    monkeypatch.setattr(Climb, "_until", until)
    cell = DENSE if house == "none" else CELL
    kept = 0.2 if house == "gaining" else 0.0
    uncached = plan(cell, pattern_cache=house == "none")
    faults = {uncached: Fault("error", "no")} if house == "failing" else {}
    truth = lambda _, t: kept * t.pattern_cache + 0.5 * (kernels_of(t) != {"quick"})  # noqa: E731
    # A dense plan never looks at these knobs.
    machine = invented() if cell is CELL else replace(invented(), identity=lambda _, t: (t.branches, t.checkpoint))
    setting = Setting(cell, truth, plan(cell), machine, rows={"faults": faults}, effort="quick", budget_s=20)
    trial = setting.run()
    first = [] if house in ("none", "gaining") else ["_kernels_and_rivals"]
    assert searches == [*first, "_fresh_and_rivals", "_plainer_and_rivals"]
    assert trial.result.state == ("tuned" if house == "gaining" else "default")


def kernels_of(tunables: Tunables) -> set[str]:
    return {kernel for branch in tunables.branches for kernel in (branch.forward, branch.backward)}


def test_blocks_are_expected_to_take_what_they_took() -> None:
    """1.1 times their samples on this machine, whether or not the default is an entry beside its two readings."""
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=0.01, math=0.02), plan(DENSE)).run()
    assert trial.context.ledger.pace.factor == pytest.approx(1.1, rel=0.01)


@pytest.mark.parametrize("at_s", [1.0, 3.0, 6.0])
def test_a_step_of_the_clock_rate_in_the_middle_changes_nothing(at_s: float) -> None:
    truth = by_kernels(quick=0.0, swift=-0.05, math=1.0)
    trial = Setting(DENSE, truth, plan(DENSE), trouble=Trouble(step=0.2, step_at_s=at_s)).run(1)
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")


def test_disturbed_blocks_are_repeated_and_reported() -> None:
    truth = by_kernels(quick=0.0, swift=-0.1, math=1.0)
    trial = Setting(DENSE, truth, plan(DENSE), trouble=Trouble(disturbed_share=0.1)).run()
    assert trial.context.ledger.discarded > 0
    assert trial.result.disturbances == ("foreign load (replayed)",)
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")


def test_a_machine_that_is_never_left_alone_needs_the_wider_margin_and_says_so() -> None:
    truth = by_kernels(quick=0.0, swift=-0.0075, math=1.0)  # both: 1.5 %
    quiet = Setting(DENSE, truth, plan(DENSE)).run()
    loaded = Setting(DENSE, truth, plan(DENSE), trouble=replace(Trouble(0, 0, drift=0), disturbed_share=1.0)).run()
    assert quiet.result.state == "tuned"
    assert loaded.result.state == "default"
    assert "foreign load" in loaded.result.note


def test_noise_beyond_all_bounds_is_inconclusive_and_keeps_the_default() -> None:
    truth = by_kernels(quick=0.0, swift=-0.1, math=1.0)
    trial = Setting(DENSE, truth, plan(DENSE), trouble=Trouble(sigma=0.6)).run()
    assert trial.result.state == "inconclusive"
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE)
    assert trial.result.choice.gain.count == 0


# --- limits, memory, dtypes ------------------------------------------------------------------------------------------


def test_a_plan_over_the_memory_limit_is_timed_and_does_not_win() -> None:
    trial = Setting(
        DENSE,
        by_kernels(quick=0.0, swift=-0.2, math=1.0),
        plan(DENSE),
        limits=Limits(peak_bytes=10 * MIB),
        rows={"peak": lambda t: (20 if t.branches[0].forward == "swift" else 5) * MIB},
    ).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "quick", "swift")
    assert plan(DENSE, "swift") in trial.context.estimates
    assert plan(DENSE, "swift") not in trial.result.failures


def test_when_no_plan_keeps_the_limits_the_refusal_says_how_near_it_got() -> None:
    trial = Setting(
        DENSE,
        by_kernels(quick=0.0, swift=-0.2, math=1.0),
        plan(DENSE),
        limits=Limits(peak_bytes=MIB),
        rows={"peak": lambda t: 8 * MIB},
    ).run()
    assert trial.result.state == "refused"
    assert "8 MiB" in trial.result.note


def test_an_error_bound_excludes_the_inexact_default_as_well() -> None:
    trial = Setting(
        DENSE,
        by_kernels(quick=0.5, swift=0.0, math=0.7),
        plan(DENSE, "swift"),
        limits=Limits(error=5e-3),
        rows={"error": lossy},
    ).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables.branches[0].forward == "quick"


def test_a_narrower_dtype_competes_for_auto_only() -> None:
    cell = workload(pattern=Pattern(), dtype="fp32")
    trial = Setting(
        cell,
        lambda _, t: -0.5 if t.dtype == "bf16" else 0.0,
        plan(cell, dtype="fp32"),
        dtypes=("fp32", "bf16"),
        main_dtypes=("fp32",),
    ).run()
    result = trial.result
    assert result.state == "default"
    assert result.auto is not None
    assert result.auto.tunables.dtype == "bf16"
    assert result.auto.gain.ratio == pytest.approx(math.exp(-0.5))
    assert all(measured.tunables.dtype == "fp32" for measured in (*result.runners_up, *result.front))


@pytest.mark.parametrize("kernels", [("swift",), ("quick", "swift", "math")])  # brute force, and race with climb
def test_a_narrower_dtype_that_is_far_slower_is_looked_at_and_not_timed_in_pairs(kernels: tuple[str, ...]) -> None:
    slower_by = math.log(8.0)
    trial = Setting(
        DENSE, lambda _, t: slower_by if t.dtype == "bf16" else 0.0, plan(DENSE, "swift", "swift", dtype="fp32"),
        invented(kernels), dtypes=("fp32", "bf16"), main_dtypes=("fp32",),
    ).run()  # fmt: skip
    narrow = {t: gain for t, gain in trial.context.estimates.items() if t.dtype == "bf16"}
    assert all(gain.median == pytest.approx(slower_by) for gain in narrow.values())
    assert {gain.count for gain in narrow.values()} == {1}
    assert trial.result.auto is None


OVER_LIMIT, LIMITS = 100 * MIB, Limits(peak_bytes=20 * MIB)


def test_a_plan_over_the_limits_hides_no_narrower_one() -> None:
    """swift is faster in both dtypes and may not be chosen in either."""
    infer = replace(DENSE, mode="infer")
    times = {("quick", "fp32"): 0.0, ("swift", "fp32"): -0.5, ("quick", "bf16"): -0.25, ("swift", "bf16"): -0.6}

    def truth(cell: Workload, tunables: Tunables) -> float:
        kernel = tunables.branches[0].forward
        frills = distance(cell, tunables, plan(cell, kernel, dtype=tunables.dtype))
        return times[kernel, tunables.dtype] + 0.02 * frills

    trial = Setting(
        infer,
        truth,
        plan(infer, dtype="fp32"),
        invented(("quick", "swift")),
        dtypes=("fp32", "bf16"),
        main_dtypes=("fp32",),
        limits=LIMITS,
        rows={"peak": lambda t: OVER_LIMIT if t.branches[0].forward == "swift" else MIB},
    ).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(infer, dtype="fp32")
    assert trial.result.auto is not None
    assert trial.result.auto.tunables == plan(infer, dtype="bf16")


def test_a_default_over_the_limits_is_no_measure_for_the_plans_within() -> None:
    trial = Setting(
        DENSE, by_kernels(quick=0.0, swift=0.2, math=0.9), plan(DENSE), invented(("quick", "math")), limits=LIMITS,
        rows={"peak": lambda t: OVER_LIMIT if "quick" in (t.branches[0].forward, t.branches[0].backward) else MIB},
        budget_s=20,
    ).run()  # fmt: skip
    assert trial.result.state == "tuned"
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "math")


@pytest.mark.parametrize("ruled_out", ["narrow", "over the limits"])
def test_what_could_not_be_chosen_makes_no_kernel_hopeless_at_the_next_length(ruled_out: str) -> None:
    best, close, far = plan(DENSE), plan(DENSE, "swift"), plan(DENSE, "math")
    fast = plan(DENSE, dtype="fp16") if ruled_out == "narrow" else replace(plan(DENSE, "other"), checkpoint="full")
    estimates = {t: Interval(m, m, m, 4) for t, m in ((best, 0.0), (close, 0.05), (far, 1.5), (fast, -1.5))}
    timed = Timed(DENSE, estimates, **{"narrow" if ruled_out == "narrow" else "ruled_out": frozenset([fast])})
    nearby = Nearby([timed])
    assert list(nearby.left_out(estimates, best)) == [far]
    assert nearby.hopeless_parts(best) == {("forward", "math"), ("backward", "math")}


def test_what_only_its_launches_made_slow_is_not_hopeless_at_the_next_length() -> None:
    """flash-attn-4 took four times flash's time over 1024 positions on an H200, and was left out where it was best."""
    best, launched, slow = plan(DENSE), plan(DENSE, "swift"), plan(DENSE, "math")
    estimates = {t: Interval(m, m, m, 4) for t, m in ((best, 0.0), (launched, 1.5), (slow, 1.5))}
    nearby = Nearby([Timed(DENSE, estimates, launch_bound=frozenset([launched]))])
    assert list(nearby.left_out(estimates, best)) == [slow]
    assert nearby.behind(launched) is None
    assert nearby.hopeless_parts(best) == {("forward", "math"), ("backward", "math")}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_plan_judged_by_its_launches_is_launch_bound(asynchronous: bool) -> None:
    """Where the host does the work itself its time is the call's, and says nothing."""
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=0.1, math=0.9), plan(DENSE), budget_s=20).run()
    context = trial.context
    context.ledger.asynchronous = asynchronous
    for known, result in list(context.ledger.checked.items()):
        if isinstance(result, Checked):
            slower = 1.0 if known == plan(DENSE) else 12.0
            context.ledger.checked[known] = replace(result, host_us=1e4 * result.call_ms * slower)
    bound = context.timed().launch_bound
    assert (plan(DENSE, "swift") in bound) == asynchronous
    assert plan(DENSE) not in bound


@given(st.floats(1e-3, 1e2), st.floats(1.0, 1e5), st.floats(1e-3, 1e2), st.floats(1.0, 1e5), st.floats(0.2, 5.0))
def test_a_call_is_judged_by_the_device_unless_its_host_launches_longer(
    ms: float, host_us: float, default_ms: float, default_host_us: float, slower: float
) -> None:
    judged = judged_ms(ms, host_us, default_ms, default_host_us)
    assert judged >= ms
    assert judged_ms(ms, 0.0, default_ms, default_host_us) <= max(ms, judged)
    assert judged_ms(default_ms, default_host_us, default_ms, default_host_us) == default_ms
    assert judged_ms(ms, default_host_us, ms, default_host_us) == ms
    # A host that is slower with everything, where it is waited for with both, changes nothing.
    if min(host_us, slower * host_us) > 1e3 * ms and min(default_host_us, slower * default_host_us) > 1e3 * default_ms:
        assert judged_ms(ms, slower * host_us, default_ms, slower * default_host_us) == pytest.approx(judged)


def test_a_dtype_that_is_far_slower_is_tried_once() -> None:
    truth = lambda _, t: 2.0 if t.dtype == "fp32" else by_kernels(quick=0.0, swift=0.1, math=3.0)(_, t)  # noqa: E731
    trial = Setting(DENSE, truth, plan(DENSE), dtypes=("bf16", "fp32"), main_dtypes=("bf16", "fp32")).run()
    wide = [known for known in trial.context.ledger.checked if known.dtype == "fp32"]
    assert len(wide) == 1


def test_what_its_launches_make_slow_is_no_measure_at_first_looks() -> None:
    """A fifth of the default's time on the device, and fifty times its host's: judged by which, it is the slowest."""
    launching = lambda tunables: 5e4 if "math" in str(tunables) else 1e3  # noqa: E731
    truth = by_kernels(quick=0.0, swift=-0.1, math=-0.8)
    rows = {"base_ms": 0.5, "host_us": launching}
    trial = Setting(DENSE, truth, plan(DENSE), rows=rows, asynchronous=True).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")
    slow = {p: gain for p, gain in trial.context.estimates.items() if "math" in str(p)}
    assert slow
    assert all(gain.median > 1.0 for gain in slow.values())


def test_a_wider_dtype_may_win() -> None:
    truth = lambda _, t: -0.3 if t.dtype == "fp32" else 0.0  # noqa: E731
    dtypes = ("bf16", "fp32")
    trial = Setting(DENSE, truth, plan(DENSE), dtypes=dtypes, main_dtypes=dtypes).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables.dtype == "fp32"


@pytest.mark.parametrize(("prefer", "checkpoint"), [("time", "selective"), ("memory", "full"), ("balanced", "offload")])
def test_preferences_choose_along_the_front(prefer: str, checkpoint: str) -> None:
    """selective: 1.0 in 100 MiB; offload: 1.1 in 40; full: 1.5 in 36."""
    times = {"selective": 0.0, "offload": math.log(1.1), "full": math.log(1.5), "none": 0.5}
    peaks = {"selective": 100, "offload": 40, "full": 36, "none": 120}
    trial = Setting(
        DENSE,
        lambda _, t: times[t.checkpoint] + (0.6 if t.branches != plan(DENSE).branches else 0.0),
        plan(DENSE),
        prefer=prefer,  # type: ignore[arg-type]
        rows={"peak": lambda t: peaks[t.checkpoint] * MIB},
        budget_s=20,
    ).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables.checkpoint == checkpoint
    front = [(m.tunables.checkpoint, m.checked.peak_bytes // MIB) for m in trial.result.front]
    assert front == [("selective", 100), ("offload", 40), ("full", 36)]


# --- budget, seeds, resume -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_s", [2.0, 5.0, 20.0])
def test_the_budget_of_a_cell_is_kept(budget_s: float) -> None:
    setting = Setting(CELL, far_from(CELL, TARGET), QUICK, trouble=NOISE, budget_s=budget_s)
    for seed in range(3):
        assert setting.run(seed).clock.now() <= 1.1 * budget_s + 0.3


def test_a_finished_cell_is_found_in_the_record_without_asking_the_machine() -> None:
    store = Store(None)
    setting = Setting(CELL, far_from(CELL, TARGET), QUICK, budget_s=20)
    first = setting.run(store=store)
    again = setting.run(store=store)
    assert first.evaluator.calls > 50
    assert again.evaluator.calls == 0
    assert again.result.choice is not None
    assert first.result.choice is not None
    assert again.result.choice.tunables == first.result.choice.tunables
    assert again.result.choice.gain == first.result.choice.gain


def test_kernels_far_slower_at_a_neighbouring_length_are_not_tried_again() -> None:
    truth = by_kernels(quick=0.0, swift=-0.1, math=1.5)
    done = Setting(DENSE, truth, plan(DENSE)).run()
    longer = Setting(DENSE.at(8192), truth, plan(DENSE)).run()
    nearby = Nearby([done.context.timed()])
    left_out = nearby.left_out(longer.space.kernel_plans, longer.space.default)
    assert left_out
    assert all("math" in (t.branches[0].forward, t.branches[0].backward) for t in left_out)
    assert "S=4096" in next(iter(left_out.values()))
    slow = replace(next(iter(left_out)), checkpoint="full")  # whatever else it has
    assert list(nearby.left_out([slow, longer.space.default], longer.space.default)) == [slow]
    assert nearby.hopeless_parts(plan(DENSE)) == {("forward", "math"), ("backward", "math")}
    assert nearby.hopeless_parts(plan(DENSE, "math")) == set()  # the default's stay


# --- the choice itself -----------------------------------------------------------------------------------------------


def interval(centre: float, width: float = 0.005) -> Interval:
    return Interval(centre - width, centre, centre + width, 12)


def candidate(
    tunables: Tunables, centre: float, width: float = 0.005, peak: int = MIB, *, allowed: bool = True
) -> Candidate:
    return Candidate(tunables, interval(centre, width), peak, allowed)


DEFAULT = candidate(QUICK, 0.0, 0.0)


@pytest.mark.parametrize(
    ("centre", "width", "noisy", "leaves"),
    [
        (-0.02, 0.005, False, True),
        (-0.02, 0.012, False, False),  # the interval reaches 0.8 %
        (-0.008, 0.001, False, False),  # surely faster, by too little
        (-0.02, 0.005, True, False),  # a noisy machine needs 2 %
        (-0.03, 0.005, True, True),
        (0.05, 0.001, False, False),
    ],
)
def test_the_default_stays_unless_the_interval_excludes_the_margin(
    centre: float, width: float, noisy: bool, leaves: bool
) -> None:
    other = candidate(plan(CELL, "swift"), centre, width)
    chosen = choose(CELL, DEFAULT, [other], noisy=noisy)
    assert (chosen is other) is leaves


@pytest.mark.parametrize(
    ("behind", "sigma", "kept"),
    [(0.01, 0.03, True), (0.01, 0.002, False), (0.03, 0.03, False), (-0.002, 0.0, True)],
    ids=["noise may hide it", "surely slower", "too far", "the best itself"],
)
def test_what_won_nearby_stays_as_long_as_it_cannot_be_told_from_the_best(
    behind: float, sigma: float, kept: bool
) -> None:
    usual, best = candidate(plan(CELL, "swift"), -0.2 + behind), candidate(plan(CELL, "math", "swift"), -0.2)
    chosen = choose(CELL, DEFAULT, [usual, best], noisy=False, sigma=sigma, usual=[usual.tunables])
    assert (chosen is usual) == kept
    assert choose(CELL, DEFAULT, [best], noisy=False, sigma=sigma, usual=[usual.tunables]) is best


def test_what_is_not_allowed_is_not_chosen() -> None:
    fast = candidate(plan(CELL, "swift"), -0.5, allowed=False)
    slow = candidate(plan(CELL, "math"), 0.3)
    assert choose(CELL, DEFAULT, [fast, slow], noisy=False) is DEFAULT
    banned = replace(DEFAULT, allowed=False)
    assert choose(CELL, banned, [fast, slow], noisy=False) is slow
    with pytest.raises(NothingAllowed):
        choose(CELL, banned, [fast], noisy=False)


@pytest.mark.parametrize("budget_s", [4.0, 9.0])
def test_the_lean_end_of_the_front_is_proven_even_where_time_is_short(budget_s: float) -> None:
    """The final raced until there was time for one proof, the choice's: a profile then held nothing to prefer."""
    cell = workload(8192)

    def truth(cell: Workload, tunables: Tunables) -> float:
        kernels = {name for branch in tunables.branches for name in (branch.forward, branch.backward)}
        frills = [tunables.checkpoint != "selective", tunables.pool_threshold_mib is not None]
        frills += [not tunables.pattern_cache, "copy" in {branch.gather for branch in tunables.branches}]
        return 0.04 * (tunables.window_tokens is not None) + 0.3 * len(kernels - {"swift"}) + 0.1 * sum(frills)

    def peak(tunables: Tunables) -> int:
        return MIB * (100 if tunables.window_tokens is None else 20 + tunables.window_tokens // 256)

    for seed in range(3):
        result = Setting(cell, truth, plan(cell), rows={"peak": peak}, budget_s=budget_s).run(seed).result
        assert result.choice is not None
        assert result.choice.tunables == plan(cell, "swift")
        assert [m.tunables for m in result.front] == [plan(cell, "swift"), plan(cell, "swift", window_tokens=2048)]


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    points = [(0.0, 100), (0.1, 50), (0.2, 60), (0.3, 20), (0.05, 99.9)]
    front = pareto_front([candidate(QUICK, t, peak=round(m * MIB)) for t, m in points])
    assert [(c.gain.median, c.peak_bytes // MIB) for c in front] == [(0.0, 100), (0.1, 50), (0.3, 20)]


# --- compiling -------------------------------------------------------------------------------------------------------


def test_only_a_full_probe_compiles_and_only_its_best_plan() -> None:
    truth = lambda _, t: -0.3 if t.compile else 0.0  # noqa: E731
    for effort, compiled in (("standard", False), ("full", True)):
        trial = Setting(DENSE, truth, plan(DENSE), effort=effort, budget_s=60).run()
        assert trial.result.choice is not None
        assert trial.result.choice.tunables.compile is compiled
        assert sum(tunables.compile for tunables in trial.context.ledger.checked) == int(compiled)


@pytest.mark.parametrize("undecided_s", [0.0, 30.0])
def test_where_noise_hides_a_gain_the_final_takes_time_that_nobody_needs(undecided_s: float) -> None:
    """swift is 11 % faster, and one reading is off by 20 %: with a few blocks nothing can be said."""
    trouble = Trouble(sigma=0.2, outlier_share=0.0, drift=0.0)
    setting = Setting(DENSE, by_kernels(quick=0.0, swift=-0.06, math=2.0), plan(DENSE), budget_s=3.0, trouble=trouble)
    trial = setting.run(undecided_s=undecided_s)
    blocks = len(trial.context.ledger.default_ms)
    assert trial.clock.now() <= 3.3 + undecided_s
    assert (blocks > 40) == (undecided_s > 0), blocks
    assert setting.run(undecided_s=undecided_s, end_s=3.0).clock.now() <= 3.3  # but never beyond the probe's
