"""Sampled rows of out, lse and every gradient: by definition, or picked out of a kernel's results.

Rows are computed apart from both the runtime and its oracle: in float64, and once more with the roundings that a right
kernel of a compute dtype makes.

Legend: B batch, S length, H query heads, G key/value heads, D head dimension, R sampled rows, K keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringattn.workload import Branch, Workload

from .arithmetic import Arithmetic, modelled
from .documents import packed_documents
from .inputs import Inputs, active_positions

ROWS_PER_HEAD = 12
KEY_HEADS = 1  # key/value heads whose dk and dv are checked; those need whole rows of every query that sees the key
KEYS_PER_HEAD = 8
_CHUNK_ELEMENTS = 2**25  # of a float64 logits block: 256 MiB


@dataclass(frozen=True, slots=True)
class Sampled:
    """Positions at which results are compared: of query rows per key/value head, and of keys of a few heads."""

    batch_of_head: tuple[int, ...]  # one batch element per key/value head
    rows_of_head: tuple[tuple[int, ...], ...]
    key_heads: tuple[int, ...]
    keys_of_head: tuple[tuple[int, ...], ...]

    def rows_among(self, held: NDArray[np.int64]) -> Sampled:
        """Return each position as its row among the (ascending) positions that a rank holds."""

        def rows(found: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(int(row) for row in np.searchsorted(held, found))

        return replace(
            self,
            rows_of_head=tuple(map(rows, self.rows_of_head)),
            keys_of_head=tuple(map(rows, self.keys_of_head)),
        )


def sample_positions(workload: Workload, seq_len: int, seed: int, held: NDArray[np.int64] | None = None) -> Sampled:
    """Sample random positions, both ends, tile edges and segment edges, where kernels go wrong first.

    A decoding step has the last one alone.

    ``held``: the positions that a rank holds; only these are sampled.
    """
    rng = np.random.default_rng((seed, seq_len))
    edges = {0, seq_len - 1, seq_len - seq_len % 64, seq_len - seq_len % 128 - 1, 63, 64, 127, 128}
    edges |= {position for b in workload.pattern.branches for position in (b.segment - 1, b.segment)}
    if (documents := packed_documents(workload, seq_len)) is not None:
        edges |= {position for bound in documents.values for position in (bound - 1, bound)}
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
    if workload.decode:
        batch = tuple(int(b) for b in rng.integers(0, workload.batch, size=heads))
        return Sampled(batch, ((seq_len - 1,),) * heads, (), ())
    key_heads = tuple(sorted(int(g) for g in rng.choice(heads, size=min(KEY_HEADS, heads), replace=False)))
    return Sampled(
        batch_of_head=tuple(int(b) for b in rng.integers(0, workload.rows_of_tensors, size=heads)),
        rows_of_head=tuple(positions(ROWS_PER_HEAD, active) for _ in range(heads)),
        key_heads=key_heads if workload.train else (),
        keys_of_head=tuple(positions(KEYS_PER_HEAD, everywhere) for _ in key_heads) if workload.train else (),
    )


def head_offset(kv_head: int, kv_heads: int, rate: int, rule: str) -> int:
    """Return the first selected position of a key/value head within a segment."""
    return kv_head % rate if rule == "interleaved" else kv_head // -(-kv_heads // rate)


def times_seen(
    branches: Sequence[Branch], offsets: Sequence[int], queries_R: Tensor, keys_K: Tensor, causal: bool
) -> Tensor:
    """Count through how many branches each query position sees each key position, (R, K)."""
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
    """Return the positions [begin, end) that contain every key any of these rows can see."""
    low, high = int(rows_R.min()), int(rows_R.max())
    begin = min(low - low % branch.segment for branch in branches)
    end = max(high - high % branch.segment + branch.segment for branch in branches)
    return begin, min(length, high + 1 if causal else end)


@dataclass(frozen=True, slots=True)
class AttendedRows:
    """Results of R rows of one head: out (R, D), lse (R); with a gradient weights and dlogits (R, K), and dq (R, D)."""

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
    want_dq: bool,
) -> AttendedRows:
    """Compute rows of attention and their flash backward, each key weighted by how often it is seen."""
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
        return AttendedRows(out, lse[:, 0])
    dout = arithmetic.operand(dout_RD.to(arithmetic.dtype))
    saved, rounded_by = exact_out, torch.zeros_like(lse)
    if arithmetic.recomputed:
        generator = torch.Generator(q.device).manual_seed(0)

        def signs(x: Tensor) -> Tensor:
            return 2.0 * torch.randint(0, 2, x.shape, generator=generator, device=x.device).to(x.dtype) - 1.0

        def perturbed(x: Tensor) -> Tensor:
            return torch.where(x == -math.inf, x, x * (1 + arithmetic.recomputed * signs(x)))

        # Merging weighs partial results by exp(L_b - L), which is as inexact as L is large: one factor per row.
        of_row = torch.where(empty, 0.0, lse).abs() * arithmetic.recomputed / 4
        logits, saved = perturbed(logits), perturbed(saved) * (1 + of_row * signs(of_row))
        # One row may be all of a dk: over 12031 positions it erred by 0.19 in every kernel, and here by 0.008 for luck.
        rounded_by = signs(of_row) * arithmetic.kept * (saved * dout).norm(dim=-1, keepdim=True)
    weights = torch.exp(logits - torch.where(empty, 0.0, lse))
    delta = (saved * dout).sum(-1, keepdim=True) + rounded_by
    dlogits = arithmetic.operand(weights * (dout @ v.T - delta))
    dq = arithmetic.result((dlogits @ k) * scale) if want_dq else None
    return AttendedRows(out, lse[:, 0], dq, weights, dlogits)


@dataclass(frozen=True, slots=True)
class Rows:
    """Sampled rows of every result, flattened: out, dq, dk, dv as (rows, D), lse as (rows,)."""

    lse: Tensor
    tensors: tuple[tuple[str, Tensor], ...]

    @classmethod
    def of(
        cls,
        lses: list[Tensor],
        outs: list[Tensor],
        dqs: list[Tensor],
        dks: list[Tensor],
        dvs: list[Tensor],
    ) -> Rows:
        """Join the rows of each head, without gradients where there are none."""
        named = {"out": outs, "dq": dqs, "dk": dks, "dv": dvs}
        return cls(torch.cat(lses), tuple((name, torch.cat(parts)) for name, parts in named.items() if parts))


def compute_rows(workload: Workload, inputs: Inputs, sampled: Sampled, arithmetic: Arithmetic) -> Rows:
    """Compute the sampled rows by definition, in float64 with EXACT or as a right kernel would round them."""
    computation = _Computation(workload, inputs, sampled, arithmetic)
    attended = [
        rows
        for kv_head, held in enumerate(sampled.rows_of_head)
        for rows in computation.group(kv_head, torch.tensor(held, device=inputs.q.device))
    ]
    of_keys = [
        computation.key_gradients(kv_head, keys)
        for kv_head, keys in zip(sampled.key_heads, sampled.keys_of_head, strict=True)
    ]
    return Rows.of(
        [rows.lse for rows in attended],
        [rows.out for rows in attended],
        [rows.dq for rows in attended if rows.dq is not None],
        [dk for dk, _ in of_keys],
        [dv for _, dv in of_keys],
    )


class _Computation:
    """Rows of one workload on given inputs, in one arithmetic."""

    def __init__(self, workload: Workload, inputs: Inputs, sampled: Sampled, arithmetic: Arithmetic) -> None:
        self._workload, self._inputs, self._sampled, self._arithmetic = workload, inputs, sampled, arithmetic
        self._length = inputs.q.shape[1]
        self._scale = 1.0 / math.sqrt(workload.head_dim)
        self._branches = workload.pattern.resolved(self._length)
        self._group = workload.heads // workload.kv_heads
        bounds = (0, self._length) if inputs.documents is None else inputs.documents.values
        self._bounds = torch.tensor(bounds, device=inputs.q.device)

    def _times_seen(self, kv_head: int, queries_R: Tensor, keys_K: Tensor) -> Tensor:
        workload, rule = self._workload, self._workload.pattern.head_offset
        offsets = [head_offset(kv_head, workload.kv_heads, branch.rate, rule) for branch in self._branches]
        if self._inputs.documents is None:
            return times_seen(self._branches, offsets, queries_R, keys_K, workload.causal)
        of_query, of_key = self._document(queries_R), self._document(keys_K)
        queries_R, keys_K = queries_R - self._bounds[of_query], keys_K - self._bounds[of_key]
        seen_RK = times_seen(self._branches, offsets, queries_R, keys_K, workload.causal)
        return seen_RK * (of_query[:, None] == of_key[None, :])

    def _document(self, positions: Tensor) -> Tensor:
        """Return the number of the document that each position lies in."""
        return torch.searchsorted(self._bounds, positions, right=True) - 1

    def _key_range(self, rows_R: Tensor) -> tuple[int, int]:
        """Return the positions [begin, end) that contain every key any of these rows can see."""
        if self._inputs.documents is None:
            return _key_range(self._branches, rows_R, self._length, self._workload.causal)
        first, last = self._document(torch.stack((rows_R.min(), rows_R.max()))).tolist()
        return int(self._bounds[first]), int(self._bounds[last + 1])

    def _heads(self, kv_head: int) -> range:
        return range(kv_head * self._group, (kv_head + 1) * self._group)

    def group(self, kv_head: int, rows_R: Tensor, *, want_dq: bool = True) -> list[AttendedRows]:
        """Attend the same rows of every query head that shares a key/value head."""
        inputs, batch = self._inputs, self._sampled.batch_of_head[kv_head]
        begin, end = self._key_range(rows_R)
        seen_RK = self._times_seen(kv_head, rows_R, torch.arange(begin, end, device=rows_R.device))
        k_KD, v_KD = (x[batch, begin:end, kv_head] for x in (inputs.k, inputs.v))
        return [
            attend_rows(
                inputs.q[batch, rows_R, head],
                k_KD,
                v_KD,
                inputs.dout[batch, rows_R, head] if self._workload.train else None,
                seen_RK,
                self._scale,
                self._arithmetic,
                want_dq=want_dq,
            )
            for head in self._heads(kv_head)
        ]

    def key_gradients(self, kv_head: int, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Compute dk and dv (keys, D) from every query with a gradient that sees one of the keys, in chunks."""
        inputs, arithmetic, device = self._inputs, self._arithmetic, self._inputs.q.device
        keys_J = torch.tensor(keys, device=device)
        everyone = torch.arange(self._length, device=device)
        sees_S = (self._times_seen(kv_head, everyone, keys_J) > 0).any(-1)
        rows = everyone[sees_S & inputs.active]
        dk, dv = torch.zeros(2, len(keys), self._workload.head_dim, dtype=arithmetic.dtype, device=device)
        batch = self._sampled.batch_of_head[kv_head]
        chunk = max(1, _CHUNK_ELEMENTS // self._length)
        for first in range(0, len(rows), chunk):
            rows_R = rows[first : first + chunk]
            begin, end = self._key_range(rows_R)
            here = (keys_J >= begin) & (keys_J < end)
            columns = keys_J[here] - begin
            for head, part in zip(self._heads(kv_head), self.group(kv_head, rows_R, want_dq=False), strict=True):
                assert part.dlogits is not None
                assert part.weights is not None
                q, dout = (
                    arithmetic.operand(x[batch, rows_R, head].to(arithmetic.dtype)) for x in (inputs.q, inputs.dout)
                )
                dk[here] += part.dlogits[:, columns].T @ q * self._scale
                dv[here] += arithmetic.operand(part.weights[:, columns]).T @ dout
        return arithmetic.result(dk), arithmetic.result(dv)


def pick_rows(workload: Workload, sampled: Sampled, out: Tensor, lse: Tensor, grads: Sequence[Tensor]) -> Rows:
    """Pick the sampled rows out of whole results: out (B, S, H, D), lse (B, H, S), grads dq, dk, dv or none.

    A decoding step's have one row, which is the one that was sampled.
    """
    group = workload.heads // workload.kv_heads
    outs, lses, dqs, dks, dvs = [], [], [], [], []
    for kv_head, rows in enumerate(sampled.rows_of_head):
        rows = (0,) if workload.decode else rows
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
    return Rows.of(lses, outs, dqs, dks, dvs)


@dataclass(frozen=True, slots=True)
class Expected:
    """Rows that a right kernel of one compute dtype gives: exact ones, and the same with its roundings."""

    exact: Rows
    rounded: Rows
    compute_dtype: str
    input_dtype: str


def expect(workload: Workload, inputs: Inputs, sampled: Sampled, exact: Rows, compute_dtype: str) -> Expected:
    """Compute the rows as a right kernel of ``compute_dtype`` rounds them, beside the exact ones."""
    rounded = compute_rows(workload, inputs, sampled, modelled(compute_dtype, workload.dtype))
    return Expected(exact, rounded, compute_dtype, workload.dtype)
