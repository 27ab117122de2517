"""Memory policies, head groups, wires, sub-groups and frozen inputs over several ranks; the independent oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import DENSE, Case, Results, assert_equal_to, exact, found, laid_out, pattern_of
from pool import Pool
from ring_cases import RingCase, check_exact, run_ring

import ringattn.distributed.ring_chunks
from ringattn import RingAttention, Workload
from ringattn.distributed.program import RingProgram, _InFlight
from ringattn.geometry.layout import shards_of
from ringattn.kernels.contract import BoundKernel, KernelConfig
from ringattn.kernels.registry import KERNELS
from ringattn.planning.plan import Conditions, Plan
from ringattn.runtime.packed.documents import Extent
from ringattn.workload import BranchTunables, Tunables

CAUSAL = Case(40, 8, 8, 4, causal=True)
CROSSING = Case(48, 8, 4, 4, pattern=pattern_of([6, 48], [1, 3]), causal=True)
WORLD_4 = [
    RingCase(CAUSAL, "ulysses", "zigzag", head_groups=2),
    RingCase(CAUSAL, "ulysses", "zigzag", head_groups=2, checkpoint="none"),
    RingCase(CAUSAL, "ulysses", "contiguous", checkpoint="none"),
    RingCase(CAUSAL, "ulysses", "zigzag", checkpoint="full"),
    RingCase(CAUSAL, "ulysses-ring", "zigzag", ulysses=2, head_groups=2),
    RingCase(CAUSAL, "ulysses-ring", "zigzag", ulysses=2, head_groups=4, checkpoint="none"),
    RingCase(CAUSAL, "ulysses-ring", "contiguous", ulysses=2, checkpoint="full"),
    RingCase(CAUSAL, "ring", "zigzag", checkpoint="full"),
    RingCase(CAUSAL, "all-gather", "zigzag", head_groups=3, checkpoint="full"),
    RingCase(CAUSAL, "all-gather", "zigzag", head_groups=8),
    RingCase(CROSSING, "ring", "contiguous", checkpoint="full"),
    RingCase(CROSSING, "ulysses", "contiguous", checkpoint="none"),
    RingCase(CROSSING, "ulysses-ring", "contiguous", ulysses=2, head_groups=2),
]


def test_memory_policies_and_head_groups(ranks: Callable[[int], Pool]) -> None:
    assert ranks(4).run(check_exact, WORLD_4) == [len(WORLD_4)] * 4


def test_kernels_are_told_all_that_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of what travels as those of what stays; tf32 has run as float32, as their tensors look alike."""
    told: list[KernelConfig] = []
    nothing = BoundKernel(lambda *rows: rows[:2], lambda *rows, grads=None: rows[:3])
    noting = replace(KERNELS["math"], load=lambda config: told.append(config) or nothing)
    monkeypatch.setitem(KERNELS, "math", noting)  # type: ignore[arg-type]
    branch, parts = BranchTunables("math", "math"), shards_of("contiguous", 96, 2)
    for pattern, causals in (
        (DENSE, (False, False, True, True)),  # full and diagonal blocks, forward and backward
        (pattern_of([12, 36], [1, 2]), (False, False, True, True) * 2 + (True, True)),
    ):
        told.clear()
        workload = Workload("train", True, 48, 4, 4, "fp32", pattern=pattern, world=2)
        branches = (branch,) * max(1, len(pattern.branches))
        tunables = Tunables("tf32", branches, schedule="ring", layout="contiguous", params=(("math.tile", 64),))
        plan = Plan(workload, tunables, False, Conditions(deterministic=True, layout="contiguous"))
        rank: Any = SimpleNamespace(rank=1, size=2)
        RingProgram(plan, 0.3, rank, parts, 1, rank)
        assert [config.causal for config in told] == list(causals)
        for config in told:
            assert (config.scale, config.deterministic, config.dtype) == (0.3, True, "tf32")
            assert config.params == {"tile": 64}


