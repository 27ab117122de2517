"""Runs torchscale's LongNet encoder from its own configuration and state_dict, over ``RingAttention``.

Legend: B batch, S sequence, E embed_dim, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ringattn.autograd.transforms import transforms_active
from ringattn.errors import InputError
from ringattn.modules.pool import AttentionPool
from ringattn.runtime.packed.documents import Documents

from .in_parts import in_parts
from .torchscale_config import EncoderSettings, settings_of

# Bytes of a feed-forward network's inner width to have at a time: half of them, between these bounds. Making them again
# takes an H200 1.4 ms of 38 at 100,003 positions, and 1.8 in parts of 64 MiB; the layer's peak is 2.7 GiB in parts of
# any size, 4.2 as a whole. At 10,001 it is 0.35 in two parts and 0.46 as a whole, for 3.96 ms and 3.73.
_CHUNK_BYTES = (32 * 2**20, 128 * 2**20)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}


class TorchscaleLongNet(nn.Module):
    """Encoder with the parameters of torchscale's ``LongNetEncoder``, under the same names.

    Its state_dict loads as it is, both ways. Results are those of torchscale where torchscale pads nothing; positions
    that are padding are never attended, where torchscale attends to them as zero keys and drops its padding mask.

    Args:
        config: torchscale's ``EncoderConfig``, or a mapping of its keyword arguments. Where several options decide
            over one thing, they do so as in torchscale.
        embed_tokens: module from src_tokens to (B, S, E); None where token_embeddings are given.
        embed_positions: module called as ``embed_positions(src_tokens or x, positions=positions)``, or None.
        output_projection: last layer; None makes one without bias where the configuration has a vocab_size.
        options: arguments of ``RingAttention`` that the configuration does not decide: profile, backend, dtype,
            checkpoint, process_group and others.

    Raises:
        InputError: an option that is not followed here, named with its value.
    """

    def __init__(
        self,
        config: Any,
        embed_tokens: nn.Module | None = None,
        embed_positions: nn.Module | None = None,
        output_projection: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.settings = s = settings_of(config)
        self.embed_tokens, self.embed_positions = embed_tokens, embed_positions
        if output_projection is None and s.vocab_size:
            output_projection = nn.Linear(s.embed_dim, s.vocab_size, bias=False)
        self.output_projection = output_projection
        self.layernorm_embedding = nn.LayerNorm(s.embed_dim, s.eps) if s.embedding_norm else None
        pattern = {"segment_lengths": s.segment_lengths, "dilation_rates": s.dilation_rates, "head_offset": "blocked"}
        pool = AttentionPool(**pattern, **options)  # one module for all layers, whose calls are equal
        steps = max(s.num_layers - 1, 1)
        self.layers = nn.ModuleList(EncoderLayer(s, pool, s.drop_path * depth / steps) for depth in range(s.num_layers))
        self.layer_norm = nn.LayerNorm(s.embed_dim, s.eps) if s.last_norm else None

    @classmethod
    def of(cls, encoder: nn.Module, **options: Any) -> Self:
        """Return one with the weights of torchscale's ``encoder``, on its device, in its dtype and mode.

        Its embeddings and output projection are taken over; other parameters are copied.
        """
        config: Any = encoder.args
        kept = {name: getattr(encoder, name) for name in ("embed_tokens", "embed_positions", "output_projection")}
        made = cls(config, **kept, **options)
        made.to(next(encoder.parameters()))
        made.load_state_dict(encoder.state_dict())
        return made.train(encoder.training)

    def forward(
        self,
        src_tokens: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
        features_only: bool = False,
        positions: Tensor | None = None,
        lengths: Any = None,
        cu_seqlens: Any = None,
        total_length: int | None = None,
    ) -> dict[str, Any]:
        """Encode src_tokens (B, S), or token_embeddings (B, S, E).

        Args:
            encoder_padding_mask: (B, S), true at padding, which ends rows; the same as ``lengths``.
            return_all_hiddens: keep the inputs of the first layer and the outputs of all.
            features_only: leave the output projection out.
            positions: for ``embed_positions``.
            lengths: positions that each row has, as of ``RingAttention``; what lies beyond is padding.
            cu_seqlens: where packed documents begin and end, as of ``RingAttention``, B = 1.
            total_length: as of ``RingAttention``, over several ranks.

        Returns a dictionary with torchscale's entries: ``encoder_out`` (B, S, E or vocab_size), ``encoder_embedding``,
        ``encoder_padding_mask``, ``encoder_states`` (before the last norm) and ``l_aux``. Rows of padding mean nothing.

        Raises:
            InputError: neither input, a mask that is not of row ends, or more than one of mask, lengths and cu_seqlens.
        """
        if encoder_padding_mask is not None:
            if lengths is not None or cu_seqlens is not None:
                raise InputError("encoder_padding_mask is given, and lengths or cu_seqlens too; give one")
            lengths = lengths_of(encoder_padding_mask)
        elif lengths is not None and not isinstance(lengths, Documents):
            lengths = Documents(lengths=lengths)  # read once for all layers
        elif cu_seqlens is not None and not isinstance(cu_seqlens, Documents):
            cu_seqlens = Documents(cu_seqlens)
        x, embedding = self._embedded(src_tokens, token_embeddings, positions)
        extent = {"lengths": lengths, "cu_seqlens": cu_seqlens, "total_length": total_length}
        states = [x] if return_all_hiddens else []
        for layer in self.layers:
            x = layer(x, extent)
            if return_all_hiddens:
                states.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        if self.output_projection is not None and not features_only:
            x = self.output_projection(x)
        return {
            "encoder_out": x,
            "encoder_embedding": embedding,
            "encoder_padding_mask": encoder_padding_mask,
            "encoder_states": states,
            "l_aux": [None] * len(self.layers),
        }

    def _embedded(
        self, src_tokens: Tensor | None, token_embeddings: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the first layer's input, and the scaled embedding alone."""
        if token_embeddings is None:
            if src_tokens is None or self.embed_tokens is None:
                raise InputError("give token_embeddings, or src_tokens to an encoder with embed_tokens")
            token_embeddings = self.embed_tokens(src_tokens)
        x = embedding = self.settings.embed_scale * token_embeddings
        if self.embed_positions is not None:
            x = x + self.embed_positions(x if src_tokens is None else src_tokens, positions=positions)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return F.dropout(x, self.settings.dropout, self.training), embedding


