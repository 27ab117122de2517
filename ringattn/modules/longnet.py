"""Defines ``LongNetBlock`` and ``LongNetEncoder``: pre-norm transformers with dilated attention (arXiv:2307.02486).

Legend: B batch, S sequence, E embed_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ringattn.arguments import integer

from .multihead_attention import MultiheadAttention


class LongNetBlock(nn.Module):
    """Pre-norm transformer block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        embed_dim: E.
        num_heads: a divisor of E.
        segment_lengths: w of each branch; None, as for dilation_rates, is dense attention.
        dilation_rates: r of each branch, as many as segment_lengths.
        mlp_dim: hidden width of the MLP; None is 4 E.
        dropout: of the outputs of attention and MLP, in training mode; attention weights have none.
        causal: a position attends to itself and earlier ones only.
        bias: biases of projections, MLP and norms.
        options: arguments of ``MultiheadAttention``: num_kv_heads, rotary_base, device, dtype, and those that it gives
            to ``RingAttention``.

    Raises:
        InputError: an argument that makes no sense.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        mlp_dim: int | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype"), "bias": bias}
        mlp_dim = 4 * embed_dim if mlp_dim is None else integer("mlp_dim", mlp_dim)
        options |= {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
        self.attention = MultiheadAttention(embed_dim, num_heads, bias=bias, batch_first=True, causal=causal, **options)
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(embed_dim, **factory) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, mlp_dim, **factory), nn.GELU(), nn.Linear(mlp_dim, embed_dim, **factory)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        total_length: int | None = None,
    ) -> Tensor:
        """Return the block's output (B, S, E) of x (B, S, E).

        ``key_padding_mask`` (B, S) is True at padding, which no position attends to. ``positions`` and ``total_length``
        are those of ``MultiheadAttention``.
        """
        self.attention.check_input("x", x)
        normed = self.attention_norm(x)
        attended, _ = self.attention(
            normed, normed, normed, key_padding_mask, positions=positions, total_length=total_length
        )
        x = x + self.dropout(attended)
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class LongNetEncoder(nn.Module):
    """Stack of ``LongNetBlock`` with a last norm.

    Args:
        num_layers: blocks.
        embed_dim: E.
        num_heads: a divisor of E.
        segment_lengths: w of each branch; None, as for dilation_rates, is dense attention.
        dilation_rates: r of each branch, as many as segment_lengths.
        options: the other arguments of ``LongNetBlock``.

    Raises:
        InputError: an argument that makes no sense.
    """

    def __init__(
        self,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        layers = range(integer("num_layers", num_layers))
        blocks = [LongNetBlock(embed_dim, num_heads, segment_lengths, dilation_rates, **options) for _ in layers]
        self.blocks = nn.ModuleList(blocks)
        norm = {name: options[name] for name in ("device", "dtype", "bias") if name in options}
        self.norm = nn.LayerNorm(embed_dim, **norm)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        total_length: int | None = None,
    ) -> Tensor:
        """Return the encoder's output (B, S, E) of x (B, S, E); the other arguments are those of ``LongNetBlock``."""
        for block in self.blocks:
            x = block(x, key_padding_mask, positions, total_length)
        y: Tensor = self.norm(x)
        return y
