"""Layouts and chunks as numbers: who holds what, what must travel, and that ranks agree without asking."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import pattern_of, patterns

from ringattn import Pattern, RingAttention
from ringattn.errors import InputError
from ringattn.geometry.layout import (
    assemble,
    grouped,
    length_of,
    no_shard_reason,
    positions,
    resolve_layout,
    shard,
    shards_of,
)
from ringattn.geometry.pattern import head_offset_of
from ringattn.geometry.ring_geometry import HeadRange, RingGeometry, affine_runs, ring_geometry
from ringattn.geometry.ring_schedules import Chunk, Transfer, _carried, _travelling

LAYOUTS = st.sampled_from(("contiguous", "zigzag"))


@st.composite
def spreads(draw: st.DrawFn) -> tuple[str, int, int]:
    """(layout, total, world) that leaves no rank empty."""
    layout, world = draw(LAYOUTS), draw(st.integers(1, 6))
    total = draw(st.integers(2 * world, 90))
    if layout == "contiguous" and -(-total // world) * (world - 1) >= total:
        total = world * -(-total // world)
    return layout, total, world


@given(spreads())
def test_every_position_is_held_once(spread: tuple[str, int, int]) -> None:
    layout, total, world = spread
    parts = shards_of(layout, total, world)
    held = torch.cat([positions(part) for part in parts])
    assert sorted(held.tolist()) == list(range(total))
    if total % world == 0:
        assert {length_of(part) for part in parts} == {total // world}


@given(spreads(), st.integers(0, 2))
def test_assemble_undoes_shard(spread: tuple[str, int, int], dim: int) -> None:
    layout, total, world = spread
    shape = [2, 3, 4]
    shape[dim] = total
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = shards_of(layout, total, world)
    pieces = [shard(x, part, dim) for part in parts]
    assert torch.equal(assemble(pieces, parts, dim), x)
    assert all(
        torch.equal(piece, x.index_select(dim, positions(part))) for piece, part in zip(pieces, parts, strict=True)
    )


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_that_is_none_is_named(dim: int) -> None:
    module = RingAttention(2, 4)
    for call in (module.shard, module.unshard):
        with pytest.raises(InputError, match=rf"^dim is {dim}; the tensor has 2 dimensions, \(4, 10\)$"):
            call(torch.zeros(4, 10), dim=dim)


@pytest.mark.parametrize("rows", ["x", torch.zeros(4, 4).to_sparse()], ids=["text", "sparse"])
def test_what_is_no_dense_tensor_is_not_sharded(rows: Any) -> None:
    module = RingAttention(2, 4)
    for call in (module.shard, module.unshard):
        with pytest.raises(InputError, match=r"^x is .*; give a dense tensor$"):
            call(rows)


@pytest.mark.parametrize("total", [20.5, True, "8", 0])
def test_positions_are_of_a_whole_number(total: Any) -> None:
    with pytest.raises(InputError, match=r"^total_length is .*; it must be an integer >= 1 and <= 1099511627776$"):
        RingAttention(2, 4).positions(total)


@given(LAYOUTS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_neighbours_together_hold_a_shard_of_a_smaller_world(layout: str, ring: int, degree: int, unit: int) -> None:
    total = 2 * ring * degree * unit
    assert grouped(shards_of(layout, total, ring * degree), degree) == shards_of(layout, total, ring)


@pytest.mark.parametrize(
    ("layout", "total", "world", "remedy"),
    [
        ("contiguous", 5, 4, "use 4 or 7 positions, or fewer ranks"),
        ("contiguous", 9, 4, "use 8 or 10 positions, layout='zigzag', which holds 9, or fewer ranks"),
        ("contiguous", 3, 4, "use 4 positions, or fewer ranks"),
        ("contiguous", 1, 4, "use 4 positions, or fewer ranks"),
        ("zigzag", 7, 4, "use 8 positions, layout='contiguous', which holds 7, or fewer ranks"),
        ("zigzag", 5, 4, "use 8 positions, or fewer ranks"),
        ("zigzag", 1, 2, "use 4 positions, or fewer ranks"),
    ],
)
def test_a_rank_without_positions_is_refused(layout: str, total: int, world: int, remedy: str) -> None:
    with pytest.raises(InputError) as error:
        shards_of(layout, total, world)
    positions = "1 position" if total == 1 else f"{total} positions"
    start = f"total_length is {total}: {layout} layout over {world} ranks would leave a rank nothing of {positions}; "
    assert str(error.value) == start + remedy


def test_what_a_refusal_names_would_do() -> None:
    """Every length and layout that it names holds, and no length between those is left out."""
    refused = 0
    for layout, world, total in product(("contiguous", "zigzag"), range(2, 9), range(1, 80)):
        reason = no_shard_reason(layout, total, world)
        if not reason:
            assert all(length_of(shard) > 0 for shard in shards_of(layout, total, world))
            continue
        refused += 1
        lengths = [int(n) for n in re.findall(r"\d+", reason.partition("; use ")[2].partition(" position")[0])]
        other = {"contiguous": "zigzag", "zigzag": "contiguous"}[layout]
        assert (f"layout='{other}', which holds {total}" in reason) == (no_shard_reason(other, total, world) == "")
        assert total < lengths[-1]
        assert all(no_shard_reason(layout, n, world) == "" for n in lengths)
        nearer = range(lengths[0] + 1 if len(lengths) == 2 else 1, lengths[-1])
        assert total in nearer
        assert all(no_shard_reason(layout, n, world) for n in nearer)
    assert refused > 50


def test_auto_layout() -> None:
    dilated = pattern_of([8], [2])
    assert resolve_layout("auto", Pattern(), True) == "zigzag"
    assert resolve_layout("auto", Pattern(), True, exchanged=True) == "contiguous"
    assert resolve_layout("zigzag", Pattern(), True, exchanged=True) == "zigzag"
    assert resolve_layout("auto", Pattern(), True, ["zigzag"], exchanged=True) == "zigzag"
    assert resolve_layout("auto", Pattern(), False) == "contiguous"
    assert resolve_layout("auto", dilated, True) == "contiguous"
    with pytest.raises(InputError, match="striped"):
        resolve_layout("striped", dilated, True)


def test_auto_is_what_the_profile_was_measured_for() -> None:
    assert resolve_layout("auto", Pattern(), True, ["contiguous"]) == "contiguous"
    assert resolve_layout("auto", Pattern(), True, ["zigzag", "contiguous", "contiguous"]) == "contiguous"
    assert resolve_layout("auto", Pattern(), False, ["zigzag", "contiguous"]) == "contiguous"  # not by their order
    assert resolve_layout("auto", Pattern(), False, ["contiguous", "zigzag"]) == "contiguous"
    assert resolve_layout("auto", Pattern(), True, [""]) == "zigzag"
    assert resolve_layout("zigzag", Pattern(), True, ["contiguous"]) == "zigzag"


# --- chunks and hops ----------------------------------------------------------------------------------------------


def _geometries(
    pattern: Pattern, causal: bool, spread: tuple[str, int, int], heads: HeadRange, transport: str, groups: int
) -> list[RingGeometry]:
    layout, total, world = spread
    parts = shards_of(layout, total, world)
    return [ring_geometry(pattern, causal, parts, me, 1, heads, transport, groups) for me in range(world)]


settings_of_chunks = given(
    patterns(), st.booleans(), spreads(), st.integers(1, 5), st.sampled_from(("ring", "all-gather")), st.integers(1, 3)
)


@settings_of_chunks
def test_what_one_rank_sends_another_receives_in_the_same_order(
    pattern: Pattern, causal: bool, spread: tuple[str, int, int], heads: int, transport: str, groups: int
) -> None:
    geometries = _geometries(pattern, causal, spread, HeadRange(0, heads, heads), transport, groups)
    for step in range(1, max(geometry.steps for geometry in geometries) + 1):
        for kind in (("sends", "receives"), ("gives", "takes")):
            sent = _by_pair(geometries, step, kind[0])
            taken = {(b, a): rows for (a, b), rows in _by_pair(geometries, step, kind[1]).items()}
            assert sent == taken, (step, kind)
            assert all(rows for messages in sent.values() for _, _, rows, _ in messages), "a message of nothing"


def _by_pair(geometries: list[RingGeometry], step: int, kind: str) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """(rank, peer) -> the messages between them in order: owner's rank, first row, rows, heads."""
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for rank, geometry in enumerate(geometries):
        for chunk in geometry.chunks:
            for hop in chunk.hops:
                for transfer in getattr(hop, kind) if hop.step == step else ():
                    message = (chunk.members[transfer.owner], transfer.begin, transfer.rows, chunk.kv_heads)
                    found.setdefault((rank, chunk.members[transfer.peer]), []).append(message)
    return found