class EncoderLayer(nn.Module):
    """One layer: attention and feed-forward network, each with a residual connection."""

    def __init__(self, settings: EncoderSettings, pool: AttentionPool, drop_path: float) -> None:
        super().__init__()
        self.settings, self.drop_path = settings, drop_path
        self.self_attn = DilatedSelfAttention(settings, pool)
        self.self_attn_layer_norm = nn.LayerNorm(settings.embed_dim, settings.eps)
        self.ffn = FeedForward(settings)
        self.final_layer_norm = nn.LayerNorm(settings.embed_dim, settings.eps)

    def forward(self, x: Tensor, extent: dict[str, Any]) -> Tensor:
        """Return the layer's output (B, S, E) of x (B, S, E); ``extent`` is handed to ``RingAttention``."""
        s = self.settings
        before, after = (_norm, _same) if s.pre_norm else (_same, _norm)
        y = self.self_attn(before(self.self_attn_layer_norm, x), extent)
        y = F.dropout(y, s.dropout, self.training)
        x = after(self.self_attn_layer_norm, x * s.residual_scale + self._kept(y))
        y = self.ffn(before(self.final_layer_norm, x))
        return after(self.final_layer_norm, x * s.residual_scale + self._kept(y))

    def _kept(self, x: Tensor) -> Tensor:
        """Return x with rows of the batch left out at random, in training mode (stochastic depth)."""
        if not self.training or not self.drop_path:
            return x
        keep = 1.0 - self.drop_path
        return x * x.new_empty(len(x), 1, 1).bernoulli_(keep).div_(keep)


