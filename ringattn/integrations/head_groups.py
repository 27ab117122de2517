"""Attention of models whose heads were split into groups, one for each branch of a pattern.

Legend: B batch, S sequence, H heads, D head dimension, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.arguments import integer
from ringattn.attention import RingAttention
from ringattn.errors import InputError
from ringattn.workload import Pattern


class HeadGroupAttention(nn.Module):
    """Attention in which group g of about H / G heads sees branch g alone, every r-th position of it from g mod r on.

    That is not LongNet, where every head sees every branch: it is what some implementations compute under that name.
    Positions that a group does not select give 0. Their division by the sum of outputs, where they have one, is not
    done, nor that by G.

    Groups are as equal as they can be, the last ones one key/value head larger.

    Args:
        num_heads: H.
        head_dim: D.
        segment_lengths: w of each group, each a multiple of its r.
        dilation_rates: r of each group.
        num_kv_heads: a divisor of H, at least G; None is H.
        options: other arguments of ``RingAttention``: causal, scale, profile, backend, dtype and others; no
            process_group.

    Raises:
        InputError: an argument that makes no sense.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        num_kv_heads: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        branches = Pattern.of(segment_lengths, dilation_rates).branches
        heads = integer("num_heads", num_heads)
        kv_heads = heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads)
        if heads % kv_heads or kv_heads < len(branches):
            told = f"a multiple of num_kv_heads, and those at least {len(branches)}, one for each branch"
            raise InputError(f"num_heads is {heads} and num_kv_heads {kv_heads}; the first must be {told}")
        if options.get("process_group") is not None:
            raise InputError("process_group is given; groups of heads select rows on one device alone")
        for branch in branches:
            if branch.segment % branch.rate:
                raise InputError(f"segment length {branch.segment} is not a multiple of its rate, {branch.rate}")
        self.rates = [branch.rate for branch in branches]
        few, larger = divmod(kv_heads, len(branches))
        self.kv_sizes = [few + (number >= len(branches) - larger) for number in range(len(branches))]
        self.sizes = [size * (heads // kv_heads) for size in self.kv_sizes]
        # Every r-th row from the offset on is a sequence with whole segments of w / r rows.
        self.groups = nn.ModuleList(
            RingAttention(size, head_dim, kv_size, [b.segment // b.rate], [1], **options)
            for b, size, kv_size in zip(branches, self.sizes, self.kv_sizes, strict=True)
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return out (B, S, H, D) of q (B, S, H, D), k and v (B, S, Hkv, D)."""
        parts = []
        split = (torch.split(x, sizes, 2) for x, sizes in ((q, self.sizes), (k, self.kv_sizes), (v, self.kv_sizes)))
        for number, (attend, rate, *rows) in enumerate(zip(self.groups, self.rates, *split, strict=True)):
            selected = slice(number % rate, None, rate)
            out = torch.zeros_like(rows[0])
            if q.shape[1] > number % rate:
                out[:, selected] = attend(*(x[:, selected] for x in rows))
            parts.append(out)
        return torch.cat(parts, 2)
