"""The one constraint function, and the plans that come of it: pure, so invented machines are as good as real ones."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_samples import A100, EPYC, H100, gpu
from oracle import DENSE, Case, cases, pattern_of, tunables_for

from ringattn.errors import KernelReason, PlanError
from ringattn.geometry.calls import LayoutKey, build_geometry
from ringattn.hardware.facts import HardwareFacts
from ringattn.kernels.registry import KERNELS
from ringattn.planning.heuristic import Wishes, heuristic_tunables
from ringattn.planning.launches import forward_gflop, launches
from ringattn.planning.plan import Conditions, build_plan, fuses, kernel_need, rejection_reasons
from ringattn.profile.resolve import built_in_heuristic
from ringattn.profile.schema import KernelLists, LaunchBound, Policy
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload, describe

V100 = gpu("Tesla V100-SXM2-32GB", (7, 0), 80, 32)
P40 = gpu("Tesla P40", (6, 1), 30, 24)
H100_TRITON = replace(H100, packages=("triton",))
H100_ALL = replace(H100, packages=("triton", "flash_attn", "flash_attn_interface", "flash_attn.cute", "xformers"))

TWO = pattern_of([1024, 4096], [1, 4])


def asked(pattern: Pattern = DENSE, mode: Any = "train", dtype: str = "bf16", **changes: Any) -> Workload:
    plain = Workload(mode, True, 8192, 16, 128, dtype, pattern=pattern)
    return replace(plain, **changes)


def chosen(*kernels: str, dtype: str = "bf16", gathers: tuple[str, ...] = (), **changes: Any) -> Tunables:
    """Each kernel "name" or "forward+backward" or "forward+" (no backward)."""
    branches = []
    for number, name in enumerate(kernels):
        forward, plus, backward = name.partition("+")
        branches.append(BranchTunables(forward, backward if plus else forward, gathers[number] if gathers else "view"))
    return Tunables(dtype, tuple(branches), **changes)


TILE = KERNELS["flash-attn-4"].params(kernel_need(asked(), 0, "bf16", arch="sm_90", vendor="nvidia"))["forward_tile"][1]

RUNS = [
    (asked(), chosen("cudnn"), H100),
    (asked(), chosen("flash+cudnn"), H100),
    (asked(mode="infer"), chosen("cudnn+"), H100),
    (asked(TWO), chosen("cudnn", "flash", gathers=("view", "copy")), A100),
    (asked(TWO), chosen("cudnn", "flash", gathers=("view", "copy"), checkpoint="none"), A100),
    (asked(TWO), chosen("cudnn", "flash", checkpoint="full", window_tokens=4096), A100),
    (asked(TWO), chosen("cudnn", "flash", pool_threshold_mib=1, pool_strategy="bucket", pattern_cache=False), A100),
    (asked(), chosen("flash", checkpoint="offload"), A100),
    (asked(dtype="fp32"), chosen("efficient", dtype="fp32"), P40),
    (asked(dtype="fp32"), chosen("flash", dtype="bf16"), A100),  # narrower is for whoever asks for it
    (asked(dtype="fp16"), chosen("efficient", dtype="fp32"), V100),
    (asked(dtype="fp64"), chosen("math", dtype="fp64"), EPYC),
    (asked(dtype="fp32"), chosen("flash-cpu+math", dtype="fp32"), EPYC),
    (asked(TWO, dtype="fp32"), chosen("flash-cpu", "math", dtype="fp32", compile=True), EPYC),
    (asked(TWO), chosen("cudnn", "cudnn", params=(("merge.block", 32),)), H100_TRITON),
    (asked(), chosen("flash-attn-4", params=(("flash-attn-4.forward_tile", TILE),)), H100_ALL),
]


@pytest.mark.parametrize(("workload", "tunables", "facts"), RUNS, ids=lambda x: str(x)[:60])
def test_plans_that_run(workload: Workload, tunables: Tunables, facts: HardwareFacts) -> None:
    assert rejection_reasons(workload, tunables, facts) == ()
    plan = build_plan(workload, tunables, facts)
    assert (plan.workload, plan.tunables) == (workload, tunables)


FUSED_UNTIL_DENSE = "parameter merge.block: a dense plan has no steps between kernels"

REJECTED = [
    # the shape of the plan
    (asked(TWO), chosen("cudnn"), H100, "has 1 branch, the pattern [1024,4096]/[1,4] has 2"),
    (asked(), chosen("cudnn", "cudnn"), H100, "has 2 branches, the pattern dense has 1"),
    # kernels
    (asked(), chosen("flash3"), H100, "branch 0 forward flash3: unknown kernel; use one of cudnn, flash, "),
    (asked(), chosen("cudnn+nothing"), H100, "branch 0 backward nothing: unknown kernel"),
    (asked(), chosen("flash-cpu"), H100, "branch 0 forward flash-cpu: runs on CPUs only"),
    (asked(dtype="fp32"), chosen("flash-cpu+cudnn", dtype="fp32"), EPYC, "branch 0 backward cudnn: runs on NVIDIA"),
    (asked(TWO), chosen("cudnn", "flash-cpu"), H100, "branch 1 forward flash-cpu: runs on CPUs only"),
    (asked(head_dim=264), chosen("cudnn"), H100, "branch 0 forward cudnn: head_dim 264; it needs a multiple of 8"),
    (asked(), chosen("flash-attn-2"), H100, "branch 0 forward flash-attn-2: the package flash_attn is not installed"),
    (asked(), chosen("flash"), V100, "branch 0 forward flash: needs sm_80 or newer, this is sm_70"),
    (asked(head_dim=160), chosen("flash"), A100, "branch 0 backward flash: its backward reads out of bounds"),
    (asked(causal=False, seq_len=4160), chosen("cudnn"), H100, "branch 0 backward cudnn: dq can be NaN on sm_90"),
    # mode
    (asked(), chosen("cudnn+"), H100, "branch 0: has no backward kernel, and this is train"),
    (asked(mode="infer"), chosen("cudnn"), H100, "branch 0: a backward kernel is for training alone, this is infer"),
    # dtype
    (asked(dtype="fp64"), chosen("math", dtype="fp32"), EPYC, "computes in fp32, but float64 inputs, and only they"),
    (asked(dtype="fp32"), chosen("math", dtype="fp64"), EPYC, "computes in fp64, but float64 inputs, and only they"),
    (asked(dtype="bf16"), chosen("efficient", dtype="tf32"), H100, "tf32 is for fp32 inputs, not bf16"),
    (asked(dtype="fp32"), chosen("math", dtype="tf32"), EPYC, "branch 0 forward math: its matrix products take TF32"),
    # what would change nothing
    (asked(TWO), chosen("cudnn", "cudnn", gathers=("copy", "view")), H100, "branch 0: rate 1 has nothing to gather"),
    (asked(), chosen("cudnn", checkpoint="none"), H100, "checkpoint none keeps gathered rows, and no branch gathers"),
    (asked(mode="infer"), chosen("cudnn+", checkpoint="full"), H100, "checkpoint full matters in training alone"),
    (asked(dtype="fp32"), chosen("math", dtype="fp32", checkpoint="offload"), EPYC, "checkpoint offload moves tensors"),
    (asked(TWO), chosen("cudnn", "cudnn", window_tokens=8192), H100, "window_tokens 8192 is no shorter than the seq"),
    (asked(TWO), chosen("cudnn", "cudnn", window_tokens=2048), H100, "window_tokens 2048 is not a multiple of every"),
    (asked(), chosen("cudnn", window_tokens=2048), H100, "window_tokens 2048 is not a multiple of every segment"),
    (asked(TWO), chosen("cudnn", "cudnn", pool_strategy="bucket"), H100, "pool_strategy is of a pool alone"),
    (asked(), chosen("cudnn", pool_threshold_mib=1), H100, "pool_threshold_mib: a dense plan has no workspace"),
    (asked(), chosen("cudnn", pattern_cache=False), H100, "pattern_cache off: a dense plan has no pattern"),
    (asked(dtype="fp32"), chosen("math", dtype="fp32", compile=True), EPYC, "compile: a dense plan has no steps"),
    (asked(TWO), chosen("cudnn", "cudnn", compile=True), H100_TRITON, "compile: the steps between kernels are fused"),
    # parameters
    (asked(), chosen("cudnn", params=(("flash.x", 1),)), H100, "parameter flash.x: no branch runs the kernel it belo"),
    (asked(), chosen("cudnn", params=(("cudnn.x", 1),)), H100, "parameter cudnn.x: cudnn has no such parameter here"),
    (asked(), chosen("cudnn", params=(("nodot", 1),)), H100, "parameter nodot: no branch runs the kernel it belongs"),
    (
        asked(),
        chosen("flash-attn-4", params=(("flash-attn-4.forward_tile", "7x7"),)),
        H100_ALL,
        "flash-attn-4.forward_tile='7x7': use one of ",
    ),
    (asked(TWO), chosen("cudnn", "cudnn", params=(("merge.block", 32),)), H100, "parameter merge.block: the steps"),
    (asked(), chosen("cudnn", params=(("merge.block", 32),)), H100_TRITON, FUSED_UNTIL_DENSE),
    (
        asked(TWO),
        chosen("cudnn", "cudnn", params=(("merge.x", 32),)),
        H100_TRITON,
        "parameter merge.x: no step",
    ),
    (asked(TWO), chosen("cudnn", "cudnn", params=(("merge.block", 33),)), H100_TRITON, "merge.block=33: use one"),
]


@pytest.mark.parametrize(("workload", "tunables", "facts", "reason"), REJECTED, ids=[r[3][:60] for r in REJECTED])
def test_plans_that_do_not(workload: Workload, tunables: Tunables, facts: HardwareFacts, reason: str) -> None:
    reasons = rejection_reasons(workload, tunables, facts)
    assert any(text.startswith(reason) for text in reasons), reasons
    assert all("\n" not in text for text in reasons)
    with pytest.raises(PlanError, match="cannot run") as raised:
        build_plan(workload, tunables, facts)
    assert raised.value.rejected == {describe(tunables): reasons}
    assert reason in str(raised.value)


def test_every_reason_is_given_at_once_and_once() -> None:
    tunables = chosen("flash-cpu", "flash-cpu", gathers=("copy", "view"), window_tokens=9000, pool_strategy="bucket")
    reasons = rejection_reasons(asked(TWO), tunables, H100)
    assert len(reasons) == len(set(reasons))
    for start in ("window_tokens 9000 is not", "window_tokens 9000 is no", "pool_strategy", "branch 0: rate 1"):
        assert any(text.startswith(start) for text in reasons)
    for number in (0, 1):
        for direction in ("forward", "backward"):
            assert f"branch {number} {direction} flash-cpu: runs on CPUs only" in reasons
    kernels = [reason for reason in reasons if isinstance(reason, KernelReason)]
    assert {(reason.kernel, reason.why) for reason in kernels} >= {("flash-cpu", "runs on CPUs only")}
    assert pickle.loads(pickle.dumps(kernels)) == kernels  # noqa: S301
    assert [vars(each) for each in copy.deepcopy(kernels)] == [vars(each) for each in kernels]


def test_a_deterministic_torch_refuses_backwards_that_are_not() -> None:
    deterministic = Conditions(deterministic=True)
    (reason,) = rejection_reasons(asked(), chosen("cudnn"), H100, conditions=deterministic)
    assert reason.startswith("branch 0 backward cudnn: its backward is not deterministic")
    assert rejection_reasons(asked(mode="infer"), chosen("cudnn+"), H100, conditions=deterministic) == ()
    assert rejection_reasons(asked(), chosen("cudnn+math"), H100, conditions=deterministic) == ()


@pytest.mark.parametrize("knob", ["schedule", "layout"])
def test_what_is_for_several_ranks_is_refused_on_one(knob: str) -> None:
    value = {"schedule": "ring", "layout": "zigzag"}[knob]
    reasons = rejection_reasons(asked(), chosen("cudnn", **{knob: value}), H100)
    assert len(reasons) == 1
    assert "is for a sequence over several ranks" in reasons[0]


# --- what a branch asks of its kernel ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "branch", "gather", "window", "rows", "blocks", "apart"),
    [
        (DENSE, 0, "view", None, 8192, 2, 1),
        (pattern_of([1024], [1]), 0, "view", None, 1024, 16, 1),
        (pattern_of([1024], [4]), 0, "view", None, 256, 16, 4),
        (pattern_of([1024], [4]), 0, "copy", None, 256, 16, 1),
        (pattern_of([1024], [1000]), 0, "copy", None, 2, 16, 1),
        (pattern_of([1 << 20], [2]), 0, "view", None, 4096, 2, 2),
        (pattern_of([1024, 2048], [1, 2]), 1, "view", 2048, 1024, 2, 2),
        (pattern_of([1024, 2048], [1, 2]), 0, "view", 2048, 1024, 4, 1),
        (pattern_of([3000], [1]), 0, "view", None, 3000, 4, 1),
    ],
)
def test_needs_are_those_of_the_largest_call(
    pattern: Pattern, branch: int, gather: str, window: int | None, rows: int, blocks: int, apart: int
) -> None:
    need = kernel_need(
        asked(pattern, batch=2),
        branch,
        "bf16",
        arch="sm_90",
        vendor="nvidia",
        gather=gather,
        window_tokens=window,
        backward=True,
    )
    assert (need.rows, need.blocks, need.row_elements) == (rows, blocks, apart * 16 * 128)
    assert (need.heads, need.kv_heads, need.head_dim, need.causal, need.backward) == (16, 16, 128, True, True)


@pytest.mark.parametrize(("kernel", "reads"), [("flash", False), ("efficient", False), ("cudnn", True)])
def test_rows_too_far_apart_for_a_tile_are_copied_or_left(kernel: str, reads: bool) -> None:
    """16 heads of 128 at rate 8192: rows 2^24 elements apart, found on an H100 (see ``far_rows_faults``)."""
    far, near = (pattern_of([1 << 20], [rate]) for rate in (8192, 8191))
    reasons = rejection_reasons(asked(far, seq_len=1 << 20), chosen(kernel), H100)
    assert (reasons == ()) == reads
    assert all("rows lie 16777216 elements apart" in reason for reason in reasons)
    assert rejection_reasons(asked(near, seq_len=1 << 20), chosen(kernel), H100) == ()
    assert rejection_reasons(asked(far, seq_len=1 << 20), chosen(kernel, gathers=("copy",)), H100) == ()


@given(cases(longest=60))
def test_no_call_is_larger_than_what_was_asked(case: Any) -> None:
    gathers = tuple("copy" if branch.rate > 1 else "view" for branch in case.pattern.resolved(case.length))
    sizes = (case.batch, case.length, case.heads, case.kv_heads)
    geometry = build_geometry(LayoutKey(case.pattern, gathers, None, *sizes, True))
    for placed in geometry.windows[0].calls:
        need = kernel_need(case.workload(), placed.branch, "fp64", arch="", vendor="cpu", gather="copy")
        assert placed.call.rows <= need.rows
        assert placed.call.batch * placed.call.segments <= need.blocks


# --- heuristics ----------------------------------------------------------------------------------------------------


def policy(*kernels: str, copy_from_rate: int = 4, bf16: str = "bf16") -> Policy:
    dtypes = (("bf16", bf16), ("fp16", "fp16"), ("fp32", "fp32"), ("fp64", "fp64"))
    return Policy(dtypes, (*kernels, "math"), (*kernels, "math"), copy_from_rate)


def test_the_first_kernel_that_can_is_taken_branch_by_branch() -> None:
    # not causal, 4160 rows are 64 beyond a multiple of 128, which cudnn's backward cannot on sm_90
    workload = asked(pattern_of([4160, 8192], [1, 4]), causal=False)
    tunables = heuristic_tunables(workload, policy("cudnn", "flash"), H100)
    assert tunables.branches == (BranchTunables("cudnn", "flash", "view"), BranchTunables("cudnn", "cudnn", "copy"))
    assert tunables.dtype == "bf16"


def test_the_heuristic_obeys_the_policy_s_dtype_and_gather() -> None:
    tunables = heuristic_tunables(
        asked(pattern_of([64, 64], [3, 4]), mode="infer"), policy("efficient", bf16="fp32", copy_from_rate=4), V100
    )
    assert tunables.dtype == "fp32"
    assert [branch.gather for branch in tunables.branches] == ["view", "copy"]
    assert [branch.backward for branch in tunables.branches] == ["", ""]


def test_little_work_a_launch_runs_as_the_policy_says_for_it() -> None:
    """1024 positions of 16 heads x 128 are 4.3 GFLOP, 4096 are 68.7."""
    few = LaunchBound(8.0, ("flash", "math"), ("efficient", "math"))
    bound = replace(policy("cudnn", copy_from_rate=64), launch_bound=few)

    def plan(pattern: Pattern, seq_len: int, mode: str = "train", **more: Any) -> list[tuple[str, str, str]]:
        tunables = heuristic_tunables(asked(pattern, seq_len=seq_len, mode=mode, **more), bound, H100)
        return [(b.forward, b.backward, b.gather) for b in tunables.branches]

    assert plan(DENSE, 1024) == [("flash", "efficient", "view")]
    assert plan(DENSE, 1024, "infer") == [("cudnn", "", "view")]  # a call of torch's own function
    assert plan(DENSE, 1024, batch=2) == [("cudnn", "cudnn", "view")]
    assert plan(DENSE, 4096) == [("cudnn", "cudnn", "view")]
    assert plan(DENSE, 1024, dtype="fp64") == [("math", "math", "view")]
    # Copies save launches of a training step; what is left of them may be large enough.
    dilated = pattern_of([2048, 4096], [1, 16])
    assert plan(dilated, 1024) == [("flash", "efficient", "view"), ("flash", "efficient", "copy")]
    assert plan(dilated, 1024, "infer") == [("flash", "", "view"), ("flash", "", "view")]
    assert plan(dilated, 4096) == [("cudnn", "cudnn", "view"), ("flash", "efficient", "view")]


def test_documents_side_by_side_run_as_the_policy_says_for_them() -> None:
    lists = KernelLists(("flash-attn-4", "cudnn", "math"), ("flash-attn-4", "flash", "math"))
    few = LaunchBound(8.0, ("flash", "math"), ("efficient", "math"))
    given = replace(policy("cudnn"), packed=lists, launch_bound=few)

    def plan(facts: HardwareFacts = H100_ALL, **more: Any) -> tuple[str, str, str]:
        workload = asked(DENSE, **{"seq_len": 9000, "batch": 32, "packed_tokens": 65536, **more})
        tunables = heuristic_tunables(workload, given, facts)
        return tunables.branches[0].forward, tunables.branches[0].backward, tunables.packing

    assert plan() == ("flash-attn-4", "flash-attn-4", "varlen")
    assert plan(H100) == ("cudnn", "flash", "documents")  # where flash-attn-4 is not installed
    assert plan(dtype="fp64") == ("math", "math", "documents")
    assert plan(mode="infer") == ("flash-attn-4", "", "varlen")
    assert plan(batch=8, seq_len=256, packed_tokens=2000) == ("flash", "efficient", "documents")  # 2 GFLOP
    assert heuristic_tunables(asked(DENSE), given, H100_ALL).branches[0].forward == "cudnn"


@pytest.mark.parametrize(
    ("segments", "rates", "kv_heads", "causal"),
    [([64, 96], [1, 4], 4, True), ([96], [3], 2, False), ([32, 256], [2, 8], 4, True)],
)
def test_the_work_of_a_branch_is_what_its_calls_do(
    segments: list[int], rates: list[int], kv_heads: int, causal: bool
) -> None:
    """Whole segments and rates that divide them: then rows are not rounded."""
    length = 4 * math.lcm(*segments, *rates)
    case = Case(length, 4, kv_heads, pattern=pattern_of(segments, rates), causal=causal)
    for gather in ("view", "copy"):
        gathers = ("view" if rate == 1 else gather for rate in rates)
        geometry = build_geometry(
            LayoutKey(case.pattern, tuple(gathers), None, case.batch, length, case.heads, kv_heads, True)
        )
        for branch in range(len(rates)):
            calls = [placed.call for placed in geometry.windows[0].calls if placed.branch == branch]
            group = case.heads // kv_heads
            pairs = sum(c.batch * c.segments * c.kv_heads * group * c.rows**2 for c in calls)
            gflop = 4e-9 * case.workload().head_dim * pairs * (0.5 if causal else 1.0)
            assert forward_gflop(case.workload(), branch) == pytest.approx(gflop, rel=0.1)
            assert launches(case.workload(), branch, gather if rates[branch] > 1 else "view") == len(calls)


def test_float64_runs_on_math_whatever_the_policy() -> None:
    assert heuristic_tunables(asked(dtype="fp64"), policy("flash"), H100).branches[0].forward == "math"


def test_the_heuristic_goes_window_by_window_where_the_pattern_nests_and_the_sequence_is_long() -> None:
    def window(segments: list[int], length: int, mode: str = "train") -> int | None:
        workload = asked(pattern_of(segments, [1] * len(segments)), seq_len=length, mode=mode)
        return heuristic_tunables(workload, policy("flash"), A100).window_tokens

    assert window([2048, 32768], 1 << 20) == 65536
    assert window([2048, 32768], 65536) is None
    assert window([2048, 3000], 1 << 20) is None
    assert window([1 << 18], 1 << 20) == 1 << 18  # one segment at least
    assert window([2048, 32768], 1 << 20, "infer") == 1 << 18  # a forward needs a third of the workspace
    assert window([2048, 32768], 1 << 18, "infer") is None
    assert heuristic_tunables(asked(seq_len=1 << 20), policy("flash"), A100).window_tokens is None


def test_where_nothing_can_every_candidate_is_named_with_its_reasons() -> None:
    wishes = Wishes(forward="flash")
    with pytest.raises(PlanError, match=r"no kernel can run .*, branch 0 forward: flash: needs sm_80") as raised:
        heuristic_tunables(asked(), policy("efficient"), V100, wishes=wishes)
    assert list(raised.value.rejected) == ["flash"]
    with pytest.raises(PlanError) as raised:
        heuristic_tunables(asked(dtype="fp32"), policy("cudnn", "flash"), EPYC, wishes=Wishes(dtype="tf32"))
    assert list(raised.value.rejected) == ["cudnn", "flash", "math"]


def test_work_grows_no_faster_than_the_number_of_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a pattern is as long as its branches are many: made once a branch, it made 5,000 take seconds."""
    written = 0

    def text(workload: Workload) -> str:
        nonlocal written
        written += 1
        return "a workload"

    monkeypatch.setattr(Workload, "__str__", text)
    for count in (1, 50):
        heuristic_tunables(asked(pattern_of([1024] * count, [2] * count)), policy("flash"), A100)
    assert written == 0


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        (Wishes(), ("cudnn", "cudnn", "bf16", "selective")),
        (Wishes(forward="flash"), ("flash", "cudnn", "bf16", "selective")),
        (Wishes(backward="math"), ("cudnn", "math", "bf16", "selective")),
        (Wishes(dtype="fp16"), ("cudnn", "cudnn", "fp16", "selective")),
        (Wishes(dtype="fp32"), ("math", "math", "fp32", "selective")),
        (Wishes(checkpoint="full"), ("cudnn", "cudnn", "bf16", "full")),
    ],
)
def test_wishes_come_first(wishes: Wishes, expected: tuple[str, ...]) -> None:
    tunables = heuristic_tunables(asked(), policy("cudnn"), H100, wishes=wishes)
    (branch,) = tunables.branches
    assert (branch.forward, branch.backward, tunables.dtype, tunables.checkpoint) == expected


