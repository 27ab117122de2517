"""The numerical gate: sampled rows of out, lse and every gradient against float64, on inputs that break kernels.

Rows are computed from the definition of DESIGN section 2, apart from both the runtime and its oracle. Beside the
float64 rows, the same rows are computed once more with the roundings that a right kernel of this compute dtype
makes; a candidate may err a few times as much as that, never a fixed and therefore generous tolerance.

Legend: B batch, S length, H query heads, G key/value heads, D head dimension, R sampled rows, K keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringattn.layout import Share, shard
from ringattn.wording import plural
from ringattn.workload import Branch, Pattern, Workload

KINDS = ("ordinary", "negative", "positive", "packed", "transposed")
ADVERSARIAL = KINDS[1:]

ROWS_PER_HEAD = 12
KEY_HEADS = 1  # key/value heads whose dk and dv are checked; those need whole rows of every query that sees the key
# One query in so many has a gradient, more at lengths where it can be had: every tile of 64 has some, and the reference
# costs that much less. With one in 8 everywhere, the references of one proof around 65536 took 11 s of an H100.
LEAST_ACTIVE_SHARE, MOST_ACTIVE_SHARE = 8, 64
ACTIVE_QUERIES = 2048  # so many, or up to twice, at lengths between
ALWAYS_ACTIVE = 1024  # lengths up to this have gradients everywhere
KEYS_PER_HEAD = 8
SLACK = 4.0  # a right kernel may err this many times as much as the modelled roundings
UNITS = 3.0  # and by so many units of its dtype beside: some accumulate a sum over blocks in it
SHARPNESS = 2.0  # ordinary logits have this standard deviation, so that a row is not lost in an average
OFFSET_LOGIT = 100.0  # magnitude of adversarial logits: exp underflows in float32 without a running maximum
_CHUNK_ELEMENTS = 2**25  # of a float64 logits block: 256 MiB

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


# --- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inputs:
    """q (B, S, H, D), k and v (B, S, G, D), dout like q, in the input dtype and the strides that ``kind`` implies.

    ``active`` (S) says at which positions dout is not zero.
    """

    kind: str
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    active: Tensor


def make_inputs(
    workload: Workload, seq_len: int, kind: str, seed: int, device: torch.device, *, for_timing: bool = False
) -> Inputs:
    """Inputs of one kind, the same for the same seed; with gradients everywhere ``for_timing``.

    ``negative`` and ``positive`` move every logit by OFFSET_LOGIT; ``packed`` slices q, k and v out of one
    projection and expands one number as the gradient, which is what ``out.sum().backward()`` gives; ``transposed``
    holds everything heads first, the gradient too.
    """
    assert kind in KINDS
    generator = torch.Generator(device).manual_seed(seed)
    b, h, g, d = workload.batch, workload.heads, workload.kv_heads, workload.head_dim
    dtype = TORCH_DTYPES[workload.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    active = np.ones(seq_len, dtype=bool) if for_timing else active_positions(seq_len, seed)
    active_S = torch.from_numpy(active).to(device)
    if kind == "packed":
        rows = normal(b, seq_len, h + 2 * g, d)
        rows[:, :, :h] *= SHARPNESS
        packed = rows.to(dtype)
        q, k, v = packed[:, :, :h], packed[:, :, h : h + g], packed[:, :, h + g :]
        if active.all():
            dout = torch.ones((), device=device, dtype=dtype).expand(b, seq_len, h, d)
        else:
            dout = active_S.to(dtype)[None, :, None, None].expand(b, seq_len, h, d)
        return Inputs(kind, q, k, v, dout, active_S)
    q, k, v, dout = (normal(b, seq_len, heads, d) for heads in (h, g, g, h))
    if not active.all():
        dout *= active_S[:, None, None]
    q *= SHARPNESS
    if kind in ("negative", "positive"):
        direction = torch.sign(normal(d)) / math.sqrt(d)
        size = math.sqrt(OFFSET_LOGIT * math.sqrt(d))
        q += size * direction
        k += (size if kind == "positive" else -size) * direction
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    if kind == "transposed":
        q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
    return Inputs(kind, q, k, v, dout, active_S)


def shard_inputs(inputs: Inputs, share: Share) -> Inputs:
    """What a rank holds of them, laid out in memory as their ``kind`` implies."""
    active = shard(inputs.active, share, 0)
    if inputs.kind == "packed":
        heads = [x.shape[2] for x in (inputs.q, inputs.k, inputs.v)]
        packed = shard(torch.cat((inputs.q, inputs.k, inputs.v), 2), share)
        q, k, v = torch.split(packed, heads, 2)
        dout = shard(inputs.dout[:, :, :1, :1], share).expand(-1, -1, *inputs.dout.shape[2:])
        return Inputs(inputs.kind, q, k, v, dout, active)
    q, k, v, dout = (
        shard(x.transpose(1, 2), share, 2).contiguous().transpose(1, 2)
        if inputs.kind == "transposed"
        else shard(x, share).contiguous()
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
    )
    return Inputs(inputs.kind, q, k, v, dout, active)


def active_positions(seq_len: int, seed: int) -> NDArray[np.bool_]:
    """The queries (S) that have a gradient: all of them where that is cheap, else a random one of each few."""
    share = active_share(seq_len)
    active = np.zeros(seq_len, dtype=bool)
    first_of_each = np.arange(0, seq_len, share)
    some = first_of_each + np.random.default_rng((seed, seq_len, 1)).integers(0, share, len(first_of_each))
    active[some[some < seq_len]] = True
    active[[0, -1]] = True
    return active


def active_share(seq_len: int) -> int:
    """One query in so many has a gradient: a power of two, or one tile in eight had none with one query in 58."""
    if seq_len <= ALWAYS_ACTIVE:
        return 1
    share = 1 << max(0, (seq_len // ACTIVE_QUERIES).bit_length() - 1)
    return min(max(LEAST_ACTIVE_SHARE, share), MOST_ACTIVE_SHARE)


# --- which key is seen, how often ------------------------------------------------------------------------------------


def head_offset(kv_head: int, kv_heads: int, rate: int, rule: str) -> int:
    """The first selected position of a key/value head within a segment."""
    return kv_head % rate if rule == "interleaved" else kv_head // -(-kv_heads // rate)


def times_seen(
    branches: Sequence[Branch], offsets: Sequence[int], queries_R: Tensor, keys_K: Tensor, causal: bool
) -> Tensor:
    """(R, K): through how many branches each query position sees each key position."""
    seen_RK = torch.zeros(len(queries_R), len(keys_K), dtype=torch.uint8, device=queries_R.device)
    for branch, offset in zip(branches, offsets, strict=True):
        # Positions that no branch selects get segments that nothing shares, -1 and -2.
        segment_R = queries_R // branch.segment
        segment_R = torch.where((queries_R % branch.segment) % branch.rate == offset, segment_R, -1)
        segment_K = keys_K // branch.segment
        segment_K = torch.where((keys_K % branch.segment) % branch.rate == offset, segment_K, -2)
        seen_RK += segment_R[:, None] == segment_K[None, :]
    if causal:
        seen_RK *= keys_K[None, :] <= queries_R[:, None]
    return seen_RK


def _key_range(branches: Sequence[Branch], rows_R: Tensor, length: int, causal: bool) -> tuple[int, int]:
    """The positions [begin, end) that contain every key any of these rows can see."""
    low, high = int(rows_R.min()), int(rows_R.max())
    begin = min(low - low % branch.segment for branch in branches)
    end = max(high - high % branch.segment + branch.segment for branch in branches)
    return begin, min(length, high + 1 if causal else end)


# --- arithmetic ------------------------------------------------------------------------------------------------------


Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How numbers are kept: ``dtype`` accumulates, ``operand`` rounds what enters a product, ``result`` what leaves.

    ``recomputed`` is the relative error between a logit of the forward and the same logit worked out again in the
    backward, by other instructions in another order, and of an out merged from several: it is what keeps the sums
    of the backward from cancelling. ``kept`` is that of an out which is kept for the backward, rounded by half a
    unit by its branch and by another half merged: as much as it may be, not what these values happen to round by.
    """

    dtype: torch.dtype
    operand: Rounding
    result: Rounding
    recomputed: float = 0.0
    kept: float = 0.0


