"""Rows over several ranks that join an earlier profile lie as those beside them: a module takes one layout for all."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from machines import FACTS
from probed_machine import Machine, Watching, request_for
from rich.console import Console

from autotune.cli.probing.probe_result import dry_run_summary
from autotune.exit_codes import ProbeFailure
from autotune.probe.output.joined_layout import joined_layout
from autotune.probe.tuning import run_probe
from ringattn.profile.schema import Profile
from ringattn.profile.yaml_io import save_profile
from ringattn.workload import BranchTunables, Tunables, Workload

PATH = Path("ring.yaml")


def cell(seq_len: int, mode: str = "train", heads: int = 32) -> Workload:
    return Workload(mode, True, seq_len, heads, 128, "bf16", heads, world=4)  # type: ignore[arg-type]


def holding(layout: str, cells: Sequence[Workload]) -> Profile:
    def tunables(workload: Workload) -> Tunables:
        kernels = BranchTunables("cudnn", "cudnn" if workload.train else "")
        return Tunables("bf16", (kernels,), schedule="ring", layout=layout)

    singles = [Profile.single(FACTS, workload, tunables(workload)) for workload in cells]
    return replace(singles[0], plans=tuple(entry for single in singles for entry in single.plans))


def test_a_new_length_lies_as_the_rows_that_are_there() -> None:
    old = holding("zigzag", [cell(8192), cell(16384)])
    assert joined_layout(cell(4096), "auto", old, {cell(4096)}, PATH) == "zigzag"
    assert joined_layout(cell(4096), "zigzag", old, {cell(4096)}, PATH) == "zigzag"


def test_another_layout_than_theirs_is_refused_before_anything_is_measured() -> None:
    old = holding("zigzag", [cell(8192), cell(16384)])
    with pytest.raises(ProbeFailure, match=r"ring\.yaml: 2 rows .* in zigzag layout.*give --layout zigzag"):
        joined_layout(cell(4096), "contiguous", old, {cell(4096)}, PATH)


def test_rows_that_are_measured_anew_decide_nothing() -> None:
    old = holding("zigzag", [cell(8192), cell(16384)])
    new = {cell(8192), cell(16384)}
    assert joined_layout(cell(8192), "auto", old, new, PATH) == "auto"
    assert joined_layout(cell(8192), "contiguous", old, new, PATH) == "contiguous"


def test_rows_of_other_heads_decide_where_the_module_would_take_them() -> None:
    """With rows of 32 heads for inference, and 6 heads measured in training only, a module of 6 takes both."""
    old = holding("contiguous", [cell(8192, "infer"), cell(8192, "train")])
    six = {cell(8192, "train", 6)}
    assert joined_layout(cell(8192, "train", 6), "auto", old, six, PATH) == "contiguous"
    both = {cell(8192, "train", 6), cell(8192, "infer", 6)}
    assert joined_layout(cell(8192, "train", 6), "auto", old, both, PATH) == "auto"


def test_without_an_earlier_profile_or_other_ranks_what_was_asked_is_searched() -> None:
    alone = replace(cell(8192), world=1)
    assert joined_layout(cell(8192), "zigzag", None, {cell(8192)}, PATH) == "zigzag"
    assert joined_layout(alone, "auto", holding("zigzag", [cell(8192)]), {alone}, PATH) == "auto"
    assert joined_layout(cell(8192), "auto", holding("zigzag", [replace(cell(8192), world=2)]), set(), PATH) == "auto"


def test_a_dry_run_lays_cells_as_the_probe_would(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    asked = {"dry_run": True, "ranks": 2, "dense": True, "heads": 4, "head_dim": 64, "causal": True}
    request = request_for(path, modes=("train",), **asked)

    def layouts() -> set[str]:
        found = run_probe(request, Watching(), machine.environment).dry_run
        assert found is not None
        shown = io.StringIO()
        Console(file=shown, width=200).print(dry_run_summary(found))
        assert all(f"{cell.workload} {cell.layout} " in shown.getvalue() for cell in found.cells)
        return {cell.layout for cell in found.cells}

    assert layouts() == {"zigzag"}  # the rule's own, in a ring
    tunables = Tunables("fp32", (BranchTunables("math", "math"),), schedule="ring", layout="contiguous")
    there = Workload("train", True, 1024, 4, 64, "fp32", 4, world=2)
    ranks = replace(machine.environment.facts, threads=1)  # what each of them finds
    save_profile(Profile.single(ranks, there, tunables), path)
    assert layouts() == {"contiguous"}
    with pytest.raises(ProbeFailure, match="give --layout contiguous, or another --output"):
        run_probe(replace(request, layout="zigzag"), Watching(), machine.environment)
