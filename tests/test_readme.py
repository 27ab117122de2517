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
from autotune.probe.workloads.grid import FIRST_STEPS, cells_for
from ringattn.arguments import dtype_name
from ringattn.hardware.facts import detect
from ringattn.planning.matching import entries_for, entry_for
from ringattn.planning.plan import Origin
from ringattn.profile.schema import Fingerprint, PlanEntry, Profile

TEXT = text_of(README)
(TEN_LINES,) = blocks("python", README)


def test_it_has_the_blocks_that_are_tested() -> None:
    assert {block.language for block in blocks_of(README)} == {"console", "python"}


def test_its_python_runs(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", TEN_LINES.text], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it prints the plan that ran"


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "getting-started.md"], ids=lambda page: page.name)
def test_the_first_cells_of_a_cpu_serve_the_first_python(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a newcomer has just measured, however short, serves the first lines they run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran: dict[str, Any] = {}
    for block in blocks("python", page):
        exec(block.text, ran)  # noqa: S102 - the page's own lines
    q, facts = ran["q"], detect("cpu")
    asked = ran["attn"].shape.workload(q.shape[1], dtype_name(q.dtype) or "", q.requires_grad, q.shape[0])
    assert [cell.workload for cell in cells_for(ProbeRequest(effort="quick"), facts)[:3]] == [*FIRST_STEPS]
    rows = tuple(PlanEntry(workload, refusal="its workload alone counts here") for workload in FIRST_STEPS)
    answering, _ = entries_for(Profile("measured", Fingerprint.of(facts), plans=rows), asked)
    assert entry_for(answering, asked, facts.sm_count) is not None


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
