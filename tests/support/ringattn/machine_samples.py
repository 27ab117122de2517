"""Invented machines and profiles for the tests of facts, profiles and resolution."""

from __future__ import annotations

from dataclasses import replace

from ringattn.hardware.facts import CudaReading, HardwareFacts, cuda_facts
from ringattn.profile.schema import Choice, Evidence, Failure, Fingerprint, PlanEntry, Profile, Provenance
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload

GIB = 2**30
CUDA_SOFTWARE = (
    ("cuda", "13.0"),
    ("cudnn", "9.10.2"),
    ("driver", "580.159.04"),
    ("python", "3.12"),
    ("torch", "2.11.0"),
)


def gpu(
    name: str,
    capability: tuple[int, int],
    sm_count: int,
    gib: float,
    *,
    l2_mib: int = 50,
    count: int = 1,
    power_limit_w: int | None = None,
    nvlinks: int | None = None,
    software: tuple[tuple[str, str], ...] = CUDA_SOFTWARE,
) -> HardwareFacts:
    limit = None if power_limit_w is None else power_limit_w * 1000
    reading = CudaReading(name, capability, sm_count, int(gib * GIB), l2_mib * 2**20, count, limit, nvlinks)
    return cuda_facts(reading, software)


H100 = gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 79.2, power_limit_w=700)
H100_PCIE = gpu("NVIDIA H100 PCIe", (9, 0), 114, 79.1, power_limit_w=350)
H200 = gpu("NVIDIA H200", (9, 0), 132, 139.8, l2_mib=60, power_limit_w=700)
A100 = gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.2, l2_mib=40, power_limit_w=400)
A100_40 = gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 39.4, l2_mib=40, power_limit_w=400)
EPYC = HardwareFacts(
    vendor="cpu",
    device_name="AMD EPYC 9654 96-Core Processor",
    sku="epyc-9004",
    arch="x86_64",
    sm_count=8,
    memory_mib=32000,
    l2_mib=32,
    isa=("avx2", "avx512_bf16", "avx512f"),
    threads=8,
    software=(("python", "3.11"), ("torch", "2.13.0+cpu")),
)

EVIDENCE = Evidence(
    median_ms=1.25,
    default_ratio=0.75,
    ratio_low=0.7,
    ratio_high=0.8,
    peak_bytes=1 << 20,
    error=0.0025,
    first_call_ms=480.0,
    host_us=26.5,
    blocks=12,
)


def measured(facts: HardwareFacts, *entries: PlanEntry) -> Profile:
    return Profile("measured", Fingerprint.of(facts), facts.software, plans=entries)


def dense_entry(seq_len: int = 4096, kernel: str = "flash", **changes: object) -> PlanEntry:
    workload = replace(Workload("train", True, seq_len, 16, 128, "bf16"), **changes)  # type: ignore[arg-type]
    branches = tuple(BranchTunables(kernel, kernel) for _ in workload.pattern.resolved(seq_len))
    return PlanEntry(workload, Choice(Tunables("bf16", branches), EVIDENCE))


def rich_profile() -> Profile:
    """A profile with something in every field."""
    pattern = Pattern.of([2048, 8192], [1, 4], "blocked")
    workload = Workload("train", True, 8192, 16, 128, "bf16", kv_heads=4, batch=2, pattern=pattern)
    choice = Choice(
        Tunables(
            "bf16",
            (BranchTunables("cudnn", "cudnn"), BranchTunables("flash", "cudnn", "copy")),
            checkpoint="none",
            window_tokens=8192,
            pool_threshold_mib=64,
            params=(("cudnn.split", 2), ("merge.fused", True), ("merge.order", "tree")),
        ),
        EVIDENCE,
    )
    plain = Choice(Tunables("fp32", (BranchTunables("math", "math"), BranchTunables("math", "math"))))
    entry = PlanEntry(
        workload,
        choice,
        runners_up=(plain,),
        auto=choice,
        front=(choice, plain),
        default=plain,
        failures=(Failure("efficient/efficient", "oom", "CUDA out of memory: tried 2 GiB"),),
    )
    refused = PlanEntry(workload.at(1 << 20), refusal="nothing fits in 80 GiB")
    return Profile(
        "measured",
        Fingerprint.of(H100),
        H100.software,
        plans=(entry, refused, dense_entry(mode="infer")),
        provenance=Provenance("0.1.0", "2026-11-27", "standard", 900.0, 812.5, 0, ("clocks not locked",)),
    )
