"""The steps between kernels in plain torch: gathers, exact merges, sums, each against positions one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Case, cases, laid_out, pattern_of, patterns
from torch import Tensor

from ringattn.distributed.chunk_rows import merge_block
from ringattn.geometry.calls import Geometry, LayoutKey, PlacedCall, Window, build_geometry
from ringattn.geometry.pattern import HeadRun
from ringattn.runtime.merge import GradJob, GradPartial, Partial, TorchOps
from ringattn.runtime.workspace import Lease

OPS = TorchOps()


def lease() -> Lease:
    return Lease(torch.device("cpu"), None, "shape")


def key_of(case: Case, gather: str = "view", window: int | None = None) -> LayoutKey:
    gathers = tuple(gather if b.rate > 1 else "view" for b in case.pattern.resolved(case.length))
    sizes = (case.batch, case.length, case.heads, case.kv_heads)
    return LayoutKey(case.pattern, gathers, window, *sizes, batch_folds=True)


def positions(placed: PlacedCall, run: HeadRun, j: int, segment: int) -> list[int]:
    """Where the rows of one head of a run lie in one segment of a call."""
    call = placed.call
    first = call.start + segment * call.length + run.offset + j * run.offset_step
    return [first + i * call.rate for i in range(call.rows)]


def rows_one_by_one(placed: PlacedCall, x_BSHD: Tensor, group: int) -> Tensor:
    """(N, M, heads, D): the rows of a call side by side, read from x in the obvious way."""
    call = placed.call
    rows = x_BSHD.new_empty(call.batch * call.segments, call.rows, call.kv_heads * group, x_BSHD.shape[-1])
    for b in range(call.batch):
        for segment in range(call.segments):
            beside = 0
            for run in call.runs:
                for j in range(run.count):
                    where = positions(placed, run, j, segment)
                    heads = slice((run.first + j * run.step) * group, (run.first + j * run.step + 1) * group)
                    into = rows[b * call.segments + segment, :, beside : beside + group]
                    into.copy_(x_BSHD[call.batch_start + b, where, heads])
                    beside += group
    return rows


def add_one_by_one(placed: PlacedCall, rows_NMHD: Tensor, x_BSHD: Tensor, group: int) -> None:
    call = placed.call
    for b in range(call.batch):
        for segment in range(call.segments):
            beside = 0
            for run in call.runs:
                for j in range(run.count):
                    where = positions(placed, run, j, segment)
                    heads = slice((run.first + j * run.step) * group, (run.first + j * run.step + 1) * group)
                    part = rows_NMHD[b * call.segments + segment, :, beside : beside + group]
                    x_BSHD[call.batch_start + b, where, heads] += part
                    beside += group


def invented(geometry: Geometry, case: Case, dtype: torch.dtype = torch.float64, size: float = 1.0) -> Any:
    """Partial results of every call, window by window, as no kernel would give them."""
    generator = torch.Generator().manual_seed(case.seed)
    group = case.heads // case.kv_heads
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    partials = []
    for window in geometry.windows:
        of_window = []
        for placed in window.calls:
            call = placed.call
            n, heads = call.batch * call.segments, call.kv_heads * group
            out = torch.randn(n, call.rows, heads, case.head_dim, generator=generator, dtype=wide).to(dtype)
            lse = torch.randn(n, heads, call.rows, generator=generator, dtype=wide) * size
            of_window.append(Partial(placed, out, lse))
        partials.append((window, of_window))
    return partials


@given(cases(longest=24), st.sampled_from(("plain", "heads_first", "every_second", "wide_rows")))
def test_gathered_rows_lie_side_by_side(case: Case, layout: str) -> None:
    group = case.heads // case.kv_heads
    generator = torch.Generator().manual_seed(0)
    x, kv = (
        laid_out(torch.randn(case.batch, case.length, h, case.head_dim, generator=generator), layout)
        for h in (case.heads, case.kv_heads)
    )
    lse = torch.randn(case.batch, case.heads, case.length, generator=generator)
    geometry = build_geometry(key_of(case, "copy"))
    for placed in geometry.windows[0].calls:
        (rows, kv_rows), lse_rows = OPS.gather_backward(geometry, placed, (x, kv), lse, lease())
        assert torch.equal(rows, rows_one_by_one(placed, x, group))
        assert torch.equal(kv_rows, rows_one_by_one(placed, kv, 1))
        assert rows.is_contiguous()
        assert lse_rows.is_contiguous()
        expected = rows_one_by_one(placed, lse.transpose(1, 2)[..., None], group)[..., 0]
        assert torch.equal(lse_rows, expected.transpose(1, 2))


def merged_one_by_one(case: Case, partials: Any) -> tuple[Tensor, Tensor]:
    """The definition: L = log sum exp L_b and O = sum exp(L_b - L) O_b, over all partials of a position."""
    group = case.heads // case.kv_heads
    shape = (case.batch, case.length, case.heads)
    weights = torch.zeros(*shape, 1, dtype=torch.float64)
    weighted = torch.zeros(*shape, case.head_dim, dtype=torch.float64)
    for _, of_window in partials:
        for placed, out, lse in of_window:
            weight = lse.double().exp().transpose(1, 2)[..., None]
            add_one_by_one(placed, weight, weights, group)
            add_one_by_one(placed, out.double() * weight, weighted, group)
    return (weighted / weights).nan_to_num(0.0), weights[..., 0].log().transpose(1, 2)


@pytest.mark.parametrize("gather", ["view", "copy"])
@given(cases(longest=24))
def test_merging_is_the_definition(gather: str, case: Case) -> None:
    geometry = build_geometry(key_of(case, gather))
    out = torch.full((case.batch, case.length, case.heads, case.head_dim), torch.nan, dtype=torch.float64)
    lse = torch.full((case.batch, case.heads, case.length), torch.nan, dtype=torch.float64)
    partials = invented(geometry, case)
    for window, of_window in partials:
        OPS.merge(geometry, window, of_window, out, lse, lease())
    expected, expected_lse = merged_one_by_one(case, partials)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("gather", ["view", "copy"])
@given(cases(longest=24))
def test_sums_of_partial_gradients(gather: str, case: Case) -> None:
    geometry = build_geometry(key_of(case, gather))
    group = case.heads // case.kv_heads
    grad, expected = (
        torch.full((case.batch, case.length, case.heads, case.head_dim), start, dtype=torch.float64)
        for start in (torch.nan, 0.0)
    )
    for window, of_window in invented(geometry, case):
        parts = [GradPartial(placed, out) for placed, out, _ in of_window]
        OPS.scatter_sum(geometry, window, [GradJob(parts, grad)], lease())
        for placed, part in parts:
            add_one_by_one(placed, part, expected, group)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


NESTED = pattern_of([4, 8], [1, 2])


def one_window(case: Case) -> tuple[Geometry, Window, list[Partial]]:
    geometry = build_geometry(key_of(case, window=8))
    window, partials = invented(geometry, case)[1]
    assert (window.begin, window.end) == (8, 16)
    return geometry, window, partials


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_only_the_window_is_written(dtype: torch.dtype) -> None:
    case = Case(21, 4, 2, 3, 2, NESTED)
    geometry, window, partials = one_window(case)
    partials = [Partial(placed, out.to(dtype), lse) for placed, out, lse in partials]
    out = torch.full((2, 21, 4, 3), 7.0, dtype=dtype)
    lse = torch.full((2, 4, 21), 7.0, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    OPS.merge(geometry, window, partials, out, lse, lease())
    grad = torch.full((2, 21, 4, 3), 7.0, dtype=dtype)
    parts = [GradPartial(placed, part) for placed, part, _ in partials]
    OPS.scatter_sum(geometry, window, [GradJob(parts, grad)], lease())
    for x in (out, grad, lse.transpose(1, 2)):
        assert (x[:, :8] == 7).all()
        assert (x[:, 16:] == 7).all()
        assert (x[:, 8:16] != 7).all()


@pytest.mark.parametrize("size", [0.0, 100.0, 1e4])
def test_lse_of_any_size_merge_without_overflow(size: float) -> None:
    case = Case(16, 2, 2, 4, pattern=NESTED)
    geometry = build_geometry(key_of(case))
    ((window, partials),) = invented(geometry, case, torch.float32, size)
    out = torch.empty(1, 16, 2, 4)
    lse = torch.empty(1, 2, 16)
    OPS.merge(geometry, window, partials, out, lse, lease())
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert out.abs().max() <= 1.01 * max(part.abs().max() for _, part, _ in partials)


def test_a_position_without_a_result_is_zero_and_minus_infinity() -> None:
    case = Case(8, 1, 1, 2, pattern=pattern_of([4], [4]))
    geometry = build_geometry(key_of(case))
    ((window, partials),) = invented(geometry, case)
    out = torch.full((1, 8, 1, 2), torch.nan, dtype=torch.float64)
    lse = torch.full((1, 1, 8), torch.nan, dtype=torch.float64)
    OPS.merge(geometry, window, partials, out, lse, lease())
    assert lse[0, 0].isneginf().tolist() == [False, True, True, True] * 2
    assert (out[0, lse[0, 0].isneginf()] == 0).all()


def test_many_bfloat16_parts_are_added_in_float32() -> None:
    """256 and then 62 ones: a bfloat16 sum would stay at 256."""
    count = 62
    case = Case(4, 1, 1, 1, pattern=pattern_of([4] * (count + 1), [1] * (count + 1)))
    geometry = build_geometry(key_of(case))
    (window,) = geometry.windows
    values = [256.0] + [1.0] * count
    parts = [
        GradPartial(placed, torch.full((1, 4, 1, 1), value, dtype=torch.bfloat16))
        for placed, value in zip(window.calls, values, strict=True)
    ]
    grad = torch.empty(1, 4, 1, 1, dtype=torch.bfloat16)
    OPS.scatter_sum(geometry, window, [GradJob(parts, grad)], lease())
    assert (grad == 318).all()
    out = torch.empty_like(grad)
    lse = torch.empty(1, 1, 4)
    # equal weights of 1/63: the mean of the values, far below one bfloat16 step of each summand otherwise
    partials = [Partial(placed, part, torch.zeros(1, 1, 4)) for placed, part in parts]
    OPS.merge(geometry, window, partials, out, lse, lease())
    torch.testing.assert_close(out.float(), torch.full((1, 4, 1, 1), 318 / 63), rtol=2**-8, atol=0)
    torch.testing.assert_close(lse, torch.full((1, 1, 4), 63.0).log())


@given(patterns(dense=False, longest=16), st.randoms(use_true_random=False))
def test_the_order_of_branches_does_not_matter(pattern: Any, random: Any) -> None:
    case = Case(17, 4, 2, 4, pattern=pattern, causal=True)
    branches = list(pattern.branches)
    random.shuffle(branches)
    q, k, v = (x.detach() for x in case.inputs())
    out, lse = case.module()(q, k, v, return_lse=True)
    other = Case(17, 4, 2, 4, pattern=type(pattern)(tuple(branches), pattern.head_offset), causal=True)
    shuffled, shuffled_lse = other.module()(q, k, v, return_lse=True)
    torch.testing.assert_close(out, shuffled, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, shuffled_lse, rtol=0, atol=1e-12)


# --- weights that sum to one -------------------------------------------------------------------------------------

LARGE_LSE = [0.0, 4e3, 4e5, -4e5, 1e30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("size", LARGE_LSE)
def test_equal_values_stay_what_they_are_whatever_the_lse(size: float, window: int | None, dtype: torch.dtype) -> None:
    case = Case(32, 2, 2, 4, pattern=pattern_of([4, 8, 8], [1, 1, 2]))
    geometry = build_geometry(key_of(case, window=window))
    out = torch.full((1, 32, 2, 4), torch.nan, dtype=dtype)
    lse = torch.full((1, 2, 32), torch.nan)
    for each, partials in invented(geometry, case, torch.float32):
        equal = [Partial(placed, torch.full_like(x, 0.7).to(dtype), part + size) for placed, x, part in partials]
        OPS.merge(geometry, each, equal, out, lse, lease())
    unit = 2.0**-8 if dtype is torch.bfloat16 else 4e-7
    torch.testing.assert_close(out, torch.full_like(out, 0.7), rtol=unit, atol=0)
    assert lse.isfinite().all()


@pytest.mark.parametrize("size", LARGE_LSE)
def test_equal_values_stay_what_they_are_through_many_steps_of_a_ring(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    total, total_lse = torch.zeros(1, 9, 2, 4), torch.full((1, 9, 2), -torch.inf)
    for _ in range(32):
        merge_block(total, total_lse, torch.full((1, 9, 2, 4), 0.7), torch.randn(1, 9, 2, generator=generator) + size)
    torch.testing.assert_close(total, torch.full_like(total, 0.7), rtol=32 * 2e-7, atol=0)


def test_a_block_that_has_nothing_changes_nothing_and_nothing_is_merged_with_nothing() -> None:
    """Row by row: only the total has something, only the block, both, neither."""
    nothing = -torch.inf
    total = torch.tensor([2.0, 0.0, 2.0, 0.0]).view(1, 4, 1, 1)
    total_lse = torch.tensor([5.0, nothing, 5.0, nothing]).view(1, 4, 1)
    part = torch.tensor([0.0, 4.0, 4.0, 0.0]).view(1, 4, 1, 1)
    part_lse = torch.tensor([nothing, 3e4, 5.0, nothing]).view(1, 4, 1)
    merge_block(total, total_lse, part, part_lse)
    assert total.flatten().tolist() == [2.0, 4.0, 3.0, 0.0]
    torch.testing.assert_close(total_lse.flatten(), torch.tensor([5.0, 3e4, 5.0 + math.log(2), nothing]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_stays_so(bad: float) -> None:
    total, total_lse = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    merge_block(total, total_lse, torch.full((1, 1, 1, 2), torch.nan), torch.full((1, 1, 1), bad))
    assert total.isnan().all()
    assert not total_lse.isfinite().any()
    case = Case(4, 1, 1, 2, pattern=pattern_of([4, 4], [1, 1]))
    geometry = build_geometry(key_of(case))
    ((window, partials),) = invented(geometry, case, torch.float32)
    placed, part, lse = partials[1]
    partials[1] = Partial(placed, torch.full_like(part, torch.nan), torch.full_like(lse, bad))
    out, lse = torch.zeros(1, 4, 1, 2), torch.zeros(1, 1, 4)
    OPS.merge(geometry, window, partials, out, lse, lease())
    assert out.isnan().all()
    assert not lse.isfinite().any()


def test_a_part_that_has_nothing_somewhere_is_nothing_there() -> None:
    """Three of four branches say -inf of some rows, with out 0; one row is -inf in all."""
    case = Case(8, 2, 1, 3, 2, pattern_of([8, 4, 8, 2], [1, 1, 1, 1]))
    geometry = build_geometry(key_of(case))
    ((window, partials),) = invented(geometry, case)
    generator = torch.Generator().manual_seed(1)
    thinned = []
    for placed, out, lse in partials:
        empty = torch.rand(lse.shape, generator=generator) < 0.4
        lse = lse.masked_fill(empty, -torch.inf)
        lse[0, 0, 0] = -torch.inf
        thinned.append(Partial(placed, out.masked_fill(lse.isneginf().transpose(1, 2)[..., None], 0.0), lse))
    out = torch.full((2, 8, 2, 3), torch.nan, dtype=torch.float64)
    lse = torch.full((2, 2, 8), torch.nan, dtype=torch.float64)
    OPS.merge(geometry, window, thinned, out, lse, lease())
    expected, expected_lse = merged_one_by_one(case, [(window, thinned)])
    assert lse.isneginf().any()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", ["flash-cpu", "math"])
@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
def test_a_module_gives_equal_values_back(size: float, kernel: str) -> None:
    """Logits up to 7e5: each branch's softmax, and the one over all."""
    case = Case(64, 4, 2, 16, 1, pattern_of([16, 32, 64], [1, 2, 4]), causal=True)
    q, k, v = (x.detach() for x in case.inputs(torch.float32, size))
    out = case.module(backend=kernel)(q, k, torch.full_like(v, 0.7))
    torch.testing.assert_close(out, torch.full_like(out, 0.7), rtol=2e-6, atol=0)