SCALED = [
    RingCase(Case(48, 4, 2, 4, pattern=pattern, causal=True, scale=0.3), schedule, spread)
    for schedule, spread, pattern in (
        ("ring", "zigzag", DENSE),
        ("ulysses", "contiguous", DENSE),
        ("local", "contiguous", pattern_of([12, 24], [1, 2])),
        ("ring", "contiguous", pattern_of([12, 24, 48], [1, 2, 2])),  # one program has what travels and what stays
        ("ring", "contiguous", pattern_of([12, 36], [1, 2])),
    )
]


def test_the_scale_of_the_module(ranks: Callable[[int], Pool]) -> None:
    assert ranks(2).run(check_exact, SCALED) == [len(SCALED)] * 2


def _program(schedule: str, dtype: str = "fp32", compute: str = "fp32", **chosen: Any) -> RingProgram:
    """Of rank 0 of two, which has nobody to talk to."""
    workload = Workload("train", True, 48, 4, 4, dtype, world=2)
    tunables = Tunables(compute, (BranchTunables("math", "math"),), schedule=schedule, layout="zigzag", **chosen)
    rank: Any = SimpleNamespace(rank=0, size=2)
    return RingProgram(Plan(workload, tunables, False), 0.5, rank, shards_of("zigzag", 96, 2), 1, rank)


def test_head_groups_are_those_of_the_plan() -> None:
    for groups in (0, 2):
        (ring,) = _program("all-gather", head_groups=groups)._rings
        assert len(ring._geometry.chunks) == max(1, groups)
        assert len(_program("ulysses", head_groups=groups)._rings) == max(1, groups)


@pytest.mark.parametrize(
    ("dtype", "compute", "grad_wire", "expected"),
    [
        ("bf16", "fp32", "", (torch.bfloat16, torch.bfloat16)),
        ("bf16", "fp32", "compute", (torch.bfloat16, torch.float32)),
        ("fp32", "bf16", "", (torch.bfloat16, torch.bfloat16)),
        ("fp32", "tf32", "", (torch.float32, torch.float32)),
    ],
)
def test_what_travels_is_no_wider_than_it_has_to_be(
    dtype: str, compute: str, grad_wire: str, expected: tuple[torch.dtype, torch.dtype]
) -> None:
    (ring,) = _program("ring", dtype, compute, grad_wire=grad_wire)._rings
    assert (ring._setting.wire, ring._setting.grad_wire) == expected


@pytest.mark.parametrize(("groups", "most"), [(1, 1), (2, 3)])
def test_few_results_are_on_their_way_home_at_once(groups: int, most: int) -> None:
    arrived: list[int] = []
    behind = _InFlight(groups, 1)
    for number in range(6):
        behind.make_room()
        behind.add(SimpleNamespace(wait=partial(arrived.append, number)))  # type: ignore[arg-type]
        assert number + 1 - len(arrived) <= most
    behind.wait()
    assert arrived == list(range(6))


def _most_kept(ring: RingCase) -> int:
    """How many steps' keys and values a chunk of this rank has at once."""
    most, move_keys = 0, ringattn.distributed.ring_chunks.RunningChunk.move_keys

    def counting(chunk: Any, *arguments: Any) -> None:
        nonlocal most
        move_keys(chunk, *arguments)
        most = max(most, len(chunk._brought) + (chunk._own is not None))

    ringattn.distributed.ring_chunks.RunningChunk.move_keys = counting  # type: ignore[method-assign]
    try:
        check_exact([ring])
    finally:
        ringattn.distributed.ring_chunks.RunningChunk.move_keys = move_keys  # type: ignore[method-assign]
    return most


def test_a_ring_keeps_the_keys_of_two_steps_at_most(ranks: Callable[[int], Pool]) -> None:
    """What a kernel reads, and what arrives meanwhile; not those of all ranks."""
    assert ranks(4).run(_most_kept, RingCase(CAUSAL, "ring", "zigzag")) == [2] * 4


def _lengths_with_equal_shards(schedule: str) -> None:
    """Rank 0 holds 5 positions of 10 and of 9."""
    rings = [RingCase(Case(n, 2, 2, 4, causal=True), schedule, "contiguous", ragged=True) for n in (10, 9, 10)]
    module = rings[0].module()
    assert module._ring is not None
    for ring in rings:
        case = ring.case
        q, k, v = case.inputs()
        here = module.positions(case.length).numel()
        assert module._ring.planned(1, here, Extent(case.length)) == (1, 5, 0), "ranks would look up plans of their own"
        assert_equal_to(run_ring(ring, module, q, k, v, case.dout()), exact(case, q, k, v, case.dout()))


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
def test_a_shard_may_belong_to_sequences_of_two_lengths(schedule: str, ranks: Callable[[int], Pool]) -> None:
    ranks(2).run(_lengths_with_equal_shards, schedule)


