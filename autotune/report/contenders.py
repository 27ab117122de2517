"""Times the plans of presets, of this machine and other libraries' attention side by side, and compares with float64.

Measured like candidates of a probe: in a worker process, paired in blocks of random order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from autotune.accuracy.inputs import Inputs
from autotune.accuracy.sampled_rows import Expected, Sampled, pick_rows
from autotune.measure.bench import BenchSettings, Phase
from autotune.measure.benchmark import DeviceBench
from autotune.measure.evaluator import Checked, Evaluator, Fault, Interference, Sample, largest_of_each
from autotune.measure.module_calls import build_module, results_of
from autotune.measure.worker_evaluator import WorkerEvaluator
from autotune.space.presets import PRESETS, plans_of
from autotune.statistics import interval_of, median
from ringattn.attention import RingAttention
from ringattn.errors import PlanError, RingAttentionError
from ringattn.hardware.facts import HardwareFacts
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload, describe

if TYPE_CHECKING:
    from torch.nn import Module

TORCH, TORCHSCALE, OURS, HEURISTIC = "torch", "torchscale", "this machine", "heuristic"
BASELINE = TORCH
CHECK_TIMEOUT_S = 600.0  # a first call may compile, and math takes its time on a CPU
SAMPLE_TARGET_MS = 30.0
BENCH = "autotune.report.contenders:ContenderBench"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Standing:
    """One contender at one workload.

    ``speedup`` is the median over blocks of the baseline's time over this one's, with its 95 % interval: of one block
    that is infinite. ``error`` is relative to float64, NaN
    where another attention is computed. ``note`` says what ran, or why nothing did: then the figures are NaN.
    """

    seq_len: int
    name: str
    note: str
    ms: float = math.nan
    tokens_per_s: float = math.nan
    peak_bytes: int = 0
    error: float = math.nan
    speedup: float = math.nan
    speedup_low: float = math.nan
    speedup_high: float = math.nan

    @property
    def is_decided(self) -> bool:
        """Return whether noise leaves no doubt that it is faster than the baseline, or that it is slower."""
        return self.speedup_low > 1 or 0 < self.speedup_high < 1


@dataclass(frozen=True, slots=True)
class Crossover:
    """Length from which on a contender is faster (or ``slower``) than the baseline, between two measured ones.

    The ends of both speed-ups' intervals give ``least`` and ``most``.
    """

    name: str
    seq_len: int
    least: int
    most: int
    slower: bool

    def __str__(self) -> str:
        change = "slower" if self.slower else "faster"
        between = f"about {self.seq_len:,} tokens on ({self.least:,} to {self.most:,})"
        return f"{self.name} is {change} than torch from {between}"


def foreign_plan(name: str, workload: Workload) -> Tunables:
    """Return the name of another library's attention in the place of a plan, which a worker's requests carry."""
    return Tunables(dtype=workload.dtype, branches=(BranchTunables(name, name if workload.train else ""),))


class Foreign:
    """Other library's attention, called like the module of a plan. Its lse is not looked at."""

    _programs: Mapping[Any, Any] = {}

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False) -> Any:
        out = self._attend(q, k, v)
        return (out, q.new_zeros(q.shape[0], q.shape[2], q.shape[1])) if return_lse else out

    def peer_workspace_bytes(self) -> int:
        return 0


class ContenderBench(DeviceBench):
    """Measures plans, and other libraries by ``foreign_plan``."""

    def _module(self, workload: Workload, tunables: Tunables) -> Any:
        if tunables.branches[0].forward == TORCH:
            return Foreign(partial(_torch, workload.causal))
        if tunables.branches[0].forward == TORCHSCALE:
            return Foreign(_torchscale(workload, self.device))
        return super()._module(workload, tunables)

    def _answer(
        self,
        module: Any,
        workload: Workload,
        tunables: Tunables,
        length: int,
        inputs: Inputs,
        sampled: Sampled,
        expected: Expected,
        phase: Phase,
    ) -> tuple[float, float]:
        """Compare; the error of another library is a figure here, however large, and no fault."""
        if not isinstance(module, Foreign):
            return super()._answer(module, workload, tunables, length, inputs, sampled, expected, phase)
        (out, lse, grads), taken_ms = self._timed(lambda: results_of(module, inputs, workload))
        if tunables.branches[0].forward == TORCH and not workload.pattern.dense:
            return math.nan, taken_ms
        exact = dict(expected.exact.tensors)
        got = pick_rows(workload, sampled, out, lse, grads).tensors
        return max(float((x.double() - exact[name]).norm() / exact[name].norm()) for name, x in got), taken_ms