def _same(x: Tensor) -> Tensor:
    return x


def _through(dtype: torch.dtype) -> Rounding:
    return lambda x: x.to(dtype).to(x.dtype)


def _to_tf32(x: Tensor) -> Tensor:
    """Round to ten bits after the point, to nearest."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


_RECOMPUTED = 2.0**-22
EXACT = Arithmetic(torch.float64, _same, _same)


def modelled(compute_dtype: str, input_dtype: str) -> Arithmetic:
    """The roundings of a right kernel that computes in this dtype and returns its results in the input dtype."""
    if compute_dtype == "fp64":
        return EXACT
    returned = _through(TORCH_DTYPES[input_dtype])
    kept = UNIT_ROUNDOFF[input_dtype]
    if compute_dtype == "fp32":
        return Arithmetic(torch.float32, _same, returned, _RECOMPUTED, kept)
    if compute_dtype == "tf32":
        return Arithmetic(torch.float32, _to_tf32, returned, _RECOMPUTED, kept)
    narrow = _through(TORCH_DTYPES[compute_dtype])
    kept = max(kept, UNIT_ROUNDOFF[compute_dtype])
    return Arithmetic(torch.float32, narrow, lambda x: returned(narrow(x)), _RECOMPUTED, kept)


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attended:
    """Of R rows of one head: out (R, D), lse (R); with a gradient weights and dlogits (R, K), and dq (R, D)."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    weights: Tensor | None = None
    dlogits: Tensor | None = None