def _in_autocast() -> None:
    module = RingAttention(2, 4, causal=True, profile=None, device="cpu", process_group=dist.group.WORLD)
    case = Case(24, 2, 2, 4, causal=True)
    q, k, v = case.inputs(torch.float32)
    dout = module.shard(case.dout(torch.float32))
    leaves = [module.shard(x.detach()).clone().requires_grad_() for x in (q, k, v)]
    plain = module(*leaves)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = module(*leaves)
    narrowed = module(*(x.bfloat16() for x in leaves))
    assert (plain.dtype, narrow.dtype, narrowed.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert torch.equal(narrow, narrowed.float())
    assert not torch.equal(narrow, plain)
    assert torch.equal(module(*leaves), plain)
    grads = torch.autograd.grad(narrow, leaves, dout)
    expected = torch.autograd.grad(narrowed, leaves, dout.bfloat16())
    assert all(torch.equal(x, y) for x, y in zip(grads, expected, strict=True))


def test_autocast_narrows_what_is_computed(ranks: Callable[[int], Pool]) -> None:
    ranks(2).run(_in_autocast)


def _on_subgroups(ring: RingCase) -> None:
    """Ranks 0 and 2, and ranks 3 and 1, each with a sequence of their own, at the same time."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[dist.get_rank() % 2]
    case = Case(**{**ring.case.__dict__, "seed": dist.get_rank() % 2})
    q, k, v = case.inputs()
    results = run_ring(RingCase(case, ring.schedule, ring.spread), ring.module(group=own), q, k, v, case.dout())
    assert_equal_to(results, exact(case, q, k, v, case.dout()))
    dist.destroy_process_group(own)


def test_sub_groups_hold_sequences_of_their_own(ranks: Callable[[int], Pool]) -> None:
    for schedule in ("ring", "ulysses"):
        ranks(4).run(_on_subgroups, RingCase(CAUSAL, schedule, "zigzag"))


def _on_a_mesh_dimension() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    case = Case(24, 2, 2, 4, causal=True, seed=mesh.get_local_rank("data"))
    ring = RingCase(case, "ring", "zigzag")
    q, k, v = case.inputs()
    results = run_ring(ring, ring.module(group=mesh["sequence"]), q, k, v, case.dout())
    assert_equal_to(results, exact(case, q, k, v, case.dout()))


def test_one_dimension_of_a_mesh(ranks: Callable[[int], Pool]) -> None:
    ranks(4).run(_on_a_mesh_dimension)


def _frozen_and_inference(ring: RingCase) -> None:
    case = ring.case
    q, k, v = case.inputs()
    expected = found(case.module(), q, k, v, case.dout())
    module = ring.module()
    rank = dist.get_rank()
    # What one rank has frozen another may have not: each keeps another leaf.
    leaves = [module.shard(x.detach()).clone().requires_grad_(number == rank % 3) for number, x in enumerate((q, k, v))]
    out = module(*leaves)
    (grad,) = torch.autograd.grad(out, leaves[rank % 3], module.shard(case.dout()))
    whole = (expected.dq, expected.dk, expected.dv)[rank % 3]
    assert (grad - module.shard(whole)).abs().max() < 1e-12
    infer = ring.module(train=False)
    with torch.no_grad():
        out, lse = infer(*(infer.shard(x.detach()) for x in (q, k, v)), return_lse=True)
    assert (out - infer.shard(expected.out)).abs().max() < 1e-12
    assert (lse - infer.shard(expected.lse, 2)).abs().max() < 1e-12


@pytest.mark.parametrize("schedule", ["ring", "all-gather", "ulysses"])
def test_frozen_inputs_and_inference(schedule: str, ranks: Callable[[int], Pool]) -> None:
    ranks(2).run(_frozen_and_inference, RingCase(CAUSAL, schedule, "zigzag"))


def _odd_memory_layouts(ring: RingCase) -> None:
    """The results do not depend on the strides of q, k, v, nor of dout."""
    case = ring.case
    q, k, v = case.inputs()
    module = ring.module()
    expected = exact(case, q, k, v, case.dout())
    local = [module.shard(x.detach()) for x in (q, k, v)]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in local]
    out = module(*turned)
    grads = torch.autograd.grad(out.sum(), turned)  # an expanded dout
    assert (out - module.shard(expected.out)).abs().max() < 1e-12
    ones = exact(case, q, k, v, torch.ones_like(q))
    for grad, whole in zip(grads, (ones.dq, ones.dk, ones.dv), strict=True):
        assert (grad - module.shard(whole)).abs().max() < 1e-12


def _rows_that_kernels_get(ring: RingCase) -> set[int]:
    """The last strides of q, k and v, also after a call of the same shape whose rows lie in one piece."""
    kernel, load, strides = KERNELS["math"], KERNELS["math"].load, set[int]()

    def noting(config: KernelConfig) -> BoundKernel:
        bound = load(config)

        def forward(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            strides.update(x.stride(-1) for x in rows)
            return bound.forward(*rows)

        return BoundKernel(forward, bound.backward)

    module = ring.module()
    leaves = [module.shard(x.detach()) for x in ring.case.inputs()]
    object.__setattr__(kernel, "load", noting)
    try:
        module(*leaves)
        module(*(laid_out(x, "last_strided") for x in leaves))
    finally:
        object.__setattr__(kernel, "load", load)
    return strides


def test_kernels_get_rows_in_one_piece(ranks: Callable[[int], Pool]) -> None:
    assert ranks(2).run(_rows_that_kernels_get, RingCase(CAUSAL, "ring", "zigzag")) == [{1}] * 2


@pytest.mark.parametrize("schedule", ["ring", "all-gather", "ulysses"])
def test_strided_inputs(schedule: str, ranks: Callable[[int], Pool]) -> None:
    for batch in (1, 2):
        ranks(2).run(_odd_memory_layouts, RingCase(Case(24, 4, 2, 4, batch, causal=True), schedule, "zigzag"))


# --- PyTorch's own ring ------------------------------------------------------------------------------------------


def _as_torchs_ring(causal: bool, spread: str) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

    case = Case(48, 4, 4, 8, 2, causal=causal)
    q, k, v = (x.detach().float() for x in case.inputs())
    ring = RingCase(case, "ring", spread)
    module = ring.module(torch.float32, "fp32", ("flash-cpu", "flash-cpu"))
    group: Any = dist.group.WORLD
    local = [module.shard(x).transpose(1, 2).contiguous() for x in (q, k, v)]
    dout = module.shard(case.dout().float())
    balanced = torchs._cp_options.enable_load_balance
    torchs._cp_options.enable_load_balance = spread == "zigzag"
    try:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = torchs._templated_ring_attention(group, 2, forward, *local, is_causal=causal)
        dq, dk, dv = torchs._templated_ring_attention_backward(
            group,
            2,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            dout.transpose(1, 2).contiguous(),
            "grad_out",
            *local,
            out,
            lse.squeeze(-1),
            is_causal=causal,
            dropout_p=0.0,
        )
    finally:
        torchs._cp_options.enable_load_balance = balanced
    leaves = [module.shard(x).clone().requires_grad_() for x in (q, k, v)]
    mine, my_lse = module(*leaves, return_lse=True)
    grads = torch.autograd.grad(mine, leaves, dout)
    theirs = [out.transpose(1, 2), lse.squeeze(-1), *(x.transpose(1, 2) for x in (dq, dk, dv))]
    assert_equal_to(Results(mine.detach(), my_lse, *grads), Results(*(x.double() for x in theirs)), tolerance=2e-6)


@pytest.mark.parametrize(("causal", "spread"), [(True, "zigzag"), (True, "contiguous"), (False, "contiguous")])
@pytest.mark.parametrize("world", [2, 4])
def test_dense_as_pytorchs_own_ring(world: int, causal: bool, spread: str, ranks: Callable[[int], Pool]) -> None:
    ranks(world).run(_as_torchs_ring, causal, spread)
