"""What every test of the core shares: invented shapes and layouts, the float64 result, and the rule of accuracy.

The rule: with x64 the float64 result, err = |x - x64| (2-norm) and u the unit roundoff of the dtype, a result passes
when err <= 1.5 times the error of one dense call of its kernel on the same inputs, or err <= 4 u |a|, with |a| the
2-norm of the same formula on absolute values.

Legend: B batch, S length, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from ringattn import Pattern, Profile, RingAttention, Workload, detect
from ringattn.geometry.documents import Document
from ringattn.hardware.facts import HardwareFacts
from ringattn.reference import dilated_attention_reference
from ringattn.runtime.packed.documents import documents_of
from ringattn.workload import Branch, BranchTunables, Tunables

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
DENSE = Pattern()
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@functools.cache
def cpu() -> HardwareFacts:
    return detect("cpu")


# --- shapes ------------------------------------------------------------------------------------------------------

# How q, k and v lie in memory. "last_strided" is the only one that no kernel reads in place.
LAYOUTS = ("plain", "heads_first", "sequence_first", "every_second", "wide_rows", "packed", "offset")
ALL_LAYOUTS = (*LAYOUTS, "last_strided", "backwards_axes")


@dataclass(frozen=True)
class Case:
    """One shape, pattern and memory layout."""

    length: int
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 4
    batch: int = 1
    pattern: Pattern = DENSE
    causal: bool = False
    scale: float | None = None
    layout: str = "plain"
    seed: int = 0
    window: int | None = None
    softcap: float | None = None
    head_dim_v: int | None = None

    def workload(self, dtype: str = "fp64", mode: Any = "train") -> Workload:
        return Workload(
            mode=mode,
            causal=self.causal,
            seq_len=self.length,
            heads=self.heads,
            head_dim=self.head_dim,
            dtype=dtype,
            kv_heads=self.kv_heads,
            batch=self.batch,
            pattern=self.pattern,
            window=0 if self.window is None or self.window >= self.length else self.window,
            softcap=self.softcap or 0.0,
            head_dim_v=self.head_dim_v or 0,
        )

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    def inputs(
        self, dtype: torch.dtype = torch.float64, size: float = 1.0, device: str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as leaves that require a gradient, laid out as the case says."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim)
        q, k, v = (
            torch.randn(self.batch, self.length, *shape, generator=generator, dtype=torch.float64) * size
            for shape in shapes
        )
        return tuple(laid_out(x.to(device, dtype), self.layout).requires_grad_() for x in (q, k, v))  # type: ignore[return-value]

    def dout(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.batch, self.length, self.heads, self.value_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def module(self, **arguments: Any) -> RingAttention:
        """A module for this case on the CPU; no profile unless one is given."""
        given: dict[str, Any] = {"profile": None, "device": "cpu", "causal": self.causal, "scale": self.scale}
        given |= {"window": self.window, "softcap": self.softcap, "head_dim_v": self.head_dim_v}
        lists = {} if self.pattern.dense else lists_of(self.pattern)
        return RingAttention(self.heads, self.head_dim, self.kv_heads, **lists, **(given | arguments))

    def running(self, tunables: Tunables, dtype: str = "fp64", mode: Any = "train", **arguments: Any) -> RingAttention:
        """A module that obeys exactly ``tunables``: its profile holds this one plan, and must run."""
        facts = detect(arguments["device"]) if "device" in arguments else cpu()
        profile = Profile.single(facts, self.workload(dtype, mode), tunables)
        return self.module(profile=profile, **arguments)

    def running_in_both_modes(self, tunables: Tunables, dtype: str) -> RingAttention:
        """The same with the plan for inference, too: which dtype an unmeasured workload gets depends on the CPU."""
        profile = Profile.single(cpu(), self.workload(dtype), tunables)
        infer = replace(profile.plans[0], workload=self.workload(dtype, "infer"))
        return self.module(profile=replace(profile, plans=(*profile.plans, infer)))

    def running_over(
        self, tunables: Tunables, longest: int, count: int, positions: int, dtype: str = "fp64", **arguments: Any
    ) -> RingAttention:
        """The same for ``count`` documents of up to ``longest`` positions."""
        workload = replace(self.workload(dtype), seq_len=longest, batch=count, packed_tokens=positions)
        return self.module(profile=Profile.single(cpu(), workload, tunables), **arguments)


def lists_of(pattern: Pattern) -> dict[str, Any]:
    return {
        "segment_lengths": [branch.segment for branch in pattern.branches],
        "dilation_rates": [branch.rate for branch in pattern.branches],
        "head_offset": pattern.head_offset,
    }


def pattern_of(segments: list[int], rates: list[int], rule: Any = "interleaved") -> Pattern:
    return Pattern.of(segments, rates, rule)


def laid_out(x_BSHD: Tensor, layout: str) -> Tensor:
    """The values of ``x_BSHD`` in a tensor of the same shape and another memory layout, without a graph."""
    b, s, h, d = x_BSHD.shape
    if layout == "plain":
        made = x_BSHD.clone(memory_format=torch.contiguous_format)
    elif layout == "heads_first":
        made = x_BSHD.new_empty(b, h, s, d).transpose(1, 2)
    elif layout == "sequence_first":
        made = x_BSHD.new_empty(s, b, h, d).transpose(0, 1)
    elif layout == "every_second":
        made = x_BSHD.new_full((b, 2 * s, h, d), math.nan)[:, 1::2]
    elif layout == "wide_rows":
        made = x_BSHD.new_full((b, s, h, d + 3), math.nan)[..., 2 : 2 + d]
    elif layout == "packed":
        made = x_BSHD.new_full((b, s, 3, h, d), math.nan)[:, :, 1]
    elif layout == "offset":
        made = x_BSHD.new_full((b + 1, s, h + 2, d), math.nan)[1:, :, 1 : 1 + h]
    elif layout == "last_strided":
        made = x_BSHD.new_full((b, s, h, 2 * d), math.nan)[..., ::2]
    elif layout == "backwards_axes":
        made = x_BSHD.new_empty(d, h, s, b).permute(3, 2, 1, 0)
    else:
        raise AssertionError(layout)
    return made.detach().copy_(x_BSHD) if layout != "plain" else made.detach()


@st.composite
def patterns(draw: st.DrawFn, most: int = 4, longest: int = 48, dense: bool = True) -> Pattern:
    """Patterns with lengths and rates that need divide nothing; about half of them nest."""
    count = draw(st.integers(0 if dense else 1, most))
    rule = draw(st.sampled_from(("interleaved", "blocked")))
    branches = []
    nested = draw(st.booleans())
    unit = draw(st.integers(1, 6))
    for _ in range(count):
        segment = unit * 2 ** draw(st.integers(0, 3)) if nested else draw(st.integers(1, longest))
        branches.append(Branch(segment, draw(st.integers(1, 9))))
    return Pattern(tuple(branches), rule)


@st.composite
def cases(draw: st.DrawFn, layouts: tuple[str, ...] = ALL_LAYOUTS, longest: int = 40) -> Case:
    kv_heads = draw(st.integers(1, 5))
    return Case(
        length=draw(st.integers(1, longest)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((1, 2, 3, 5, 8))),
        batch=draw(st.integers(1, 3)),
        pattern=draw(patterns()),
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 0.5, 1.0))),
        layout=draw(st.sampled_from(layouts)),
        seed=draw(st.integers(0, 5)),
    )


@st.composite
def tunables_for(
    draw: st.DrawFn, case: Case, dtype: str = "fp64", kernels: tuple[str, ...] = ("math",), train: bool = True
) -> Tunables:
    """Any plan that can run the case: kernels and gather per branch, memory policy, window."""
    branches = []
    for branch in case.pattern.resolved(case.length):
        gather = draw(st.sampled_from(("view", "copy"))) if branch.rate > 1 else "view"
        backward = draw(st.sampled_from(kernels)) if train else ""
        branches.append(BranchTunables(draw(st.sampled_from(kernels)), backward, gather))
    tunables = Tunables(dtype, tuple(branches))
    if train:
        gathers = any(branch.gather == "copy" for branch in branches)
        modes = ("selective", "full", "none") if gathers else ("selective", "full")
        tunables = replace(tunables, checkpoint=draw(st.sampled_from(modes)))
    if case.pattern.dense:
        return tunables
    unit = math.lcm(*(branch.segment for branch in case.pattern.branches))
    windows = [unit * n for n in (1, 2, 3) if unit * n < case.length]
    threshold = draw(st.sampled_from((None, 0)))
    return replace(
        tunables,
        window_tokens=draw(st.sampled_from((None, *windows))),
        pattern_cache=draw(st.booleans()),
        pool_threshold_mib=threshold,
        pool_strategy="shape" if threshold is None else draw(st.sampled_from(("shape", "bucket"))),
    )


# --- results -----------------------------------------------------------------------------------------------------


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    """The float64 result for these inputs, whatever their dtype."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = dilated_attention_reference(
        *leaves, case.pattern, case.causal, case.scale, window=case.window, softcap=case.softcap
    )
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double()))