@settings_of_chunks
def test_blocks_show_every_query_exactly_its_keys(
    pattern: Pattern, causal: bool, spread: tuple[str, int, int], heads: int, transport: str, groups: int
) -> None:
    layout, total, world = spread
    for rule_first in (0, 1):
        window = HeadRange(rule_first, heads, heads + rule_first)
        geometries = _geometries(pattern, causal, spread, window, transport, groups)
        segments = [branch.segment for branch in pattern.resolved(total)]
        seen: dict[tuple[int, int, int, int], int] = {}
        for me, geometry in enumerate(geometries):
            for chunk in geometry.chunks:
                _note_blocks(seen, me, chunk, causal, geometries, segments)
        expected = _expected_blocks(pattern, causal, total, window, geometries[0].local)
        assert seen == expected


def _positions_of(chunk: Chunk, geometry: RingGeometry, segment: int) -> list[list[tuple[int, int]]]:
    """Per head of the chunk, in its order, the (head, global position) of each row."""
    held = positions(geometry.shard).tolist()
    rows: list[list[tuple[int, int]]] = [[] for _ in range(chunk.kv_heads)]
    for call in chunk.calls:
        number = 0
        for run in call.runs:
            for j in range(run.count):
                first = call.start + segment * call.length + run.offset + j * run.offset_step
                head = run.first + j * run.step
                rows[number] += [(head, held[first + i * call.rate]) for i in range(call.rows)]
                number += 1
    return rows


