"""The accuracy check of kernels with dropout finds those that do not drop what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machine_samples import A100, EPYC, H200

from ringattn.errors import PlanError
from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Combination
from ringattn.kernels.contract import BoundDropout, KernelConfig
from ringattn.kernels.registry import KERNELS, KernelNeed
from ringattn.planning.heuristic import Wishes, heuristic_tunables
from ringattn.planning.module_setup import set_up_for
from ringattn.planning.plan import kernel_reasons, rejection_reasons
from ringattn.planning.table import ModuleShape
from ringattn.planning.validation.accuracy_check import Case, case_of, check, config_of, hold_dropping
from ringattn.workload import BranchTunables, Pattern, Tunables

HERE = torch.device("cpu")
ASKED = Combination("math", 40, "fp32", False, True, True, dropout=True)
HOPPER = KernelNeed("nvidia", "sm_90", "bf16", 128, 16, 16, 4096, 1, True, True)


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of(ASKED, HERE)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("changes", [{}, {"window": True}, {"softcap": True}, {"causal": False, "head_dim_v": 24}])
def test_math_passes(changes: dict[str, object], backward: bool) -> None:
    asked = replace(ASKED, backward=backward, **changes)
    verdict = check(asked, case_of(replace(asked, dropout=False), HERE))
    assert verdict.passes, verdict.reason
    assert all(figure.error < figure.bound / 2 for figure in verdict.figures)


def kernel() -> tuple[BoundDropout, KernelConfig]:
    config = config_of(ASKED)
    load = KERNELS["math"].load_dropout
    assert load is not None
    return load(config), config


def test_it_leaves_the_random_numbers_alone(case: Case) -> None:
    state = torch.get_rng_state()
    hold_dropping(*kernel(), case, ASKED)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_backward_with_another_mask_is_found(case: Case) -> None:
    right, config = kernel()
    wrong = BoundDropout(right.forward, lambda *x: right.backward(*x[:6], (x[6][0] + 1,)))
    verdict = hold_dropping(wrong, config, case, replace(ASKED, backward=True))
    assert not verdict.passes
    assert all(name in verdict.reason for name in ("dq", "dk", "dv"))


def test_a_forward_that_does_not_scale_what_is_left_is_found(case: Case) -> None:
    right, config = kernel()

    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        out, lse, state = right.forward(*inputs)
        return out * (1.0 - config.dropout), lse, state

    assert "out errs" in hold_dropping(BoundDropout(forward, right.backward), config, case, ASKED).reason


def test_a_kernel_that_drops_too_few_or_nothing_is_found(case: Case) -> None:
    _, config = kernel()
    for p in (0.0, 0.2):
        load = KERNELS["math"].load_dropout
        assert load is not None
        assert "share of kept weights" in hold_dropping(load(replace(config, dropout=p)), config, case, ASKED).reason


# --- which kernels have it ---------------------------------------------------------------------------------------


def test_the_kernels_that_say_so_can_be_bound_with_it() -> None:
    able = {name for name, kernel in KERNELS.items() if "dropout" in kernel.features}
    assert able == {name for name, kernel in KERNELS.items() if kernel.load_dropout is not None}
    assert able == {"cudnn", "flash", "efficient", "math", "flash-attn-2"}


@pytest.mark.parametrize("name", KERNELS)
def test_the_others_are_refused_with_a_line_that_names_those(name: str) -> None:
    why = " ".join(kernel_reasons(name, replace(HOPPER, dropout=True), H200))
    told = "no dropout; cudnn, flash, efficient, math, flash-attn-2 have it" in why
    assert told == ("dropout" not in KERNELS[name].features)


@pytest.mark.parametrize("facts", [H200, A100, EPYC], ids=lambda facts: facts.sku)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize(("causal", "rows"), [(True, 1), (True, 4096), (False, 192), (False, 4096)])
def test_the_heuristic_takes_one_kernel_both_ways(facts: HardwareFacts, dtype: str, causal: bool, rows: int) -> None:
    """Of those that have dropout, whatever it would take without."""
    shape = ModuleShape(16, 16, 64, causal, Pattern())
    workload = shape.workload(rows, dtype, True, dropout=0.1)
    setup = set_up_for(facts, None, HERE, shape)
    tunables = heuristic_tunables(workload, setup.policy, facts)
    (branch,) = tunables.branches
    assert branch.forward == branch.backward
    assert "dropout" in KERNELS[branch.forward].features
    assert rejection_reasons(workload, tunables, facts) == ()
    if facts is H200 and dtype == "bf16" and rows == 4096:
        assert branch.forward == "cudnn"


def test_a_backward_of_another_kernel_is_refused() -> None:
    """Each would drop weights of its own."""
    workload = ModuleShape(16, 16, 64, True, Pattern()).workload(4096, "bf16", True, dropout=0.1)
    for pair in (("cudnn", "flash"), ("flash", "cudnn")):
        tunables = Tunables("bf16", (BranchTunables(*pair),))
        assert any(
            "the backward needs the kernel of the forward" in x for x in rejection_reasons(workload, tunables, H200)
        )
    assert rejection_reasons(workload, Tunables("bf16", (BranchTunables("flash", "flash"),)), H200) == ()
    wishes = Wishes(forward="cudnn", backward="flash")
    setup = set_up_for(H200, None, HERE, ModuleShape(16, 16, 64, True, Pattern()))
    with pytest.raises(PlanError, match="the backward needs the kernel of the forward"):
        heuristic_tunables(workload, setup.policy, H200, wishes=wishes)
    one = heuristic_tunables(workload, setup.policy, H200, wishes=Wishes(backward="flash"))
    assert one.branches[0].forward == one.branches[0].backward == "flash"