def attend_rows(
    q_RD: Tensor,
    k_KD: Tensor,
    v_KD: Tensor,
    dout_RD: Tensor | None,
    seen_RK: Tensor,
    scale: float,
    arithmetic: Arithmetic,
    *,
    want_dq: bool = True,
) -> Attended:
    """Rows of attention and their flash backward, each key weighted by how often it is seen."""
    q, k, v = (arithmetic.operand(x.to(arithmetic.dtype)) for x in (q_RD, k_KD, v_KD))
    logits = (q @ k.T) * scale
    most = int(seen_RK.max()) if seen_RK.numel() else 0
    of_count = torch.tensor([-math.inf, *(math.log(n) for n in range(1, most + 1))], device=q.device, dtype=q.dtype)
    logits += of_count[seen_RK.int()]
    highest = logits.amax(-1, keepdim=True)
    empty = highest == -math.inf
    shifted = torch.exp(logits - torch.where(empty, 0.0, highest))
    total = shifted.sum(-1, keepdim=True)
    lse = torch.where(empty, -math.inf, highest + total.log())
    divisor = torch.where(empty, 1.0, total)
    exact_out = (arithmetic.operand(shifted) @ v) / divisor
    out = arithmetic.result(exact_out)
    if dout_RD is None:
        return Attended(out, lse[:, 0])
    dout = arithmetic.operand(dout_RD.to(arithmetic.dtype))
    saved, rounded_by = exact_out, torch.zeros_like(lse)
    if arithmetic.recomputed:
        generator = torch.Generator(q.device).manual_seed(0)

        def signs(x: Tensor) -> Tensor:
            return 2.0 * torch.randint(0, 2, x.shape, generator=generator, device=x.device).to(x.dtype) - 1.0

        def wobbled(x: Tensor) -> Tensor:
            return torch.where(x == -math.inf, x, x * (1 + arithmetic.recomputed * signs(x)))

        # Merging weighs partial results by exp(L_b - L), which is as inexact as L is large: one factor per row.
        of_row = torch.where(empty, 0.0, lse).abs() * arithmetic.recomputed / 4
        logits, saved = wobbled(logits), wobbled(saved) * (1 + of_row * signs(of_row))
        # One row may be all of a dk: over 12031 positions it erred by 0.19 in every kernel, and here by 0.008 for luck.
        rounded_by = signs(of_row) * arithmetic.kept * (saved * dout).norm(dim=-1, keepdim=True)
    weights = torch.exp(logits - torch.where(empty, 0.0, lse))
    delta = (saved * dout).sum(-1, keepdim=True) + rounded_by
    dlogits = arithmetic.operand(weights * (dout @ v.T - delta))
    dq = arithmetic.result((dlogits @ k) * scale) if want_dq else None
    return Attended(out, lse[:, 0], dq, weights, dlogits)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Where results are looked at: per key/value head positions of query rows, and keys of a few heads."""

    batch_of_head: tuple[int, ...]  # one batch element per key/value head
    rows_of_head: tuple[tuple[int, ...], ...]
    key_heads: tuple[int, ...]
    keys_of_head: tuple[tuple[int, ...], ...]

    def rows_among(self, held: NDArray[np.int64]) -> Sampled:
        """The same, each position as its row among the (ascending) positions that a rank holds."""

        def rows(found: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(int(row) for row in np.searchsorted(held, found))

        return replace(
            self,
            rows_of_head=tuple(map(rows, self.rows_of_head)),
            keys_of_head=tuple(map(rows, self.keys_of_head)),
        )


def sample_positions(workload: Workload, seq_len: int, seed: int, held: NDArray[np.int64] | None = None) -> Sampled:
    """Random positions, and with them both ends, tile edges and segment edges, where kernels go wrong first.

    ``held``: only of these, which a rank holds.
    """
    rng = np.random.default_rng((seed, seq_len))
    edges = {0, seq_len - 1, seq_len - seq_len % 64, seq_len - seq_len % 128 - 1, 63, 64, 127, 128}
    edges |= {position for b in workload.pattern.branches for position in (b.segment - 1, b.segment)}
    everywhere = np.arange(seq_len) if held is None else held
    edges &= set(everywhere.tolist())
    active = np.flatnonzero(active_positions(seq_len, seed))
    if held is not None:
        mine = np.intersect1d(active, held)
        active = mine if len(mine) else held

    def positions(count: int, among: NDArray[np.intp]) -> tuple[int, ...]:
        some = rng.choice(sorted(edges), size=min(len(edges), count // 3), replace=False)
        rest = rng.choice(among, size=count - len(some))
        return tuple(sorted({int(p) for p in (*some, *rest)}))

    heads = workload.kv_heads
    key_heads = tuple(sorted(int(g) for g in rng.choice(heads, size=min(KEY_HEADS, heads), replace=False)))
    return Sampled(
        batch_of_head=tuple(int(b) for b in rng.integers(0, workload.batch, size=heads)),
        rows_of_head=tuple(positions(ROWS_PER_HEAD, active) for _ in range(heads)),
        key_heads=key_heads if workload.train else (),
        keys_of_head=tuple(positions(KEYS_PER_HEAD, everywhere) for _ in key_heads) if workload.train else (),
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Sampled rows of every result, flattened: out, dq, dk, dv as (rows, D), lse as (rows,)."""

    lse: Tensor
    tensors: tuple[tuple[str, Tensor], ...]


