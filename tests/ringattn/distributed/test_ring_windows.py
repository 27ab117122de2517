"""Sliding windows and softcap over ranks: as on one rank, and nobody is sent a key that it does not see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from oracle import Case, exact, pattern_of
from pool import Pool
from ring_cases import RingCase, check_exact
from test_ring_bytes import _sent

from ringattn import Pattern, RingAttention, detect
from ringattn.errors import PlanError
from ringattn.geometry.layout import Span, shards_of
from ringattn.geometry.ring_geometry import HeadRange, ring_geometry
from ringattn.geometry.ring_schedules import windowed
from ringattn.planning.plan import rejection_reasons

WORLDS = (2, 3)


def _cases(schedule: str, world: int) -> list[RingCase]:
    """Windows of one position to almost all, below and above what a rank holds, grouped heads, uneven shares."""
    unit = world if schedule == "ulysses" else 1
    found = []
    for number, window in enumerate((1, 2, 5, 12, 13, 12 * world - 1, 500)):
        heads, kv_heads = ((3, 3), (4, 2))[number % 2]
        length = 12 * world + (0, 5)[number % 2]
        case = Case(length, heads * unit, kv_heads * unit, 4, 1 + number % 2, causal=True, seed=number, window=window)
        case = replace(case, softcap=(None, 1.5, None)[number % 3])
        found.append(RingCase(case, schedule, "contiguous", head_groups=2 * (schedule == "all-gather"), ragged=True))
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("schedule", ["ring", "all-gather", "ulysses"])
def test_as_on_one_rank(schedule: str, world: int, ranks: Callable[[int], Pool]) -> None:
    cases = _cases(schedule, world)
    assert ranks(world).run(check_exact, cases) == [len(cases)] * world


@pytest.mark.parametrize("spread", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_softcap_is_of_each_score(spread: str, causal: bool, ranks: Callable[[int], Pool]) -> None:
    case = Case(29, 4, 2, 4, 2, causal=causal, softcap=0.7)
    rings = [RingCase(case, schedule, spread, ragged=True) for schedule in ("ring", "all-gather")]
    assert ranks(3).run(check_exact, rings) == [2] * 3


def test_ulysses_takes_any_layout(ranks: Callable[[int], Pool]) -> None:
    ring = RingCase(Case(30, 4, 2, 4, causal=True, window=7), "ulysses", "zigzag", ragged=True)
    assert ranks(2).run(check_exact, [ring]) == [1] * 2


@pytest.mark.parametrize("schedule", ["ring", "all-gather"])
@pytest.mark.parametrize(
    ("window", "rows"),
    [(1, [0, 0, 0]), (2, [1, 1, 0]), (9, [8, 8, 0]), (32, [31, 31, 0]), (33, [32, 32, 0]), (41, [40, 32, 0])],
)
def test_only_keys_that_are_seen_travel(
    schedule: str, window: int, rows: list[int], ranks: Callable[[int], Pool]
) -> None:
    """Of 32 positions on each of three ranks: keys and values forth, again in the backward, and their gradients back.

    Beyond 33 the last rank sees some of the first one's, which in a ring the middle one hands on.
    """
    case = Case(96, 4, 2, 4, causal=True, window=window)
    sent = ranks(3).run(_sent, RingCase(case, schedule, "contiguous"))
    row = 2 * 2 * 4 * 8  # K and V of two heads of four float64
    if schedule == "ring" and window == 41:
        rows = [32, 32 + 8, 0]  # the middle one hands on what it was sent
    assert [forward for forward, _ in sent] == [row * n for n in rows]
    assert sum(both for _, both in sent) == 2 * sum(forward for forward, _ in sent) + row * _keys_of_others(window)


def _keys_of_others(window: int) -> int:
    """Sum over ranks of the keys that it sees of others, whose gradients it sends."""
    return sum(min(window - 1, 32 * rank) for rank in range(3))


def _messages(ring: RingCase) -> int:
    """Number of messages of rows that this rank sends in a forward."""
    counted: list[Any] = []
    start = dist.batch_isend_irecv

    def messages(operations: Any) -> Any:
        counted.extend(o for o in operations if o.op is dist.isend and o.tensor.dtype is not torch.int64)
        return start(operations)

    module = ring.module()
    leaves = [module.shard(x.detach()) for x in ring.case.inputs()]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(dist, "batch_isend_irecv", messages)
        module(*leaves)
    return len(counted)


@pytest.mark.parametrize(("window", "expected"), [(1, [0, 0, 0]), (33, [1, 1, 0]), (34, [1, 2, 0])])
def test_no_message_beyond_the_reach_of_a_window(
    window: int, expected: list[int], ranks: Callable[[int], Pool]
) -> None:
    case = Case(96, 2, 2, 4, causal=True, window=window)
    assert ranks(3).run(_messages, RingCase(case, "ring", "contiguous")) == expected


@given(
    queries=st.tuples(st.integers(10, 30), st.integers(1, 30)),
    keys=st.tuples(st.integers(0, 9), st.integers(1, 10)),
    window=st.integers(1, 50),
)
def test_blocks_of_a_window_show_each_key_once_to_whom_sees_it(
    queries: tuple[int, int], keys: tuple[int, int], window: int
) -> None:
    q, k = Span(queries[0], sum(queries)), Span(keys[0], min(sum(keys), queries[0]))
    shown = torch.zeros(q.length, k.length, dtype=torch.int64)
    for block in windowed(q, k, window):
        rows, seen = block.q_end - block.q_begin, block.k_end - block.k_begin
        assert not block.edge or rows == seen
        part = torch.ones(rows, seen, dtype=torch.int64)
        shown[block.q_begin : block.q_end, block.k_begin : block.k_end] += part.triu() if block.edge else part
    position = torch.arange(q.begin, q.end)[:, None]
    assert torch.equal(shown, (torch.arange(k.begin, k.end) > position - window).long())


@given(
    total=st.integers(8, 60),
    world=st.integers(2, 6),
    window=st.integers(1, 70),
    transport=st.sampled_from(("ring", "all-gather")),
)
def test_what_one_member_sends_another_receives(total: int, world: int, window: int, transport: str) -> None:
    """And every key that a query sees is in exactly one block of it."""
    step = -(-total // world)
    if step * (world - 1) >= total:
        return
    parts = shards_of("contiguous", total, world)
    of = [
        ring_geometry(Pattern(), True, parts, me, 1, HeadRange(0, 1, 1), transport, 1, window).chunks[0]
        for me in range(world)
    ]
    for me, chunk in enumerate(of):
        for hop in chunk.hops:
            for transfer in hop.receives:
                sender = next(other for other in of[transfer.peer].hops if other.step == hop.step)
                assert (transfer.owner, transfer.rows) in [(s.owner, s.rows) for s in sender.sends if s.peer == me]
            for transfer in hop.gives:
                taker = next(other for other in of[transfer.peer].hops if other.step == hop.step)
                assert (transfer.begin, transfer.rows) in [(t.begin, t.rows) for t in taker.takes if t.peer == me]
        received = sum(t.rows for hop in chunk.hops for t in hop.gives)
        assert received == min(window - 1, parts[me][0].begin)


def test_documents_over_ranks_have_windows_of_their_own(ranks: Callable[[int], Pool]) -> None:
    assert ranks(3).run(_documents) == [True] * 3


def _documents() -> bool:
    case = Case(36, 4, 2, 4, causal=True, window=5)
    bounds = [0, 3, 20, 21, 36]
    q, k, v = (x.detach() for x in case.inputs())
    dout = case.dout()
    module = RingAttention(
        4, 4, 2, causal=True, window=5, profile=None, device="cpu", process_group=dist.group.WORLD, layout="contiguous"
    )
    leaves = [module.shard(x).clone().requires_grad_() for x in (q, k, v)]
    out = module(*leaves, cu_seqlens=bounds)
    grads = torch.autograd.grad(out, leaves, module.shard(dout))
    parts = [exact(case, *(x[:, b:e] for x in (q, k, v, dout))) for b, e in pairwise(bounds)]
    for name, x in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True):
        whole = torch.cat([getattr(part, name) for part in parts], 1)
        torch.testing.assert_close(x, module.shard(whole), rtol=0, atol=1e-10)
    return True


def test_zigzag_in_a_ring_is_refused_and_contiguous_chosen(ranks: Callable[[int], Pool]) -> None:
    assert ranks(2).run(_layouts) == [("contiguous", "zigzag")] * 2
    ring = RingCase(Case(30, 2, causal=True, window=7), "ring", "zigzag")
    workload = replace(ring.case.workload(), seq_len=15, world=2)
    (reason,) = rejection_reasons(workload, ring.tunables("fp64", "math", "math"), detect("cpu"))
    assert reason.startswith("layout zigzag: a sliding window is for rows without gaps")


def _layouts() -> tuple[str, str]:
    arguments: dict[str, Any] = {"causal": True, "profile": None, "device": "cpu", "process_group": dist.group.WORLD}
    with pytest.raises(PlanError, match="layout zigzag: a sliding window"):
        RingAttention(2, 4, window=7, layout="zigzag", **arguments).plan_for(15, torch.float64, True)
    return RingAttention(2, 4, window=7, **arguments).layout, RingAttention(2, 4, **arguments).layout


@pytest.mark.parametrize("schedule", ["ring", "all-gather"])
def test_maps_over_ranks_follow_the_window(schedule: str, ranks: Callable[[int], Pool]) -> None:
    assert ranks(3).run(_maps, RingCase(Case(33, 2, 2, 4, causal=True, window=13, softcap=2.0), schedule, "contiguous"))


def _maps(ring: RingCase) -> bool:
    q, k, v = (x.detach() for x in ring.case.inputs())
    module, alone = ring.module(), ring.case.module()
    mine = [module.shard(x) for x in (q, k, v)]
    torch.testing.assert_close(module.received(*mine), module.shard(alone.received(q, k, v), dim=2), rtol=0, atol=1e-10)
    rows = module.rows(*mine, [0, 14, 32])
    torch.testing.assert_close(rows, module.shard(alone.rows(q, k, v, [0, 14, 32]), dim=3), rtol=0, atol=1e-10)
    return True


def test_a_head_dim_of_v_is_refused_over_ranks(ranks: Callable[[int], Pool]) -> None:
    assert (
        ranks(2).run(_sizes)
        == ["head_dim_v is 3 and head_dim 4; over 2 ranks keys and values travel together: pad the smaller with zeros"]
        * 2
    )


def _sizes() -> str:
    with pytest.raises(ValueError, match="head_dim_v") as error:
        RingAttention(2, 4, head_dim_v=3, profile=None, device="cpu", process_group=dist.group.WORLD)
    return str(error.value)


@pytest.mark.parametrize("world", WORLDS)
def test_sinks_enter_once_over_ranks(world: int, ranks: Callable[[int], Pool]) -> None:
    """Also where a plan keeps what it exchanged, and a module has a window."""
    case = Case(12 * world + 1, 6, 6, 4, 2, causal=True)
    rings = [
        RingCase(case, "ring", "zigzag", ragged=True),
        RingCase(replace(case, pattern=pattern_of([8, 24], [1, 3])), "all-gather", "contiguous", ragged=True),
        RingCase(replace(case, window=7), "ring", "contiguous", ragged=True),
        RingCase(case, "ulysses", "contiguous", checkpoint="none", ragged=True),
        RingCase(case, "ulysses", "contiguous", checkpoint="full", ragged=True),
    ]
    assert ranks(world).run(_sinks, rings) == [5] * world


def _sinks(rings: list[RingCase]) -> int:
    for ring in rings:
        case, total = ring.case, ring.case.length
        module, inputs, dout = ring.module(), ring.case.inputs(), ring.case.dout()
        sinks = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
        leaves = [module.shard(x.detach()).clone().requires_grad_() for x in inputs]
        out, lse = module(*leaves, return_lse=True, total_length=total, sinks=sinks)
        *grads, of_sinks = torch.autograd.grad(out, (*leaves, sinks), module.shard(dout).contiguous())
        dist.all_reduce(of_sinks)
        alone = case.module()(*inputs, return_lse=True, sinks=sinks)
        expected = torch.autograd.grad(alone[0], (*inputs, sinks), dout)
        torch.testing.assert_close(of_sinks, expected[3], rtol=0, atol=1e-10)
        torch.testing.assert_close(lse.detach(), module.shard(alone[1].detach(), dim=2), rtol=0, atol=1e-10)
        for x, whole in zip((out.detach(), *grads), (alone[0].detach(), *expected[:3]), strict=True):
            torch.testing.assert_close(x, module.shard(whole), rtol=0, atol=1e-10)
    return len(rings)
