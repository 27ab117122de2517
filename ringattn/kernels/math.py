"""Computes attention in plain matrix products: any device, any dtype, any head dimension, bounded memory.

The last resort of every machine and the only kernel for float64. 16-bit inputs are computed in float32. A logit of -inf
has no part in any gradient, also where q or k is infinite itself.

Legend: N batch (segments times batch elements), M rows, T rows of packed sequences, H query heads, K key/value heads,
G = H / K, D head dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .contract import Grads, Sequences

# Scores of one block of query rows, all heads: 32 Mi elements are 128 MiB in float32, enough to keep the matrix
# products large and small beside the inputs of any length that this kernel is bearable for.
_MAX_SCORES = 32 * 2**20
_LEAST_WINDOWED = 128  # query rows of a block under a sliding window, however narrow that is

# Maps the weights of a block (N, K, G, rows, keys), its query rows and its keys to their factors: 0 where a weight is
# dropped, and 1 / (1 - p) elsewhere.
Factors = Callable[[Tensor, slice, slice], Tensor]


def drawn_factors(seed: Tensor, dropout: float, device: torch.device) -> Factors:
    """Return factors that are the same for a seed, as long as the blocks come in one order."""
    generator = torch.Generator(device).manual_seed(int(seed))

    def factors(weights: Tensor, rows: slice, keys: slice) -> Tensor:
        kept = torch.empty_like(weights).bernoulli_(1.0 - dropout, generator=generator)
        return kept.div_(1.0 - dropout)

    return factors


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _grouped(x_NMHD: Tensor, kv_heads: int) -> Tensor:
    n, m, h, d = x_NMHD.shape
    return _wide(x_NMHD).reshape(n, m, kv_heads, h // kv_heads, d).permute(0, 2, 3, 1, 4)  # N K G M D


def _without_infinities(x: Tensor) -> Tensor:
    """Return x with 0 for infinite elements, which only meet weights of 0 in a gradient, or NaN, which stays."""
    return x.masked_fill(x.isinf(), 0.0)


def _row_blocks(n: int, rows: int, keys: int, heads: int, window: int) -> Iterator[tuple[int, int]]:
    step = max(1, min(rows, _MAX_SCORES // max(1, n * heads * keys)))
    if window:  # a block meets its own rows and a window more: of as many rows, half of that is seen
        step = min(rows, max(step * keys // (2 * min(window, keys)), 1), max(window, _LEAST_WINDOWED))
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


def scores_bytes(
    n: int, rows: int, keys: int, heads: int, dtype: str, *, causal: bool, window: int, backward: bool, dropout: bool
) -> int:
    """Return the most bytes that a call holds of logits, weights and their gradients: a few for each of a block.

    Of the last block those of the one before are there until its own replace them.
    """
    _, step = next(_row_blocks(n, rows, keys, heads, window))
    seen = _seen(rows - step, rows, keys, causal, window)
    several = step < rows
    held = 5 + 2 * dropout + several if backward else 3 + (dropout or several)
    keys_seen: int = seen.stop - seen.start
    return held * n * heads * step * keys_seen * (8 if dtype == "fp64" else 4)


def _seen(begin: int, end: int, keys: int, causal: bool, window: int) -> slice:
    """Return the keys that some of query rows [begin, end) may see."""
    return slice(max(0, begin - window + 1) if window else 0, end if causal else keys)


def _scores(
    q_NKGRD: Tensor, k_NKMD: Tensor, begin: int, first: int, causal: bool, scale: float, window: int, softcap: float
) -> Tensor:
    """Return logits of query rows from ``begin`` on against keys from ``first`` on; -inf where a row sees none."""
    scores = torch.matmul(q_NKGRD, k_NKMD[:, :, None].transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        row = torch.arange(begin, begin + scores.shape[-2], device=scores.device)[:, None]
        key = torch.arange(first, first + scores.shape[-1], device=scores.device)[None, :]
        hidden = (key > row) | (key <= row - window) if window else key > row
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def forward(
    q_NMHD: Tensor,
    k_NMKD: Tensor,
    v_NMKD: Tensor,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    factors: Factors | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (N, M, H, Dv) in the input dtype and lse (N, H, M) in float32 (float64 for float64).

    ``window`` and ``softcap`` as in ``KernelConfig``; v may have a head dimension Dv of its own. ``factors`` are those
    of dropout, which the lse knows nothing of.
    """
    n, rows, heads, _ = q_NMHD.shape
    kv_heads = k_NMKD.shape[2]
    keys = k_NMKD.shape[1]
    assert not causal or rows == keys
    assert causal or not window
    if not causal and heads != kv_heads and factors is None:
        return _heads_as_rows(q_NMHD, k_NMKD, v_NMKD, scale, softcap)
    q, k, v = _grouped(q_NMHD, kv_heads), _wide(k_NMKD).transpose(1, 2), _wide(v_NMKD).transpose(1, 2)
    out_NMHD = q_NMHD.new_empty(n, rows, heads, v.shape[-1])
    lse_NHM = q.new_empty(n, heads, rows)
    for begin, end in _row_blocks(n, rows, keys, heads, window):
        seen = _seen(begin, end, keys, causal, window)
        scores = _scores(q[:, :, :, begin:end], k[:, :, seen], begin, seen.start, causal, scale, window, softcap)
        peak = scores.amax(-1, keepdim=True)
        peak = peak.masked_fill(peak == -math.inf, 0.0)  # -inf - -inf is no number
        p = torch.exp(scores - peak)
        total = p.sum(-1, keepdim=True)  # 1 or more, but 0 where every logit is -inf
        if factors is not None:
            p = p * factors(p, slice(begin, end), seen)
        # Divided by their own sum, not by exp(lse): a rounded lse of 4e5 is off by 0.03.
        out = torch.matmul(p, v[:, :, None, seen]) / total.clamp(min=1.0)
        lse = (peak + total.log()).squeeze(-1)
        out_NMHD[:, begin:end] = out.permute(0, 3, 1, 2, 4).reshape(n, end - begin, heads, -1)
        lse_NHM[:, :, begin:end] = lse.reshape(n, heads, end - begin)
    return out_NMHD, lse_NHM


