"""Which of the workloads that a program recorded a probe measures, and which it names as left out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import one_line_error, ringtune
from hypothesis import given
from hypothesis import strategies as st
from machines import FACTS
from probed_machine import Machine, Watching

import ringattn
from autotune.exit_codes import UsageFailure
from autotune.probe.request import ProbeRequest
from autotune.probe.tuning import run_probe
from autotune.probe.workloads.grid import cells_for, left_out
from autotune.probe.workloads.recorded import SECONDS_PER_CELL, call_gflop, choose_recorded, read_workloads
from autotune.search.budget import EFFORTS, RESERVE_S
from ringattn.planning.unmeasured_workloads import line_of, read_record
from ringattn.profile.yaml_io import load_profile
from ringattn.workload import Pattern, Workload

DENSE = Workload("infer", False, 512, 4, 64, "fp32")


def request_for(*recorded: tuple[Workload, int], **changes: object) -> ProbeRequest:
    return replace(ProbeRequest(recorded=recorded), **changes)  # type: ignore[arg-type]


def room_for(cells: int) -> float:
    return RESERVE_S + cells * SECONDS_PER_CELL


def test_cells_are_exactly_what_was_recorded_cheapest_first() -> None:
    dilated = Workload("train", True, 2048, 8, 32, "bf16", kv_heads=2, batch=3, pattern=Pattern.of([256], [2]))
    request = request_for((dilated, 2), (DENSE.at(2048), 7), (DENSE, 1))
    cells = cells_for(request, FACTS)
    assert [cell.workload for cell in cells] == [DENSE, dilated, DENSE.at(2048)]
    assert cells[1].main_dtypes == ("bf16", "fp32")
    assert left_out(request, FACTS) == ""


def test_the_budget_buys_those_that_cost_most_and_the_others_are_named() -> None:
    """A call at 4 times the length costs 16 times as much."""
    often, long, rare = (DENSE, 1600), (DENSE.at(2048), 99), (DENSE.at(8192), 1)
    chosen = choose_recorded(request_for(rare, often, long, budget_s=room_for(2)))
    assert chosen.chosen == (DENSE, DENSE.at(2048))
    (line,) = chosen.left_out
    assert line == f"1 workload left out for a larger --effort or --budget: {DENSE.at(8192)}"
    assert choose_recorded(request_for(rare, often, long, budget_s=0.1)).chosen == (DENSE,)
    many = request_for(*((replace(DENSE, head_dim=dim), dim) for dim in range(8, 64, 8)), budget_s=room_for(1))
    assert choose_recorded(many).left_out[0].startswith("6 workloads left out")
    assert choose_recorded(many).left_out[0].endswith(" and 3 more")


def test_every_effort_has_room_for_as_many_as_its_own_grid_has() -> None:
    gpu = replace(FACTS, vendor="nvidia", arch="sm_90", memory_mib=81559)
    for effort in EFFORTS:
        grid = cells_for(ProbeRequest(effort=effort), gpu)  # type: ignore[arg-type]
        shapes = [(replace(DENSE, head_dim=dim), 1) for dim in range(1, 400)]
        assert len(choose_recorded(request_for(*shapes, effort=effort)).chosen) >= len(grid)


def test_training_costs_its_backward_and_compiled_calls_count_once() -> None:
    train, infer = replace(DENSE, mode="train"), replace(DENSE, head_dim=128)
    assert call_gflop(train) == pytest.approx(3.5 * 4e-9 * 512**2 * 4 * 64)
    assert choose_recorded(request_for((infer, 3), (train, 2), budget_s=room_for(1))).chosen == (train,)  # 6 : 7
    assert choose_recorded(request_for((infer, 4), (train, 2), budget_s=room_for(1))).chosen == (infer,)
    assert choose_recorded(request_for((train, 0), (DENSE, 3), budget_s=room_for(1))).chosen == (train,)


def test_what_one_row_will_serve_is_one_cell() -> None:
    near = [(DENSE.at(length), 10) for length in (390, 420, 480, 512, 560, 700)]
    near += [(replace(DENSE, batch=batch), 1) for batch in (1, 2, 64, 70)]
    chosen = choose_recorded(request_for(*near)).chosen
    assert {(w.seq_len, w.batch) for w in chosen} == {(700, 1), (480, 1), (512, 2), (512, 70)}


@given(st.lists(st.tuples(st.integers(1, 1 << 16), st.integers(1, 64), st.integers(0, 9)), min_size=1, max_size=12))
def test_every_workload_is_near_a_cell_where_there_is_room(shapes: list[tuple[int, int, int]]) -> None:
    asked = [(replace(DENSE, seq_len=length, batch=batch), calls) for length, batch, calls in shapes]
    chosen = choose_recorded(request_for(*asked, effort="full")).chosen
    assert set(chosen) <= {workload for workload, _ in asked}
    assert len(set(chosen)) == len(chosen)
    for w, _ in asked:
        assert any(
            max(w.seq_len, c.seq_len) ** 2 <= 2.0001 * min(w.seq_len, c.seq_len) ** 2
            and max(w.batch, c.batch) ** 2 <= 2.0001 * min(w.batch, c.batch) ** 2
            for c in chosen
        )


def test_other_numbers_of_ranks_and_fp64_are_left_out_and_named() -> None:
    ring = replace(DENSE, world=2, total_length=1023)
    exact = replace(DENSE, dtype="fp64")
    choice = choose_recorded(request_for((ring, 4), (exact, 1), (DENSE, 1)))
    assert choice.chosen == (DENSE,)
    assert choice.left_out == (
        f"{exact} left out: no better dtype to check it against",
        "workloads over other numbers of ranks left out: --nproc 2 measures them",
    )
    over_two = choose_recorded(request_for((ring, 4), (DENSE, 1), ranks=2))
    assert over_two.chosen == (replace(ring, total_length=0),)
    with pytest.raises(UsageFailure, match=r"none of the recorded workloads can be measured: .*--nproc 2"):
        choose_recorded(request_for((ring, 4)))


def test_a_probe_of_a_record_measures_its_cells(tmp_path: Path) -> None:
    probed, heard = Machine(tmp_path), Watching()
    cells = [Workload("train", True, 512, 8, 32, "fp32", batch=2), Workload("infer", True, 4096, 4, 64, "fp32")]
    request = ProbeRequest(
        output=tmp_path / "p.yaml", effort="quick", recorded=tuple((cell, 1) for cell in cells), budget_s=room_for(2)
    )
    result = run_probe(request, heard, probed.environment)
    assert result.profile is not None
    assert {entry.workload for entry in result.profile.plans} == set(cells) == set(heard.cells)


# --- the command -------------------------------------------------------------------------------------------------


def test_a_record_is_read_and_what_is_skipped_is_told(asked: list[ProbeRequest], tmp_path: Path) -> None:
    path = tmp_path / "missed.jsonl"
    path.write_text(line_of({DENSE: 2}) + line_of({DENSE: 3}) + '\n{"schema"')
    result = ringtune("probe", "--like", path, "--effort", "quick")
    assert result.exit_code == 0, result.output
    assert asked == [ProbeRequest(modes=("train", "infer"), effort="quick", recorded=((DENSE, 5),))]
    assert "line 4: is cut short or no JSON; line skipped" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "also",
    [
        ("--heads", "4"), ("--head-dim", "64"), ("--seq-len", "512"), ("--causal",), ("--no-causal",),
        ("--mode", "both"), ("--batch-size", "1"), ("--dense",), ("--precision", "auto"), ("--model", "."),
        ("--segment-lengths", "64", "--dilation-rates", "1"),
    ],
)  # fmt: skip
def test_a_record_says_all_of_a_workload(asked: list[ProbeRequest], also: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "missed.jsonl"
    path.write_text(line_of({DENSE: 2}))
    result = ringtune("probe", "--like", path, *also)
    assert result.exit_code == 2
    assert "--like says what to probe; leave --" in result.stderr
    assert asked == []


@pytest.mark.parametrize(("content", "why"), [("", ""), ("hello", "line 1: is cut short or no JSON")])
def test_no_record_is_one_line(content: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "missed.jsonl"
    path.write_text(content)
    error = one_line_error(ringtune("probe", "--like", path), 2)
    assert f"{path}: holds no workloads" in error
    assert why in error
    assert f"RINGTUNE_RECORD={path}" in error


def test_a_file_that_cannot_be_read_is_a_usage_failure(tmp_path: Path) -> None:
    with pytest.raises(UsageFailure, match="cannot be read"):
        read_workloads(tmp_path)


def test_a_model_fills_in_what_is_not_given(asked: list[ProbeRequest], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mistral", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,'
        '"max_position_embeddings": 32768, "sliding_window": 4096}'
    )
    both = ProbeRequest(modes=("train", "infer"), heads=32, kv_heads=8, head_dim=128, causal=True, dense=True)
    result = ringtune("probe", "--model", tmp_path)
    assert result.exit_code == 0, result.output
    assert "the full attention is probed" in " ".join(result.stderr.split())
    ringtune("probe", "--model", tmp_path / "config.json", "--seq-len", "777", "--no-causal", "--heads", "8")
    ringtune("probe", "--model", tmp_path, "--segment-lengths", "64", "--dilation-rates", "2", "--kv-heads", "4")
    assert asked == [
        replace(both, longest=32768),
        replace(both, seq_lens=(777,), causal=False, heads=8),
        replace(both, longest=32768, kv_heads=4, dense=False, segment_lengths=(64,), dilation_rates=(2,)),
    ]
    (tmp_path / "config.json").write_text('{"hidden_size": 512}')
    assert "does not say the number of heads" in one_line_error(ringtune("probe", "--model", tmp_path), 2)


PROGRAM = """
import torch
from ringattn import RingAttention