def _note_blocks(
    seen: dict[tuple[int, int, int, int], int],
    me: int,
    chunk: Chunk,
    causal: bool,
    geometries: list[RingGeometry],
    segments: list[int],
) -> None:
    def note(branch: int, queries: list[tuple[int, int]], keys: list[tuple[int, int]], diagonal: bool) -> None:
        for q, (head, query) in enumerate(queries):
            for k, (other, key) in enumerate(keys):
                assert head == other, "a message has its heads in another order than its reader"
                if not diagonal or not causal or k <= q:
                    seen[branch, head, query, key] = seen.get((branch, head, query, key), 0) + 1

    for segment in range(chunk.segments):
        for rows in _positions_of(chunk, geometries[me], segment):
            note(chunk.branch, rows, rows, True)
    for hop in chunk.hops:
        own = _positions_of(chunk, geometries[me], 0)
        for number in range(chunk.kv_heads):
            keys: list[tuple[int, int]] = []
            for transfer in hop.receives:
                there = _same_chunk(chunk, geometries, transfer, segments[chunk.branch])
                keys += there[number][transfer.begin : transfer.begin + transfer.rows]
            for q_begin, q_end, k_begin, k_end, edge in hop.work:
                assert not edge, "no window is asked for"
                note(chunk.branch, own[number][q_begin:q_end], keys[k_begin:k_end], False)


def _same_chunk(
    chunk: Chunk, geometries: list[RingGeometry], transfer: Transfer, segment: int
) -> list[list[tuple[int, int]]]:
    """The rows of the owner's chunk that is the other side of this one: the same heads of the same segment."""

    def about(one: Chunk, geometry: RingGeometry) -> tuple[int, int, set[int]]:
        rows = _positions_of(one, geometry, 0)
        return one.branch, rows[0][0][1] // segment, {row[0][0] for row in rows}

    geometry = geometries[chunk.members[transfer.owner]]
    mine = about(chunk, geometries[chunk.members[chunk.me]])
    (other,) = [other for other in geometry.chunks if other.segments == 1 and about(other, geometry) == mine]
    assert (other.members, other.spans) == (chunk.members, chunk.spans)
    return _positions_of(other, geometry, 0)


