"""Grid of workloads that a probe measures: those of the request, and defaults for what it leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.exit_codes import UsageFailure
from autotune.probe.request import Effort, ProbeRequest, usual_dtype, usual_shape
from autotune.space.space import NARROWER
from ringattn.errors import InputError
from ringattn.hardware.facts import HardwareFacts
from ringattn.wording import plural
from ringattn.workload import Branch, Mode, Pattern, Workload, nearest_bucket, not_narrower

from .recorded import choose_recorded

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
# ViT-B/16 and BERT-base: full attention over many short sequences, as (batch, length) for a GPU and for a CPU.
_SHORT: tuple[tuple[int, int], ...] = ((64, 197), (32, 512))
_SHORT_CPU: tuple[tuple[int, int], ...] = ((8, 197), (4, 512))
_SHORT_HEADS, _SHORT_HEAD_DIM = 12, 64
_SHORTEST_OF_MODEL = 1024  # of the lengths for a model that reaches it
_DECODED = (1, 8, 64)  # sequences that are decoded at once
# What the documentation's first examples run on a CPU, or are served by: a probe that has time for few measures these.
FIRST_STEPS: tuple[Workload, ...] = (
    Workload("train", True, 2048, 4, 64, "fp32", pattern=LONGNET_CPU),  # README
    Workload("infer", True, 2048, 4, 64, "fp32"),  # getting started: the module
    Workload("train", True, 2048, 4, 64, "fp32"),  # getting started: `ringtune explain`
)
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload with the compute dtypes that may win, and the narrower ones that compete for ``dtype="auto"``."""

    workload: Workload
    main_dtypes: tuple[str, ...]
    narrow_dtypes: tuple[str, ...] = ()


def check_lengths(request: ProbeRequest) -> None:
    """Raise UsageFailure where a rank would hold too little of a sequence to have both of its chunks."""
    if request.documents is not None and (request.ranks > 1 or (request.batch_size or 1) > 1):
        raise UsageFailure("--documents is measured on one rank and in one row; leave --nproc and --batch-size out")
    if request.documents is not None and "decode" in request.modes:
        raise UsageFailure("--documents is about whole documents, and decoding has one query of each; use --mode both")
    if request.ranks > 1 and request.layout != "contiguous" and 1 in request.seq_lens:
        raise UsageFailure(
            f"--seq-len 1: in zigzag layout each of {request.ranks} ranks holds 2 positions at least; "
            "give a longer one, or --layout contiguous"
        )


def cells_for(request: ProbeRequest, facts: HardwareFacts) -> tuple[Cell, ...]:
    """Return every cell of the request, the first steps, then the shortest; raises UsageFailure when none is left."""
    workloads = _workloads(request, facts)
    found = [workload for workload in workloads if _fits(workload, facts)]
    if not found:
        raise UsageFailure(f"{_too_large(workloads[0], facts)}; ask for a shorter --seq-len")
    return tuple(cell_of(workload, request) for workload in found)


def left_out(request: ProbeRequest, facts: HardwareFacts) -> str:
    """Return what the request names and a probe does not measure, and why; empty where it measures everything."""
    said = []
    if (longest := _longest(request)) is not None and longest > (most := _grid_lengths(request, facts)[-1]):
        said.append(
            f"lengths beyond {most}, up to {longest}, left out at --effort {request.effort}: --seq-len names one"
        )
    said += choose_recorded(request).left_out
    large = [workload for workload in _workloads(request, facts) if not _fits(workload, facts)]
    if large:
        others = f" (and {plural(len(large) - 1, 'larger workload')})" if len(large) > 1 else ""
        said.append(f"left out{others}: {_too_large(large[0], facts)}")
    return "; ".join(said)


def _too_large(workload: Workload, facts: HardwareFacts) -> str:
    return (
        f"{workload}: its tensors alone{' (each rank makes the whole sequence once)' * (workload.world > 1)} "
        f"take more than {100 * MEMORY_SHARE:.0f} % of the device's {facts.memory_mib} MiB"
    )


def _workloads(request: ProbeRequest, facts: HardwareFacts) -> list[Workload]:
    if request.recorded:
        return list(choose_recorded(request).chosen)
    on_cpu = facts.vendor == "cpu"
    usual = usual_shape(facts.vendor)
    heads = request.heads or request.kv_heads or usual.heads
    lengths = _lengths(request, facts)
    modes: Sequence[Mode] = request.modes or ("train", "infer")
    workloads = _short_workloads(request, facts)
    for seq_len in lengths:
        for dtype in _input_dtypes(request, facts):
            for pattern in _patterns(request, on_cpu):
                for mode, batch in dict.fromkeys(_with_batches(modes, request.batch_size)):
                    try:
                        packed = _packed(request.documents, seq_len)
                        workload = Workload(
                            mode=mode,
                            causal=True if request.causal is None else request.causal,
                            heads=heads,
                            head_dim=request.head_dim or usual.head_dim,
                            dtype=dtype,
                            kv_heads=request.kv_heads or heads,
                            pattern=pattern,
                            world=request.ranks,
                            **(packed or {"seq_len": seq_len, "batch": batch}),
                        )
                    except InputError as error:
                        raise UsageFailure(str(error)) from None
                    workloads.append(workload)
    return sorted(workloads, key=lambda workload: (first_step(workload), workload.seq_len))


