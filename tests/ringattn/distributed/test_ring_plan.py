"""Which plans over ranks are chosen where nothing was measured, and which are refused, with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle import DENSE, cpu, pattern_of

from ringattn import Pattern, Workload
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.heuristic import heuristic_tunables
from ringattn.planning.plan import Conditions, rejection_reasons
from ringattn.profile.schema import Policy
from ringattn.workload import BranchTunables, Tunables

H100 = HardwareFacts(
    vendor="nvidia", device_name="H100", sku="h100-sxm", arch="sm_90", sm_count=132, memory_mib=81559, l2_mib=50,
    device_count=4, link="nv18",
)  # fmt: skip
POLICY = Policy(
    (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp64", "fp64")),
    ("cudnn", "flash", "flash-cpu", "math"),
    ("cudnn", "flash", "flash-cpu", "math"),
    8,
)
DILATED = pattern_of([2048, 8192], [1, 4])


def _workload(world: int = 4, kv_heads: int = 32, pattern: Pattern = DENSE, **more: Any) -> Workload:
    return Workload("train", True, 8192, 32, 128, "bf16", kv_heads, pattern=pattern, world=world, **more)


def _chosen(workload: Workload, facts: HardwareFacts, layout: str = "") -> Tunables:
    return heuristic_tunables(workload, POLICY, facts, conditions=Conditions(layout=layout))


def test_heuristic_schedules() -> None:
    assert _chosen(_workload(), H100).schedule == "ulysses"
    assert _chosen(_workload(kv_heads=8), H100).schedule == "ulysses"
    assert _chosen(_workload(kv_heads=2), H100).schedule == "ring"  # fewer key/value heads than ranks
    assert _chosen(_workload(world=8, kv_heads=32), H100).schedule == "ring"  # beyond one host
    assert _chosen(_workload(), replace(H100, link="pcie")).schedule == "ring"
    assert _chosen(_workload(pattern=DILATED), H100).schedule == "local"  # segments stay on one rank
    assert _chosen(replace(_workload(pattern=DILATED), seq_len=2048), H100).schedule == "all-gather"


def test_heads_go_in_groups_only_where_that_was_measured_to_pay() -> None:
    assert _chosen(_workload(), H100).head_groups == 0


def test_heuristic_layouts() -> None:
    """Zigzag balances a ring; where heads are exchanged all ranks have the same work; contiguous rows are in order."""
    assert _chosen(_workload(), H100).layout == "contiguous"
    assert _chosen(_workload(kv_heads=2), H100).layout == "zigzag"
    assert _chosen(_workload(), replace(H100, link="pcie")).layout == "zigzag"
    assert _chosen(_workload(), replace(H100, device_count=2)).layout == "zigzag"  # two hosts
    assert _chosen(_workload(), H100, "zigzag").layout == "zigzag"
    assert _chosen(replace(_workload(), causal=False), H100).layout == "contiguous"
    assert _chosen(_workload(pattern=DILATED), H100).layout == "contiguous"
    assert _chosen(_workload(), H100, "contiguous").layout == "contiguous"


def _tunables(**fields: Any) -> Tunables:
    return Tunables("bf16", (BranchTunables("cudnn", "cudnn"),), **{"schedule": "ring", "layout": "zigzag", **fields})


@pytest.mark.parametrize(
    ("fields", "workload", "reason"),
    [
        ({"layout": ""}, _workload(), "has no layout"),
        ({"schedule": "local"}, _workload(), "dense attention crosses ranks"),
        ({"schedule": "ulysses"}, _workload(kv_heads=2), "needs a multiple of 4 key/value heads, not 2"),
        ({"schedule": "ulysses-ring", "ulysses": 3}, _workload(), "ulysses 3 is no divisor of 4 ranks"),
        ({"ulysses": 2}, _workload(), "ulysses 2 belongs to schedule ulysses-ring"),
        ({"head_groups": 2}, _workload(), "ring does not cut heads in groups"),
        ({"schedule": "ulysses", "head_groups": 3}, _workload(), "head_groups 3 does not divide the 8"),
        ({"schedule": "all-gather", "head_groups": 64}, _workload(), "head_groups 64 is more than the 32"),
        ({"schedule": "all-gather", "head_groups": 1}, _workload(), "head_groups 1 is what 0 means"),
        ({"checkpoint": "none"}, _workload(), "checkpoint none: ring keeps nothing that it receives"),
        ({"grad_wire": "compute"}, _workload(), "grad_wire compute: bf16 is no wider than the inputs"),
        ({"exchange": "symmetric"}, _workload(), "exchange symmetric: ring exchanges no heads"),
        ({"exchange": "symmetric"}, _workload(world=1), "exchange symmetric is for a sequence over several ranks"),
        ({}, replace(_workload(), seq_len=1), "zigzag layout over 4 ranks would leave a rank nothing of 4 positions"),
        (
            {"layout": "contiguous"},
            replace(_workload(), seq_len=3, total_length=9),
            "contiguous layout over 4 ranks would leave a rank nothing of 9 positions; use 8 or 10 positions",
        ),
        ({}, _workload(world=1), "schedule ring is for a sequence over several ranks"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(fields: dict[str, Any], workload: Workload, reason: str) -> None:
    reasons = rejection_reasons(workload, _tunables(**fields), H100)
    assert any(reason in each for each in reasons), reasons


def test_what_runs_is_not_refused() -> None:
    for fields in (
        {},
        {"schedule": "all-gather", "head_groups": 4},
        {"schedule": "ulysses", "head_groups": 4, "checkpoint": "none"},
        {"schedule": "ulysses-ring", "ulysses": 2, "head_groups": 2},
        {"schedule": "ulysses", "exchange": "symmetric"},
    ):
        assert rejection_reasons(_workload(), _tunables(**fields), H100) == ()


@pytest.mark.parametrize(
    ("facts", "apart", "reason"),
    [
        (replace(H100, link="pcie"), "", "copies over NVLink, and the GPUs' link here is pcie"),
        (replace(H100, link=""), "", "link here is not known"),
        (replace(H100, device_count=2), "", "4 ranks, and each sees 2 GPUs"),
        (cpu(), "", "copies between NVIDIA GPUs"),
        (H100, "ranks 0 and 3 are on different hosts", "symmetric: ranks 0 and 3 are on different hosts"),
    ],
)
def test_where_ranks_cannot_reach_each_others_memory(facts: HardwareFacts, apart: str, reason: str) -> None:
    tunables = _tunables(schedule="ulysses", exchange="symmetric")
    reasons = rejection_reasons(_workload(), tunables, facts, conditions=Conditions(apart=apart))
    assert any(reason in each for each in reasons), reasons


def test_kernels_are_asked_about_the_blocks_of_every_step() -> None:
    """cudnn's backward may be wrong on full blocks of 64 rows beyond a multiple of 128 on sm_90: halves of 192 are."""
    odd = replace(_workload(), seq_len=384)
    assert any("pytorch/pytorch#196678" in each for each in rejection_reasons(odd, _tunables(), H100))
    # Diagonal blocks are causal, and with Ulysses there are no others.
    assert rejection_reasons(odd, _tunables(schedule="ulysses"), H100) == ()


def test_a_layout_that_is_not_the_modules() -> None:
    reasons = rejection_reasons(_workload(), _tunables(), H100, conditions=Conditions(layout="contiguous"))
    assert reasons == ("layout zigzag, but this module's sequences lie in contiguous layout",)


def test_segments_that_stay_leave_nothing_to_a_ring() -> None:
    workload = _workload(pattern=DILATED)
    branches = (BranchTunables("cudnn", "cudnn"),) * 2
    ring = replace(_tunables(layout="contiguous"), branches=branches)
    assert any("every segment stays on one rank" in each for each in rejection_reasons(workload, ring, H100))
    assert rejection_reasons(workload, replace(ring, schedule="local"), H100) == ()


def test_cpus_take_the_ring() -> None:
    workload = replace(_workload(kv_heads=32), dtype="fp32")
    assert _chosen(workload, cpu()).schedule == "ring"