def varlen_forward(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    sequences: Sequences,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return out (T, H, D) and lse (H, T) of packed sequences, one after the other."""
    parts = [
        forward(q_THD[None, begin:end], k_TKD[None, begin:end], v_TKD[None, begin:end], causal, scale, window, softcap)
        for begin, end in itertools.pairwise(sequences.bounds)
    ]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def varlen_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    sequences: Sequences,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Grads:
    """Return dq, dk, dv of packed sequences against the final out and lse."""
    parts = []
    for begin, end in itertools.pairwise(sequences.bounds):
        dout, q, k, v, out = (x[None, begin:end] for x in (dout_THD, q_THD, k_TKD, v_TKD, out_THD))
        parts.append(backward(dout, q, k, v, out, lse_HT[None, :, begin:end], causal, scale, window, softcap))
    dq, dk, dv = (torch.cat(grads, 1)[0] for grads in zip(*parts, strict=True))
    return dq, dk, dv


def _heads_as_rows(
    q_NMHD: Tensor, k_NMKD: Tensor, v_NMKD: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attend with the query heads of a group as rows of one: a product of each would copy k and v for all of them."""
    n, rows, heads, d = q_NMHD.shape
    kv_heads = k_NMKD.shape[2]
    group = heads // kv_heads
    q = torch.unflatten(q_NMHD, 2, (kv_heads, group)).transpose(2, 3).reshape(n, rows * group, kv_heads, d)
    out, lse = forward(q, k_NMKD, v_NMKD, False, scale, softcap=softcap)
    out = torch.unflatten(out, 1, (rows, group)).transpose(2, 3).reshape(n, rows, heads, -1)
    return out, torch.unflatten(lse, 2, (rows, group)).transpose(2, 3).reshape(n, heads, rows)


def backward(
    dout_NMHD: Tensor,
    q_NMHD: Tensor,
    k_NMKD: Tensor,
    v_NMKD: Tensor,
    out_NMHD: Tensor,
    lse_NHM: Tensor,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    factors: Factors | None = None,
) -> Grads:
    """Return dq, dk, dv of this block against the *final* out and lse (FlashAttention, arXiv:2205.14135, alg. 4).

    A row whose final lse is -inf has no gradient. ``factors`` are those of the forward, if it had some.
    """
    n, rows, heads, head_dim = q_NMHD.shape
    kv_heads = k_NMKD.shape[2]
    group = heads // kv_heads
    keys = k_NMKD.shape[1]
    q, k, v = _grouped(q_NMHD, kv_heads), _wide(k_NMKD).transpose(1, 2), _wide(v_NMKD).transpose(1, 2)
    dout, out = _grouped(dout_NMHD, kv_heads), _grouped(out_NMHD, kv_heads)
    lse = lse_NHM.masked_fill(lse_NHM == -math.inf, math.inf).reshape(n, kv_heads, group, rows)
    finite_q, finite_k = _without_infinities(q), _without_infinities(k)
    dq_NMHD = torch.empty_like(q_NMHD, memory_format=torch.contiguous_format)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for begin, end in _row_blocks(n, rows, keys, heads, window):
        seen = _seen(begin, end, keys, causal, window)
        block = slice(begin, end)
        scores = _scores(q[:, :, :, block], k[:, :, seen], begin, seen.start, causal, scale, window, softcap)
        p = torch.exp(scores - lse[:, :, :, block, None])
        do = dout[:, :, :, block]
        delta = (do * out[:, :, :, block]).sum(-1, keepdim=True)
        dp = torch.matmul(do, v[:, :, None, seen].transpose(-1, -2))
        kept = p
        if factors is not None:
            of_block = factors(p, block, seen)
            kept, dp = p * of_block, dp * of_block
        ds = p * (dp - delta) * scale
        if softcap:  # the slope of its tanh; a hidden score of -inf has p = 0
            ds = ds * (1.0 - (scores.clamp(min=-softcap) / softcap) ** 2)
        dq = torch.matmul(ds, finite_k[:, :, None, seen])
        dq_NMHD[:, block] = dq.permute(0, 3, 1, 2, 4).reshape(n, end - begin, heads, head_dim)
        dk[:, :, seen] += torch.matmul(ds.transpose(-1, -2), finite_q[:, :, :, block]).sum(2)
        dv[:, :, seen] += torch.matmul(kept.transpose(-1, -2), do).sum(2)
    return dq_NMHD, dk.transpose(1, 2).to(k_NMKD.dtype), dv.transpose(1, 2).to(v_NMKD.dtype)
