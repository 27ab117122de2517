"""Inputs of attention from a seed: q, k, v and a gradient, ordinary or of a kind that breaks kernels.

Legend: B batch, S length, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringattn.dtypes import TORCH_DTYPES
from ringattn.geometry.layout import Shard, shard
from ringattn.runtime.packed.documents import Documents
from ringattn.workload import Workload

from .documents import packed_documents

KINDS = ("ordinary", "negative", "positive", "packed", "transposed")

# One query in so many has a gradient, more at lengths where it can be had: every tile of 64 has some, and the reference
# costs that much less. With one in 8 everywhere, the references of one validation around 65536 took 11 s of an H100.
LEAST_ACTIVE_SHARE, MOST_ACTIVE_SHARE = 8, 64
ACTIVE_QUERIES = 2048  # so many, or up to twice, at lengths between
ALWAYS_ACTIVE = 1024  # lengths up to this have gradients everywhere
SHARPNESS = 2.0  # ordinary logits have this standard deviation, so that a row is not lost in an average
RAGGED_SPREAD = math.sqrt(2)  # a bucket reaches this factor to both sides
OFFSET_LOGIT = 100.0  # magnitude of adversarial logits: exp underflows in float32 without a running maximum


@dataclass(frozen=True, slots=True)
class Inputs:
    """q (B, S, H, D), k and v (B, S, G, D), dout like q, in the input dtype and the strides that ``kind`` implies.

    ``active`` (S) says at which positions dout is not zero. ``documents`` are packed into the row, unless it is None.
    """

    kind: str
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    active: Tensor
    documents: Documents | None = None


def make_inputs(
    workload: Workload, seq_len: int, kind: str, seed: int, device: torch.device, *, for_timing: bool = False
) -> Inputs:
    """Make inputs of one kind, the same for the same seed; with gradients everywhere ``for_timing``.

    ``negative`` and ``positive`` move every logit by OFFSET_LOGIT; ``packed`` slices q, k and v out of one
    projection and expands one number as the gradient, which is what ``out.sum().backward()`` gives; ``transposed``
    holds everything heads first, the gradient too.
    """
    assert kind in KINDS
    generator = torch.Generator(device).manual_seed(seed)
    b, h, g, d = workload.rows_of_tensors, workload.heads, workload.kv_heads, workload.head_dim
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
        return Inputs(kind, q, k, v, dout, active_S, packed_documents(workload, seq_len))
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
    return Inputs(kind, q, k, v, dout, active_S, packed_documents(workload, seq_len))


def shard_inputs(inputs: Inputs, spans: Shard) -> Inputs:
    """Return the shard of a rank, laid out in memory as the ``kind`` implies."""
    active = shard(inputs.active, spans, 0)
    if inputs.kind == "packed":
        heads = [x.shape[2] for x in (inputs.q, inputs.k, inputs.v)]
        packed = shard(torch.cat((inputs.q, inputs.k, inputs.v), 2), spans)
        q, k, v = torch.split(packed, heads, 2)
        dout = shard(inputs.dout[:, :, :1, :1], spans).expand(-1, -1, *inputs.dout.shape[2:])
        return Inputs(inputs.kind, q, k, v, dout, active)
    q, k, v, dout = (
        shard(x.transpose(1, 2), spans, 2).contiguous().transpose(1, 2)
        if inputs.kind == "transposed"
        else shard(x, spans).contiguous()
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
    )
    return Inputs(inputs.kind, q, k, v, dout, active)


def active_positions(seq_len: int, seed: int) -> NDArray[np.bool_]:
    """Return the queries (S) that have a gradient: all where that is cheap, else a random one of each few."""
    share = active_share(seq_len)
    active = np.zeros(seq_len, dtype=bool)
    first_of_each = np.arange(0, seq_len, share)
    some = first_of_each + np.random.default_rng((seed, seq_len, 1)).integers(0, share, len(first_of_each))
    active[some[some < seq_len]] = True
    active[[0, -1]] = True
    return active


def active_share(seq_len: int) -> int:
    """Return n where one query in n has a gradient: a power of two, as with 58 one tile in eight had none."""
    if seq_len <= ALWAYS_ACTIVE:
        return 1
    share = 1 << max(0, (seq_len // ACTIVE_QUERIES).bit_length() - 1)
    return min(max(LEAST_ACTIVE_SHARE, share), MOST_ACTIVE_SHARE)


def validation_inputs(workload: Workload, count: int, seed: int) -> tuple[tuple[int, str], ...]:
    """Return random lengths of the workload's bucket, evenly in log2, each with a kind of inputs.

    Over seeds every residue of every tile occurs. Training and inference share them, and so the reference rows.
    """
    rng = np.random.default_rng((seed, workload.seq_len, workload.causal))
    low, high = workload.seq_len / RAGGED_SPREAD, workload.seq_len * RAGGED_SPREAD
    lengths = np.exp(rng.uniform(math.log(low), math.log(high), size=count))
    whole = [int(min(max(math.ceil(low), round(n)), math.floor(high))) for n in lengths]
    return tuple((length, KINDS[(number + seed) % len(KINDS)]) for number, length in enumerate(whole))
