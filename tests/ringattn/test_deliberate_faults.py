"""Faults put in on purpose, one for each file of the steps between kernels: the checks used elsewhere notice them.

``python test_deliberate_faults.py`` puts those of the fused steps in under Triton's interpreter, in a process of its
own because the switch is read at import, and prints which results were right. None of them writes out of bounds.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fused_cases import FusedCase, FusedCheck
from interpreted_triton import interpreted, patch_once
from oracle import Case, assert_equal_to, exact, found, pattern_of
from torch import Tensor

from ringattn.autograd import checkpoint
from ringattn.distributed import chunk_rows
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning import plan
from ringattn.planning.fused_steps import steps_not_taken
from ringattn.planning.plan import rejection_reasons
from ringattn.runtime import merge
from ringattn.runtime.fused.fused_layout import Strides
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload

CASE = Case(37, 4, 2, 4, 2, pattern_of([4, 8, 16, 5], [1, 2, 4, 3]), causal=True)


def check(**arguments: Any) -> None:
    q, k, v = CASE.inputs()
    assert_equal_to(found(CASE.module(**arguments), q, k, v, CASE.dout()), exact(CASE, q, k, v, CASE.dout()))


# --- merge ---


def _not_normalised(total: Tensor, out: Tensor, part: Tensor, peak: Tensor, weights: Tensor) -> None:
    total.add_(out * torch.exp(part - peak).unsqueeze(-1))


def _of_the_wrong_difference(total: Tensor, out: Tensor, part: Tensor, peak: Tensor, weights: Tensor) -> None:
    total.add_(out * (torch.exp(peak - part) / weights).unsqueeze(-1))


def _heads_swapped(*arguments: Any, right: Callable[..., Tensor] = merge._unfolded_lse) -> Tensor:
    return right(*arguments).flip(-1)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_add_weighted", _not_normalised),
        ("_add_weighted", _of_the_wrong_difference),
        ("_unfolded_lse", _heads_swapped),
        ("_add_weight", lambda total, part, peak: total.add_(1.0)),
        ("_raise_peak", lambda peak, part: peak.copy_(torch.minimum(peak, part))),
    ],
)
def test_in_the_merge(name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    monkeypatch.setattr(merge, name, fault)
    with pytest.raises(AssertionError):
        check()


def test_in_the_merge_of_a_ring_step() -> None:
    """Weights from rounded LSEs: what is merged is equal, and the result is not."""

    def rounded(total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        merged = torch.logaddexp(total_lse, part_lse)
        total.mul_(torch.exp(total_lse - merged).unsqueeze(-1))
        total.add_(part * torch.exp(part_lse - merged).unsqueeze(-1))
        total_lse.copy_(merged)

    errors = []
    for merge_block in (chunk_rows.merge_block, rounded):
        total, total_lse = torch.ones(1, 5, 1, 2), torch.full((1, 5, 1), 4e5)
        merge_block(total, total_lse, torch.ones_like(total), total_lse + torch.linspace(-2, 2, 5)[:, None])
        errors.append((total - 1).abs().max().item())
    assert errors[0] < 1e-6 < 1e-3 < errors[1]


# --- checkpoint ---


def _other_inputs(program: Any, saved: Sequence[Tensor], on_host: Any, random: Any) -> Sequence[Tensor]:
    q, k, v = saved
    return q, v, k, *program.attend(q, v, k)


def _not_restored(program: Any, saved: Sequence[Tensor], on_host: Any, random: Any) -> Sequence[Tensor]:
    q, k, v, out, lse, *kept = saved
    return q, k, v, torch.zeros_like(out), lse, *kept


@pytest.mark.parametrize(("mode", "fault"), [("full", _other_inputs), ("selective", _not_restored)])
def test_in_a_checkpoint(mode: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(checkpoint=mode)
    monkeypatch.setattr(checkpoint, "restore", fault)
    with pytest.raises(AssertionError):
        check(checkpoint=mode)


# --- which steps a plan takes ---

HOPPER = HardwareFacts(
    "nvidia", "NVIDIA H100 80GB HBM3", "h100-sxm", "sm_90", 132, 2**37, 5 * 2**20, packages=("triton",)
)


def steps(train: bool, rate: int, gather: str) -> set[str]:
    """The steps whose parameters a plan is allowed."""
    workload = Workload("train" if train else "infer", True, 4096, 8, 64, "bf16", pattern=Pattern.of([1024], [rate]))
    branch = BranchTunables("math", "math" if train else "", gather)
    taken = set()
    for step in ("merge", "gather", "sum"):
        tunables = Tunables("bf16", (branch,), params=((f"{step}.block", 32),))
        taken |= set() if rejection_reasons(workload, tunables, HOPPER) else {step}
    return taken


RIGHT = {
    (True, 1, "view"): {"merge", "sum"},
    (True, 4, "view"): {"merge", "sum", "gather"},
    (True, 4, "copy"): {"merge", "sum", "gather"},
    (False, 1, "view"): {"merge"},
    (False, 4, "view"): {"merge"},
    (False, 4, "copy"): {"merge", "gather"},
}


@pytest.mark.parametrize("fault", [None, "sum", "gather"])
def test_in_the_steps_that_a_plan_takes(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(workload: Workload, tunables: Tunables) -> dict[str, str]:
        found = dict(steps_not_taken(workload, tunables))
        found.pop(fault or "", None)
        return found

    monkeypatch.setattr(plan, "steps_not_taken", faulty)
    assert ({asked: steps(*asked) for asked in RIGHT} == RIGHT) == (fault is None)


# --- the fused steps ---

FUSED_FAULTS = {
    "none": True,
    "every head is the first": False,
    "weights not normalised": False,
    "a mask off by one": False,
}
SMALL = FusedCase("small", ((4, 1, "view"), (8, 2, "copy")), 20, 1, 4, 2, head_dim=16, window=8, block=4)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the triton package")
def test_in_the_fused_steps() -> None:
    assert json.loads(interpreted(__file__)) == FUSED_FAULTS


def _fused_main() -> None:
    patch_once()
    from ringattn.runtime.fused import fused_kernels, fused_rows, merge_triton

    right_words = merge_triton.stride_words

    def of_one_head(layout: Any, jobs: Sequence[Sequence[Strides]]) -> tuple[int, ...]:
        return right_words(layout, [[strides._replace(head=0) for strides in job] for job in jobs])

    weights = _rewritten(fused_kernels, "_weighted_sum", "tl.exp(lse - shift) * scale", "tl.exp(lse - shift)")
    mask = _rewritten(fused_rows, "_selection", "within < BRANCHES[N][0]", "within < BRANCHES[N][0] - 1")
    faults: dict[str, tuple[Any, str, Any]] = {
        "none": (fused_kernels, "_selection", fused_kernels._selection),
        "every head is the first": (merge_triton, "stride_words", of_one_head),
        "weights not normalised": (fused_kernels, "_weighted_sum", weights),
        "a mask off by one": (fused_kernels, "_selection", mask),
    }
    results = {}
    for name, (owner, attribute, fault) in faults.items():
        right = getattr(owner, attribute)
        setattr(owner, attribute, fault)
        ops = merge_triton.TritonOps(merge_block=SMALL.block, sum_block=SMALL.block, gather_block=SMALL.block)
        try:
            FusedCheck(SMALL, ops, "cpu", torch.float32).merges()
            results[name] = True
        except AssertionError:
            results[name] = False
        setattr(owner, attribute, right)
    print(json.dumps(results))


def _rewritten(module: Any, name: str, right: str, wrong: str) -> Any:
    """A kernel of ``module`` with ``wrong`` in the place of ``right`` in its source."""
    source = inspect.getsource(getattr(module, name).fn)
    assert source.count(right) == 1
    source = source.replace(right, wrong)
    file = f"<{name} with a fault>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), vars(module), made)  # noqa: S102 - source of ours with one change
    return made[name]


if __name__ == "__main__":
    _fused_main()