def test_a_checkpoint_is_a_wish_about_training() -> None:
    tunables = heuristic_tunables(asked(mode="infer"), policy("cudnn"), H100, wishes=Wishes(checkpoint="full"))
    assert tunables.checkpoint == "selective"
    with pytest.raises(PlanError, match="checkpoint none keeps gathered rows, and no branch gathers"):
        heuristic_tunables(asked(), policy("cudnn"), H100, wishes=Wishes(checkpoint="none"))


@given(cases(longest=60), st.sampled_from(("fp32", "bf16", "fp16", "fp64")), st.sampled_from(("train", "infer")))
def test_the_heuristic_of_a_cpu_always_has_a_plan(case: Any, dtype: str, mode: Any) -> None:
    workload = case.workload(dtype, mode)
    tunables = heuristic_tunables(workload, built_in_heuristic("cpu").policy, EPYC)  # type: ignore[arg-type]
    assert rejection_reasons(workload, tunables, EPYC) == ()


@given(st.data())
def test_the_plans_of_these_tests_pass_the_constraint_function(data: st.DataObject) -> None:
    case = data.draw(cases())
    tunables = data.draw(tunables_for(case, "fp32", ("math", "flash-cpu")))
    assert rejection_reasons(case.workload("fp32"), tunables, EPYC) == ()


