"""Memory that a call holds beyond its inputs: recorded by a profile, scaled to another shape, or from the shapes alone.

Pure: everything is handed to it. Inputs are q, k and v, and dout in training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ringattn.dtypes import TORCH_DTYPES
from ringattn.errors import PlanError
from ringattn.kernels import math as kernels_math
from ringattn.profile.schema import Choice
from ringattn.wording import format_bytes
from ringattn.workload import Tunables, Workload, describe

from .plan import Plan, build_plan, kernel_need
from .table import PlanTable, fitted
from .unmeasured_workloads import call_options, remedy

Source = Literal["measured", "scaled", "estimated"]


@dataclass(frozen=True, slots=True)
class Need:
    """Peak bytes of a plan's call beyond its inputs, and where the number is from.

    ``measured`` at this very shape, ``scaled`` from ``at``, the nearest that was measured, by the elements of the
    inputs, or ``estimated`` from the shapes alone. ``ms`` is the recorded time of a call there, 0 if unknown.
    """

    plan: Plan
    peak_bytes: int
    source: Source
    at: Workload | None = None
    ms: float = 0.0

    def __str__(self) -> str:
        text = f"{describe(self.plan.tunables)}: {format_bytes(self.peak_bytes)} ({self.source}"
        if self.source == "scaled" and self.at is not None:
            text += f" from B{self.at.batch} S{self.at.seq_len}"
        return text + ")"


@dataclass(frozen=True, slots=True)
class Fit:
    """Answer of ``RingAttention.fits``: true where what the call needs beyond its inputs is free now.

    ``leaner`` are the recorded plans that need less, leanest last, that are free, too. Its text says all of it.
    """

    need: Need
    free_bytes: int
    leaner: tuple[Need, ...] = ()

    def __bool__(self) -> bool:
        return self.need.peak_bytes <= self.free_bytes

    def __str__(self) -> str:
        verdict = "fits" if self else "does not fit"
        free = f"{format_bytes(self.free_bytes)} free"
        advice = "" if self and not self.leaner else f"; {self._advice()}"
        return f"{verdict}: {self.need.plan.workload} by {self.need} beyond its inputs; {free}{advice}"

    def _advice(self) -> str:
        if not self.leaner:
            w = self.need.plan.workload
            limit = f"--memory-limit {max(1, self.free_bytes // 2**20)}"
            probe = remedy(w, *call_options(w), limit, what="what does")
            return (
                f"no leaner plan that fits is recorded: a shorter sequence or a smaller batch needs less, and {probe}"
            )
        recorded = "; ".join(f"{need}{_cost(need, self.need)}" for need in self.leaner)
        return f"leaner plans that fit, the last by prefer='memory': {recorded}"


def _cost(need: Need, of: Need) -> str:
    return f", {need.ms / of.ms:.2f} times as long" if need.ms > 0 and of.ms > 0 and need.at == of.at else ""


def fit_of(
    table: PlanTable, workload: Workload, free_bytes: int, plan: Plan | None = None, *, backward: bool | None = None
) -> Fit:
    """Return whether a workload fits into ``free_bytes`` by ``plan``; None is the table's.

    ``backward`` says whether the call has one; None: where the plan is of training. PlanError where that is a refusal.
    """
    if plan is None:
        plan = table.row_of(workload).runnable()
    recorded = recorded_needs(table, workload)
    mine = next((need for need in recorded if need.plan.tunables == plan.tunables), None)
    need = mine or Need(plan, estimated_bytes(workload, plan.tunables, backward=backward), "estimated")
    leaner = [other for other in recorded if other.peak_bytes < min(need.peak_bytes, free_bytes + 1)]
    return Fit(need, free_bytes, tuple(sorted(leaner, key=lambda other: -other.peak_bytes)))


def recorded_needs(table: PlanTable, workload: Workload) -> list[Need]:
    """Return what every plan needs that the profile's row for this workload has a peak of, and that can run here."""
    entry, choices = table.choices_of(workload)
    if entry is None:
        return []
    found: dict[Tunables, Need] = {}
    for choice, plan in _runnable(table, workload, choices):
        evidence = choice.evidence
        if evidence is None or plan.tunables in found:
            continue
        at, peak = entry.workload, evidence.peak_bytes
        same = (at.seq_len, at.batch, at.heads, at.kv_heads) == (
            workload.seq_len, workload.batch, workload.heads, workload.kv_heads,
        )  # fmt: skip
        if not same:
            peak = round(peak * _input_elements(workload) / _input_elements(at))
        found[plan.tunables] = Need(plan, peak, "measured" if same else "scaled", at, evidence.median_ms)
    return list(found.values())


