"""The numerical gate: it passes right kernels, whatever the inputs, and catches wrong ones, however small the fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autotune.accuracy.arithmetic import EXACT
from autotune.accuracy.check import CheckResult, check_rows
from autotune.accuracy.inputs import KINDS, Inputs, active_positions, make_inputs, validation_inputs
from autotune.accuracy.sampled_rows import Sampled, compute_rows, expect, pick_rows, sample_positions
from ringattn import Profile, RingAttention, detect
from ringattn.reference import dilated_attention_reference
from ringattn.workload import BranchTunables, Mode, Pattern, Tunables, Workload

CPU = torch.device("cpu")
DILATED = Pattern.of([128, 256, 512], [1, 2, 4])
PATTERNS = (Pattern(), DILATED, Pattern.of([100], [3]), Pattern.of([64, 64], [1, 1], "blocked"))


def workload(
    seq_len: int = 300, dtype: str = "fp32", pattern: Pattern = DILATED, mode: Mode = "train", **changes: object
) -> Workload:
    made = Workload(mode, True, seq_len, 4, 32, dtype, kv_heads=2, batch=2, pattern=pattern)
    return replace(made, **changes)  # type: ignore[arg-type]


def whole_results(cell: Workload, inputs: Inputs) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The oracle's out, lse and gradients, all rows."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = dilated_attention_reference(q, k, v, cell.pattern, cell.causal)
    return out.detach(), lse.detach(), torch.autograd.grad(out, (q, k, v), inputs.dout)


# --- rows against the oracle -----------------------------------------------------------------------------------------


@given(
    seq_len=st.integers(1, 300),
    pattern=st.sampled_from(PATTERNS),
    causal=st.booleans(),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_sampled_rows_are_the_rows_of_the_whole(
    seq_len: int, pattern: Pattern, causal: bool, kind: str, seed: int
) -> None:
    cell = workload(seq_len, "fp64", pattern, causal=causal)
    inputs = make_inputs(cell, seq_len, kind, seed, CPU)
    sampled = sample_positions(cell, seq_len, seed)
    rows = compute_rows(cell, inputs, sampled, EXACT)
    out, lse, grads = whole_results(cell, inputs)
    expected = pick_rows(cell, sampled, out, lse, grads)
    assert [name for name, _ in rows.tensors] == ["out", "dq", "dk", "dv"]
    for (_, got), (_, wanted) in zip(rows.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rows.lse, expected.lse, rtol=1e-10, atol=1e-10)


def test_gradients_of_long_cells_are_sparse_and_still_those_of_the_whole() -> None:
    cell = workload(1500, "fp64", batch=1)
    inputs = make_inputs(cell, 1500, "ordinary", 1, CPU)
    share = float(inputs.active.double().mean())
    assert 1 / 12 < share < 1 / 5
    assert not bool(inputs.dout[:, ~inputs.active].any())
    tiles = inputs.active[: 1500 // 64 * 64].view(-1, 64)
    assert bool(tiles.any(1).all())  # every tile of queries has a gradient
    sampled = sample_positions(cell, 1500, 1)
    rows = compute_rows(cell, inputs, sampled, EXACT)
    expected = pick_rows(cell, sampled, *whole_results(cell, inputs))
    for (_, got), (_, wanted) in zip(rows.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [1025, 20481, 68000, 92682, 120000, 131072, 300000])
def test_every_tile_of_queries_has_a_gradient(length: int) -> None:
    active = active_positions(length, 3)
    assert active[: length // 64 * 64].reshape(-1, 64).any(1).all()
    assert active.sum() <= max(length / 8, 4096, length / 64) + 3


def test_what_is_timed_has_gradients_everywhere() -> None:
    cell = workload(1500)
    assert bool(make_inputs(cell, 1500, "ordinary", 1, CPU, for_timing=True).active.all())


# --- inputs ----------------------------------------------------------------------------------------------------------


def logits_of(cell: Workload, inputs: Inputs) -> Tensor:
    q, k = inputs.q[0, :, 0].double(), inputs.k[0, :, 0].double()
    return q @ k.T / math.sqrt(cell.head_dim)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_adversarial_logits_are_far_from_zero_and_ordinary_ones_are_sharp(dtype: str) -> None:
    cell = workload(256, dtype)
    means = {kind: logits_of(cell, make_inputs(cell, 256, kind, 0, CPU)) for kind in KINDS}
    assert float(means["negative"].mean()) < -80
    assert float(means["positive"].mean()) > 80
    assert float(means["positive"].max()) > 88  # exp() of it overflows float32
    assert float(means["ordinary"].std()) == pytest.approx(2.0, rel=0.15)


def test_inputs_come_in_the_layouts_that_models_use() -> None:
    cell = workload(256)
    ordinary, packed, transposed = (
        make_inputs(cell, 256, kind, 0, CPU) for kind in ("ordinary", "packed", "transposed")
    )
    assert ordinary.q.is_contiguous()
    assert not packed.q.is_contiguous()
    assert packed.q.untyped_storage().data_ptr() == packed.v.untyped_storage().data_ptr()
    assert packed.dout.stride() == (0, 0, 0, 0)
    assert transposed.dout.transpose(1, 2).is_contiguous()
    long = make_inputs(workload(1500), 1500, "packed", 0, CPU)
    assert long.dout.stride() == (0, 1, 0, 0)
    again = make_inputs(cell, 256, "ordinary", 0, CPU)
    assert torch.equal(again.q, ordinary.q)
    assert not torch.equal(make_inputs(cell, 256, "ordinary", 1, CPU).q, ordinary.q)


def test_ragged_lengths_stay_in_the_bucket_and_reach_every_tile_residue() -> None:
    cell = workload(4096, pattern=Pattern())
    lengths, kinds = set(), set()
    for seed in range(200):
        for length, kind in validation_inputs(cell, 8, seed):
            assert 4096 / math.sqrt(2) <= length <= 4096 * math.sqrt(2)
            lengths.add(length)
            kinds.add(kind)
    assert {length % 128 for length in lengths} == set(range(128))
    assert kinds == set(KINDS)
    assert validation_inputs(cell, 8, 3) == validation_inputs(replace(cell, mode="infer"), 8, 3)
    assert len({kind for _, kind in validation_inputs(cell, 8, 0)}) == len(KINDS)


# --- right kernels pass ----------------------------------------------------------------------------------------------


def judged(cell: Workload, length: int, kind: str, seed: int, tunables: Tunables) -> CheckResult:
    """The runtime's own module under the gate."""
    branches = cell.pattern.branches
    module = RingAttention(
        cell.heads,
        cell.head_dim,
        num_kv_heads=cell.kv_heads,
        segment_lengths=[b.segment for b in branches] or None,
        dilation_rates=[b.rate for b in branches] or None,
        head_offset=cell.pattern.head_offset,
        causal=cell.causal,
        profile=Profile.single(detect("cpu"), cell.at(length), tunables),
        device="cpu",
    )
    inputs = make_inputs(cell, length, kind, seed, CPU)
    q, k, v = (x.detach().requires_grad_(cell.train) for x in (inputs.q, inputs.k, inputs.v))
    out, lse = module(q, k, v, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout) if cell.train else ()
    return verdict_of(cell, length, inputs, seed, tunables.dtype, out.detach(), lse.detach(), grads)


