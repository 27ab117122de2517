"""Benchmarks on a machine that lacks what they measure."""

from __future__ import annotations

import json
import re
import runpy
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ON_GPUS = (
    "decode",
    "dense",
    "dilated",
    "encoder_layer",
    "fused_ops",
    "generate",
    "launch",
    "memory",
    "packed",
    "ring",
    "triton_kernel",
)


def end_of(name: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """What the script gives to ``sys.exit``: a text goes to stderr, and the exit status is 1."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / f"{name}.py")])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("name", ON_GPUS)
def test_without_a_gpu_a_benchmark_ends_with_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    said = end_of(name, monkeypatch)
    assert isinstance(said, str)
    assert said.startswith(f"{name}.py: needs 1 NVIDIA GPU, and torch {torch.__version__} finds 0 here; ")
    assert "\n" not in said


def test_packed_documents_are_timed_on_a_cpu_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    small = "--device cpu --profile none --documents 3 --tokens 24 --heads 2 --kv-heads 1 --head-dim 8"
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "packed.py"), *small.split()])
    runpy.run_path(sys.argv[0], run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("module_over_best") == 2
    assert "3 documents in 24 tokens, forward+backward" in said


def test_the_ring_says_how_to_start_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert "torchrun --standalone" in str(end_of("ring", monkeypatch))


def test_the_picture_is_made_of_the_committed_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = tmp_path / "dense.svg"
    monkeypatch.setattr(sys, "argv", ["plot_dense.py", "--output", str(made)])
    monkeypatch.syspath_prepend(BENCHMARKS)
    runpy.run_path(str(BENCHMARKS / "plot_dense.py"), run_name="__main__")
    committed = BENCHMARKS.parent / "docs" / "dense.svg"
    assert made.read_text("utf-8") == committed.read_text("utf-8"), "run: python benchmarks/plot_dense.py"
    xml.etree.ElementTree.parse(made)
    assert "http" not in made.read_text("utf-8").replace("http://www.w3.org/2000/svg", ""), "it loads nothing"


def test_the_figures_of_the_pages_are_the_committed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    made = runpy.run_path(str(BENCHMARKS / "page_tables.py"))
    texts = {page: page.read_text("utf-8") for page in made["PAGES"]}
    for page, text in texts.items():
        assert made["rewritten"](text) == text, f"{page.name}: run python benchmarks/page_tables.py"
    shown = [name for text in texts.values() for _, name, _ in made["BLOCK"].findall(text)]
    assert sorted(shown) == sorted(made["FIGURES"])
    (performance,) = (text for page, text in texts.items() if page.name == "performance.md")
    prose = made["BLOCK"].sub("", performance)
    assert re.findall(r"\d\.\d+|\d (?:ms|us|%|times)", prose) == [], "what was measured stands in a block"


def test_decoding_is_tried_on_any_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["decode.py", "--tiny", "--profile", "none", "--output", str(tmp_path)])
    monkeypatch.syspath_prepend(BENCHMARKS)
    runpy.run_path(str(BENCHMARKS / "decode.py"), run_name="__main__")
    rows = json.loads((tmp_path / "decode.json").read_text("utf-8"))["rows"]
    assert [row["work"].partition(" H32")[0] for row in rows] == [
        "decode B1 S512",
        "decode B2 S128",
        "prefill chunk B1 64 of S512",
    ]
    assert all(row["differs"] < 1e-2 for row in rows[:2])
    assert "share_of_copy" in capsys.readouterr().out


@pytest.mark.parametrize("more", ["", "--batch 2 --padded"])
def test_generation_is_timed_on_a_cpu_too(more: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    small = f"--device cpu --tiny --profile none --layers 1 --tokens 4 --turns 1 --lengths 9 {more} --output {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["generate.py", *small.split()])
    monkeypatch.syspath_prepend(BENCHMARKS)
    runpy.run_path(str(BENCHMARKS / "generate.py"), run_name="__main__")
    (row,) = json.loads((tmp_path / "generate.json").read_text("utf-8"))["rows"]
    assert row["same_tokens"] == 1.0
    assert row["ringtune_ms"] > 0
