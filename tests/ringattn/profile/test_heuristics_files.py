"""The shipped heuristics: every family of devices resolves to one file, and its policy says what the family can do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from machine_samples import EPYC, H100, gpu

from ringattn.hardware.facts import HardwareFacts, detect
from ringattn.kernels.registry import KERNELS
from ringattn.planning.heuristic import heuristic_tunables
from ringattn.profile.locations import collect, shipped_folder
from ringattn.profile.resolve import resolve
from ringattn.profile.schema import Policy
from ringattn.profile.yaml_io import dump_profile, load_profile, parse_profile
from ringattn.workload import INPUT_DTYPES, BranchTunables, Workload, not_narrower

FILES = sorted(shipped_folder().glob("heuristic-*.yaml"))

GENERIC = ("efficient", "math")
FLASH_FIRST = ("flash", "cudnn", "efficient", "math")
CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")
ON_CPU = ("flash-cpu", "math")

# device, file, compute dtype of bf16 and fp16 inputs, kernels of both directions
FAMILIES = [
    (gpu("Tesla P100-PCIE-16GB", (6, 0), 56, 16), "sm_60", "fp32", "fp16", GENERIC),
    (gpu("GeForce GTX 1080 Ti", (6, 1), 28, 11), "sm_61", "fp32", "fp32", GENERIC),
    (gpu("Tesla P40", (6, 1), 30, 24), "sm_61", "fp32", "fp32", GENERIC),
    (gpu("Tesla V100-SXM2-32GB", (7, 0), 80, 32), "sm_70-sm_75", "fp32", "fp16", GENERIC),
    (gpu("Xavier", (7, 2), 8, 32), "sm_70-sm_75", "fp32", "fp16", GENERIC),
    (gpu("Tesla T4", (7, 5), 40, 15), "sm_70-sm_75", "fp32", "fp16", GENERIC),
    (gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80), "sm_80-sm_89", "bf16", "fp16", FLASH_FIRST),
    (gpu("NVIDIA A10G", (8, 6), 80, 22), "sm_80-sm_89", "bf16", "fp16", FLASH_FIRST),
    (gpu("Orin", (8, 7), 16, 32), "sm_80-sm_89", "bf16", "fp16", FLASH_FIRST),
    (gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 24), "sm_80-sm_89", "bf16", "fp16", FLASH_FIRST),
    (H100, "sm_90", "bf16", "fp16", CUDNN_FIRST),
    (gpu("NVIDIA H200", (9, 0), 132, 140), "sm_90", "bf16", "fp16", CUDNN_FIRST),
    (gpu("NVIDIA B200", (10, 0), 148, 178), "sm_100+", "bf16", "fp16", CUDNN_FIRST),
    (gpu("NVIDIA B300 SXM6 AC", (10, 3), 148, 270), "sm_100+", "bf16", "fp16", CUDNN_FIRST),
    (gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 31), "sm_100+", "bf16", "fp16", CUDNN_FIRST),
    (gpu("NVIDIA Something", (14, 2), 200, 500), "sm_100+", "bf16", "fp16", CUDNN_FIRST),
    (EPYC, "cpu-bf16", "bf16", "fp32", ON_CPU),
    (
        HardwareFacts("cpu", "Intel Core i7", "core-i7", "x86_64", 4, 16000, 8, isa=("avx2",)),
        "cpu",
        "fp32",
        "fp32",
        ON_CPU,
    ),
    (HardwareFacts("cpu", "neoverse-n1", "neoverse-n1", "aarch64", 4, 16000, 8), "cpu", "fp32", "fp32", ON_CPU),
]
DEVICES = [facts for facts, *_ in FAMILIES]


def policy_for(facts: HardwareFacts) -> tuple[str, Policy]:
    located, _ = collect(heuristics_only=True)
    resolution = resolve([entry for entry in located if entry.origin == "shipped"], facts)
    assert (resolution.profile, resolution.tier) == (None, "heuristic")
    assert resolution.heuristic.policy is not None
    return Path(resolution.path).name, resolution.heuristic.policy


@pytest.mark.parametrize(
    ("facts", "family", "bf16", "fp16", "kernels"), FAMILIES, ids=[f[0].device_name for f in FAMILIES]
)
def test_every_family_has_its_policy(
    facts: HardwareFacts, family: str, bf16: str, fp16: str, kernels: tuple[str, ...]
) -> None:
    name, policy = policy_for(facts)
    assert name == f"heuristic-{family}.yaml"
    assert policy.compute_dtype == (("bf16", bf16), ("fp16", fp16), ("fp32", "fp32"), ("fp64", "fp64"))
    assert policy.forward == kernels
    assert policy.backward == kernels


@pytest.mark.parametrize(
    "facts", [f[0] for f in FAMILIES if f[0].vendor == "nvidia"], ids=lambda facts: facts.device_name
)
def test_flash_is_attempted_only_where_it_runs_and_bf16_never_becomes_fp16(facts: HardwareFacts) -> None:
    _, policy = policy_for(facts)
    old = int(facts.arch.removeprefix("sm_")) < 80
    assert old == ("flash" not in policy.forward + policy.backward)
    assert old == ("cudnn" not in policy.forward + policy.backward)
    assert (policy.dtype_for("bf16") == "fp32") == old


@pytest.mark.parametrize("facts", DEVICES, ids=lambda facts: facts.device_name)
def test_every_list_ends_in_math_and_fp64_runs_on_math_alone(facts: HardwareFacts) -> None:
    _, policy = policy_for(facts)
    for names in (policy.forward, policy.backward):
        assert names[-1] == "math"
    assert policy.kernels_for("forward", policy.dtype_for("fp64")) == ("math",)
    assert policy.kernels_for("backward", policy.dtype_for("fp64")) == ("math",)
    assert all(policy.dtype_for(name) in not_narrower(name) for name in INPUT_DTYPES)


def test_a_device_older_than_every_family_gets_the_built_in_policy() -> None:
    name, policy = policy_for(gpu("GeForce GTX 980", (5, 2), 16, 4))
    assert name == "built-in"
    assert policy.forward == GENERIC
    assert policy.dtype_for("fp16") == "fp32"


@pytest.mark.parametrize("head_dim", [64, 128, 136, 160, 192, 256])
def test_wide_heads_run_on_cudnn_where_it_has_them(head_dim: int) -> None:
    """As torch's own dispatcher runs them on sm_90 with cuDNN 9.10 or newer."""
    workload = Workload("train", True, 8192, 16, head_dim, "bf16", kv_heads=4)
    chosen = heuristic_tunables(workload, policy_for(H100)[1], H100)
    assert chosen.branches == (BranchTunables("cudnn", "cudnn"),)
    older = replace(H100, software=(("cudnn", "9.1.0"),))
    flash = "flash" if head_dim >= 192 else "efficient"  # its backward reads out of bounds between 128 and 192
    before = BranchTunables("cudnn", "cudnn") if head_dim <= 128 else BranchTunables("flash", flash)
    assert heuristic_tunables(workload, policy_for(H100)[1], older).branches == (before,)


def test_this_machine_has_a_policy() -> None:
    name, policy = policy_for(detect())
    assert name != "built-in"
    assert policy.forward[-1] == "math"


def test_no_family_is_left_out_here() -> None:
    assert {path.name for path in FILES} == {f"heuristic-{family}.yaml" for _, family, *_ in FAMILIES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_heuristic_file(path: Path) -> None:
    profile = load_profile(path)
    assert profile.source == "heuristic"
    assert profile.plans == ()
    assert profile.policy is not None
    assert {*profile.policy.forward, *profile.policy.backward} <= set(KERNELS)
    assert parse_profile(dump_profile(profile), str(path)) == profile
    assert path.read_text().endswith(dump_profile(profile))
