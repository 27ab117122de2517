"""Methods of ``RingAttention`` for queries at other positions than the keys.

Legend: B batch, Sq queries, Sk keys, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .cross import Align, cross

if TYPE_CHECKING:
    from .cross import CrossModule


class DecodingMethods:
    """What ``RingAttention`` does beyond a forward over one sequence."""

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
        With ``window``, of causal dense attention, a query sees so many positions at most, its own among them.

        Returns what ``forward`` does, for Sq positions, and autograd comes back to q, k, v and lse in the same way.
        InputError over several ranks, under torch.export and under torch.func; torch.compile breaks its graph here.
        """
        out, lse = cross(self, q, k, v, align, window)
        return (out, lse) if return_lse else out
