"""Random shapes, patterns and plans over ranks, the same every time; ranks run them, one process checks them.

They lean to what one rank's rows make of segments: several whole ones in one chunk beside others that cross ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from oracle import ALL_LAYOUTS, DENSE, Case, Results, assert_equal_to, cpu, exact
from ring_cases import RingCase, assert_keeps_the_rule, run_here

from ringattn import Pattern
from ringattn.geometry.layout import Shard, assemble, grouped, no_shard_reason, shards_of
from ringattn.geometry.ring_geometry import HeadRange, ring_geometry, stays
from ringattn.planning.plan import Conditions, rejection_reasons
from ringattn.workload import Branch

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Trial:
    """A case with the dtype of its inputs, the one it is computed in, and its kernel."""

    ring: RingCase
    dtype: str = "fp64"
    compute: str = "fp64"
    kernel: str = "math"
    world: int = 2

    @property
    def possible(self) -> bool:
        """Whether the plan runs, both as the profile has it, with equal shards, and for the total of the call."""

        def runs(total_length: int) -> bool:
            workload = replace(
                self.ring.case.workload(self.dtype), seq_len=-(-case.length // world), world=world,
                total_length=total_length,
            )  # fmt: skip
            return not rejection_reasons(workload, tunables, cpu(), conditions=Conditions(layout=self.ring.spread))

        case, world = self.ring.case, self.world
        tunables = self.ring.tunables(self.compute, self.kernel, self.kernel)
        return runs(0) and runs(case.length)


def trials(world: int, count: int) -> list[Trial]:
    """The first ``count`` for so many ranks; each follows from its number alone."""
    return [_trial(world, number) for number in range(count)]


def _trial(world: int, number: int) -> Trial:
    draw = random.Random(f"{world} ranks, case {number}")
    while not (trial := _drawn(world, draw)).possible:
        pass
    return trial


def _drawn(world: int, draw: random.Random) -> Trial:
    schedules = ["ring", "ring", "all-gather", "all-gather", "ulysses"] + ["ulysses-ring"] * (2 if world == 4 else 0)
    schedule = draw.choice(schedules)
    unit = {"ulysses": world, "ulysses-ring": 2}.get(schedule, 1)
    for _ in range(
        draw.choice((1, 40, 40, 40))
    ):  # until some rank holds whole segments of a branch that crosses others
        spread = draw.choice(("contiguous", "zigzag"))
        local = draw.randint(2, 13)
        uneven = draw.random() < 0.7
        length = local * world - (draw.randrange(world) if uneven else 0)
        if no_shard_reason(spread, length, world):
            return _drawn(world, draw)
        parts = grouped(shards_of(spread, length, world), 2 if schedule == "ulysses-ring" else 1)
        whole = _segments_whole_on_one(parts)
        if whole:
            break
    kv_heads = unit * draw.choice((1, 2) if unit > 1 else (1, 2, 2, 3, 4))
    dtype, compute = draw.choice((("fp64", "fp64"),) * 6 + (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")))
    case = Case(
        length=length,
        heads=kv_heads * draw.choice((1, 1, 2, 3)),
        kv_heads=kv_heads,
        head_dim=draw.choice((2, 4, 8)),
        batch=draw.choice((1, 2)),
        pattern=_pattern(draw, whole, local, length),
        causal=draw.random() < 0.5,
        scale=draw.choice((None, 0.5)),
        layout=draw.choice(ALL_LAYOUTS),
        seed=draw.randrange(100),
    )
    ring = RingCase(
        case,
        schedule,
        spread,
        ulysses=2 if schedule == "ulysses-ring" else 0,
        head_groups=draw.choice((0, 0, 2)) if schedule != "ring" else 0,
        checkpoint=draw.choice(("selective", "full", "none") if unit > 1 else ("selective", "selective", "full")),
        grad_wire="compute" if dtype != compute and draw.random() < 0.5 else "",
        ragged=uneven or draw.random() < 0.2,
    )
    return Trial(ring, dtype, compute, "math" if dtype == "fp64" else draw.choice(("math", "flash-cpu")), world)


def _segments_whole_on_one(parts: tuple[Shard, ...]) -> list[int]:
    """The segments of which some member of a ring holds two or more and nothing else, while others cross members."""
    return [
        segment
        for (span, *more) in parts
        for segment in range(2, span.length // 2 + 1)
        if not more and span.begin % segment == span.end % segment == 0 and not stays(Branch(segment, 1), parts)
    ]


def _pattern(draw: random.Random, whole: list[int], local: int, length: int) -> Pattern:
    """Dense; one branch of rate 1 from ``whole``, if there is any; one of any kind; several."""
    kind = draw.random()
    if kind < 0.12:
        return DENSE
    rule = draw.choice(("interleaved", "blocked"))
    if kind < 0.6 and whole:
        return Pattern((Branch(draw.choice(whole), 1),), rule)
    if kind < 0.7:
        return Pattern((Branch(draw.randint(1, length), draw.choice((1, 1, 2, 3, 4))),), rule)
    short = max(1, local // 2)
    segments = [
        draw.choice((*whole[-1:], draw.randint(1, short), local, draw.randint(1, length)))
        for _ in range(draw.randint(2, 3))
    ]
    branches = [Branch(segment, draw.choice((1, 1, 2, 3, 5))) for segment in segments]
    return Pattern(tuple(branches), rule)


def has_chunk_of_whole_segments(trial: Trial) -> bool:
    """Whether all rows of some rank are one chunk of two whole segments or more, of two heads or more."""
    ring, case = trial.ring, trial.ring.case
    degree = {"ulysses": trial.world, "ulysses-ring": 2}.get(ring.schedule, 1)
    groups = max(1, ring.head_groups)
    transport, cut = ("all-gather", groups) if ring.schedule == "all-gather" else ("ring", 1)
    own = case.kv_heads // degree // (groups if degree > 1 else 1)
    parts = grouped(shards_of(ring.spread, case.length, trial.world), degree)
    if case.pattern.dense or len(case.pattern.branches) > 1 or case.pattern.branches[0].rate > 1:
        return False
    chunks = [
        ring_geometry(
            case.pattern, case.causal, parts, me, case.batch, HeadRange(0, own, case.kv_heads), transport, cut
        ).chunks
        for me in range(len(parts))
    ]  # fmt: skip
    return own * case.heads // case.kv_heads > 1 and any(len(ls) == 1 and ls[0].segments > 1 for ls in chunks)


# --- on the ranks ------------------------------------------------------------------------------------------------

Rows = list[tuple[str, "numpy.ndarray[Any, Any]"]]  # dtype and values of out, lse, dq, dk and dv: pipes take no tensors


def rows_of(given: Sequence[Trial]) -> list[Rows | str]:
    """This rank's rows of the results of each trial, or what it raised."""
    return [_rows_or_error(trial) for trial in given]


