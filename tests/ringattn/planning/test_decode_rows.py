"""Plans of decoding: a workload of its own, with rows of its own in a profile and in a module's table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from machine_samples import H100 as BARE_H100
from oracle import cpu

from ringattn import Pattern, Profile, RingAttention, Workload, load_profile
from ringattn.errors import FieldError, PlanError
from ringattn.planning.heuristic import Wishes, heuristic_tunables
from ringattn.planning.launches import forward_gflop
from ringattn.planning.plan import kernel_need, rejection_reasons
from ringattn.profile.schema import Policy
from ringattn.workload import BranchTunables, Tunables

H100 = replace(BARE_H100, packages=("triton",))
DECODE = Workload("decode", True, 4096, 32, 128, "bf16", 8, 4)
LONGNET = Pattern.of([1024, 4096], [1, 4])
SPLIT_KV = Tunables("bf16", (BranchTunables("split-kv"),))


def test_it_asks_for_one_query_of_each_sequence() -> None:
    need = kernel_need(replace(DECODE, pattern=LONGNET), 1, "bf16", arch="sm_90", vendor="nvidia")
    assert (need.queries, need.rows, need.blocks) == (1, 1024, 4)
    assert kernel_need(replace(DECODE, mode="infer"), 0, "bf16", arch="sm_90", vendor="nvidia").queries == 0


def test_another_mode_is_refused() -> None:
    with pytest.raises(FieldError, match="use 'train', 'infer' or 'decode'"):
        replace(DECODE, mode="generate")  # type: ignore[arg-type]


def test_work_is_that_of_one_query() -> None:
    assert forward_gflop(DECODE, 0) == pytest.approx(4e-9 * 128 * 4 * 32 * 4096)


def test_the_kernel_that_reads_caches_is_the_heuristics_where_it_runs() -> None:
    policy = _policy("heuristic-sm_90")
    assert heuristic_tunables(DECODE, policy, H100).branches[0].forward == "split-kv"
    dilated = heuristic_tunables(replace(DECODE, pattern=LONGNET), policy, H100)
    assert [branch.forward for branch in dilated.branches] == ["split-kv"] * 2
    wide = heuristic_tunables(replace(DECODE, head_dim=512), policy, H100)
    assert wide.branches[0].forward != "split-kv"
    assert heuristic_tunables(replace(DECODE, mode="infer"), policy, H100).branches[0].forward == "cudnn"
    bare = heuristic_tunables(DECODE, policy, BARE_H100)
    assert bare.branches[0].forward == "flash", "without triton; cudnn has no single query"
    on_cpu = heuristic_tunables(replace(DECODE, dtype="fp32"), _policy("heuristic-cpu"), cpu())
    assert on_cpu.branches[0].forward == "flash-cpu"


def test_cudnn_comes_first_where_its_single_query_was_measured() -> None:
    software = tuple({**dict(H100.software), "cudnn": "9.19.0"}.items())
    newer, policy = replace(H100, software=software), _policy("heuristic-sm_90")
    assert heuristic_tunables(DECODE, policy, newer).branches[0].forward == "cudnn"
    dilated = heuristic_tunables(replace(DECODE, pattern=LONGNET), policy, newer)
    assert [branch.forward for branch in dilated.branches] == ["split-kv"] * 2


def test_a_named_kernel_that_has_no_single_query_is_refused() -> None:
    with pytest.raises(PlanError, match="one query row was measured on sm_90 alone"):
        heuristic_tunables(DECODE, _policy("heuristic-sm_90"), H100, wishes=Wishes(forward="cudnn"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"launch": "graph"}, "launch is of the steps of a whole sequence, and this is decode"),
        ({"window_tokens": 1024}, "window_tokens is of the steps"),
        ({"checkpoint": "full"}, "checkpoint is of the steps"),
        ({"compile": True}, "compile is of the steps"),
    ],
)
def test_what_belongs_to_whole_sequences_is_no_other_plan(changes: dict[str, object], reason: str) -> None:
    assert rejection_reasons(DECODE, SPLIT_KV, H100) == ()
    reasons = rejection_reasons(DECODE, replace(SPLIT_KV, **changes), H100)  # type: ignore[arg-type]
    assert any(reason in why for why in reasons)


def test_parameters_of_the_kernel_are_those_it_has() -> None:
    chosen = replace(SPLIT_KV, params=(("split-kv.tile", "16x64-w4-s3"), ("split-kv.waves", 2)))
    assert rejection_reasons(DECODE, chosen, H100) == ()
    wrong = replace(SPLIT_KV, params=(("split-kv.waves", 5),))
    assert any("split-kv.waves=5" in why for why in rejection_reasons(DECODE, wrong, H100))


def test_it_is_no_kernel_of_whole_sequences() -> None:
    for mode in ("infer", "train"):
        workload = replace(DECODE, mode=mode, seq_len=8)  # type: ignore[arg-type]
        tunables = replace(SPLIT_KV, branches=(BranchTunables("split-kv", "flash" if mode == "train" else ""),))
        assert any("a few queries over a cache" in why for why in rejection_reasons(workload, tunables, H100))


def test_a_profile_row_of_decoding_serves_decoding_alone() -> None:
    workload = replace(DECODE, dtype="fp32", seq_len=512, head_dim=16)
    profile = Profile.single(cpu(), workload, Tunables("fp32", (BranchTunables("math"),)))
    module = RingAttention(32, 16, 8, causal=True, profile=profile, device="cpu")
    assert "decode  math" in module.explain()
    row = module.plan.decode_at(600, "fp32", 4)
    assert row.runnable().tunables.branches[0].forward == "math"
    assert row.origin.source == "profile"
    assert module.plan.row_of(workload).bucket == 512
    assert module.plan.plan_at(512, "fp32", False, 4).origin.source == "heuristic"
    assert module.plan.decode_at(4096, "fp32", 4).origin.source == "heuristic", "beyond what was measured"


def _policy(name: str) -> Policy:
    policy = load_profile(Path(__file__).parents[3] / "profiles" / f"{name}.yaml").policy
    assert policy is not None
    return policy
