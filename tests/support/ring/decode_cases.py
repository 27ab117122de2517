"""What a rank does in the tests of decoding: a cache that the ranks hold together, against one rank's forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from oracle import DENSE, lists_of

from ringattn import Pattern, RingAttention
from ringattn.decoding import cache as caches
from ringattn.errors import RingAttentionError


@dataclass(frozen=True)
class RankedCase:
    """A prompt in chunks, then so many single positions; ``stripe`` consecutive ones lie on a rank."""

    prompt: int
    chunk: int
    steps: int
    pattern: Pattern = DENSE
    causal: bool = True
    window: int | None = None
    counts: tuple[int, ...] | None = None
    rollback: int = 0
    heads: int = 4
    kv_heads: int = 2
    batch: int = 2
    stripe: int = 4


def module(case: RankedCase, **arguments: Any) -> RingAttention:
    lists = {} if case.pattern.dense else lists_of(case.pattern)
    given = {"causal": case.causal, "profile": None, "device": "cpu"}
    return RingAttention(case.heads, 4, case.kv_heads, **lists, **(given | arguments))


def check_decoding(cases: list[RankedCase]) -> int:
    """Check every case and return how many; ranks keep about equally much."""
    usual = caches.STRIPE
    for case in cases:
        caches.STRIPE = case.stripe
        ours, alone = module(case, process_group=dist.group.WORLD), module(case)
        generator = torch.Generator().manual_seed(case.prompt)
        total = case.prompt + case.steps
        q, k, v = (
            torch.randn(case.batch, total, h, 4, generator=generator, dtype=torch.float64)
            for h in (case.heads, case.kv_heads, case.kv_heads)
        )
        options: dict[str, Any] = {"dtype": torch.float64, "window": case.window, "rollback": case.rollback}
        cache, whole = ours.kv_cache(case.batch, **options), alone.kv_cache(case.batch, **options)
        begins = [*range(0, case.prompt, case.chunk), *range(case.prompt, total)]
        for begin, end in zip(begins, [*begins[1:], total], strict=True):
            chunk = [x[:, begin:end] for x in (q, k, v)]
            counts = None if case.counts is None or begin else list(case.counts)
            found = ours.prefill(*chunk, cache, counts, return_lse=True)
            expected = alone.prefill(*chunk, whole, counts, return_lse=True)
            for x, x64 in zip(found, expected, strict=True):
                torch.testing.assert_close(x, x64, atol=1e-10, rtol=1e-10)
            if case.rollback:
                for each in (cache, whole):
                    each.truncate([max(0, length - 1) for length in each.lengths])
        held = max(whole.most_rows, 1)
        assert cache.most_rows <= -(-held // (case.stripe * cache.world)) * case.stripe + case.stripe
        caches.STRIPE = usual
    return len(cases)


def check_faults() -> str:
    """The message of a cache of one rank that is given to a module of several."""
    case = RankedCase(8, 8, 0)
    made = module(case, process_group=dist.group.WORLD)
    cache = module(case).kv_cache(2, dtype=torch.float64)
    x = torch.zeros(2, 8, 2, 4, dtype=torch.float64)
    try:
        made.prefill(torch.zeros(2, 8, 4, 4, dtype=torch.float64), x, x, cache)
    except RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_cross() -> str:
    case = RankedCase(8, 8, 0)
    x = torch.zeros(2, 8, 2, 4)
    try:
        module(case, process_group=dist.group.WORLD).cross(torch.zeros(2, 3, 4, 4), x, x)
    except RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""
