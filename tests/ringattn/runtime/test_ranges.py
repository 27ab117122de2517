"""Named ranges: which there are, that they change nothing, and that a program without them has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import DENSE, Case, pattern_of
from torch import nn

from ringattn import RingAttention, Workload, named_ranges
from ringattn.kernels.contract import BlockKernel, BoundKernel
from ringattn.kernels.registry import KERNELS
from ringattn.planning.plan import Plan
from ringattn.runtime.graphed import GraphedProgram
from ringattn.runtime.packed.documents_program import load_program
from ringattn.runtime.program import Program
from ringattn.runtime.ranges import PREFIX
from ringattn.workload import BranchTunables, Tunables

DILATED = Case(24, 4, 2, 8, 2, pattern_of([8, 24], [1, 2]), causal=True)


def step(module: RingAttention, case: Case, train: bool = True) -> list[torch.Tensor]:
    q, k, v = case.inputs(torch.float32)
    if not train:
        with torch.no_grad():
            return [module(q, k, v)]
    out = module(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), case.dout(torch.float32))]


def ranges_in(call: Callable[[], object]) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    return Counter(e.name.removeprefix(PREFIX) for e in profiler.events() or () if e.name.startswith(PREFIX))


def test_the_steps_of_a_pattern_have_names() -> None:
    module = DILATED.module(backend=("math", "flash-cpu"))
    with named_ranges(nn.Sequential(module)):
        step(module, DILATED)
        found = ranges_in(lambda: step(module, DILATED))
        infer = ranges_in(lambda: step(module, DILATED, train=False))
    kernels = {name: count for name, count in found.items() if name.startswith("branch")}
    assert set(kernels) == {f"branch {n} {name}" for n in (0, 1) for name in ("math forward", "flash-cpu backward")}
    assert found["merge"] == found["sum"] == 1
    assert found["gather"] >= 1
    assert set(infer) <= {"branch 0 math forward", "branch 1 math forward", "gather", "merge"}


@pytest.mark.parametrize("train", [True, False])
def test_kernels_that_torch_would_call_by_itself_have_names(train: bool) -> None:
    case = replace(DILATED, pattern=DENSE)
    module = case.module(backend="flash-cpu")
    with named_ranges(module):
        found = ranges_in(lambda: step(module, case, train))
    forward = {"branch 0 flash-cpu forward": 1}
    assert found == (forward | {"branch 0 flash-cpu backward": 1} if train else forward)


@pytest.mark.parametrize("pattern", [DENSE, DILATED.pattern], ids=str)
def test_results_are_the_same(pattern: Any) -> None:
    case = replace(DILATED, pattern=pattern)
    module = case.module()
    expected = step(module, case)
    with named_ranges(module):
        inside = step(module, case)
    for one, other, again in zip(expected, inside, step(module, case), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, again)


def test_outside_nothing_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without ranges calls what the kernel's ``load`` gave, itself, and so does one made after leaving."""
    math: BlockKernel = KERNELS["math"]
    loaded: list[BoundKernel] = []

    def load(config: Any) -> BoundKernel:
        loaded.append(math.load(config))
        return loaded[-1]

    monkeypatch.setitem(KERNELS, "math", replace(math, load=load))  # type: ignore[arg-type]
    module = DILATED.module(backend="math")
    module.validates = False
    step(module, DILATED)
    with named_ranges(module):
        step(module, DILATED)
    assert not ranges_in(lambda: step(module, DILATED))
    (program,) = module._programs.values()
    assert isinstance(program, Program)
    assert {id(forward) for forward in program._forward} <= {id(kernel.forward) for kernel in loaded}
    assert {id(backward) for backward in program._backward} <= {id(kernel.backward) for kernel in loaded}
    assert not {"gather", "gather_backward", "merge", "scatter_sum"} & set(vars(program._ops))


def test_an_error_inside_leaves_the_module_without_names() -> None:
    module = DILATED.module()

    def fails() -> None:
        with named_ranges(module):
            step(module, DILATED)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not ranges_in(lambda: step(module, DILATED))


def test_a_backward_keeps_the_program_of_its_forward() -> None:
    module = DILATED.module(backend="math")
    q, k, v = DILATED.inputs(torch.float32)
    with named_ranges(module):
        out = module(q, k, v)
    assert ranges_in(lambda: out.sum().backward())["sum"] == 1


def test_a_plan_that_replays_graphs_is_launched_step_by_step() -> None:
    workload = Workload("train", True, 64, 2, 8, "fp32")
    plan = Plan(workload, Tunables("fp32", (BranchTunables("math", "math"),), launch="graph"), fused=False)
    assert isinstance(load_program(plan, 0.5), GraphedProgram)
    assert type(load_program(plan, 0.5, ranges=True)) is Program