def _expected_blocks(
    pattern: Pattern, causal: bool, total: int, heads: HeadRange, local: tuple[int, ...]
) -> dict[tuple[int, int, int, int], int]:
    expected = {}
    for number, branch in enumerate(pattern.resolved(total)):
        if number in local:
            continue
        for head in range(heads.size):
            offset = head_offset_of(heads.first + head, heads.total, branch.rate, pattern.head_offset)
            for begin in range(0, total, branch.segment):
                end = min(begin + branch.segment, total)
                chosen = [p for p in range(begin, end) if (p - begin) % branch.rate == offset]
                for query in chosen:
                    for key in chosen:
                        if not causal or key <= query:
                            expected[number, head, query, key] = 1
    return expected


@given(st.integers(2, 8), st.integers(4, 64), st.sampled_from(("ring", "all-gather")))
def test_zigzag_balances_causal_work(world: int, half: int, transport: str) -> None:
    spread = ("zigzag", 2 * world * half, world)
    work = []
    for geometry in _geometries(Pattern(), True, spread, HeadRange(0, 1, 1), transport, 1):
        (chunk,) = geometry.chunks
        blocks = [(r.q_end - r.q_begin) * (r.k_end - r.k_begin) for hop in chunk.hops for r in hop.work]
        work.append(chunk.rows * (chunk.rows + 1) / 2 + sum(blocks))
    assert max(work) <= 1.05 * sum(work) / world
    total = spread[1]
    assert sum(work) == total * (total + 1) / 2  # nothing masked is computed


def test_no_buffer_of_the_ring_grows_with_the_world() -> None:
    for world in (2, 4, 8):
        for geometry in _geometries(Pattern(), True, ("zigzag", 64 * world, world), HeadRange(0, 1, 1), "ring", 1):
            (chunk,) = geometry.chunks
            assert max(hop.rows for hop in chunk.hops) <= 64
            assert [hop.step for hop in chunk.hops] == list(range(1, world))


@pytest.mark.parametrize(("groups", "made"), [(1, [4]), (2, [2, 2]), (3, [1, 1, 2]), (9, [1, 1, 1, 1])])
def test_head_groups_of_an_all_gather_travel_one_after_the_other(groups: int, made: list[int]) -> None:
    for geometry in _geometries(Pattern(), False, ("zigzag", 32, 2), HeadRange(0, 4, 4), "all-gather", groups):
        assert [chunk.kv_heads for chunk in geometry.chunks] == made
        assert [[hop.step for hop in chunk.hops] for chunk in geometry.chunks] == [[1 + n] for n in range(len(made))]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=12))
def test_runs_list_their_heads_in_order(heads: list[tuple[int, int]]) -> None:
    listed = [
        (run.first + j * run.step, run.offset + j * run.offset_step)
        for run in affine_runs(heads)
        for j in range(run.count)
    ]
    assert listed == heads


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize(("layout", "world"), [("zigzag", 5), ("contiguous", 4), ("contiguous", 1)])
def test_the_rows_of_a_whole_journey_are_those_of_its_hops(
    layout: str, world: int, direction: int, causal: bool
) -> None:
    geometry = ring_geometry(
        Pattern(()), causal, shards_of(layout, 12 * world + 1, world), 0, 1, HeadRange(0, 1, 1), "ring", 1
    )
    for chunk in geometry.chunks:
        steps = range(1, len(chunk.members))
        carried = [_carried(chunk, causal, 0, direction, owner, step) for owner in range(world) for step in steps]
        assert _travelling(chunk, causal, 0, direction) == sum(end - begin for begin, end in carried)
    assert geometry.chunks
