"""Grid of workloads that a probe measures: those of the request, and defaults for what it leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.exit_codes import UsageFailure
from autotune.space.space import NARROWER
from ringattn.errors import InputError
from ringattn.hardware.facts import HardwareFacts
from ringattn.wording import plural
from ringattn.workload import Branch, Mode, Pattern, Workload, not_narrower

from .request import Effort, ProbeRequest

LONGNET = Pattern((Branch(2048, 1), Branch(4096, 2), Branch(8192, 4), Branch(16384, 8), Branch(32768, 16)))
LONGNET_CPU = Pattern((Branch(512, 1), Branch(1024, 2), Branch(2048, 4)))
MEMORY_SHARE = 0.25  # of the device that q, k, v, out and the gradients of a cell may take

_GPU_LENGTHS: dict[Effort, tuple[int, ...]] = {
    "quick": (2048, 16384),
    "standard": (1024, 4096, 16384, 32768, 65536),
    "full": (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
}
_CPU_LENGTHS: dict[Effort, tuple[int, ...]] = {
    "quick": (512, 2048),
    "standard": (512, 1024, 2048, 4096),
    "full": (256, 512, 1024, 2048, 4096, 8192),
}
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload with the compute dtypes that may win, and the narrower ones that compete for ``dtype="auto"``."""

    workload: Workload
    main_dtypes: tuple[str, ...]
    narrow_dtypes: tuple[str, ...] = ()


def check_lengths(request: ProbeRequest) -> None:
    """Raise UsageFailure where a rank would hold too little of a sequence to have both of its chunks."""
    if request.ranks > 1 and request.layout != "contiguous" and 1 in request.seq_lens:
        raise UsageFailure(
            f"--seq-len 1: in zigzag layout each of {request.ranks} ranks holds 2 positions at least; "
            "give a longer one, or --layout contiguous"
        )


def cells_for(request: ProbeRequest, facts: HardwareFacts) -> tuple[Cell, ...]:
    """Return every cell of the request, cheapest first; raises UsageFailure when none is left."""
    workloads = _workloads(request, facts)
    found = [workload for workload in workloads if _fits(workload, facts)]
    if not found:
        raise UsageFailure(f"{_too_large(workloads[0], facts)}; ask for a shorter --seq-len")
    return tuple(_cell(workload, request) for workload in found)


def left_out(request: ProbeRequest, facts: HardwareFacts) -> str:
    """Return what the request names and a probe does not measure, and why; empty where it measures everything."""
    large = [workload for workload in _workloads(request, facts) if not _fits(workload, facts)]
    if not large:
        return ""
    others = f" (and {plural(len(large) - 1, 'larger workload')})" if len(large) > 1 else ""
    return f"left out{others}: {_too_large(large[0], facts)}"


def _too_large(workload: Workload, facts: HardwareFacts) -> str:
    return (
        f"{workload}: its tensors alone{' (each rank makes the whole sequence once)' * (workload.world > 1)} "
        f"take more than {100 * MEMORY_SHARE:.0f} % of the device's {facts.memory_mib} MiB"
    )


def _workloads(request: ProbeRequest, facts: HardwareFacts) -> list[Workload]:
    on_cpu = facts.vendor == "cpu"
    heads = request.heads or request.kv_heads or (4 if on_cpu else 16)
    lengths = tuple(sorted(set(request.seq_lens))) or (_CPU_LENGTHS if on_cpu else _GPU_LENGTHS)[request.effort]
    modes: Sequence[Mode] = request.modes or ("train", "infer")
    workloads = []
    for seq_len in lengths:
        for dtype in _input_dtypes(request, facts):
            for pattern in _patterns(request, on_cpu):
                for mode in dict.fromkeys(modes):
                    try:
                        workload = Workload(
                            mode=mode,
                            causal=True if request.causal is None else request.causal,
                            seq_len=seq_len,
                            heads=heads,
                            head_dim=request.head_dim or (64 if on_cpu else 128),
                            dtype=dtype,
                            kv_heads=request.kv_heads or heads,
                            batch=request.batch_size,
                            pattern=pattern,
                            world=request.ranks,
                        )
                    except InputError as error:
                        raise UsageFailure(str(error)) from None
                    workloads.append(workload)
    return workloads


def _patterns(request: ProbeRequest, on_cpu: bool) -> tuple[Pattern, ...]:
    if request.segment_lengths is None and request.dilation_rates is None:
        if request.dense:
            return (Pattern(),)
        return (Pattern(), LONGNET_CPU if on_cpu else LONGNET)
    try:
        return (Pattern.of(request.segment_lengths, request.dilation_rates),)
    except InputError as error:
        raise UsageFailure(str(error)) from None


def _input_dtypes(request: ProbeRequest, facts: HardwareFacts) -> tuple[str, ...]:
    if request.precision in ("bf16", "fp16"):
        return (request.precision,)
    if request.precision in ("fp32", "tf32") or facts.vendor == "cpu":
        return ("fp32",)
    sm = int(facts.arch.removeprefix("sm_"))
    usual = "bf16" if sm >= 80 else "fp16" if sm >= 70 else "fp32"
    if request.effort == "full":
        return tuple(dict.fromkeys((usual, "fp16", "fp32")))
    return (usual,)


def _cell(workload: Workload, request: ProbeRequest) -> Cell:
    if request.precision == "auto":
        return Cell(workload, not_narrower(workload.dtype), NARROWER[workload.dtype])
    if request.precision == "tf32":
        return Cell(workload, ("fp32",), ("tf32",))
    return Cell(workload, (workload.dtype,))


def tensor_bytes(workload: Workload) -> int:
    """Return the bytes of q, k, v, out and, in training, their gradients and dout, of the whole sequence."""
    rows = workload.batch * workload.total * workload.head_dim * _BYTES[workload.dtype]
    inputs = rows * (2 * workload.heads + 2 * workload.kv_heads)
    return 2 * inputs if workload.train else inputs


def _fits(workload: Workload, facts: HardwareFacts) -> bool:
    return tensor_bytes(workload) <= MEMORY_SHARE * facts.memory_mib * 2**20


def between(shorter: Cell, longer: Cell) -> Cell | None:
    """Return the cell half way between two in log2, a multiple of 64; None when they are too close to matter."""
    middle = round((shorter.workload.seq_len * longer.workload.seq_len) ** 0.5 / 64) * 64
    if not shorter.workload.seq_len * 1.2 < middle < longer.workload.seq_len / 1.2:
        return None
    return replace(shorter, workload=shorter.workload.at(middle))