class DilatedSelfAttention(nn.Module):
    """Projections and dilated attention; with ``subln`` a norm before the last projection."""

    def __init__(self, settings: EncoderSettings, pool: AttentionPool) -> None:
        super().__init__()
        width = settings.embed_dim
        if width % settings.num_heads:
            raise InputError(f"encoder_embed_dim is {width}, not a multiple of {settings.num_heads} heads")
        self.settings, self._pool = settings, pool
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.inner_attn_ln = nn.LayerNorm(width, settings.eps) if settings.subln else None

    def forward(self, x: Tensor, extent: dict[str, Any]) -> Tensor:
        """Return (B, S, E) of x (B, S, E)."""
        if self.training and self.settings.attention_dropout:
            raise InputError(
                f"attention_dropout is {self.settings.attention_dropout} in training mode, and no kernel is exact "
                "across branches; set it to 0.0, or call eval()"
            )
        heads = (self.settings.num_heads, -1)
        q, k, v = (project(x).unflatten(-1, heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self._pool.module_for(q, k, causal=False, scale=None)(q, k, v, **extent).flatten(2)
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        y: Tensor = self.out_proj(out)
        return y


class FeedForward(nn.Module):
    """Two linear layers; with ``subln`` a norm before the second."""

    def __init__(self, settings: EncoderSettings) -> None:
        super().__init__()
        self.settings = settings
        self.fc1 = nn.Linear(settings.embed_dim, settings.ffn_dim)
        self.fc2 = nn.Linear(settings.ffn_dim, settings.embed_dim)
        self.ffn_layernorm = nn.LayerNorm(settings.ffn_dim, settings.eps) if settings.subln else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, S, E) of x (B, S, E), some positions at a time where there are many.

        What is as wide as ``encoder_ffn_embed_dim`` is most of a layer's memory. Of it the first layer's result is kept
        for the backward, which makes the rest again. Compilers decide that themselves, and export any length at once.
        """
        if transforms_active() or torch.compiler.is_compiling():  # the first take no hooks on what is kept
            y = self._inner(self.fc1(x))
        else:
            y = self._in_parts(x)
        return F.dropout(y, self.settings.dropout, self.training)

    def _in_parts(self, x: Tensor) -> Tensor:
        """Return what follows from x (B, S, E), as a whole where it is small."""
        inner_bytes, (least, most) = self.settings.ffn_dim * x.element_size(), _CHUNK_BYTES
        rows = x.flatten(0, 1)
        at_a_time = max(1, min(most, max(least, len(rows) * inner_bytes // 2)) // inner_bytes)
        if len(rows) <= at_a_time:
            return self._inner(self.fc1(x))
        if not torch.is_grad_enabled():
            return torch.cat([self._inner(self.fc1(part)) for part in torch.split(rows, at_a_time)]).view(
                *x.shape[:2], -1
            )
        of_inner = [module for module in (self.ffn_layernorm, self.fc2) if module is not None]
        draws = self.training and self.settings.activation_dropout > 0
        return in_parts(at_a_time, self.fc1, self._inner, of_inner, rows, draws=draws).view(*x.shape[:2], -1)

    def _inner(self, h: Tensor) -> Tensor:
        """Return what follows the first linear layer.

        torchscale converts the activation's input to float32 and its result back. torch's kernels do so inside, to the
        same numbers but for 0.4 % of a bfloat16 GELU's on CPUs, a rounding apart; nothing of twice the size is kept.
        """
        s = self.settings
        h = F.dropout(_ACTIVATIONS[s.activation](h), s.activation_dropout, self.training)
        if self.ffn_layernorm is not None:
            h = self.ffn_layernorm(h)
        y: Tensor = self.fc2(h)
        return y


def _norm(norm: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = norm(x)
    return y


def _same(norm: nn.Module, x: Tensor) -> Tensor:
    return x


def lengths_of(padding_mask: Tensor) -> Documents | None:
    """Return the positions that rows of a mask (B, S), true at padding, have; None where there is no padding.

    Raises:
        InputError: padding that is not at the end of a row.
    """
    there = ~padding_mask.bool().cpu()
    lengths = there.sum(1)
    if not bool((there == (torch.arange(there.shape[1], device="cpu") < lengths[:, None])).all()):
        raise InputError("encoder_padding_mask has padding before a row's end; move it there, or pack rows")
    return None if bool(there.all()) else Documents(lengths=lengths)
