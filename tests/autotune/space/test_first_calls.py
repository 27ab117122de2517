"""First calls made ahead: which ones, and that a probe times nothing before they are over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from machines import FACTS, H100, row_of
from machines import environment_of as replayed_edge

from autotune.measure.evaluator import Evaluator, Fault
from autotune.measure.simulated import ReplayEvaluator, SimulatedClock
from autotune.probe.cells.space import space_or_refusal
from autotune.probe.machine.environment import environment_of
from autotune.probe.request import ProbeObserver, ProbeRequest
from autotune.probe.tuning import run_probe
from autotune.probe.workloads.grid import cells_for
from autotune.space.first_calls import Call, calls_worth_making, kernels_compiled
from autotune.space.space import Space, machine_of
from ringattn.hardware.facts import HardwareFacts
from ringattn.workload import Tunables

COMPILING = replace(H100, packages=("flash_attn.cute", "triton"))


def spaces(facts: HardwareFacts, **asked: object) -> list[Space]:
    def no_evaluator(*_: object) -> Evaluator:
        raise AssertionError("spaces are worked out, not measured")

    environment = environment_of(facts, no_evaluator, ())
    request = ProbeRequest(**asked)  # type: ignore[arg-type]
    found = [space_or_refusal(cell, environment, "auto") for cell in cells_for(request, facts)]
    return [space for space in found if isinstance(space, Space)]


# --- which ------------------------------------------------------------------------------------------------------------


def test_every_compiled_kernel_and_every_gather_is_called_once_for_all_lengths_and_modes() -> None:
    calls = calls_worth_making(spaces(COMPILING))
    assert len(set(calls)) == len(calls)
    forwards = [(cell, made) for cell, made in calls if not cell.train]
    assert all(len(made.kernels) == 1 for _, made in forwards)  # it compiles beside its backward, not before it
    for dense in (True, False):
        alone = {made.branches[0].forward for cell, made in forwards if cell.pattern.dense == dense}
        assert alone == {"flash-attn-4", "triton"}
    calls = tuple((cell, made) for cell, made in calls if cell.train)
    dilated = [made for cell, made in calls if not cell.pattern.dense and cell.seq_len == 32768]  # segments divide it
    clipped = [made for cell, made in calls if not cell.pattern.dense and cell.seq_len != 32768]
    assert {(b.forward, b.backward) for made in clipped for b in made.branches} == {
        ("flash-attn-4", "flash-attn-4"),
        ("cudnn", "flash-attn-4"),
    }  # it alone compiles again where a short sequence clips segments
    assert {made.branches[-1].gather for made in clipped} == {"view", "copy"}
    gathers = {tuple(b.gather for b in made.branches) for made in dilated if made.branches[0].forward == "cudnn"}
    assert len(gathers) == 2**4
    for dtype, kernel in (("fp32", "efficient"), ("bf16", "flash-attn-4"), ("bf16", "triton")):
        ways = [
            {b.gather for b in made.branches[1:]}
            for made in dilated
            if made.dtype == dtype and {made.branches[0].forward, made.branches[0].backward} == {kernel}
        ]
        assert ways == [{"view"}, {"copy"}], (dtype, kernel)
    for of_pattern in (dilated, [made for cell, made in calls if cell.pattern.dense]):
        alone = [made.branches[0] for made in of_pattern if made.dtype == "bf16"]
        assert {"flash-attn-4", "triton"} <= {b.forward for b in alone if b.forward == b.backward}
    kernels = ("flash-attn-4", "triton")
    assert all(
        made.branches[0].forward in kernels or made.branches[0].backward in kernels
        for cell, made in calls
        if cell.pattern.dense
    )  # nothing else compiles there


def test_a_compiled_backward_is_called_after_another_kernel_s_forward_too() -> None:
    calls = calls_worth_making(spaces(COMPILING, modes=("train",)))
    for dense in (True, False):
        made = {b for cell, p in calls if cell.pattern.dense == dense and p.dtype == "bf16" for b in kernels_of(p)}
        for kernel in ("flash-attn-4", "triton"):
            assert (kernel, kernel) in made
            assert any(backward == kernel != forward for forward, backward in made)


def test_what_defaults_compile_comes_first_then_what_takes_longest_and_gathers_last() -> None:
    made = [plan for _, plan in calls_worth_making(spaces(COMPILING))]
    kernels = [{name for pair in kernels_of(plan) for name in pair} for plan in made]
    slowest = [number for number, names in enumerate(kernels) if "flash-attn-4" in names]
    some_copied = [len({branch.gather for branch in plan.branches[1:]}) == 2 for plan in made]
    assert kernels[0] == {"cudnn"}
    assert slowest == list(range(slowest[0], slowest[0] + len(slowest)))
    assert slowest[0] <= 2
    assert some_copied == sorted(some_copied)
    assert some_copied[-1]
    assert min(number for number, names in enumerate(kernels) if "triton" in names) > slowest[-1]


def test_what_won_before_waits_for_what_the_defaults_compile() -> None:
    found = spaces(COMPILING)
    without = calls_worth_making(found)
    standing = next(call for call in reversed(without) if "flash-attn-4" in call[1].kernels)
    calls = calls_worth_making(found, [standing])
    before = calls.index(standing)
    assert calls[:before] == without[:before]
    assert 0 < before < without.index(standing)
    assert all(plan.kernels == {"cudnn"} for _, plan in calls[:before])


def kernels_of(plan: Tunables) -> set[tuple[str, str]]:
    return {(branch.forward, branch.backward) for branch in plan.branches}


def test_documents_run_at_once_where_a_kernel_can_and_are_compiled_apart() -> None:
    """flash-attn-4's entry for documents counted as hung after 2.6 s: its dense one had been compiled."""
    (space,) = spaces(COMPILING, documents=8, seq_lens=(4096,), modes=("train",), dense=True, precision="bf16")
    packing = {name: plan.packing for plan in space.kernel_plans if len(plan.kernels) == 1 for name in plan.kernels}
    assert packing["cudnn"] == packing["math"] == "documents"
    assert packing["flash-attn-4"] == packing["flash"] == "varlen"
    called = {plan.packing for _, plan in calls_worth_making([space]) if plan.kernels == {"flash-attn-4"}}
    assert called == {"varlen"}
    plan = next(plan for plan in space.kernel_plans if plan.kernels == {"flash-attn-4"})
    one, other = (
        kernels_compiled(space.workload, replace(plan, packing=way), frozenset({"flash-attn-4"}))
        for way in ("varlen", "documents")
    )
    assert one.isdisjoint(other)