def compute_rows(
    workload: Workload, inputs: Inputs, sampled: Sampled, arithmetic: Arithmetic, scale: float | None = None
) -> Rows:
    """The sampled rows of ``inputs`` by definition, in float64 with EXACT or as a right kernel would round them."""
    length = inputs.q.shape[1]
    scale = 1.0 / math.sqrt(workload.head_dim) if scale is None else scale
    branches = workload.pattern.resolved(length)
    outs, lses, dqs, dks, dvs = [], [], [], [], []
    for kv_head in range(workload.kv_heads):
        offsets = _offsets(workload.pattern, branches, kv_head, workload.kv_heads)
        rows_R = torch.tensor(sampled.rows_of_head[kv_head], device=inputs.q.device)
        for attended in _attend_group(workload, inputs, sampled, kv_head, rows_R, branches, offsets, scale, arithmetic):
            outs.append(attended.out)
            lses.append(attended.lse)
            if attended.dq is not None:
                dqs.append(attended.dq)
    for kv_head, keys in zip(sampled.key_heads, sampled.keys_of_head, strict=True):
        offsets = _offsets(workload.pattern, branches, kv_head, workload.kv_heads)
        dk, dv = _key_gradients(workload, inputs, sampled, kv_head, keys, branches, offsets, scale, arithmetic)
        dks.append(dk)
        dvs.append(dv)
    named = {"out": outs, "dq": dqs, "dk": dks, "dv": dvs}
    return Rows(torch.cat(lses), tuple((name, torch.cat(parts)) for name, parts in named.items() if parts))


def _offsets(pattern: Pattern, branches: Sequence[Branch], kv_head: int, kv_heads: int) -> list[int]:
    return [head_offset(kv_head, kv_heads, branch.rate, pattern.head_offset) for branch in branches]