def _rows_or_error(trial: Trial) -> Rows | str:
    ring, dtype, kernels = trial.ring, _DTYPES[trial.dtype], (trial.kernel, trial.kernel)
    try:
        module = ring.module(dtype, trial.compute, kernels)
        results = run_here(ring, module, *ring.case.inputs(dtype), ring.case.dout(dtype))
    except Exception as error:  # noqa: BLE001  the next trials are to run all the same
        return f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    assert {program.plan.tunables for program in module._programs.values()} == {ring.tunables(trial.compute, *kernels)}
    return [(str(x.dtype)[6:], x.detach().double().numpy()) for x in results]


# --- beside them -------------------------------------------------------------------------------------------------


def faults_of(given: Sequence[Trial], per_rank: Sequence[Sequence[Rows | str]]) -> list[tuple[Trial, str]]:
    """The trials that went wrong, and how, by what ``rows_of`` gave on every rank."""
    found = []
    for trial, rows in zip(given, zip(*per_rank, strict=True), strict=True):
        fault = next((each for each in rows if isinstance(each, str)), "") or _fault_in(trial, rows)  # type: ignore[arg-type]
        if fault:
            found.append((trial, fault))
    return found


def _fault_in(trial: Trial, per_rank: Sequence[Rows]) -> str:
    ring, case, dtype = trial.ring, trial.ring.case, _DTYPES[trial.dtype]
    parts = shards_of(ring.spread, case.length, trial.world)
    results = Results(*(_whole(each, parts, 2 if n == 1 else 1) for n, each in enumerate(zip(*per_rank, strict=True))))
    inputs = (*case.inputs(dtype), case.dout(dtype))
    try:
        if dtype is torch.float64:
            assert_equal_to(results, exact(case, *inputs))
        else:
            assert_keeps_the_rule(ring, results, inputs, _DTYPES[trial.compute], trial.kernel)
    except AssertionError as error:
        return str(error)
    return ""


def _whole(rows: Sequence[tuple[str, Any]], parts: tuple[Shard, ...], dim: int) -> torch.Tensor:
    return assemble([torch.from_numpy(x).to(getattr(torch, dtype)) for dtype, x in rows], parts, dim)
