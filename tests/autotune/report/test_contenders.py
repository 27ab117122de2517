"""The comparison of presets, torch and this machine's plan."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from machines import FACTS, workload
from rich.console import Console

from autotune.cli.machine.compare import comparison_summary
from autotune.cli.main import cli
from autotune.measure.evaluator import Block, Checked, Fault, Interference, InterferenceKind, Sample
from autotune.measure.worker_evaluator import WorkerEvaluator
from autotune.report.contenders import (
    BASELINE,
    OURS,
    Crossover,
    Standing,
    _standings,
    compare,
    contenders,
    crossovers,
    workloads_of,
)
from autotune.report.pages.contenders_page import contenders_page
from autotune.space.presets import PRESETS
from ringattn.hardware.facts import detect
from ringattn.workload import Pattern, Tunables, Workload

SHAPE: dict[str, Any] = {"causal": True, "heads": 2, "head_dim": 16, "dtype": "fp32"}


def test_everything_is_measured_against_float64_and_torch() -> None:
    cpu = torch.device("cpu")
    workloads = workloads_of([96, 64], Pattern(), mode="train", **SHAPE)
    found, _ = compare(workloads, detect(cpu), cpu, blocks=2)
    assert [s.seq_len for s in found] == [64] * (len(found) // 2) + [96] * (len(found) // 2)
    measured = {s.name: s for s in found if s.seq_len == 96 and not math.isnan(s.ms)}
    assert set(measured) >= {BASELINE, OURS, *PRESETS}
    assert measured[BASELINE].speedup == 1.0
    for standing in measured.values():
        assert 0 < standing.error < 1e-5
        assert standing.tokens_per_s == pytest.approx(96 / standing.ms * 1e3)
        assert standing.peak_bytes > 0


def test_dense_torch_is_timed_beside_a_pattern_and_has_no_error() -> None:
    cpu = torch.device("cpu")
    (asked,) = workloads_of([64], Pattern.of([16, 32], [1, 2]), mode="infer", **SHAPE)
    standings, _ = compare([asked], detect(cpu), cpu, blocks=1)
    found = {s.name: s for s in standings}
    assert found[BASELINE].ms > 0
    assert math.isnan(found[BASELINE].error)
    assert found[OURS].error < 1e-5
    assert found["torchscale"].note == "not measured: dilated attention with blocked head offsets alone"


class OutOfMemory:
    """Evaluator on which every plan but windowed ones runs out of memory, and another library fails when timed."""

    def check(self, cell: Workload, candidate: Tunables, **_: Any) -> Checked | Fault:
        own = candidate.window_tokens is None and candidate.branches[0].forward != BASELINE
        return Fault("oom", "no room") if own else Checked(1.0, 1e-6, 7, 1.0, 1.0)

    def block(self, cell: Workload, order: Sequence[Tunables], **_: Any) -> Block:
        return Block(tuple(Sample(1.0 if p.window_tokens else 4.0) for p in order))


def test_a_preset_turns_to_its_leaner_plan_after_out_of_memory() -> None:
    asked = workload(8192, dtype="fp32")
    entries = list(contenders(asked, FACTS, torch.device("cpu")))
    evaluator: Any = OutOfMemory()
    found = {s.name: s for s in _standings(asked, entries, evaluator, 3, 0, lambda line: None, [])}
    assert (found["production"].ms, found["production"].speedup) == (1.0, 4.0)
    assert "window" in found["production"].note
    assert found["collective-ring"].note == "oom: no room"
    assert math.isnan(found["collective-ring"].ms)


def test_crossovers_lie_where_the_line_between_two_speedups_is_one() -> None:
    def standings(name: str, *speedups: float, noise: float = 1.0) -> list[Standing]:
        return [
            Standing(1024 * 4**n, name, "", 1.0, 0.0, 0, 0.0, ratio, ratio / noise, ratio * noise)
            for n, ratio in enumerate(speedups)
        ]

    found = crossovers([*standings(BASELINE, 1.0, 1.0), *standings("one", 0.5, 2.0, 4.0), *standings("two", 4.0, 0.5)])
    two = round(1024 * 4 ** (2 / 3))
    assert found == [Crossover("one", 2048, 2048, 2048, slower=False), Crossover("two", two, two, two, slower=True)]
    assert not crossovers(standings("never", 0.5, math.nan, 0.9))
    (noisy,) = crossovers(standings("noisy", 0.5, 1.05, 2.0, noise=1.2))  # of the middle length nobody knows
    assert (noisy.seq_len, noisy.slower) == (4096, False)
    assert 1024 < noisy.least < 4096 < noisy.most < 16384
    assert str(noisy).endswith(f"from about 4,096 tokens on ({noisy.least:,} to {noisy.most:,})")
    assert not crossovers(standings("hidden", 0.95, 1.05, noise=1.2))
    assert not crossovers(standings("one block", 0.5, 2.0, noise=math.inf))


def test_the_command_says_what_disturbed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["compare", "--seq-len", "64", "--heads", "2", "--head-dim", "16", "--blocks", "2", "--device", "cpu"]
    real = WorkerEvaluator.block
    shares = iter((40.0, 62.0))

    def disturbed(self: WorkerEvaluator, *arguments: Any, **options: Any) -> Block:
        found = Interference(InterferenceKind.FOREIGN_LOAD, next(shares))
        return replace(real(self, *arguments, **options), disturbances=(found,))

    monkeypatch.setattr(WorkerEvaluator, "block", disturbed)
    done = CliRunner().invoke(cli, [*asked, "--json"])
    assert json.loads(done.stdout)["interference"] == ["other processes used 62 % of the CPUs"]
    said = "disturbed while it was timed: other processes used 62 % of the CPUs; measure again on a quieter machine"
    assert said in done.stderr.splitlines()


def test_the_command_prints_a_table_and_json_and_writes_a_page(tmp_path: Path) -> None:
    asked = ["compare", "--seq-len", "64", "--heads", "2", "--head-dim", "16", "--blocks", "1", "--device", "cpu"]
    table = CliRunner().invoke(cli, asked)
    assert table.exit_code == 0
    assert all(name in table.stdout for name in ("Speed-up", *PRESETS))
    page = tmp_path / "compared.html"
    document = json.loads(CliRunner().invoke(cli, [*asked, "--json", "--output", str(page)]).stdout)
    assert {entry["name"] for entry in document["standings"]} >= {BASELINE, OURS, *PRESETS}
    assert document["crossovers"] == []
    shown = page.read_text("utf-8")
    for entry in document["standings"]:
        assert entry["name"] in shown
    assert "Nowhere between the lengths measured, beyond noise." in shown
    assert "Made by <code>ringtune compare</code>" in shown
    refused = CliRunner().invoke(cli, [*asked, "--output", str(tmp_path)])
    assert refused.exit_code == 1
    assert "is a folder" in refused.stderr


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_names_and_figures_stay_whole_beside_long_reasons(columns: int) -> None:
    why = "not measured: " + "a reason of many words, " * 9
    rows = [Standing(1024, name, why) for name in PRESETS]
    rows += [Standing(1024, OURS, "flash", 123.456, 1234567.0, 2**31, 1e-6, 12.5)]
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(comparison_summary("a card", rows, []))
    shown = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert all(name in shown for name in (*PRESETS, OURS, "123 ms", "1,234,567", "2.00 GiB", "1.0e-06", "Speed-up"))


def test_the_page_escapes_what_it_is_told_and_draws_what_is_known() -> None:
    rows = [
        Standing(1024, BASELINE, "", 1.0, 1e6, 2**20, 1e-6, 1.0),
        Standing(1024, OURS, "<b>flash</b>", 0.5, 2e6, 2**20, math.nan, 2.0),
        Standing(1024, "production", "oom: no room"),
    ]
    page = contenders_page("A <card>", "train dense", rows, [Crossover(OURS, 700, 650, 800, slower=False)])
    assert "A &lt;card&gt;" in page
    assert "&lt;b&gt;flash&lt;/b&gt;" in page
    assert "this machine is faster than torch from about 700 tokens on" in page
    assert "this machine: 2,000,000 tokens/s" in page
    assert "oom: no room" in page
    assert "nan" not in page
