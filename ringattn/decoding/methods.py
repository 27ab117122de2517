"""Methods of ``RingAttention`` for queries at other positions than the keys.

Legend: B batch, Sq queries, Sk keys, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringattn.errors import InputError

from .cache import KVCache
from .cross import Align, cross, window_of
from .decode import decode, prefill

if TYPE_CHECKING:
    from .cross import CrossModule


class DecodingMethods:
    """Methods of ``RingAttention`` for caches, and for queries at other positions than the keys."""

    def cross(
        self: CrossModule,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        align: Align = "end",
        return_lse: bool = False,
        window: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend over q (B, Sq, H, D) with k and v (B, Sk, Hkv, D), of which there may be more or fewer, or as many.

        Keys are at positions 0 to Sk - 1. ``align`` says where the queries are, which causality and a dilated pattern
        depend on: ``"end"``, the last one at the last key, as when they follow what is cached, or ``"start"``, the
        first one at the first key. A query before position 0 sees nothing, but in dense attention that is not causal.
        With ``window``, of causal dense attention, a query sees so many positions at most, its own among them; that of
        the module, if it has one.

        Returns what ``forward`` does, for Sq positions, and autograd comes back to q, k, v and lse in the same way.
        InputError over several ranks, under torch.export and under torch.func; torch.compile breaks its graph here.
        """
        out, lse = cross(self, q, k, v, align, window, return_lse)
        if not return_lse:
            return out
        assert lse is not None
        return out, lse

    def kv_cache(
        self: CrossModule,
        batch: int,
        max_length: int | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        window: int | None = None,
        rollback: int = 0,
    ) -> KVCache:
        """Return an empty cache for ``batch`` sequences of this module; see ``KVCache``.

        ``dtype`` is that of k and v; None is that of the module, float32 where it computes in TF32. InputError where
        it was given none.
        """
        if dtype is None:
            own = self.plan.wishes.dtype
            if own is None:
                raise InputError(
                    "dtype is None, and this module was given none either; name that of k and v, as in "
                    "kv_cache(batch, dtype=torch.bfloat16)"
                )
            dtype = "fp32" if own == "tf32" else own
        if self.shape.head_dim_v:
            raise InputError(
                f"head_dim_v is {self.shape.head_dim_v} and head_dim {self.shape.head_dim}; a cache holds keys and "
                "values of one size: pad the smaller with zeros"
            )
        return KVCache(
            batch, self.shape.kv_heads, self.shape.head_dim, max_length, dtype=dtype, device=self.device,
            window=window_of(self.shape, window), pattern=self.shape.pattern, rollback=rollback,
            process_group=None if self._ring is None else self._ring.comm.group,
        )  # fmt: skip

    def prefill(
        self: CrossModule,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        counts: Sequence[int] | None = None,
        return_lse: bool = False,
        kept: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Append k and v (B, S, Hkv, D) to the cache and attend with q (B, S, H, D), the same positions.

        A prompt may come whole or in chunks, and a position at a time: with a causal module the results are those of
        ``forward`` on the whole. Queries that are not causal see what is cached by then. Of sequence b the first
        ``counts[b]`` positions count, or with ``kept`` (B, S), a boolean tensor, best on the CPU, those where it is
        True: padding may then be on the left, or between. Each sequence is one of its own, whose positions count from
        its first that is kept. Results of the others are 0 and their lse -inf.

        Returns what ``forward`` does. Over several ranks each is given all of q, k and v and the same counts, keeps the
        keys that are its own, and has all results: ranks merge theirs once a call. No gradients, and a graph break
        under torch.compile. In a CUDA graph memory does not grow: give the cache a max_length, and call
        ``cache.advance()`` after each replay.
        """
        out, lse = prefill(self, q, k, v, cache, counts, kept)
        return (out, lse) if return_lse else out

    def decode(
        self: CrossModule,
        q: Tensor,
        cache: KVCache,
        counts: Sequence[int] | None = None,
        return_lse: bool = False,
        kept: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend with q (B, Sq, H, D), the last Sq positions that the cache holds; see ``prefill``."""
        out, lse = decode(self, q, cache, counts, kept)
        return (out, lse) if return_lse else out
