"""The README is true: its Python runs, what it names and links exists; test_benchmarks.py has its figures."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import README, ROOT, blocks, blocks_of, run, text_of

from autotune.probe.request import ProbeRequest
from autotune.probe.workloads.grid import cells_for
from ringattn.hardware.facts import detect
from ringattn.planning.plan import Origin

TEXT = text_of(README)
(TEN_LINES,) = blocks("python", README)


def test_it_has_the_blocks_that_are_tested() -> None:
    assert {block.language for block in blocks_of(README)} == {"console", "python"}


def test_its_python_runs(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", TEN_LINES.text], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it prints the plan that ran"


def test_its_python_runs_what_a_quick_probe_of_a_cpu_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a newcomer has just measured serves the first lines they run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran: dict[str, Any] = {}
    exec(TEN_LINES.text, ran)  # noqa: S102 - the README's own lines
    batch, seq_len = ran["q"].shape[:2]
    assert ran["q"].dtype == torch.float32
    grid = {cell.workload for cell in cells_for(ProbeRequest(effort="quick"), detect("cpu"))}
    assert ran["attn"].shape.workload(seq_len, "fp32", True, batch) in grid


def test_what_it_says_of_the_printed_plan_is_what_can_be_printed() -> None:
    """Beside a plan asked for by hand: as measured, as a busy machine's probe left it, and without a profile."""
    printed = [str(Origin("profile")), str(Origin("profile", measured=False)), str(Origin("heuristic"))]
    section = TEXT.partition("The printed plan ends in")[2].partition("##")[0]
    assert re.findall(r"`\((.*?)\)`", section) == printed


def test_the_ten_lines_of_python_are_ten() -> None:
    assert "Ten lines of Python" in TEXT
    assert len(TEN_LINES.text.strip().splitlines()) <= 10


def test_it_can_be_read_in_a_minute() -> None:
    assert len(TEXT.splitlines()) <= 110


def test_it_shows_the_picture_and_links_every_page() -> None:
    assert "](docs/dense.svg)" in TEXT
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    linked = set(re.findall(r"\]\(([^)#]+)", TEXT))
    assert pages - linked == {"docs/index.md", "docs/changelog.md"}, "the site's own start, and CHANGELOG.md"