def exact_over(case: Case, documents: Sequence[Document], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    """The float64 result where each of ``documents`` is a sequence of its own, and the rest is padding."""
    whole = Results(
        *(torch.zeros_like(x, dtype=torch.float64).detach() for x in (q, q[..., 0].transpose(1, 2), q, k, v))
    )
    whole.lse.fill_(-torch.inf)
    for row, begin, end in documents:
        rows = slice(row, row + 1), slice(begin, end)
        found = exact(case, *(x[rows] for x in (q, k, v, dout)))
        for name, x, part in zip(Results._fields, whole, found, strict=True):
            x[(rows[0], slice(None), rows[1]) if name == "lse" else rows] = part
    return whole


def found(module: RingAttention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **arguments: Any) -> Results:
    out, lse = module(q, k, v, return_lse=True, **arguments)
    return Results(out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout))


def assert_equal_to(results: Results, expected: Results, tolerance: float = 1e-10) -> None:
    """Every result within ``tolerance`` of the expected one, relative to its largest element or absolutely."""
    for name, x, x64 in zip(Results._fields, results, expected, strict=True):
        assert x.shape == x64.shape, name
        if name == "lse":
            assert torch.equal(x.isneginf(), x64.isneginf()), "lse is -inf elsewhere"
            x, x64 = x.masked_fill(x.isneginf(), 0), x64.masked_fill(x64.isneginf(), 0)
        assert not x.isnan().any(), f"{name} has NaN"
        largest = max(1.0, x64.abs().max().item())
        assert (x.double() - x64).abs().max().item() <= tolerance * largest, name