def first_step(workload: Workload) -> int:
    """Return the place of a workload among ``FIRST_STEPS``; all others come after."""
    return FIRST_STEPS.index(workload) if workload in FIRST_STEPS else len(FIRST_STEPS)


def _packed(documents: int | None, tokens: int) -> dict[str, int]:
    """Return batch, longest length and tokens of so many documents of uneven lengths; empty without any."""
    if documents is None:
        return {}
    longest = min(tokens - documents + 1, -(-2 * tokens // documents))
    if longest < 1:
        raise InputError(f"--documents {documents} does not fit into --seq-len {tokens}; give fewer")
    return {"batch": documents, "seq_len": longest, "packed_tokens": tokens}


def _with_batches(modes: Sequence[Mode], named: int | None) -> list[tuple[Mode, int]]:
    """Return the modes with their batch sizes; decoding has those of one user and of many where none is named."""
    return [(mode, batch) for mode in modes for batch in _batches(mode, named)]


def _batches(mode: Mode, named: int | None) -> tuple[int, ...]:
    return (named,) if named is not None else _DECODED if mode == "decode" else (1,)


def _grid_lengths(request: ProbeRequest, facts: HardwareFacts) -> tuple[int, ...]:
    return (_CPU_LENGTHS if facts.vendor == "cpu" else _GPU_LENGTHS)[request.effort]


def _lengths(request: ProbeRequest, facts: HardwareFacts) -> tuple[int, ...]:
    """Return the lengths asked for, those of a model, or the grid's."""
    grid = _grid_lengths(request, facts)
    longest = _longest(request)
    if request.seq_lens or longest is None:
        return tuple(sorted(set(request.seq_lens))) or grid
    longest = min(longest, grid[-1])
    lengths = [2**power for power in range(_SHORTEST_OF_MODEL.bit_length() - 1, longest.bit_length())]
    if not lengths or nearest_bucket(longest, lengths) is None:
        lengths.append(longest)
    # The grid has two patterns at each length, a model one.
    step = -(-len(lengths) // (2 * len(grid)))
    return tuple(lengths[::-1][::step][::-1])


def _longest(request: ProbeRequest) -> int | None:
    """Return the longest that a rank holds of a model's sequence; None where no model or a length is named."""
    if request.longest is None or request.seq_lens:
        return None
    return -(-request.longest // request.ranks)


def _short_workloads(request: ProbeRequest, facts: HardwareFacts) -> list[Workload]:
    """Return the grid's full attention over short sequences, where the request leaves the shape open; quick has none.

    In 50 s its 8 cells have 6 s each, and these 4 would take a third of that away.
    """
    named = (request.heads, request.head_dim, request.segment_lengths, request.longest, *request.seq_lens)
    named += (request.batch_size,)
    if request.effort == "quick" or request.causal or request.ranks > 1:
        return []
    if request.documents is not None:
        return []
    if any(value is not None for value in named):
        return []
    return [
        Workload(mode, False, seq_len, _SHORT_HEADS, _SHORT_HEAD_DIM, _input_dtypes(request, facts)[0], batch=batch)
        for batch, seq_len in (_SHORT_CPU if facts.vendor == "cpu" else _SHORT)
        for mode in dict.fromkeys(request.modes or ("train", "infer"))
        if mode != "decode"
    ]


def _patterns(request: ProbeRequest, on_cpu: bool) -> tuple[Pattern, ...]:
    if request.segment_lengths is None and request.dilation_rates is None:
        if request.dense:
            return (Pattern(),)
        return (Pattern(), LONGNET_CPU if on_cpu else LONGNET)
    try:
        return (Pattern.of(request.segment_lengths, request.dilation_rates, request.head_offset),)
    except InputError as error:
        raise UsageFailure(str(error)) from None


def _input_dtypes(request: ProbeRequest, facts: HardwareFacts) -> tuple[str, ...]:
    if request.precision in ("bf16", "fp16"):
        return (request.precision,)
    if request.precision in ("fp32", "tf32"):
        return ("fp32",)
    if request.input_dtype is not None:
        return (request.input_dtype,)
    usual = usual_dtype(facts.vendor, facts.arch)
    if request.effort == "full" and facts.vendor != "cpu":
        return tuple(dict.fromkeys((usual, "fp16", "fp32")))
    return (usual,)


def cell_of(workload: Workload, request: ProbeRequest) -> Cell:
    """Return a workload with the compute dtypes that the request allows."""
    if request.precision == "auto":
        return Cell(workload, not_narrower(workload.dtype), NARROWER[workload.dtype])
    if request.precision == "tf32":
        return Cell(workload, ("fp32",), ("tf32",))
    return Cell(workload, (workload.dtype,))


def tensor_bytes(workload: Workload) -> int:
    """Return the bytes of q, k, v, out and, in training, their gradients and dout, of the whole sequence."""
    rows = workload.rows_of_tensors * workload.positions_of_tensors * workload.head_dim * _BYTES[workload.dtype]
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
