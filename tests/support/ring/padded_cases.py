"""What a rank does in the tests of padded batches over a cache that ranks hold together: every row against the oracle.

Legend: B batch, S positions of a chunk, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import cross_oracle
import torch
import torch.distributed as dist
from faults import Told, told_of
from oracle import DENSE, lists_of
from torch import Tensor

from ringattn import Pattern, RingAttention
from ringattn.decoding import cache as caches

Chunk = tuple[tuple[bool, ...], ...]  # of every row, which of the chunk's positions count


@dataclass(frozen=True)
class PaddedCase:
    """Chunks of a batch, padded anywhere; ``stripe`` consecutive positions lie on a rank."""

    chunks: tuple[Chunk, ...]
    pattern: Pattern = DENSE
    causal: bool = True
    window: int | None = None
    kv_heads: int = 2
    group: int = 2
    stripe: int = 4
    back: int = 0  # positions that every row forgets after a chunk

    @property
    def batch(self) -> int:
        return len(self.chunks[0])

    def module(self, **arguments: Any) -> RingAttention:
        lists = {} if self.pattern.dense else lists_of(self.pattern)
        given = {"causal": self.causal, "profile": None, "device": "cpu"}
        return RingAttention(self.kv_heads * self.group, 4, self.kv_heads, **lists, **(given | arguments))


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def expected_row(case: PaddedCase, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (S, H, D) and lse (H, S) of the last positions of a row of its own: q (S, H, D), k and v (any, Hkv, D)."""
    length = len(k)
    at = torch.arange(length)
    seen = cross_oracle.counts(
        case.pattern, case.causal, at[length - len(q) :], at, q.shape[1], k.shape[1], case.window
    )
    out, lse = cross_oracle.attend(q[None], k[None], v[None], seen)
    return out[0], lse[0]


class Way(Protocol):
    """How chunks reach a cache."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept_BL: Tensor) -> tuple[Tensor, Tensor | None]:
        """out and lse of a chunk, of which ``kept_BL`` says with all before it what is no padding."""
        ...

    def crop(self, kept_BL: Tensor, columns: int) -> None:
        """Forget so many columns at the end; ``kept_BL`` are those that stay."""
        ...

    @property
    def lengths(self) -> tuple[int, ...]: ...


class ByModule:
    """Chunks that are given to ``RingAttention.prefill``."""

    def __init__(self, case: PaddedCase) -> None:
        self.made = case.module(process_group=dist.group.WORLD)
        self.cache = self.made.kv_cache(case.batch, dtype=torch.float64, window=case.window, rollback=case.back)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept_BL: Tensor) -> tuple[Tensor, Tensor | None]:
        kept = kept_BL[:, -q.shape[1] :]
        out, lse = self.made.prefill(q, k, v, self.cache, kept=kept, return_lse=True)
        assert torch.equal(self.made.decode(q, self.cache, kept=kept)[0], out[0])
        assert bool(lse.transpose(1, 2)[~kept].isneginf().all())
        return out, lse

    def crop(self, kept_BL: Tensor, columns: int) -> None:
        self.cache.truncate(kept_BL.sum(1).tolist())

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.cache.lengths


def check_padded(case: PaddedCase, way: Callable[[PaddedCase], Way]) -> tuple[int, ...]:
    """Every chunk is what each row gives alone; return the lengths of the rows in the cache."""
    usual, caches.STRIPE = caches.STRIPE, case.stripe
    try:
        ours = way(case)
        generator = torch.Generator().manual_seed(len(case.chunks))
        kept_BL = torch.empty(case.batch, 0, dtype=torch.bool)
        held: list[tuple[Tensor, Tensor]] = [(torch.empty(0, case.kv_heads, 4).double(),) * 2] * case.batch
        for chunk in case.chunks:
            kept = torch.tensor(chunk)
            kept_BL = torch.cat((kept_BL, kept), 1)
            q, k, v = (
                random(generator, *kept.shape, heads, 4)
                for heads in (case.kv_heads * case.group, case.kv_heads, case.kv_heads)
            )
            out, lse = ours.attend(q, k, v, kept_BL)
            assert bool((out[~kept] == 0).all())
            for b, row in enumerate(kept):
                held[b] = (torch.cat((held[b][0], k[b, row])), torch.cat((held[b][1], v[b, row])))
                if bool(row.any()):
                    expected = expected_row(case, q[b, row], *held[b])
                    torch.testing.assert_close(out[b, row], expected[0], atol=1e-10, rtol=1e-10)
                    if lse is not None:
                        torch.testing.assert_close(lse[b][:, row], expected[1], atol=1e-10, rtol=1e-10)
            if case.back:
                back = min(case.back, kept_BL.shape[1])
                kept_BL = kept_BL[:, : kept_BL.shape[1] - back]
                ours.crop(kept_BL, back)
                held = [(k[:n], v[:n]) for (k, v), n in zip(held, kept_BL.sum(1).tolist(), strict=True)]
        return ours.lengths
    finally:
        caches.STRIPE = usual


def wrong_on_one_rank(given: dict[str, Any]) -> tuple[Told, Told]:
    """What a call with these arguments on the last rank alone tells, and the next one, a right one, on all."""
    case = PaddedCase((((True,) * 6,) * 2,))
    made = case.module(process_group=dist.group.WORLD)
    cache = made.kv_cache(2, dtype=torch.float64)
    q, k = torch.zeros(2, 6, 4, 4).double(), torch.zeros(2, 6, 2, 4).double()
    own = given if dist.get_rank() == dist.get_world_size() - 1 else {}
    first = told_of(lambda: made.prefill(q, k, k, cache, **own))
    cache.reset()
    return first, told_of(lambda: made.prefill(q, k, k, cache))