def _attend_group(
    workload: Workload,
    inputs: Inputs,
    sampled: Sampled,
    kv_head: int,
    rows_R: Tensor,
    branches: Sequence[Branch],
    offsets: Sequence[int],
    scale: float,
    arithmetic: Arithmetic,
    *,
    want_dq: bool = True,
) -> list[Attended]:
    """The same rows of every query head that shares a key/value head."""
    batch, group = sampled.batch_of_head[kv_head], workload.heads // workload.kv_heads
    begin, end = _key_range(branches, rows_R, inputs.q.shape[1], workload.causal)
    keys_K = torch.arange(begin, end, device=rows_R.device)
    seen_RK = times_seen(branches, offsets, rows_R, keys_K, workload.causal)
    k_KD, v_KD = (x[batch, begin:end, kv_head] for x in (inputs.k, inputs.v))
    return [
        attend_rows(
            inputs.q[batch, rows_R, head],
            k_KD,
            v_KD,
            inputs.dout[batch, rows_R, head] if workload.train else None,
            seen_RK,
            scale,
            arithmetic,
            want_dq=want_dq,
        )
        for head in range(kv_head * group, (kv_head + 1) * group)
    ]


def _key_gradients(
    workload: Workload,
    inputs: Inputs,
    sampled: Sampled,
    kv_head: int,
    keys: Sequence[int],
    branches: Sequence[Branch],
    offsets: Sequence[int],
    scale: float,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor]:
    """dk and dv (keys, D): every query with a gradient that sees one of the keys is attended whole, in chunks."""
    length, device = inputs.q.shape[1], inputs.q.device
    keys_J = torch.tensor(keys, device=device)
    everyone = torch.arange(length, device=device)
    sees_S = (times_seen(branches, offsets, everyone, keys_J, workload.causal) > 0).any(-1)
    rows = everyone[sees_S & inputs.active]
    shape = (len(keys), workload.head_dim)
    dk = torch.zeros(shape, dtype=arithmetic.dtype, device=device)
    dv = torch.zeros(shape, dtype=arithmetic.dtype, device=device)
    batch, group = sampled.batch_of_head[kv_head], workload.heads // workload.kv_heads
    chunk = max(1, _CHUNK_ELEMENTS // length)
    for first in range(0, len(rows), chunk):
        rows_R = rows[first : first + chunk]
        begin, end = _key_range(branches, rows_R, length, workload.causal)
        here = (keys_J >= begin) & (keys_J < end)
        columns = keys_J[here] - begin
        attended = _attend_group(
            workload, inputs, sampled, kv_head, rows_R, branches, offsets, scale, arithmetic, want_dq=False
        )
        for head, part in zip(range(kv_head * group, (kv_head + 1) * group), attended, strict=True):
            assert part.dlogits is not None
            assert part.weights is not None
            q, dout = (arithmetic.operand(x[batch, rows_R, head].to(arithmetic.dtype)) for x in (inputs.q, inputs.dout))
            dk[here] += part.dlogits[:, columns].T @ q * scale
            dv[here] += arithmetic.operand(part.weights[:, columns]).T @ dout
    return arithmetic.result(dk), arithmetic.result(dv)


def pick_rows(workload: Workload, sampled: Sampled, out: Tensor, lse: Tensor, grads: Sequence[Tensor]) -> Rows:
    """The same rows out of a candidate's whole results: out (B, S, H, D), lse (B, H, S), grads dq, dk, dv or none."""
    group = workload.heads // workload.kv_heads
    outs, lses, dqs, dks, dvs = [], [], [], [], []
    for kv_head, rows in enumerate(sampled.rows_of_head):
        batch, rows_R = sampled.batch_of_head[kv_head], torch.tensor(rows, device=out.device)
        for head in range(kv_head * group, (kv_head + 1) * group):
            outs.append(out[batch, rows_R, head])
            lses.append(lse[batch, head, rows_R])
            if grads:
                dqs.append(grads[0][batch, rows_R, head])
    for kv_head, keys in zip(sampled.key_heads, sampled.keys_of_head, strict=True) if grads else ():
        batch, keys_J = sampled.batch_of_head[kv_head], torch.tensor(keys, device=out.device)
        dks.append(grads[1][batch, keys_J, kv_head])
        dvs.append(grads[2][batch, keys_J, kv_head])
    named = {"out": outs, "dq": dqs, "dk": dks, "dv": dvs}
    return Rows(torch.cat(lses), tuple((name, torch.cat(parts)) for name, parts in named.items() if parts))


# --- the verdict -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expected:
    """What a right kernel of one compute dtype gives: exact rows, and the same with its roundings."""

    exact: Rows
    rounded: Rows
    compute_dtype: str
    input_dtype: str


def expect(workload: Workload, inputs: Inputs, sampled: Sampled, exact: Rows, compute_dtype: str) -> Expected:
    rounded = compute_rows(workload, inputs, sampled, modelled(compute_dtype, workload.dtype))
    return Expected(exact, rounded, compute_dtype, workload.dtype)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``error`` is the largest relative 2-norm over out and the gradients; ``fault`` is one line, or empty."""

    error: float
    fault: str = ""


def judge(expected: Expected, got: Rows, whole: Sequence[tuple[str, Tensor]]) -> Verdict:
    """Hold the rows against the expected ones; ``whole`` are complete results, which must be finite everywhere."""
    for name, tensor in whole:
        finite = torch.isfinite(tensor) if name != "lse" else ~torch.isnan(tensor) & (tensor != math.inf)
        if not bool(finite.all()):
            bad = int((~finite).sum())
            return Verdict(math.inf, f"{name} holds {plural(bad, 'value')} not finite, of {tensor.numel()}")
    errors = []
    exact_rows, rounded_rows = dict(expected.exact.tensors), dict(expected.rounded.tensors)
    for name, tensor in got.tensors:
        error, fault = _compare(name, tensor.double(), exact_rows[name], rounded_rows[name].double(), expected)
        if fault:
            return Verdict(error, fault)
        errors.append(error)
    fault = _compare_lse(got.lse.double(), expected)
    return Verdict(max(errors), fault)


def _compare(name: str, got: Tensor, exact: Tensor, rounded: Tensor, expected: Expected) -> tuple[float, str]:
    """The relative 2-norm of all rows, and of each row alone: a single wrong row must not drown in the sum."""
    unit = _unit(expected)
    norm = float(exact.norm())
    error, modelled_error = float((got - exact).norm()), float((rounded - exact).norm())
    relative = error / norm if norm else error
    if error > SLACK * modelled_error + UNITS * unit * norm:
        return relative, (
            f"{name} errs by {relative:.1e} (2-norm, relative to float64), a right kernel by about "
            f"{modelled_error / norm if norm else modelled_error:.1e}"
        )
    size_R = exact.norm(dim=-1) + norm / math.sqrt(max(1, len(exact)))
    if norm:
        row_R, model_R = ((x - exact).norm(dim=-1) / size_R for x in (got, rounded))
        worst = float(row_R.max())
        if worst > SLACK * (float(model_R.max()) + unit):
            return relative, (
                f"{name} has a row that errs by {worst:.1e} of its size, a right kernel's worst by "
                f"{float(model_R.max()):.1e}"
            )
    return relative, ""


def _unit(expected: Expected) -> float:
    """The relative error of one weight that no kernel can be blamed for: exp(logit - lse) is only as exact as those."""
    finite = expected.exact.lse[torch.isfinite(expected.exact.lse)]
    largest = float(finite.abs().max()) if len(finite) else 0.0
    accumulator = UNIT_ROUNDOFF["fp64" if expected.compute_dtype == "fp64" else "fp32"]
    coarsest = max(UNIT_ROUNDOFF[expected.compute_dtype], UNIT_ROUNDOFF[expected.input_dtype])
    return coarsest + accumulator * largest


def _compare_lse(got: Tensor, expected: Expected) -> str:
    exact, rounded = expected.exact.lse, expected.rounded.lse.double()
    empty = exact == -math.inf
    if bool((empty != (got == -math.inf)).any()):
        return "lse is not -inf exactly where nothing is selected"
    if bool(empty.all()):
        return ""
    difference = (got - exact)[~empty].abs()
    model = float((rounded - exact)[~empty].abs().max())
    narrow = expected.compute_dtype in ("bf16", "fp16", "tf32")
    unit = UNIT_ROUNDOFF[expected.compute_dtype]
    allowed = SLACK * model + (1e-4 if narrow else 32 * unit * (1 + float(exact[~empty].abs().max())))
    worst = float(difference.max())
    return f"lse is off by {worst:.1e}, allowed is {allowed:.1e}" if worst > allowed else ""