def times_seen(case: Case) -> Tensor:
    """(H, S, S): how often each query sees each key, by loops over every segment: independent of the reference."""
    group = case.heads // case.kv_heads
    counts = torch.zeros(case.heads, case.length, case.length, dtype=torch.float64)
    for branch in case.pattern.resolved(case.length):
        for head in range(case.heads):
            kv_head = head // group
            if case.pattern.head_offset == "interleaved":
                offset = kv_head % branch.rate
            else:
                offset = kv_head // math.ceil(case.kv_heads / branch.rate)
            for begin in range(0, case.length, branch.segment):
                end = min(begin + branch.segment, case.length)
                chosen = torch.tensor([p for p in range(begin, end) if (p - begin) % branch.rate == offset])
                if len(chosen):
                    sees = chosen[None, :] <= chosen[:, None] if case.causal else torch.tensor(1.0)
                    if case.window is not None:
                        sees = sees & (chosen[None, :] > chosen[:, None] - case.window)
                    counts[head, chosen[:, None], chosen[None, :]] += sees
    return counts


def absolute_norms(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, float]:
    """|a| of out and of every gradient: each sum of its formula with all terms made positive."""
    q, k, v, dout = (x.detach().cpu().double() for x in (q, k, v, dout))
    group = case.heads // case.kv_heads
    counts = times_seen(case)
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    slope = torch.ones_like(scores)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
        slope = 1 - (scores / case.softcap) ** 2
    p = torch.softmax(scores + counts.log(), -1).nan_to_num(0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", p, v.abs())
    dp = torch.einsum("bqhd,bkhd->bhqk", dout.abs(), v.abs())
    delta = torch.einsum("bqhd,bqhd->bhq", dout.abs(), out)[..., None]
    ds = p * (dp + delta) * slope * abs(scale)
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, k.abs())
    dk = torch.einsum("bhqk,bqhd->bkhd", ds, q.abs()).unflatten(2, (case.kv_heads, group)).sum(3)
    dv = torch.einsum("bhqk,bqhd->bkhd", p, dout.abs()).unflatten(2, (case.kv_heads, group)).sum(3)
    return {name: x.norm().item() for name, x in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}


