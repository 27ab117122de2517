"""Rows of a profile and accuracy checks know a window, a softcap and a head dimension of v."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from machine_samples import H100
from test_table import POLICY, SHAPE, choice

from autotune.exit_codes import UsageFailure
from autotune.measure.module_calls import build_module
from autotune.probe.request import ProbeRequest
from autotune.probe.workloads.recorded import choose_recorded
from ringattn.errors import FieldError, InputError
from ringattn.hardware.kernel_faults import Combination
from ringattn.kernels.registry import KERNELS
from ringattn.planning.launches import forward_gflop
from ringattn.planning.matching import entries_for
from ringattn.planning.plan import combinations
from ringattn.planning.table import ModuleShape, build_table
from ringattn.planning.validation.accuracy_check import case_of, check, config_of, hold
from ringattn.profile.plain_data import from_plain, to_plain
from ringattn.profile.schema import PlanEntry, Profile
from ringattn.workload import Workload

OPTIONS: list[dict[str, Any]] = [{"window": 512}, {"softcap": 30.0}, {"head_dim_v": 64}]
CPU = torch.device("cpu")


def row(shape: ModuleShape, length: int, name: str) -> PlanEntry:
    return PlanEntry(shape.workload(length, "bf16", True), choice(name), ())


def module_of(shape: ModuleShape) -> Workload:
    return replace(shape.workload(1, "bf16", True), window=shape.window)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_row_measured_without_never_serves_it_nor_the_other_way(options: dict[str, Any]) -> None:
    asked = replace(SHAPE, **options)
    plain, own = row(SHAPE, 4096, "flash-attn-4"), row(asked, 4096, "flash-attn-4")
    profile = Profile.single(H100, plain.workload, plain.choice.tunables)  # type: ignore[union-attr]
    profile = replace(profile, plans=(plain, own))
    table = build_table(asked, entries_for(profile, module_of(asked))[0], POLICY, H100)
    found = table.plan_at(4096, "bf16", True, 1)
    assert found.measured == own.workload
    others = build_table(SHAPE, entries_for(profile, module_of(SHAPE))[0], POLICY, H100)
    assert others.plan_at(4096, "bf16", True, 1).measured == plain.workload
    alone = build_table(asked, entries_for(replace(profile, plans=(plain,)), module_of(asked))[0], POLICY, H100)
    assert alone.plan_at(4096, "bf16", True, 1).measured is None


def test_sequences_within_a_window_take_the_rows_without() -> None:
    asked = replace(SHAPE, window=4096)
    rows = (row(SHAPE, 4096, "flash-attn-4"), row(asked, 8192, "flash-attn-4"))
    table = build_table(asked, rows, POLICY, H100)
    assert [table.plan_at(n, "bf16", True, 1).bucket for n in (4096, 4097, 8192)] == [4096, None, 8192]
    assert table.plan_at(4096, "bf16", True, 1).measured == rows[0].workload
    assert table.fallback_note(table.plan_at(4097, "bf16", True, 1)) == (
        f"{asked} bf16 train: measured at 8192 positions; outside, a heuristic plan serves",
        "no probe measures this one (sliding windows are not probed)",
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_workload_is_written_and_read_back_and_old_ones_do_not_change(options: dict[str, Any]) -> None:
    plain = SHAPE.workload(4096, "bf16", True)
    asked = replace(plain, **options)
    assert to_plain(asked) == to_plain(plain) | options
    assert from_plain(Workload, to_plain(asked), "test") == asked
    assert not {"window", "softcap", "head_dim_v"} & to_plain(plain).keys()
    assert ModuleShape.of(asked).workload(4096, "bf16", True) == asked
    assert str(asked) != str(plain)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"window": 8, "causal": False}, "window is 8, which is for causal dense attention"),
        ({"window": -1}, "window is -1"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"head_dim_v": -8}, "head_dim_v is -8"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(FieldError, match=f"^{error}"):
        replace(SHAPE.workload(4096, "bf16", True), **options)


def test_equal_head_dimensions_are_one_workload() -> None:
    plain = SHAPE.workload(4096, "bf16", True)
    assert replace(plain, head_dim_v=plain.head_dim) == plain
    assert replace(SHAPE, head_dim_v=SHAPE.head_dim) == SHAPE


def test_work_of_a_window_is_that_of_the_keys_it_shows() -> None:
    plain = SHAPE.workload(4096, "bf16", True)
    for window in (1, 512, 4095):
        shown = sum(min(window, 1 + position) for position in range(4096)) / (4096 * 4096 / 2)
        share = forward_gflop(replace(plain, window=window), 0) / forward_gflop(plain, 0)
        assert share == pytest.approx(shown, rel=1e-2, abs=1e-3)
    assert forward_gflop(replace(plain, head_dim_v=64), 0) == forward_gflop(plain, 0) * 0.75


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": True}, {"head_dim_v": 24}, {"window": True}, {"window": True, "softcap": True}]
)
@pytest.mark.parametrize("backward", [True, False])
def test_the_check_of_a_kernel_has_them(options: dict[str, Any], causal: bool, backward: bool) -> None:
    """Math passes, and what ignores one does not."""
    if options.get("window") and not causal:
        return
    asked = Combination("math", 16, "fp32", backward, causal, True, **options)
    case = case_of(asked, CPU)
    assert check(asked, case).passes
    for name in ("window", "softcap"):
        if options.get(name):
            ignoring = KERNELS["math"].load(replace(config_of(asked), **{name: 0}))
            assert not hold(ignoring, case, "fp32", backward=backward).passes


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_validated_combinations_are_told_apart(options: dict[str, Any]) -> None:
    plain, tunables = SHAPE.workload(4096, "bf16", True), choice("flash-attn-4").tunables
    asked = replace(plain, **options)
    without, having = (set(combinations(w, tunables, H100)) for w in (plain, asked))
    assert without
    assert not without & having


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_probe_measures_what_it_has_no_reference_for(options: dict[str, Any]) -> None:
    asked = replace(SHAPE.workload(4096, "bf16", True), **options)
    request = ProbeRequest(recorded=((asked, 1), (SHAPE.workload(4096, "bf16", True), 1)))
    found = choose_recorded(request)
    assert found.chosen == (SHAPE.workload(4096, "bf16", True),)
    word = {"window": "sliding windows are", "softcap": "softcaps are", "head_dim_v": "a head_dim_v is"}[
        next(iter(options))
    ]
    told = f"{asked} left out: {word} not probed"
    assert found.left_out == (told,)
    with pytest.raises(UsageFailure, match="not probed"):
        choose_recorded(ProbeRequest(recorded=((asked, 1),)))
    with pytest.raises(InputError, match="not probed"):
        build_module(asked, profile=None, device=CPU)