def verdict_of(
    cell: Workload,
    length: int,
    inputs: Inputs,
    seed: int,
    dtype: str,
    out: Tensor,
    lse: Tensor,
    grads: Sequence[Tensor],
    sampled: Sampled | None = None,
) -> CheckResult:
    sampled = sampled or sample_positions(cell, length, seed)
    exact = compute_rows(cell, inputs, sampled, EXACT)
    expected = expect(cell, inputs, sampled, exact, dtype)
    got = pick_rows(cell, sampled, out, lse, grads)
    whole = [("out", out), ("lse", lse), *zip(("dq", "dk", "dv"), grads, strict=False)]
    return check_rows(expected, got, whole)


@given(
    length=st.integers(16, 700),  # the gradient of a row with one key is what is left of two equal terms
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    pattern=st.sampled_from(PATTERNS),
    causal=st.booleans(),
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(["train", "infer"]),
    kernels=st.sampled_from([("flash-cpu", "flash-cpu"), ("math", "math"), ("flash-cpu", "math")]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_right_kernels_pass(
    length: int, dtype: str, pattern: Pattern, causal: bool, kind: str, mode: Mode, kernels: tuple[str, str], seed: int
) -> None:
    cell = workload(length, dtype, pattern, mode, causal=causal, batch=1)
    back = kernels[1] if mode == "train" else ""
    tunables = Tunables(dtype, tuple(BranchTunables(kernels[0], back) for _ in pattern.resolved(length)))
    verdict = judged(cell, length, kind, seed, tunables)
    assert verdict.fault == ""
    if kind == "ordinary":
        assert verdict.error < {"fp32": 1e-5, "bf16": 5e-2, "fp16": 5e-3}[dtype]


@lru_cache
def _of_flash_cpu(cell: Workload) -> RingAttention:
    branches = tuple(BranchTunables("flash-cpu", "flash-cpu") for _ in cell.pattern.branches)
    profile = Profile.single(detect("cpu"), cell, Tunables("bf16", branches))
    return RingAttention(
        2, 128, segment_lengths=[64, 64], dilation_rates=[1, 2], causal=True, profile=profile, device="cpu"
    )


@pytest.mark.parametrize("seed", range(150))
def test_a_right_kernel_passes_where_one_row_is_all_of_a_dk(seed: int) -> None:
    """Query 1 alone has a gradient, and only key 0 is looked at: by luck the modelled out is hardly rounded there."""
    pattern = Pattern.of([64, 64], [1, 2])
    cell = workload(64, "bf16", pattern, batch=1, heads=2, kv_heads=2, head_dim=128)
    ordinary = make_inputs(cell, 64, "positive", seed, CPU)
    only = torch.arange(64) == 1
    inputs = replace(ordinary, dout=ordinary.dout * only[:, None, None], active=only)
    sampled = Sampled((0, 0), ((1,), (1,)), (1,), ((0,),))  # the odd head, whose second branch holds query 1 too
    module = _of_flash_cpu(cell)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = module(q, k, v, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout)
    assert verdict_of(cell, 64, inputs, seed, "bf16", out.detach(), lse.detach(), grads, sampled).fault == ""


# --- wrong ones do not -----------------------------------------------------------------------------------------------


Spoil = Callable[[Tensor, Tensor, list[Tensor]], None]


def spoiled(spoil: Spoil, dtype: str = "bf16", kind: str = "ordinary", pattern: Pattern = DILATED) -> CheckResult:
    """A right answer in this dtype, with one fault."""
    cell = workload(300, dtype, pattern)
    inputs = make_inputs(cell, 300, kind, 0, CPU)
    as_64 = Inputs(kind, inputs.q.double(), inputs.k.double(), inputs.v.double(), inputs.dout.double(), inputs.active)
    out, lse, grads = whole_results(cell, as_64)
    results = [x.to(inputs.q.dtype) for x in (out, *grads)]
    lse = lse.float()
    spoil(results[0], lse, results[1:])
    return verdict_of(cell, 300, inputs, 0, dtype, results[0], lse, results[1:])


def test_the_unspoiled_answer_passes() -> None:
    for dtype in ("bf16", "fp16", "fp32"):
        assert spoiled(lambda out, lse, grads: None, dtype).fault == ""


def a_sampled_row() -> tuple[int, int, int]:
    cell = workload(300)
    sampled = sample_positions(cell, 300, 0)
    return sampled.batch_of_head[1], sampled.rows_of_head[1][5], 2  # a query head of the second key/value head


def zero_one_row(out: Tensor, lse: Tensor, grads: list[Tensor]) -> None:
    batch, row, head = a_sampled_row()
    out[batch, row, head] = 0


def swap_heads(out: Tensor, lse: Tensor, grads: list[Tensor]) -> None:
    out.copy_(out[:, :, [1, 0, 3, 2]])


def one_nan_anywhere(out: Tensor, lse: Tensor, grads: list[Tensor]) -> None:
    grads[2][1, 250, 1, 7] = float("nan")


def lse_of_zero_for_empty_rows(out: Tensor, lse: Tensor, grads: list[Tensor]) -> None:
    lse[lse == -math.inf] = 0.0


def lse_in_bf16(out: Tensor, lse: Tensor, grads: list[Tensor]) -> None:
    lse.copy_(lse.bfloat16().float())


def merge_weights_taken_for_constants(out: Tensor, lse: Tensor, grads: list[Tensor]) -> None:
    grads[0] *= 1.12  # what that mistake costs is about 12 % of dq and dk


def accumulated_twice(out: Tensor, lse: Tensor, grads: list[Tensor]) -> None:
    grads[2][:, 128:] *= 2


def shifted_mask(out: Tensor, lse: Tensor, grads: list[Tensor]) -> None:
    out[:, 1:] = out[:, :-1].clone()


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (zero_one_row, "out has a row|out errs"),
        (swap_heads, "out errs"),
        (one_nan_anywhere, "dv holds 1 value not finite"),
        (lse_in_bf16, "lse is off by"),
        (merge_weights_taken_for_constants, "dq errs"),
        (accumulated_twice, "dv errs|dv has a row"),
        (shifted_mask, "out errs"),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_fault_is_caught_and_named(spoil: Spoil, names: str, dtype: str) -> None:
    assert spoiled(lambda out, lse, grads: None, dtype).fault == ""
    fault = spoiled(spoil, dtype).fault
    assert any(fault.startswith(name) for name in names.split("|")), fault
    assert "\n" not in fault


def test_a_made_up_lse_where_nothing_is_selected_is_caught() -> None:
    sparse = Pattern.of([100], [3])  # most positions of most heads are in no branch
    assert spoiled(lambda out, lse, grads: None, pattern=sparse).fault == ""
    assert "-inf exactly where nothing is selected" in spoiled(lse_of_zero_for_empty_rows, pattern=sparse).fault


def test_a_kernel_without_a_running_maximum_fails_on_adversarial_inputs() -> None:
    """exp() of the raw logits: right for ordinary ones, inf or 0 for logits of 100."""
    cell = workload(300, "fp32", Pattern())

    def naive(inputs: Inputs) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(2, 2) for x in (inputs.k, inputs.v))
        logits = torch.einsum("bqhd,bkhd->bhqk", inputs.q, k) / math.sqrt(cell.head_dim)
        weights = torch.exp(logits).tril()
        total = weights.sum(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights / total[..., None], v), total.log()

    faults = {}
    for kind in ("ordinary", "negative", "positive"):
        inference = replace(cell, mode="infer")
        inputs = make_inputs(inference, 300, kind, 0, CPU)
        faults[kind] = verdict_of(inference, 300, inputs, 0, "fp32", *naive(inputs), ()).fault
    assert faults["ordinary"] == ""
    assert "not finite" in faults["positive"]
    assert faults["negative"] != ""


def test_a_wider_compute_dtype_is_held_to_its_own_precision_up_to_the_returned_dtype() -> None:
    """fp32 inside, bf16 out: the rounding of what is returned is allowed, a bf16 computation is not mistaken for it."""
    cell = workload(300, "bf16", mode="infer")
    inputs = make_inputs(cell, 300, "ordinary", 0, CPU)
    out, lse = dilated_attention_reference(
        inputs.q.float(), inputs.k.float(), inputs.v.float(), cell.pattern, cell.causal
    )
    verdict = verdict_of(cell, 300, inputs, 0, "fp32", out.bfloat16(), lse, ())
    assert verdict.fault == ""
    assert verdict.error < 3e-3


def test_positions_include_edges_and_are_drawn_anew_for_every_seed() -> None:
    cell = workload(4096, pattern=Pattern())
    seen = [sample_positions(cell, 4096, seed) for seed in range(30)]
    rows = {row for sampled in seen for head in sampled.rows_of_head for row in head}
    assert {0, 4095, 63, 64, 127, 128} <= rows
    assert len(rows) > 200
    assert {sampled.key_heads for sampled in seen} == {(0,), (1,)}
    assert np.all([row < 4096 for row in rows])
