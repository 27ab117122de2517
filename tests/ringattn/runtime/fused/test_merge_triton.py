"""The fused steps between kernels: their layout of slots, their numbers under Triton's interpreter and on a GPU."""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_cases import LARGE, SMALL, FusedCase, FusedCheck, interpreted
from hypothesis import given
from hypothesis import strategies as st
from oracle import Case, cases
from torch import Tensor

from ringattn.errors import PlanError
from ringattn.geometry.calls import LayoutKey, PlacedCall, Window, build_geometry
from ringattn.geometry.pattern import head_offset_of
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.plan import Plan, build_plan
from ringattn.runtime.fused.fused_layout import (
    BATCH_BITS,
    FAR_BITS,
    HEAD_BITS,
    HEAD_STRIDE_BITS,
    ROW_STRIDE_BITS,
    SEGMENT_BITS,
    Slot,
    Strides,
    slot_layouts,
    word,
)
from ringattn.runtime.merge import GradJob, GradPartial, Partial, TorchOps
from ringattn.runtime.program import Program
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the triton package")


# --- layout ------------------------------------------------------------------------------------------------------


def fields(packed: int, *bits: int) -> list[int]:
    """What ``word`` packed."""
    packed >>= 1
    values = []
    for width in bits:
        values.append(packed & ((1 << width) - 1))
        packed >>= width
    return values


def heads_of(slot: Slot) -> list[int]:
    return fields(slot.heads, HEAD_BITS, HEAD_BITS, HEAD_BITS, BATCH_BITS)


@given(st.lists(st.integers(0, 2**12 - 1), min_size=1, max_size=5))
def test_words_are_told_apart_by_value_alone(values: list[int]) -> None:
    """Triton compiles another kernel for the value 1, for multiples of 16 and for integers of other widths."""
    packed = word(*((value, 12) for value in values))
    assert fields(packed, *[12] * len(values)) == values
    assert packed % 2 == 1
    assert 2**31 < packed < 2**63


def test_a_value_that_does_not_fit_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="4096 does not fit in 12 bits"):
        word((4096, HEAD_BITS))


def test_strides_of_single_elements_count_for_nothing() -> None:
    assert Strides.of(torch.empty_strided((1, 5, 1, 8), (7, 16, 3, 1))) == (0, 16, 0)
    far, near = Strides(2**59, 2**25, 2**33).words()
    assert fields(far, FAR_BITS) == [2**59]
    assert fields(near, ROW_STRIDE_BITS, HEAD_STRIDE_BITS) == [2**25, 2**33]


def key_of(case: Case, gather: str, window: int | None = None, folds: bool = True) -> LayoutKey:
    gathers = tuple(gather if b.rate > 1 else "view" for b in case.pattern.resolved(case.length))
    return LayoutKey(case.pattern, gathers, window, case.batch, case.length, case.heads, case.kv_heads, folds)


