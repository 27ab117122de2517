"""``prefer``: which end of a measured front a module runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from machine_samples import EVIDENCE, H100
from oracle import DENSE

from ringattn import Profile, RingAttention, detect
from ringattn.errors import FieldError, InputError
from ringattn.planning.heuristic import Wishes
from ringattn.planning.plan import Origin
from ringattn.planning.preference import Launch, Preference, by_preference
from ringattn.planning.table import ModuleShape, build_table
from ringattn.profile.schema import Choice, Fingerprint, PlanEntry, Policy
from ringattn.workload import BranchTunables, Tunables

POLICY = Policy(
    (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp64", "fp64")), ("efficient", "math"), ("math",), 4
)
MIB = 2**20


def choice(kernel: str, ratio: float, mib: int, high: float | None = None, dtype: str = "bf16") -> Choice:
    high = ratio if high is None else high
    evidence = replace(EVIDENCE, default_ratio=ratio, ratio_low=ratio, ratio_high=high, peak_bytes=mib * MIB)
    return Choice(Tunables(dtype, (BranchTunables(kernel, kernel),)), evidence)


FAST, MIDDLE, LEAN = choice("cudnn", 0.8, 900), choice("flash", 0.9, 500), choice("efficient", 1.5, 400)


@pytest.mark.parametrize(
    ("prefer", "expected"),
    [(None, "flash"), ("time", "cudnn"), ("memory", "efficient"), ("balanced", "flash")],
)
def test_each_end_of_the_front_can_be_asked_for(prefer: Preference | None, expected: str) -> None:
    shape = ModuleShape(16, 16, 128, True, DENSE)
    entry = PlanEntry(shape.workload(1024, "bf16", True), MIDDLE, front=(FAST, MIDDLE, LEAN))
    row = build_table(shape, (entry,), POLICY, H100, prefer=prefer).plan_at(1024, "bf16", True, 1)
    assert row.plan is not None
    assert row.plan.tunables.branches[0].forward == expected
    assert row.origin == Origin("profile")


def test_a_preferred_plan_that_cannot_run_gives_way_to_the_next_best() -> None:
    shape = ModuleShape(16, 16, 128, True, DENSE)
    absent = choice("flash-attn-2", 1.4, 300)
    entry = PlanEntry(shape.workload(1024, "bf16", True), FAST, front=(FAST, MIDDLE, LEAN, absent))
    row = build_table(shape, (entry,), POLICY, H100, prefer="memory").plan_at(1024, "bf16", True, 1)
    assert row.plan is not None
    assert row.plan.tunables.branches[0].forward == "efficient"
    assert "flash_attn is not installed" in row.note


def test_a_narrower_dtype_is_preferred_only_where_it_may_run() -> None:
    narrow = choice("flash", 0.5, 100)
    wide = replace(FAST, tunables=replace(FAST.tunables, dtype="fp32", branches=LEAN.tunables.branches))
    shape = ModuleShape(16, 16, 128, True, DENSE)
    entry = PlanEntry(shape.workload(1024, "fp32", True), wide, auto=narrow)
    for auto, dtype in ((False, "fp32"), (True, "bf16")):
        table = build_table(shape, (entry,), POLICY, H100, prefer="time", auto_dtype=auto)
        row = table.plan_at(1024, "fp32", True, 1)
        assert row.plan is not None
        assert row.plan.tunables.dtype == dtype


def test_what_was_measured_with_another_checkpoint_is_not_preferred_for_it() -> None:
    lean = replace(LEAN, tunables=replace(LEAN.tunables, checkpoint="full"))
    shape = ModuleShape(16, 16, 128, True, DENSE)
    entry = PlanEntry(shape.workload(1024, "bf16", True), FAST, front=(FAST, MIDDLE, lean))
    for checkpoint, kernel in ((None, "efficient"), ("selective", "flash")):
        table = build_table(shape, (entry,), POLICY, H100, prefer="memory", wishes=Wishes(checkpoint=checkpoint))
        row = table.plan_at(1024, "bf16", True, 1)
        assert row.plan is not None
        assert row.plan.tunables.branches[0].forward == kernel


def test_what_cannot_be_told_apart_keeps_its_order() -> None:
    same = choice("flash", 0.7999, 900)
    assert by_preference([FAST, same, LEAN], "time") == [FAST, same, LEAN]
    assert by_preference([same, FAST, LEAN], "time") == [same, FAST, LEAN]


def test_a_gain_that_may_be_none_is_none() -> None:
    """The default, at 1.0, is not left for a plan whose interval reaches beyond it."""
    default, lucky = choice("efficient", 1.0, 400), choice("flash", 0.9, 500, high=1.01)
    assert by_preference([default, lucky], "time")[0] == default
    sure = choice("flash", 0.9, 500, high=0.95)
    assert by_preference([default, sure], "time")[0] == sure


def test_plans_without_numbers_come_last_and_in_order() -> None:
    unknown, other = Choice(FAST.tunables), Choice(LEAN.tunables)
    assert by_preference([unknown, MIDDLE, other], "memory") == [MIDDLE, unknown, other]
    assert by_preference([unknown, other], "time") == [unknown, other]
    assert by_preference([], "time") == []


def test_a_module_obeys_and_refuses_other_words() -> None:
    facts = detect("cpu")
    lean = choice("math", 3.0, 10, dtype="fp32")
    fast = choice("efficient", 1.0, 20, dtype="fp32")
    fast = replace(fast, tunables=replace(fast.tunables, branches=(BranchTunables("flash-cpu", "flash-cpu"),)))
    workload = ModuleShape(2, 2, 16, False, DENSE).workload(64, "fp32", True)
    plans = (PlanEntry(workload, fast, front=(fast, lean)),)
    profile = Profile(source="measured", fingerprint=Fingerprint.of(facts), software=facts.software, plans=plans)
    for prefer, kernel in ((None, "flash-cpu"), ("memory", "math"), ("time", "flash-cpu")):
        attn = RingAttention(2, 16, profile=profile, device="cpu", prefer=prefer)
        assert attn.plan_for(64, torch.float32, True).tunables.branches[0].forward == kernel
    with pytest.raises(InputError, match="prefer is 'lean'; use one of time, memory, balanced, or None"):
        RingAttention(2, 16, device="cpu", prefer="lean")  # type: ignore[arg-type]


# --- how calls are launched ---------------------------------------------------------------------------------------


def launched(of: Choice, launch: str) -> Choice:
    return replace(of, tunables=replace(of.tunables, launch=launch))


def planned(launch: Launch, prefer: Preference | None = None, **fields: Any) -> tuple[str, str]:
    """Kernel and launch of the plan that serves calls launched so."""
    shape = ModuleShape(16, 16, 128, True, DENSE)
    entry = PlanEntry(shape.workload(1024, "bf16", True), **fields)
    row = build_table(shape, (entry,), POLICY, H100, prefer=prefer, launch=launch).plan_at(1024, "bf16", True, 1)
    assert row.plan is not None
    return row.plan.tunables.branches[0].forward, row.plan.tunables.launch


def test_each_way_to_launch_gets_its_own_plan() -> None:
    fields = {"choice": MIDDLE, "captured": FAST, "runners_up": (LEAN,)}
    assert planned("eager", **fields) == ("flash", "eager")
    assert planned("captured", **fields) == ("cudnn", "eager")
    assert planned("captured", choice=MIDDLE) == ("flash", "eager")


def test_captured_calls_run_no_graph_of_their_own() -> None:
    graph = launched(FAST, "graph")
    assert planned("eager", choice=graph, runners_up=(MIDDLE,)) == ("cudnn", "graph")
    assert planned("captured", choice=graph, runners_up=(MIDDLE,)) == ("flash", "eager")
    assert planned("captured", choice=graph, captured=FAST) == ("cudnn", "eager")


def test_of_captured_calls_the_devices_time_is_preferred() -> None:
    """The eager ratio is that of a host which is slow with it."""
    assert FAST.evidence is not None
    slow_host = replace(FAST, evidence=replace(FAST.evidence, default_ratio=1.5, ratio_high=1.5, median_ms=0.5))
    fields = {"choice": MIDDLE, "front": (MIDDLE, slow_host)}
    assert planned("eager", "time", **fields) == ("flash", "eager")
    assert planned("captured", "time", **fields) == ("cudnn", "eager")


def test_a_captured_plan_is_another_one_and_no_graph() -> None:
    workload = ModuleShape(16, 16, 128, True, DENSE).workload(1024, "bf16", True)
    with pytest.raises(FieldError, match="another plan than choice"):
        PlanEntry(workload, FAST, captured=FAST)
    with pytest.raises(FieldError, match="has launch graph"):
        PlanEntry(workload, FAST, captured=launched(MIDDLE, "graph"))


def test_a_module_refuses_another_way_to_launch() -> None:
    with pytest.raises(InputError, match="launch is 'graph'; use one of eager, captured"):
        RingAttention(4, 64, launch="graph")  # type: ignore[arg-type]


def test_a_module_takes_the_plans_of_the_way_it_is_launched() -> None:
    assert RingAttention(4, 64, launch="captured", device="cpu", profile=None).plan.launch == "captured"
    assert RingAttention(4, 64, device="cpu", profile=None).plan.launch == "eager"
