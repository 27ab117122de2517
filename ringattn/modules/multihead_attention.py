"""Defines ``MultiheadAttention``, in the place of torch's.

Legend: B batch, Sq queries, Sk keys, S both, E embed_dim, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ringattn.arguments import check_dropout, integer
from ringattn.autograd.function import outside_graphs
from ringattn.errors import InputError

from .attend import attend
from .masks import Keys, keys_of_mask, keys_of_padding, remembered
from .pool import AttentionPool
from .rotary import check_rotary, rotated
from .sequences import check_alike, check_mask, check_sequences

T = TypeVar("T")


class MultiheadAttention(nn.Module):
    """Multi-head attention with projections, as ``torch.nn.MultiheadAttention``, over ``RingAttention``.

    Without ``num_kv_heads`` its parameters have the names and shapes of torch's, so a state_dict fits both ways.

    Args:
        embed_dim: E, of queries and output.
        num_heads: H, a divisor of E.
        dropout: probability, < 1, that an attention weight is dropped in training mode; see ``RingAttention``.
        bias: biases of the projections.
        add_bias_kv: refused.
        add_zero_attn: refused.
        kdim: width of keys; None is E.
        vdim: width of values; None is E.
        batch_first: inputs are (B, S, E), not (S, B, E).
        device: of the parameters.
        dtype: of the parameters.
        num_kv_heads: Hkv, a divisor of H; None is H. With fewer the key and value projections are Hkv * D wide and
            their weights are ``k_proj_weight`` and ``v_proj_weight``.
        causal: every call is causal.
        rotary_base: base of rotary embeddings of q and k, halves of a head rotated together as in Llama; None is none.
        options: arguments of ``RingAttention``: a pattern, profile, backend, process_group, layout and others.

    Raises:
        InputError: an argument that makes no sense, or one that is refused.
    """

    # nn.TransformerEncoderLayer reads this, and where it is true computes dense attention itself from the weights.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        rotary_base: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                told = "adds keys of no position; use torch.nn.MultiheadAttention"
                raise InputError(f"{name} is {given!r}, which {told}")
        self.embed_dim, self.num_heads = integer("embed_dim", embed_dim), integer("num_heads", num_heads)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads)
        if self.embed_dim % self.num_heads or self.num_heads % self.num_kv_heads:
            raise InputError(
                f"embed_dim is {embed_dim}, num_heads {num_heads} and num_kv_heads {self.num_kv_heads}; each must be a "
                "multiple of the next"
            )
        self.head_dim = self.embed_dim // self.num_heads
        self.kdim = self.embed_dim if kdim is None else integer("kdim", kdim)
        self.vdim = self.embed_dim if vdim is None else integer("vdim", vdim)
        for name, flag in (("bias", bias), ("batch_first", batch_first), ("causal", causal)):
            if not isinstance(flag, bool):
                raise InputError(f"{name} is {flag!r}; it must be True or False")
        check_dropout("dropout", dropout)
        self.dropout, self.batch_first, self.causal = float(dropout), batch_first, causal
        self.rotary_base = check_rotary(rotary_base, self.head_dim)
        self._pool = AttentionPool(**options)
        self._make_parameters(bias, {"device": device, "dtype": dtype})

    def _make_parameters(self, bias: bool, factory: dict[str, Any]) -> None:
        """Make the parameters, under torch's names and with its initial values."""
        width, kv_width = self.embed_dim, self.num_kv_heads * self.head_dim
        if self.kdim == self.vdim == width == kv_width:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width, **factory))
            weights = [self.in_proj_weight]
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(width, width, **factory))
            self.k_proj_weight = nn.Parameter(torch.empty(kv_width, self.kdim, **factory))
            self.v_proj_weight = nn.Parameter(torch.empty(kv_width, self.vdim, **factory))
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
            self.register_parameter("in_proj_weight", None)
        self.in_proj_bias = nn.Parameter(torch.zeros(width + 2 * kv_width, **factory)) if bias else None
        self.out_proj = nn.Linear(width, width, bias=bias, **factory)
        for weight in weights:
            nn.init.xavier_uniform_(weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        positions: Tensor | None = None,
        total_length: int | None = None,
    ) -> tuple[Tensor, None]:
        """Attend from query (B, Sq, E) to key (B, Sk, kdim) and value (B, Sk, vdim); (Sq, B, E) without batch_first.

        Args:
            key_padding_mask: (B, Sk), True or -inf at keys that are not there. Where query is key, such rows give the
                output projection's bias; where it is not, a causal mask is refused.
            need_weights: refused if true; unlike torch's, the default is False.
            attn_mask: (Sq, Sk), a causal mask, True or -inf at keys that are not attended; others are refused.
            average_attn_weights: of no effect, as without weights in torch.
            is_causal: this call is causal; with an attn_mask, that must be causal.
            positions: (Sq,) or (B, Sq) for rotary embeddings; None counts from 0, over several ranks from where this
                rank's rows are.
            total_length: length of the whole sequence, where ranks hold unequal numbers of positions.

        Returns the output, like query, and None in the place of the weights.

        Raises:
            InputError: an argument that is refused, or tensors that do not fit.
        """
        arguments = (query, key, value, key_padding_mask, need_weights, attn_mask, is_causal, positions, total_length)
        if self._pool.over_ranks:
            attended: tuple[Tensor, None] = outside_graphs(self._told, self._attended, *arguments)
            return attended
        return self._attended(*arguments)

    def check_input(self, name: str, x: Tensor) -> None:
        """Raise InputError unless x is a sequence (B, S, E) of this module's width and dtype; all ranks are told."""
        if self._pool.over_ranks:
            outside_graphs(self._told, check_sequences, {name: (x, self.embed_dim)}, self.out_proj.weight)
        else:
            check_sequences({name: (x, self.embed_dim)}, self.out_proj.weight)

    def _told(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call in which an error is told to the other ranks, also where it comes before the attention."""
        with self._pool.reporting(self.out_proj.weight.device):
            return call(*arguments)

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
        positions: Tensor | None,
        total_length: int | None,
    ) -> tuple[Tensor, None]:
        if need_weights:
            raise InputError(
                "need_weights is True, and no kernel keeps attention weights; use torch.nn.MultiheadAttention, which "
                "loads this module's state_dict"
            )
        dropout = self.dropout if self.training else 0.0
        check_sequences(
            {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)},
            self.out_proj.weight,
        )
        check_alike(query, key, value, 0 if self.batch_first else 1)
        check_mask("key_padding_mask", key_padding_mask)
        check_mask("attn_mask", attn_mask)
        of_one, batched = query is key, query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._projected(query, key, value)
        causal = self.causal or is_causal or attn_mask is not None
        keys = None
        if key_padding_mask is not None or attn_mask is not None:
            keys = self._keys(key_padding_mask, attn_mask, causal, of_one, q, k)
        if self.rotary_base is not None:
            q, k = self._rotated(q, k, of_one, causal, positions, total_length)
        elif positions is not None:
            raise InputError("positions is given, and the module was built without rotary_base")
        out, _ = attend(
            self._pool, q, k, v, causal=causal, keys=keys, aligned="start", of_one=of_one, total_length=total_length,
            dropout=dropout,
        )  # fmt: skip
        out = self.out_proj(out.flatten(2))
        if not batched:
            return out[0], None
        return out if self.batch_first else out.transpose(0, 1), None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, Sq, H, D), k and v (B, Sk, Hkv, D)."""
        width, kv_width = self.embed_dim, self.num_kv_heads * self.head_dim
        sizes = [width, kv_width, kv_width]
        weight, bias = self.in_proj_weight, self.in_proj_bias
        parts: Sequence[Tensor]
        if weight is not None and query is key is value:
            parts = torch.split(linear(query, weight, bias), sizes, -1)
        else:
            weights: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if weight is not None:
                weights = torch.split(weight, sizes)
            biases = (None,) * 3 if bias is None else torch.split(bias, sizes)
            parts = tuple(map(linear, (query, key, value), weights, biases))
        q, k, v = (part.view(*part.shape[:2], -1, self.head_dim) for part in parts)
        return q, k, v

    @torch.compiler.disable(reason="what a mask means is read on the host")  # type: ignore[no-untyped-call, untyped-decorator]
    def _keys(
        self,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        causal: bool,
        of_one: bool,
        q: Tensor,
        k: Tensor,
    ) -> Keys | None:
        """Return the keys that the masks leave."""
        if attn_mask is not None:
            keys = remembered(_kept_by, attn_mask)
            if not keys.causal or attn_mask.shape[-2:] != (q.shape[1], k.shape[1]):
                raise InputError(
                    f"attn_mask has shape {tuple(attn_mask.shape)} and is not causal; use key_padding_mask, or "
                    "FlexAttention (torch.nn.attention.flex_attention), which follows any mask"
                )
        if key_padding_mask is None:
            return None
        if key_padding_mask.shape != k.shape[:2]:
            raise InputError(
                f"key_padding_mask has shape {tuple(key_padding_mask.shape)}; it must be {tuple(k.shape[:2])}"
            )
        if causal and q.shape[1] != k.shape[1]:
            raise InputError(f"key_padding_mask with causality needs as many queries as keys, not {q.shape[1]}")
        if causal and not of_one:
            raise InputError(
                "key_padding_mask with causality needs one tensor as query and key, in which rows at padding are no "
                "queries; use FlexAttention (torch.nn.attention.flex_attention), which follows any mask"
            )
        return remembered(_kept, key_padding_mask, causal)

    def _rotated(
        self, q: Tensor, k: Tensor, of_one: bool, causal: bool, positions: Tensor | None, total_length: int | None
    ) -> tuple[Tensor, Tensor]:
        if not of_one:
            raise InputError("rotary_base is for attention of one sequence to itself, where key is query")
        assert self.rotary_base is not None
        if positions is None:
            attention = self._pool.module_for(q, k, causal, self.head_dim**-0.5)
            whole = attention.shape.world * q.shape[1] if total_length is None else total_length
            positions = attention.positions(whole)
        elif not isinstance(positions, Tensor):
            raise InputError(f"positions is a {type(positions).__name__}; it must be a tensor")
        return rotated(q, positions, self.rotary_base), rotated(k, positions, self.rotary_base)

    def extra_repr(self) -> str:
        kv = f", num_kv_heads={self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}{kv}, causal={self.causal}"


def _kept_by(attn_mask: Tensor) -> Keys:
    """Return what a mask means that is True at keys which are not attended, as those of torch's module are."""
    return keys_of_mask(~attn_mask if attn_mask.dtype is torch.bool else attn_mask)


def _kept(key_padding_mask: Tensor, causal: bool) -> Keys:
    if key_padding_mask.dtype != torch.bool:
        if not bool(((key_padding_mask == 0) | (key_padding_mask == -torch.inf)).all()):
            raise InputError(
                "key_padding_mask adds a bias to the logits, which no kernel here does; use FlexAttention "
                "(torch.nn.attention.flex_attention), which does it exactly"
            )
        key_padding_mask = key_padding_mask < 0
    return keys_of_padding(~key_padding_mask, causal)
