"""Profiles for the tests of what people read: an invented GPU with everything a profile can hold, and a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from machines import H100

from ringattn.profile.schema import Choice, Evidence, Failure, Fingerprint, PlanEntry, Policy, Profile, Provenance
from ringattn.profile.yaml_io import dump_profile
from ringattn.workload import Branch, BranchTunables, Pattern, Tunables, Workload

LONGNET = Pattern((Branch(2048, 1), Branch(4096, 2), Branch(8192, 4)))
LENGTHS = (1024, 4096, 16384, 65536, 262144)
# Forward+backward ms per 1024 tokens squared at D=128, by kernel, falling with length as launch overhead fades.
COST_MS = {"cudnn": 0.036, "flash": 0.066, "efficient": 0.14, "flash-attn-4": 0.033, "math": 1.1}
OVERHEAD_MS = {"cudnn": 0.12, "flash": 0.09, "efficient": 0.11, "flash-attn-4": 0.30, "math": 0.4}


def evidence(ms: float, ratio: float, peak_mib: int, half_width: float = 0.015) -> Evidence:
    return Evidence(
        median_ms=ms,
        default_ratio=ratio,
        ratio_low=ratio * (1 - half_width),
        ratio_high=ratio * (1 + half_width),
        peak_bytes=peak_mib * 2**20,
        error=2.4e-3,
        first_call_ms=ms + 480.0,
        host_us=96.0,
        blocks=12,
    )


def plan(forward: str, backward: str, branches: int = 1, dtype: str = "bf16", **knobs: object) -> Tunables:
    return Tunables(dtype, (BranchTunables(forward, backward),) * branches, **knobs)  # type: ignore[arg-type]


def _entry(workload: Workload) -> PlanEntry:
    branches = max(1, len(workload.pattern.branches))
    share = 0.35 if workload.train else 0.1
    scale = 1.0 if workload.pattern.dense else min(1.0, 16384 / workload.seq_len)

    def ms(forward: str, backward: str) -> float:
        tokens = workload.seq_len / 1024
        cost = (COST_MS[forward] * share + (COST_MS[backward] * (1 - share) if backward else 0)) * tokens**2 * scale
        return cost + OVERHEAD_MS[forward] + (OVERHEAD_MS[backward] if backward else 0)

    default_ms = ms("cudnn", "cudnn" if workload.train else "")
    pairs = [(f, b if workload.train else "") for f in COST_MS for b in (COST_MS if workload.train else ("",))]
    ranked = sorted(pairs, key=lambda pair: ms(*pair))

    def choice(pair: tuple[str, str], **knobs: object) -> Choice:
        peak = 34 * workload.seq_len // 1024 * (1 if pair[0] != "math" else 8)
        return Choice(plan(*pair, branches, **knobs), evidence(ms(*pair), ms(*pair) / default_ms, peak))

    winner = choice(ranked[0])
    assert winner.evidence is not None
    lean = Choice(
        plan(*ranked[0], branches, checkpoint="full", window_tokens=8192),
        evidence(winner.evidence.median_ms * 1.3, winner.evidence.default_ratio * 1.3, 12 * workload.seq_len // 1024),
    )
    failures = [Failure("xformers", "rejected", "the package xformers is not installed")]
    if workload.seq_len >= 65536:
        failures.append(Failure("math/math bf16", "oom", "would need 34.4 GiB of workspace"))
    if workload.seq_len == 1024:
        failures.append(
            Failure(
                "flash-attn-4/flash-attn-4 bf16 pack_gqa=True", "wrong", "dk off by 12 % at length 1013 (ragged tile)"
            )
        )
    kernels = [k for k in COST_MS if k != "math" or workload.seq_len < 65536]  # math fails beyond, see below
    singles = tuple(choice((k, k if workload.train else "")) for k in kernels)
    return PlanEntry(
        workload,
        winner,
        runners_up=(choice(ranked[1]), choice(ranked[2])),
        front=(winner, lean),
        default=choice(("cudnn", "cudnn" if workload.train else "")),
        singles=singles,
        failures=tuple(failures),
    )


POLICY = Policy(
    compute_dtype=(("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp64", "fp64")),
    forward=("cudnn", "flash", "efficient", "math"),
    backward=("cudnn", "flash", "efficient", "math"),
    copy_from_rate=8,
)


@cache
def gpu_text() -> str:
    """The file of ``gpu_profile``: 0.1 s, which two hundred tests need not pay each."""
    return dump_profile(gpu_profile())


@cache
def gpu_profile() -> Profile:
    entries = []
    for mode in ("train", "infer"):
        for pattern in (Pattern(), LONGNET):
            for seq_len in LENGTHS:
                w = Workload(mode, True, seq_len, 16, 128, "bf16", pattern=pattern)  # type: ignore[arg-type]
                entries.append(_entry(w))
    refused = Workload("train", False, 4096, 16, 512, "bf16")
    entries.append(PlanEntry(refused, refusal="no kernel here has a backward for head_dim 512 within the memory limit"))
    return Profile(
        source="measured",
        fingerprint=Fingerprint.of(replace(H100, power_limit_w=700)),
        software=(
            ("torch", "2.13.0"),
            ("cuda", "13.0"),
            ("cudnn", "9.15.1"),
            ("driver", "580.95"),
            ("python", "3.12.3"),
        ),
        policy=POLICY,
        plans=tuple(entries),
        provenance=Provenance(
            "0.1.0",
            "2026-11-27",
            "standard",
            180.0,
            171.4,
            0,
            ("power was capped during 2 of 240 blocks; they were repeated",),
        ),
    )


def cpu_profile() -> Profile:
    entries = []
    for mode in ("train", "infer"):
        for seq_len in (256, 1024):
            w = Workload(mode, True, seq_len, 4, 64, "fp32")  # type: ignore[arg-type]
            backward = "flash-cpu" if mode == "train" else ""
            default = Choice(plan("flash-cpu", backward, dtype="fp32"), evidence(seq_len / 300, 1.0, 3, 0.0))
            slow = Choice(plan("math", backward and "math", dtype="fp32"), evidence(seq_len / 100, 3.0, 20))
            entries.append(PlanEntry(w, default, runners_up=(slow,), default=default))
    return Profile(
        source="measured",
        fingerprint=Fingerprint(
            "cpu",
            "AMD EPYC 9654 96-Core Processor",
            "epyc-9004",
            "x86_64",
            2,
            24576,
            32,
            threads=2,
            isa=("avx2", "avx512f"),
        ),
        software=(("torch", "2.13.0"), ("python", "3.11.2")),
        policy=POLICY,
        plans=tuple(entries),
        provenance=Provenance("0.1.0", "2026-11-27", "quick", 60.0, 48.2, 0),
    )


def heuristic_profile() -> Profile:
    return Profile(
        source="heuristic",
        fingerprint=Fingerprint("nvidia", arch="sm_100+"),
        policy=POLICY,
        provenance=Provenance("0.1.0", "2026-11-27", notes=("nobody has measured this family yet",)),
    )