def assert_within_rule(
    case: Case,
    forward: str,
    backward: str,
    dtype: torch.dtype,
    module: RingAttention | None = None,
    device: str = "cpu",
) -> None:
    """The module's results in ``dtype`` pass the rule against one dense call of the same kernels.

    ``module`` is one that runs these kernels on the case; None makes the plainest.
    """
    q, k, v = case.inputs(dtype, device=device)
    dout = case.dout(dtype, device)
    compute = {"backend": (forward, backward), "dtype": dtype, "device": device}
    results = found(module or case.module(**compute), q, k, v, dout)
    dense_results = found(replace(case, pattern=DENSE).module(**compute), q, k, v, dout)
    expected, dense_expected, norms = _of_the_rule(case, dtype, device)
    for name in ("out", "dq", "dk", "dv"):
        x, x64 = getattr(results, name), getattr(expected, name)
        assert x.dtype is dtype, name
        err = (x.double() - x64).norm().item()
        dense_err = (getattr(dense_results, name).double() - getattr(dense_expected, name)).norm().item()
        bound = max(1.5 * dense_err, 4 * UNIT_ROUNDOFF[dtype] * norms[name])
        assert err <= bound, f"{name}: error {err:.3e}, allowed {bound:.3e} (dense call {dense_err:.3e})"
    assert_lse_within_rule(results.lse, expected.lse, _lse_error(dense_results.lse, dense_expected.lse), dtype)


@lru_cache(maxsize=32)  # of one case in one dtype, for every pair of kernels
def _of_the_rule(case: Case, dtype: torch.dtype, device: str) -> tuple[Results, Results, dict[str, float]]:
    """The exact results of a case and of the dense one, and the norms of the case."""
    tensors = (*case.inputs(dtype, device=device), case.dout(dtype, device))
    return exact(case, *tensors), exact(replace(case, pattern=DENSE), *tensors), absolute_norms(case, *tensors)


def assert_within_rule_over(
    case: Case,
    forward: str,
    backward: str,
    dtype: torch.dtype,
    module: RingAttention | None = None,
    device: str = "cpu",
    **documents: Any,
) -> None:
    """The results with documents pass the rule: against dense calls of the same kernels, document by document."""
    q, k, v = case.inputs(dtype, device=device)
    dout = case.dout(dtype, device)
    compute = {"backend": (forward, backward), "dtype": dtype, "device": device}
    placed = documents_of(documents.get("cu_seqlens"), documents.get("lengths")).placed(case.batch, case.length)
    results = found(module or case.module(**compute), q, k, v, dout, **documents)
    dense_case = replace(case, pattern=DENSE)
    dense_results = found(dense_case.module(**compute), q, k, v, dout, **documents)
    expected, dense_expected = (exact_over(c, placed, q, k, v, dout) for c in (case, dense_case))
    norms = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    for row, begin, end in placed:
        parts = (x[row : row + 1, begin:end] for x in (q, k, v, dout))
        for name, norm in absolute_norms(replace(case, length=end - begin), *parts).items():
            norms[name] = math.hypot(norms[name], norm)
    for name, norm in norms.items():
        x, x64 = getattr(results, name), getattr(expected, name)
        assert x.dtype is dtype, name
        err = (x.double() - x64).norm().item()
        dense_err = (getattr(dense_results, name).double() - getattr(dense_expected, name)).norm().item()
        bound = max(1.5 * dense_err, 4 * UNIT_ROUNDOFF[dtype] * norm)
        assert err <= bound, f"{name}: error {err:.3e}, allowed {bound:.3e} (dense call {dense_err:.3e})"
    assert_lse_within_rule(results.lse, expected.lse, _lse_error(dense_results.lse, dense_expected.lse), dtype)


def _lse_error(lse: Tensor, lse64: Tensor) -> float:
    there = ~lse64.isneginf()
    return (lse.double() - lse64)[there].abs().max().item() if there.any() else 0.0


def assert_lse_within_rule(lse: Tensor, lse64: Tensor, dense_error: float, dtype: torch.dtype) -> None:
    assert lse.dtype is torch.float32
    assert torch.equal(lse.isneginf(), lse64.isneginf())
    there = ~lse64.isneginf()
    error = (lse.double() - lse64)[there].abs()
    slack = 1e-4 if dtype is not torch.float32 else 2e-6 * (1 + lse64[there].abs())
    assert bool((error <= 1.5 * dense_error + slack).all()), f"lse: error {error.max():.3e}"