@given(cases(), st.sampled_from(["view", "copy"]), st.booleans())
def test_every_selected_position_has_one_slot_and_the_row_is_its_own(case: Case, gather: str, folds: bool) -> None:
    key = key_of(case, gather, folds=folds)
    geometry = build_geometry(key)
    (window,) = geometry.windows
    layouts = slot_layouts(key, window)
    assert [layout.batch_begin for layout in layouts[1:]] == [layout.batch_end for layout in layouts[:-1]]
    for layout in layouts:
        for number, branch in enumerate(layout.branches):
            slots = layout.slots[branch.slot_begin : branch.slot_end]
            for kv_head in range(case.kv_heads):
                rule = case.pattern.head_offset
                offset = head_offset_of(kv_head, case.kv_heads, branch.rate, rule)
                assert offset == (kv_head // branch.heads_per_offset if rule == "blocked" else kv_head % branch.rate)
                for position in range(offset, case.length):
                    segment, within = divmod(position, branch.segment)
                    row, rest = divmod(within - offset, branch.rate)
                    if rest or row < 0:
                        continue
                    held = [slot for slot in slots if holds(slot, kv_head, segment, branch.step)]
                    assert len(held) == 1, (number, kv_head, position)
                    check_row(window, held[0], (kv_head, offset, position, segment, row), branch.step)


def holds(slot: Slot, kv_head: int, segment: int, step: int) -> bool:
    first, count, _, _ = heads_of(slot)
    first_segment, segments = fields(slot.segments, SEGMENT_BITS, SEGMENT_BITS)
    j, rest = divmod(kv_head - first, step)
    return rest == 0 and 0 <= j < count and 0 <= segment - first_segment < segments


def check_row(window: Window, slot: Slot, selected: tuple[int, ...], step: int) -> None:
    """The (head, segment, row) that a slot gives is the one that the call's runs have at this position."""
    kv_head, offset, position, segment, row = selected
    assert slot.call is not None
    call = window.calls[slot.call].call
    first, _, own, batch = heads_of(slot)
    first_segment, segments = fields(slot.segments, SEGMENT_BITS, SEGMENT_BITS)
    assert (batch, segments) == (call.batch_start, call.segments)
    begin = own + (kv_head - first) // step
    run = next(run for run in call.runs if 0 <= begin - before(call.runs, run) < run.count)
    j = begin - before(call.runs, run)
    assert run.first + j * run.step == kv_head
    assert run.offset + j * run.offset_step == offset
    assert row < call.rows
    assert call.start + (segment - first_segment) * call.length + offset + row * call.rate == position


def before(runs: tuple[Any, ...], run: Any) -> int:
    return sum(other.count for other in runs[: runs.index(run)])


@pytest.mark.parametrize("gather", ["view", "copy"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (6, 6)])
def test_all_lengths_of_a_pattern_share_two_layouts(gather: str, heads: int, kv_heads: int) -> None:
    """Without and with tails: what is a constant of a kernel must not depend on the length."""
    pattern = Pattern.of([32, 64, 128], [1, 2, 4])
    constants = set()
    for length in [*range(1, 160), 128 * 7, 128 * 9 + 61]:
        gathers = ("view", gather, gather)
        key = LayoutKey(pattern, gathers, None, 1, length, heads, kv_heads, True)
        (window,) = build_geometry(key).windows
        (layout,) = slot_layouts(key, window)
        constants.add((layout.branches, len(layout.slots)))
    assert len(constants) == 2


# --- numbers -----------------------------------------------------------------------------------------------------


@functools.cache
def interpreted_once() -> dict[str, str]:
    return interpreted()


@needs_triton
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_interpreter_agrees_with_plain_torch(case: FusedCase) -> None:
    assert interpreted_once()[case.name] == ""


def fused(case: FusedCase) -> Any:
    from ringattn.runtime.fused.merge_triton import TritonOps

    block = case.block or None
    return TritonOps(merge_block=block, sum_block=block, gather_block=block)


@needs_triton
@pytest.mark.parametrize("step", ["gather", "merge", "sum"])
def test_what_a_gpu_would_run(step: str) -> None:
    """Compiled for an H100 without one: rows move 16 bytes at a time and nothing goes through shared memory."""
    case = FusedCase("compiled", ((2048, 1, "view"), (4096, 2, "view"), (8192, 8, "copy")), 8192, 1, 8, 8, 128, block=0)
    ops = fused(case)
    launches: list[tuple[Any, ...]] = []
    ops._launch = lambda kernel, launch, device, align, args: launches.append((kernel, launch, args))
    check = FusedCheck(case, ops, "cpu", torch.bfloat16)
    q = check.random(1, 8192, 8, 128)
    lse = torch.zeros(1, 8, 8192)
    (window,) = check.geometry.windows
    if step == "gather":
        ops.gather_backward(check.geometry, window.calls[-1], [q] * 5, lse, check.lease)
    elif step == "merge":
        partials = [check.partial(placed) for placed in window.calls]
        ops.merge(check.geometry, window, partials, q, lse, check.lease)
    else:
        jobs = [GradJob([check.grad(window, placed, q, 1) for placed in window.calls], q)] * 3
        ops.scatter_sum(check.geometry, window, jobs, check.lease)
    ((kernel, launch, args),) = launches
    compiled = compiled_for_sm_90(kernel, (*args, *launch.scalars, *launch.constants.values()))
    accesses = set(re.findall(r"\b(?:ld|st)\.(?:global|shared|local)\S*", compiled.asm["ptx"]))
    rows = {"ld.global.v4.b32", "st.global.v4.b32"}
    lses = {"ld.global.b32", "st.global.b32"} if step != "sum" else set()
    assert accesses == rows | lses
    assert compiled.metadata.shared == 0


def compiled_for_sm_90(kernel: Any, values: tuple[Any, ...]) -> Any:
    """Rows at multiples of 16 bytes are told so; nothing else is said about an argument but its type."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def type_of(value: Any) -> Any:
        return tuple(map(type_of, value)) if isinstance(value, tuple) else "i32" if value < 2**31 else "i64"

    constant = {parameter.name: parameter.is_constexpr for parameter in kernel.params}
    given = dict(zip(kernel.arg_names, values, strict=True))
    signature = {name: "constexpr" if constant[name] else type_of(value) for name, value in given.items()}
    constants = {(number,): given[name] for number, name in enumerate(given) if constant[name]}
    source = ASTSource(kernel, signature, constants, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True})


# --- choice ------------------------------------------------------------------------------------------------------

HOPPER = HardwareFacts("nvidia", "NVIDIA H100", "h100-sxm", "sm_90", 132, 81559, 50, packages=("triton",))
NESTED = Pattern.of([1024, 2048], [1, 2])


def plan_for(
    facts: HardwareFacts, dtype: str = "bf16", pattern: Pattern = NESTED, mode: Any = "train", **params: Any
) -> Plan:
    workload = Workload(mode, True, 8192, 8, 64, dtype, pattern=pattern)
    branch = BranchTunables("math", "math" if mode == "train" else "")
    named = tuple(sorted((name.replace("_", "."), value) for name, value in params.items()))
    tunables = Tunables(dtype, (branch,) * len(pattern.resolved(8192)), params=named)
    return build_plan(workload, tunables, facts)


@needs_triton
def test_a_gpu_with_triton_runs_the_fused_steps_with_the_blocks_of_the_plan() -> None:
    from ringattn.runtime.fused.merge_triton import TritonOps

    ops = Program(plan_for(HOPPER, merge_block=64, gather_block=32), 0.125)._ops
    assert isinstance(ops, TritonOps)
    assert ops._blocks == {"merge": 64, "sum": None, "gather": 32}


@pytest.mark.parametrize(
    ("facts", "dtype"),
    [
        (HOPPER, "fp64"),
        (replace(HOPPER, packages=()), "bf16"),
        (replace(HOPPER, arch="sm_61"), "fp32"),
        (HardwareFacts("cpu", "x", "epyc-9004", "x86_64", 2, 1000, 10, packages=("triton",)), "fp32"),
    ],
    ids=["float64", "no triton", "sm_61", "cpu"],
)
def test_everything_else_runs_torch_operations(facts: HardwareFacts, dtype: str) -> None:
    plan = plan_for(facts, dtype)
    assert not plan.fused
    assert isinstance(Program(plan, 0.125)._ops, TorchOps)
    with pytest.raises(PlanError, match=r"merge\.block: the steps between kernels are not fused here"):
        plan_for(facts, dtype, merge_block=32)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"merge_block": 48}, "merge.block=48: use one of 16, 32, 64, 128"),
        ({"merge_block": True}, "merge.block=True: use one of"),
        ({"merge_warps": 4}, "merge.warps: no step between kernels has it"),
        ({"sum_block": 32, "mode": "infer"}, "sum.block: only training sums gradients"),
        ({"gather_block": 32, "pattern": Pattern()}, "gather.block: a dense plan has no steps between kernels"),
    ],
)
def test_a_parameter_that_would_be_ignored_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        plan_for(HOPPER, **given)


@pytest.mark.parametrize(
    ("segments", "block", "blocks", "aligned"),
    [
        ((1024, 2048), 32, 4, True),
        ((192, 64), 32, 2, True),
        ((2000, 4000), 64, 4, False),
        ((1000, 500), 64, 4, False),
        ((1024, 2**20 + 1), 32, 4, True),  # at 2^20 positions the longer one has no edge
    ],
)
@needs_triton
def test_blocks_do_not_cross_segments_if_it_can_be_helped(
    segments: tuple[int, ...], block: int, blocks: int, aligned: bool
) -> None:
    from ringattn.runtime.fused.merge_triton import TritonOps

    key = LayoutKey(Pattern.of(segments, [1, 2]), ("view", "view"), None, 1, 2**20, 8, 8, True)
    geometry = build_geometry(key)
    tiling = TritonOps()._tiling("merge", geometry, geometry.windows[0], 128, 8)
    assert tiling == (block, blocks, -(-(2**20) // (block * blocks)), aligned)


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=lambda case: case.name)
def test_a_gpu_agrees_with_plain_torch(case: FusedCase, dtype: torch.dtype) -> None:
    check = FusedCheck(case, fused(case), "cuda", dtype)
    check.run()
    check.run()  # again, through the launches that were kept


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements() -> None:
    """Inputs, partial results and targets of 2^31 elements and more, whose last rows are the farthest."""
    length, heads, head_dim = 2**17 + 512, 128, 128
    assert length * heads * head_dim > 2**31
    case = FusedCase("far", ((length, 1, "view"), (2**16, 64, "copy")), length, 1, heads, heads, head_dim, block=0)
    ops = fused(case)
    check = FusedCheck(case, ops, "cuda", torch.bfloat16)
    (window,) = check.geometry.windows
    dense, *dilated = window.calls
    # Small integers: exact in bfloat16, so are their sums.
    q = torch.arange(length, device="cuda").remainder_(64).to(torch.bfloat16)[None, :, None, None]
    q = q.expand(1, length, heads, head_dim).contiguous()
    for placed in dilated:
        (rows,) = ops.gather(check.geometry, placed, [q], check.lease)
        for j in (0, heads - 1):
            first = placed.call.start + j % 64
            at = torch.arange(placed.call.segments, device="cuda")[:, None] * placed.call.length + first
            at = at + 64 * torch.arange(placed.call.rows, device="cuda")
            assert torch.equal(rows[:, :, j, 0], at.remainder(64).to(torch.bfloat16))
            assert torch.equal(rows[:, :, j, -1], rows[:, :, j, 0])
        del rows

    def part(placed: PlacedCall, value: float) -> Tensor:
        call = placed.call
        return torch.full((call.segments, call.rows, heads, head_dim), value, dtype=torch.bfloat16, device="cuda")

    total = torch.full_like(q, torch.nan)
    jobs = [GradJob([GradPartial(dense, q), *(GradPartial(p, part(p, 3.0)) for p in dilated)], total)]
    ops.scatter_sum(check.geometry, window, jobs, check.lease)
    seen = torch.arange(length, device="cuda")[:, None] % 2**16 % 64 == torch.arange(heads, device="cuda") % 64
    for column in (0, -1):
        assert torch.equal(total[0, :, :, column], q[0, :, :, column] + 3 * seen)
    # Equal LSEs make the merged rows the mean of the partial ones.
    del jobs
    partials = [Partial(p, q if p is dense else part(p, 3.0), lse_of(p, heads)) for p in window.calls]
    lse = torch.full((1, heads, length), torch.nan, device="cuda")
    ops.merge(check.geometry, window, partials, total, lse, check.lease)
    for column in (0, -1):
        mean = torch.where(seen, (q[0, :, :, column].float() + 3) / 2, q[0, :, :, column].float())
        torch.testing.assert_close(total[0, :, :, column].float(), mean, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(lse[0].T, torch.where(seen, 1 + math.log(2), 1.0), rtol=1e-6, atol=1e-6)


def lse_of(placed: PlacedCall, heads: int) -> Tensor:
    return torch.ones(placed.call.segments, heads, placed.call.rows, device="cuda")


@pytest.mark.gpu
def test_a_graph_replays_every_step() -> None:
    case = FusedCase("graph", ((512, 1, "view"), (1024, 2, "copy")), 3000, 1, 8, 4, 64, block=0)
    ops = fused(case)
    check = FusedCheck(case, ops, "cuda", torch.bfloat16)
    (window,) = check.geometry.windows
    copied = next(placed for placed in window.calls if placed.call.copied)
    q, lse_in = check.random(1, 3000, 8, 64), torch.randn(1, 8, 3000, device="cuda")
    partials = [check.partial(placed) for placed in window.calls]
    out, lse, grad = torch.empty_like(q), torch.empty_like(lse_in), torch.empty_like(q)
    job = GradJob([GradPartial(placed, x) for placed, x, _ in partials], grad)

    def steps() -> list[Tensor]:
        rows, lse_rows = ops.gather_backward(check.geometry, copied, [q], lse_in, check.lease)
        ops.merge(check.geometry, window, partials, out, lse, check.lease)
        ops.scatter_sum(check.geometry, window, [job], check.lease)
        return [*rows, lse_rows, out, lse, grad]

    steps()  # compiles, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = steps()
    for x in (q, lse_in, *(partial.out for partial in partials)):
        x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [x.clone() for x in captured]
    for x, expected in zip(replayed, steps(), strict=True):
        assert torch.equal(x, expected)


@pytest.mark.gpu
def test_lengths_do_not_compile_again() -> None:
    from ringattn.runtime.fused import fused_kernels

    def compiled() -> int:
        kernels = (fused_kernels.gather_rows, fused_kernels.merge_partials, fused_kernels.sum_partials)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def run(length: int) -> None:
        case = FusedCase("any", ((256, 1, "view"), (512, 2, "view"), (1024, 4, "copy")), length, 1, 8, 8, 64, block=0)
        FusedCheck(case, fused(case), "cuda", torch.bfloat16).run()

    for length in (1024, 1543):  # without and with tails
        run(length)
    before = compiled()
    for length in (2048, 1025, 1311, 2999, 4097, 3072):
        run(length)
    assert compiled() == before


@pytest.mark.gpu
def test_the_device_of_the_tensors_is_used() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    case = FusedCase("second device", ((512, 1, "view"), (1024, 2, "copy")), 3000, 1, 4, 4, 64, block=0)
    with torch.cuda.device(0):
        FusedCheck(case, fused(case), "cuda:1", torch.bfloat16).run()