def _torch(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return torch's own dense attention, on the kernel it chooses."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(
        1, 2
    )


def _torchscale(workload: Workload, device: torch.device) -> Attend:
    """Return torchscale's dilated attention without projections, on flash-attn or, without it, the kernels here."""
    from types import SimpleNamespace

    from torchscale.component import multihead_attention
    from torchscale.component.dilated_attention import DilatedAttention

    width = workload.heads * workload.head_dim
    args = SimpleNamespace(
        flash_attention=True,
        segment_length=[branch.segment for branch in workload.pattern.branches],
        dilated_ratio=[branch.rate for branch in workload.pattern.branches],
        seq_parallel=False,
        multiway=False,
        xpos_rel_pos=False,
        layernorm_eps=1e-5,
    )
    theirs: Module = DilatedAttention(args, width, workload.heads, self_attention=True, subln=False)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(theirs, name, torch.nn.Identity())
    if multihead_attention.flash_attn_func is None:
        shape = (workload.heads, workload.head_dim)
        dense = RingAttention(*shape, causal=workload.causal, profile=None, device=device)
        multihead_attention.flash_attn_func = lambda q, k, v, *_: dense(q, k, v, return_lse=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = theirs(*(x.flatten(2) for x in (q, k, v)), is_causal=workload.causal)[0]
        return out.view(q.shape)

    return attend


def contenders(
    workload: Workload, facts: HardwareFacts, device: torch.device
) -> Iterator[tuple[str, tuple[Tunables, ...], str]]:
    """Yield name, plans and a note of all that can be asked for a workload; without plans the note says why not."""
    dense = workload.pattern.dense
    yield TORCH, (foreign_plan(TORCH, workload),), "" if dense else "dense attention over the whole sequence"
    yield TORCHSCALE, *_torchscale_plans(workload)
    for preset in PRESETS.values():
        try:
            yield preset.name, plans_of(preset, workload, facts), ""
        except PlanError as error:
            yield preset.name, (), str(error).splitlines()[0]
    for name, profile in ((HEURISTIC, None), (OURS, "auto")):
        try:
            plan = build_module(workload, profile=profile, device=device).plan.row_of(workload).runnable()
        except RingAttentionError as error:
            yield name, (), str(error).splitlines()[0]
        else:
            yield name, (plan.tunables,), "" if profile is None else f"{plan.origin}"


def _torchscale_plans(workload: Workload) -> tuple[tuple[Tunables, ...], str]:
    from importlib.util import find_spec

    if workload.pattern.dense or workload.pattern.head_offset != "blocked":
        return (), "dilated attention with blocked head offsets alone"
    if workload.heads != workload.kv_heads:
        return (), "as many key/value heads as query heads alone"
    if find_spec("torchscale") is None or find_spec("torchscale.component.dilated_attention") is None:
        return (), "not installed, or a release without LongNet (0.3.0 is)"
    return (foreign_plan(TORCHSCALE, workload),), ""


def compare(
    workloads: Sequence[Workload],
    facts: HardwareFacts,
    device: torch.device,
    *,
    blocks: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[list[Standing], tuple[Interference, ...]]:
    """Return the standing of every contender at every workload, in order, and what disturbed their timing."""
    settings = BenchSettings(str(device), facts, seed, SAMPLE_TARGET_MS, ragged_lengths=0, train_too=workloads[0].train)
    evaluator = WorkerEvaluator(settings, bench=BENCH)
    try:
        found = []
        seen: list[Interference] = []
        for workload in workloads:
            asked = list(contenders(workload, facts, device))
            found += _standings(workload, asked, evaluator, blocks, seed, progress, seen)
        return found, largest_of_each(seen)
    finally:
        evaluator.close()


def _standings(
    workload: Workload,
    asked: Sequence[tuple[str, tuple[Tunables, ...], str]],
    evaluator: WorkerEvaluator,
    blocks: int,
    seed: int,
    progress: Callable[[str], None],
    seen: list[Interference],
) -> list[Standing]:
    checks: dict[Tunables, Checked | Fault] = {}
    runs: dict[str, Tunables] = {}
    for name, plans, _ in asked:
        for plan in plans:  # the later ones are for out-of-memory
            if plan not in checks:
                progress(f"{name}, {workload}")
                checks[plan] = evaluator.check(workload, plan, timeout_s=CHECK_TIMEOUT_S)
            runs[name] = plan
            result = checks[plan]
            if not isinstance(result, Fault) or result.kind != "oom":
                break
    right = [plan for plan, c in checks.items() if isinstance(c, Checked)]
    times = _times(workload, right, evaluator, blocks, random.Random(seed), seen)
    base = times.get(runs[BASELINE], [])
    return [_standing(workload, name, note, runs.get(name), checks, times, base, seed) for name, _, note in asked]


def _times(
    workload: Workload,
    plans: list[Tunables],
    evaluator: Evaluator,
    blocks: int,
    shuffled: random.Random,
    seen: list[Interference],
) -> dict[Tunables, list[float]]:
    """Return the ms of every plan in every block, and add what disturbed them to ``seen``.

    A plan that fails in one is left out.
    """
    times: dict[Tunables, list[float]] = {plan: [] for plan in plans}
    for _ in range(blocks):
        order = shuffled.sample(list(times), len(times))
        block = evaluator.block(workload, order, timeout_s=CHECK_TIMEOUT_S)
        seen += block.disturbances
        for plan, result in zip(order, block.results, strict=True):
            if isinstance(result, Sample):
                times[plan].append(result.ms)
            else:
                del times[plan]
    return times


def _standing(
    workload: Workload,
    name: str,
    note: str,
    plan: Tunables | None,
    checks: Mapping[Tunables, Checked | Fault],
    times: Mapping[Tunables, list[float]],
    base: Sequence[float],
    seed: int,
) -> Standing:
    if plan is None:
        return Standing(workload.seq_len, name, f"not measured: {note}")
    checked = checks[plan]
    if isinstance(checked, Fault):
        return Standing(workload.seq_len, name, f"{checked.kind}: {checked.message}")
    if plan not in times:
        return Standing(workload.seq_len, name, "failed while it was timed")
    own = name not in (TORCH, TORCHSCALE)
    told = "; ".join(filter(None, (describe(plan) if own else checked.torch_kernel, note)))
    ms = median(times[plan])
    logs = [math.log(theirs / mine) for theirs, mine in zip(base, times[plan], strict=True)] if base else []
    speedup = interval_of(logs, seed=seed) if logs else None
    return Standing(
        workload.seq_len,
        name,
        told,
        ms,
        workload.batch * workload.seq_len / ms * 1e3,
        checked.peak_bytes,
        checked.error,
        *((speedup.ratio, speedup.ratio_low, speedup.ratio_high) if speedup is not None else ()),
    )


def crossovers(standings: Sequence[Standing]) -> list[Crossover]:
    """Return where contenders pass the baseline, by a straight line through two speed-ups in log2 of the length.

    Lengths at which noise hides which of the two is faster are passed over.
    """
    found = []
    for name in dict.fromkeys(s.name for s in standings if s.name != BASELINE):
        of_name = sorted((s for s in standings if s.name == name and s.is_decided), key=lambda s: s.seq_len)
        for one, other in pairwise(of_name):
            if (one.speedup < 1) != (other.speedup < 1):
                lengths = (one.seq_len, other.seq_len)
                middle = _even(lengths, one.speedup, other.speedup)
                ends = (
                    _even(lengths, one.speedup_low, other.speedup_low),
                    _even(lengths, one.speedup_high, other.speedup_high),
                )
                found.append(Crossover(name, middle, min(ends), max(ends), slower=one.speedup > 1))
    return found


def _even(lengths: tuple[int, int], one: float, other: float) -> int:
    """Return the length between two at which the line through their speed-ups is at 1."""
    low, high = math.log2(one), math.log2(other)
    share: float = low / (low - high)
    return round(lengths[0] * math.pow(lengths[1] / lengths[0], share))


def workloads_of(lengths: Sequence[int], pattern: Pattern, **shape: Any) -> list[Workload]:
    """Return a workload for every length."""
    return [Workload(seq_len=length, pattern=pattern, **shape) for length in sorted(set(lengths))]