def test_a_probe_of_inference_calls_inference() -> None:
    calls = calls_worth_making(spaces(COMPILING, modes=("infer",), dense=True))
    assert {cell.mode for cell, _ in calls} == {"infer"}
    assert {cell.seq_len for cell, _ in calls} == {197, 512, 1024}  # full without whole tiles, full, causal


def test_where_nothing_is_compiled_nothing_is_called() -> None:
    assert calls_worth_making(spaces(FACTS)) == ()
    assert machine_of(FACTS).just_in_time == frozenset()
    assert calls_worth_making([]) == ()


# --- in a probe -------------------------------------------------------------------------------------------------------


class Calling(ReplayEvaluator):
    """Says in which order it was asked."""

    def __init__(self, clock: SimulatedClock, log: list[str], note: str = "") -> None:
        super().__init__(row_of(lambda cell, plan: 0.0), clock, 0)
        self.log, self.note = log, note
        self.asked: Sequence[Call] = ()
        self.left: Sequence[Call] = ()

    def begin_first_calls(self, calls: Sequence[Call]) -> None:
        self.log.append("begin")
        self.asked = self.left = calls

    def unfinished_calls(self) -> Sequence[Call]:
        return self.left

    def failed_calls(self) -> Mapping[Call, Fault]:
        return {}

    def wait_for_first_call(self, timeout_s: float) -> None:
        assert timeout_s >= 0
        self.log.append("wait")
        self.left = self.left[1:]

    def end_first_calls(self, timeout_s: float) -> str:
        assert timeout_s >= 0
        self.log.append("end")
        return self.note

    def check(self, *arguments: Any, **more: Any) -> Any:
        self.log.append("check")
        return super().check(*arguments, **more)

    def block(self, *arguments: Any, **more: Any) -> Any:
        self.log.append("block")
        return super().block(*arguments, **more)


def test_they_are_made_beside_the_defaults_and_beside_plans_that_compile_nothing(tmp_path: Path) -> None:
    clock, log = SimulatedClock(), list[str]()
    evaluator = Calling(clock, log, "1 first call made ahead failed")
    environment = replayed_edge(tmp_path, lambda: evaluator, clock)
    environment = replace(environment, machine=replace(environment.machine, just_in_time=frozenset({"math"})))
    notes: list[str] = []

    class Heard(ProbeObserver):
        def note(self, text: str) -> None:
            notes.append(text)

    request = ProbeRequest(output=tmp_path / "made.yaml", effort="quick", seq_lens=(256, 512), dense=True)
    run_probe(request, Heard(), environment)
    assert evaluator.asked
    assert all("math" in (made.branches[0].forward, made.branches[0].backward) for _, made in evaluator.asked)
    assert log[0] == "begin"
    waits = [number for number, what in enumerate(log) if what == "wait"]
    assert log[1 : waits[0]].count("check") >= 4  # the defaults: two lengths, both modes
    assert len(waits) == len(evaluator.asked)
    assert log[waits[-1] + 1] == "block"  # the default's again: what ran beside it is over
    assert "check" in log[waits[-1] :]
    assert log[-1] == "end"
    assert "1 first call made ahead failed" in notes


def test_without_anything_to_compile_none_are_made(tmp_path: Path) -> None:
    clock, log = SimulatedClock(), list[str]()
    environment = replayed_edge(tmp_path, lambda: Calling(clock, log), clock)
    run_probe(
        ProbeRequest(output=tmp_path / "made.yaml", effort="quick", seq_lens=(256,), dense=True), None, environment
    )
    assert "begin" not in log
