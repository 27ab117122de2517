"""Which workloads a probe measures."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machines import FACTS
from probed_machine import Machine

from autotune.exit_codes import UsageFailure
from autotune.probe.request import ProbeObserver, ProbeRequest
from autotune.probe.tuning import run_probe
from autotune.probe.workloads.grid import FIRST_STEPS, LONGNET_CPU, cells_for, check_lengths, left_out


@pytest.mark.parametrize("effort", ["quick", "standard", "full"])
def test_the_grid_covers_both_modes_dense_and_dilated_and_several_lengths(effort: str) -> None:
    cells = cells_for(ProbeRequest(effort=effort), FACTS)  # type: ignore[arg-type]
    workloads = [cell.workload for cell in cells]
    assert {w.mode for w in workloads} == {"train", "infer"}
    assert {w.pattern.dense for w in workloads} == {True, False}
    assert len({w.seq_len for w in workloads}) >= 2
    assert len(set(workloads)) == len(workloads)
    first, others = workloads[: len(FIRST_STEPS)], workloads[len(FIRST_STEPS) :]
    assert tuple(first) == FIRST_STEPS
    assert [w.seq_len for w in others] == sorted(w.seq_len for w in others)


def test_the_gpu_grid_of_a_standard_probe_has_five_lengths() -> None:
    gpu = dataclasses.replace(FACTS, vendor="nvidia", arch="sm_90", memory_mib=81559)
    cells = cells_for(ProbeRequest(effort="standard"), gpu)
    assert {cell.workload.seq_len for cell in cells if cell.workload.causal} == {1024, 4096, 16384, 32768, 65536}
    assert {cell.workload.dtype for cell in cells} == {"bf16"}
    assert len(cells) == 24
    old = dataclasses.replace(gpu, arch="sm_61")
    assert {cell.workload.dtype for cell in cells_for(ProbeRequest(), old)} == {"fp32"}


def test_documents_are_packed_into_every_length() -> None:
    cells = cells_for(ProbeRequest(documents=8, seq_lens=(512, 4096), dense=True), FACTS)
    found = [(w.mode, w.batch, w.seq_len, w.packed_tokens, w.pattern.dense) for w in (c.workload for c in cells)]
    expected = [(mode, 8, tokens // 4, tokens, True) for tokens in (512, 4096) for mode in ("train", "infer")]
    assert found == expected


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (ProbeRequest(documents=9, seq_lens=(8,)), "--documents 9 does not fit into --seq-len 8"),
        (ProbeRequest(documents=2, batch_size=2), "--documents is measured on one rank and in one row"),
        (ProbeRequest(documents=2, ranks=2), "--documents is measured on one rank and in one row"),
    ],
)
def test_documents_that_cannot_be_packed_are_told(request_: ProbeRequest, told: str) -> None:
    refuses = (
        cells_for
        if request_.ranks == 1 and request_.batch_size is None
        else lambda request, facts: check_lengths(request)
    )
    with pytest.raises(UsageFailure, match=told):
        refuses(request_, FACTS)


def test_many_short_sequences_are_cells_of_the_standard_and_the_full_grid() -> None:
    gpu = dataclasses.replace(FACTS, vendor="nvidia", arch="sm_90", memory_mib=81559)
    sizes = {("quick", "gpu"): 8, ("standard", "gpu"): 24, ("full", "gpu"): 112}
    sizes |= {("quick", "cpu"): 8, ("standard", "cpu"): 20, ("full", "cpu"): 28}
    for (effort, kind), size in sizes.items():
        facts = gpu if kind == "gpu" else FACTS
        workloads = [c.workload for c in cells_for(ProbeRequest(effort=effort), facts)]  # type: ignore[arg-type]
        assert len(workloads) == size, (effort, kind)
        short = {(w.mode, w.batch, w.seq_len, w.heads, w.head_dim) for w in workloads if not w.causal}
        batches = {197: 64, 512: 32} if kind == "gpu" else {197: 8, 512: 4}
        shapes = {(m, b, n, 12, 64) for n, b in batches.items() for m in ("train", "infer")}
        assert short == (set() if effort == "quick" else shapes)


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True}, {"heads": 8}, {"head_dim": 32}, {"seq_lens": (1024,)}, {"batch_size": 2}, {"ranks": 2},
        {"segment_lengths": (128,), "dilation_rates": (2,)}, {"longest": 4096, "heads": 4, "causal": True},
    ],
)  # fmt: skip
def test_a_request_that_names_a_shape_has_no_cells_of_another(changes: dict[str, Any]) -> None:
    cells = cells_for(ProbeRequest(**changes), FACTS)
    assert {(c.workload.causal, c.workload.heads) for c in cells} == {(True, changes.get("heads", 4))}


@pytest.mark.parametrize(
    ("longest", "effort", "lengths"),
    [
        (512, "standard", [512]),
        (197, "quick", [197]),
        (1024, "standard", [1024]),
        (1500, "standard", [1024, 1500]),  # beyond the reach of a row at 1024
        (1400, "standard", [1024]),
        (40960, "standard", [1024, 2048, 4096, 8192, 16384, 32768]),
        (131072, "standard", [1024, 2048, 4096, 8192, 16384, 32768, 65536]),
        (131072, "quick", [1024, 4096, 16384]),
        (131072, "full", [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]),
        (1 << 20, "full", [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]),
    ],
)
def test_a_models_lengths_are_powers_of_two_up_to_its_longest(longest: int, effort: str, lengths: list[int]) -> None:
    gpu = dataclasses.replace(FACTS, vendor="nvidia", arch="sm_90", memory_mib=81559)
    request = ProbeRequest(longest=longest, effort=effort, dense=True, modes=("infer",), precision="bf16")  # type: ignore[arg-type]
    assert [cell.workload.seq_len for cell in cells_for(request, gpu)] == lengths
    most = {"quick": 16384, "standard": 65536, "full": 131072}[effort]
    said = left_out(request, gpu)
    assert said == (
        f"lengths beyond {most}, up to {longest}, left out at --effort {effort}: --seq-len names one" * (longest > most)
    )


def test_a_models_longest_sequence_is_split_over_ranks_and_seq_len_wins() -> None:
    gpu = dataclasses.replace(FACTS, vendor="nvidia", arch="sm_90", memory_mib=81559)
    request = ProbeRequest(longest=8192, ranks=4, dense=True, modes=("infer",))
    assert [cell.workload.seq_len for cell in cells_for(request, gpu)] == [1024, 2048]
    request = replace(request, seq_lens=(777,), longest=1 << 20)
    assert [cell.workload.seq_len for cell in cells_for(request, gpu)] == [777]
    assert left_out(request, gpu) == ""


def test_options_override_the_grid() -> None:
    request = ProbeRequest(
        modes=("train",), causal=False, seq_lens=(777,), batch_size=3, heads=8, kv_heads=2, head_dim=32,
        segment_lengths=(128,), dilation_rates=(2,), precision="fp16",
    )  # fmt: skip
    (cell,) = cells_for(request, FACTS)
    workload = cell.workload
    assert (workload.mode, workload.causal, workload.seq_len, workload.batch) == ("train", False, 777, 3)
    assert (workload.heads, workload.kv_heads, workload.head_dim, workload.dtype) == (8, 2, 32, "fp16")
    assert str(workload.pattern) == "[128]/[2]"
    assert cell.main_dtypes == ("fp16",)


@pytest.mark.parametrize(
    ("precision", "dtype", "main", "narrow"),
    [
        ("auto", "fp32", ("fp32",), ("tf32", "bf16", "fp16")),
        ("fp32", "fp32", ("fp32",), ()),
        ("tf32", "fp32", ("fp32",), ("tf32",)),
        ("bf16", "bf16", ("bf16",), ()),
    ],
)
def test_precision_says_what_may_win_and_what_may_only_serve_auto(
    precision: str, dtype: str, main: tuple[str, ...], narrow: tuple[str, ...]
) -> None:
    cell = cells_for(ProbeRequest(precision=precision), FACTS)[0]  # type: ignore[arg-type]
    assert (cell.workload.dtype, cell.main_dtypes, cell.narrow_dtypes) == (dtype, main, narrow)


def test_mismatched_options_are_usage_errors() -> None:
    for request in (
        ProbeRequest(heads=6, kv_heads=4),
        ProbeRequest(segment_lengths=(128, 256), dilation_rates=(1,)),
        ProbeRequest(segment_lengths=(128,)),
    ):
        with pytest.raises(UsageFailure):
            cells_for(request, FACTS)


def test_workloads_too_large_for_the_device_are_left_out_and_said_so(tmp_path: Path) -> None:
    """256 k positions of 4 heads x 64 in fp32 take 1 GiB in inference and 2 in training."""
    probed = Machine(tmp_path)
    environment = replace(probed.environment, facts=replace(FACTS, memory_mib=6000))
    notes: list[str] = []

    class Heard(ProbeObserver):
        def note(self, text: str) -> None:
            notes.append(text)

    asked = ProbeRequest(seq_lens=(512, 1 << 18, 1 << 19), dense=True, dry_run=True)
    result = run_probe(asked, Heard(), environment)
    assert result.dry_run is not None
    assert [(c.workload.seq_len, c.workload.mode) for c in result.dry_run.cells] == [
        (512, "train"), (512, "infer"), (1 << 18, "infer")
    ]  # fmt: skip
    (note,) = notes
    assert note.startswith("left out (and 2 larger workloads): train dense causal B1 S262144 H4 D64 fp32: its tensors")
    assert "25 % of the device's 6000 MiB" in note
    notes.clear()
    run_probe(replace(asked, seq_lens=(512,)), Heard(), environment)
    assert notes == []


def test_dense_alone_leaves_the_dilated_pattern_out() -> None:
    cells = cells_for(ProbeRequest(dense=True), FACTS)
    assert cells
    assert all(cell.workload.pattern.dense for cell in cells)


def test_the_dilated_pattern_of_the_grid_nests() -> None:
    widest = max(branch.segment for branch in LONGNET_CPU.branches)
    assert all(widest % branch.segment == 0 for branch in LONGNET_CPU.branches)


def test_decoding_is_measured_where_it_is_asked_for_alone_and_for_one_sequence_and_many() -> None:
    gpu = dataclasses.replace(FACTS, vendor="nvidia", arch="sm_90", memory_mib=81559)
    workloads = [cell.workload for cell in cells_for(ProbeRequest(modes=("decode",), seq_lens=(8192,)), gpu)]
    assert {w.mode for w in workloads} == {"decode"}
    assert sorted(w.batch for w in workloads if w.pattern.dense) == [1, 8, 64]
    named = cells_for(ProbeRequest(modes=("infer", "decode"), seq_lens=(8192,), batch_size=5), gpu)
    assert {(cell.workload.mode, cell.workload.batch) for cell in named} == {("infer", 5), ("decode", 5)}