def _runnable(table: PlanTable, workload: Workload, choices: Iterable[Choice]) -> Iterable[tuple[Choice, Plan]]:
    for choice in choices:
        try:
            plan = build_plan(workload, fitted(choice.tunables, workload), table.facts, conditions=table.conditions)
        except PlanError:
            continue  # a plan of another machine, which plan_at passes over, too
        yield choice, plan


def _input_elements(workload: Workload) -> int:
    """Return the elements of q, k and v, to which everything that a call allocates is proportional."""
    return workload.batch * workload.seq_len * (workload.heads + 2 * workload.kv_heads) * workload.head_dim


def estimated_bytes(workload: Workload, tunables: Tunables, *, backward: bool | None = None) -> int:
    """Estimate the peak of a plan that nobody measured: results, gradients, accumulators and partial results.

    Most of the kernels sum dq in float32. Of the peaks recorded on H100s and H200s it says 0.5 to 1.9 times as much, up
    to 2.5 of graphs of a pattern, and of half of them the same to 2 %. Of a decoding step it leaves out
    the partial results: at most 6 MiB there, of 64 sequences.
    """
    w, itemsize = workload, TORCH_DTYPES[tunables.dtype].itemsize
    backward = w.train if backward is None else backward
    wide = 8 if w.dtype == "fp64" else 4
    tokens = w.batch * (1 if w.mode == "decode" else w.seq_len)  # a cache is an input
    if w.packed:
        tokens = -(-w.packed_tokens // w.world)
    queries, keys = tokens * w.heads * w.head_dim, tokens * w.kv_heads * w.head_dim
    rows = tokens * w.heads * wide  # an LSE
    total = queries * itemsize + rows
    if tunables.dtype not in (w.dtype, "tf32"):
        total += (queries + 2 * keys) * itemsize
    if w.mode == "decode":
        total += _repeated_cache_bytes(w, tunables)
    elif "efficient" in tunables.kernels and w.heads != w.kv_heads:
        total += 2 * queries * itemsize  # it takes k and v with as many heads as q
    if "efficient" in tunables.kernels and w.head_dim > 128:
        total += queries * wide * (itemsize < wide)  # it sums out in float32: 3 times out, recorded at 192 and 256
    if backward:
        total += (queries + 2 * keys) * itemsize + queries * wide * (itemsize < wide)
    if not w.pattern.dense:
        window = min(1.0, (tunables.window_tokens or w.seq_len) / w.seq_len)
        for branch, chosen in zip(w.pattern.branches, tunables.branches, strict=True):
            copied = (2 + backward) * queries + 2 * keys if chosen.gather == "copy" else 0
            partial = (queries + 2 * keys if backward else queries) + copied
            total += round(window / branch.rate * (partial * itemsize + rows))
    if w.world > 1 or tunables.launch == "graph":  # what is sent and what arrives, or a graph's own inputs and results
        total += 2 * (queries + 2 * keys) * itemsize
    if "math" in tunables.kernels:
        total += backward * (queries + 2 * keys) * wide  # it sums dk and dv in float32, of a finite q and k
        total += max(_math_bytes(w, tunables, number, backward=backward) for number in range(len(tunables.branches)))
    return total


def _repeated_cache_bytes(workload: Workload, tunables: Tunables) -> int:
    """Return what a decoding step holds of a branch's keys and values with as many heads as q.

    Efficient makes both, math one after the other; the other kernels read groups of heads.
    """
    w = workload
    copies = 2 if "efficient" in tunables.kernels else int("math" in tunables.kernels)
    if w.heads == w.kv_heads or not copies:
        return 0
    rows = max(-(-min(branch.segment, w.seq_len) // branch.rate) for branch in w.pattern.resolved(w.seq_len))
    return copies * w.batch * rows * w.heads * w.head_dim * TORCH_DTYPES[tunables.dtype].itemsize


def _math_bytes(workload: Workload, tunables: Tunables, number: int, *, backward: bool) -> int:
    """Return what math holds of logits and weights in a call of branch ``number``; 0 where others run it."""
    branch = tunables.branches[number]
    need = kernel_need(
        workload, number, tunables.dtype, arch="", vendor="", gather=branch.gather, window_tokens=tunables.window_tokens
    )
    rate = 1 if branch.gather == "copy" else workload.pattern.resolved(workload.seq_len)[number].rate
    ways = ((False, branch.forward), *([(True, branch.backward)] if backward else []))
    held = [
        kernels_math.scores_bytes(
            1 if workload.packed else need.blocks,  # documents run one by one
            need.queries or need.rows,
            need.rows,
            -(-need.heads // rate),  # in place those of one offset
            tunables.dtype,
            causal=need.causal and not need.queries,
            window=need.window,
            backward=is_backward,
            dropout=need.dropout,
        )
        for is_backward, name in ways
        if name == "math"
    ]
    return max(held, default=0)