module = RingAttention(2, 16, device="cpu", causal=True)
for length, calls in ((64, 4), (256, 2)):
    x = torch.randn(2, length, 2, 16, requires_grad=length == 256)
    for _ in range(calls):
        module(x, x, x)
"""


def test_a_program_is_recorded_probed_and_then_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, profile = tmp_path / "missed.jsonl", tmp_path / "profile.yaml"
    monkeypatch.setenv("PYTHONPATH", str(Path(ringattn.__file__).parents[1]))
    monkeypatch.setenv("RINGTUNE_RECORD", str(record))
    run = [sys.executable, "-c", PROGRAM]
    subprocess.run(run, check=True, cwd=tmp_path, capture_output=True)
    infer = Workload("infer", True, 64, 2, 16, "fp32", batch=2)
    train = Workload("train", True, 256, 2, 16, "fp32", batch=2)
    assert read_record(record) == ({infer: 4, train: 2}, ())
    command = ["probe", "--like", str(record), "--device", "cpu", "--output", str(profile)]
    probed = subprocess.run(
        [sys.executable, "-m", "autotune", *command, "--budget", "16", "--effort", "quick"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    if probed.returncode == 6:
        pytest.skip("this machine is too busy to measure anything now")
    assert probed.returncode == 0, probed.stderr
    assert {entry.workload for entry in load_profile(profile).plans} == {infer, train}
    record.unlink()
    monkeypatch.setenv("RINGTUNE_PROFILE", str(profile))
    subprocess.run(run, check=True, cwd=tmp_path, capture_output=True)
    assert not record.exists()