# --- printing ------------------------------------------------------------------------------------------------------


def test_a_plan_prints_what_is_not_at_its_default() -> None:
    plan = build_plan(asked(), chosen("cudnn"), H100)
    assert str(plan) == "train dense causal B1 S8192 H16 D128 bf16: cudnn/cudnn bf16"
    tunables = chosen(
        "cudnn+flash",
        "math",
        gathers=("view", "copy"),
        checkpoint="none",
        window_tokens=4096,
        pattern_cache=False,
        pool_threshold_mib=16,
        pool_strategy="bucket",
        compile=True,
        params=(("a.b", 1),),
    )
    assert describe(tunables) == (
        "cudnn/flash,math/math bf16 gather=v,c checkpoint=none window=4096 no-pattern-cache pool>=16MiB/bucket "
        "compile a.b=1"
    )
    assert describe(chosen("math", "math")) == "math/math bf16"  # equal branches once


def test_fused_steps_need_triton_a_gpu_that_has_it_and_no_float64() -> None:
    assert fuses(H100_TRITON, "bf16")
    assert not fuses(H100, "bf16")
    assert not fuses(H100_TRITON, "fp64")
    assert not fuses(replace(P40, packages=("triton",)), "fp32")
    assert not fuses(replace(EPYC, packages=("triton",)), "fp32")
    assert build_plan(asked(TWO), chosen("cudnn", "cudnn"), H100_TRITON).fused
    assert not build_plan(asked(TWO), chosen("cudnn", "cudnn"), H100).fused
