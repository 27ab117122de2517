"""What may win a search, and what is preferred: limits, compute dtypes, time against memory."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from machines import MIB, Setting, Trial, by_kernels, invented, plan, workload

from autotune.measure.evaluator import Checked, Fault, Proven
from autotune.probe.output.writer import entry_of
from autotune.search.budget import Deadline
from autotune.search.limits import Limits
from autotune.space.space import distance
from ringattn.workload import Pattern, Tunables, Workload

DENSE = workload(pattern=Pattern())
OVER_LIMIT, LIMITS = 100 * MIB, Limits(peak_bytes=20 * MIB)


def lossy(tunables: Tunables) -> float:
    return 1e-2 if tunables.branches[0].forward == "swift" else 1e-3


# --- limits ----------------------------------------------------------------------------------------------------------


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
    assert trial.search.state.entry(plan(DENSE, "swift")).checked is not None
    assert plan(DENSE, "swift") not in trial.result.failures


ALL_OVER_THE_LIMIT = Setting(
    DENSE,
    by_kernels(quick=0.0, swift=-0.2, math=1.0),
    plan(DENSE),
    limits=Limits(peak_bytes=MIB),
    rows={"peak": lambda t: 8 * MIB},
)


def test_when_no_plan_keeps_the_limits_the_refusal_says_how_near_it_got() -> None:
    trial = ALL_OVER_THE_LIMIT.run()
    assert trial.result.state == "refused"
    assert re.fullmatch(
        r"none of \d+ plans keeps the memory limit of 1 MiB "
        r"\(the smallest peak is 8 MiB; give --memory-limit 8 or a shorter --seq-len\)",
        trial.result.note,
    )


def test_plans_for_which_no_time_was_left_may_be_within_a_limit_that_all_others_break() -> None:
    trial = replace(ALL_OVER_THE_LIMIT, budget_s=1.5).run()
    assert trial.result.state == "inconclusive"
    assert "the smallest peak is 8 MiB; give --memory-limit 8 or" in trial.result.note
    assert re.search(r"; no time was left for others: \d+, give a larger --budget$", trial.result.note)
    assert trial.result.choice is None


def test_an_error_limit_that_no_plan_keeps_is_said_beside_that_on_memory() -> None:
    checked = [Checked(1.0, 2e-3, 3 * MIB, 1.0, 1.0), Checked(1.0, 1e-3, 5 * MIB // 2, 1.0, 1.0)]
    assert Limits(peak_bytes=MIB, error=1e-4).missed(checked) == (
        "none of 2 plans keeps the memory limit of 1 MiB (the smallest peak is 3 MiB; give --memory-limit 3 or a "
        "shorter --seq-len) and the error limit of 1.0e-04 (the smallest error is 1.0e-03; give a larger --max-error "
        "or a wider --precision)"
    )


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


# --- dtypes ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kernels", [("swift",), ("quick", "swift", "math")])
def test_a_narrower_dtype_that_is_far_slower_is_looked_at_and_not_timed_in_pairs(kernels: tuple[str, ...]) -> None:
    slower_by = math.log(8.0)
    trial = Setting(
        DENSE, lambda _, t: slower_by if t.dtype == "bf16" else 0.0, plan(DENSE, "swift", "swift", dtype="fp32"),
        invented(kernels), dtypes=("fp32", "bf16"), main_dtypes=("fp32",),
    ).run()  # fmt: skip
    narrow = [entry for plan, entry in trial.search.state.entries.items() if plan.dtype == "bf16"]
    assert narrow
    assert not any(entry.log_ratios for entry in narrow)
    assert trial.result.auto is None


def test_a_dtype_that_is_far_slower_is_tried_once() -> None:
    truth = lambda _, t: 2.0 if t.dtype == "fp32" else by_kernels(quick=0.0, swift=0.1, math=3.0)(_, t)  # noqa: E731
    trial = Setting(DENSE, truth, plan(DENSE), dtypes=("bf16", "fp32"), main_dtypes=("bf16", "fp32")).run()
    wide = [known for known in trial.search.state.entries if known.dtype == "fp32"]
    assert len(wide) == 1


def test_a_wider_dtype_may_win() -> None:
    truth = lambda _, t: -0.3 if t.dtype == "fp32" else 0.0  # noqa: E731
    dtypes = ("bf16", "fp32")
    trial = Setting(DENSE, truth, plan(DENSE), dtypes=dtypes, main_dtypes=dtypes).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables.dtype == "fp32"


# --- time against memory ---------------------------------------------------------------------------------------------


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


LEAN_MATH = by_kernels(quick=0.0, swift=-0.1, math=1.0)


def with_lean_math(unproven: dict[Tunables, Fault], budget_s: float = 6.0, seed: int = 0) -> Trial:
    """A search after which a backward by math, of seven times the time and half the memory, balances nothing."""

    def peak(tunables: Tunables) -> int:
        return (50 if tunables.branches[0].backward == "math" else 100) * MIB + (tunables.branches[0].forward == "math")

    return Setting(DENSE, LEAN_MATH, plan(DENSE), rows={"peak": peak}, budget_s=budget_s, unproven=unproven).run(seed)


@pytest.mark.parametrize("budget_s", [4.0, 6.0, 9.0])
def test_the_leanest_plan_of_a_training_cell_is_kept_however_slow(budget_s: float) -> None:
    """The search lets it go after one call; ``prefer="memory"`` had the choice alone then."""
    for seed in range(3):
        trial = with_lean_math({}, budget_s, seed)
        assert min(m.checked.peak_bytes for m in (trial.result.choice, *trial.result.front) if m) >= 100 * MIB
        result = trial.search.with_leanest(trial.result, Deadline(trial.clock, trial.clock.now() + 60))
        assert result is not None
        assert (result.choice, result.front[:-1]) == (trial.result.choice, trial.result.front)
        leanest = result.front[-1]
        assert leanest.checked.peak_bytes <= 50 * MIB + 1
        assert leanest.gain.count >= 2
        assert isinstance(trial.search.state.entry(leanest.tunables).validated, Proven)
        noted = trial.search.study.noted_result()
        assert noted is not None
        assert len(noted.front) == len(result.front)
        assert leanest.tunables in {choice.tunables for choice in entry_of(result).front}
        assert trial.search.with_leanest(result, Deadline(trial.clock, trial.clock.now() + 60)) is None


def test_the_leanest_plan_is_let_go_where_there_is_no_time_or_it_is_wrong() -> None:
    trial = with_lean_math({})
    assert trial.search.with_leanest(trial.result, Deadline(trial.clock, trial.clock.now())) is None
    lean = [
        entry.tunables for entry in trial.search.state.entries.values() if entry.tunables.branches[0].backward == "math"
    ]
    trial = with_lean_math({tunables: Fault("inaccurate", "dq is wrong") for tunables in lean})
    found = trial.search.with_leanest(trial.result, Deadline(trial.clock, trial.clock.now() + 60))
    assert found is None or not {m.tunables for m in found.front} & set(lean)


def test_a_front_without_the_choice_is_written() -> None:
    result = with_lean_math({}).result
    assert result.choice is not None
    lean = replace(result.choice, tunables=plan(DENSE, "math"))
    assert [choice.tunables for choice in entry_of(replace(result, front=(lean,))).front] == [lean.tunables]
    assert entry_of(replace(result, front=(result.choice,))).front == ()
