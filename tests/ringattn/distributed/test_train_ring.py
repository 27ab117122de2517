"""The training example gives one loss on one rank and on several, with FSDP2 along the other dimension."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import LIMIT_S

ROOT = Path(__file__).parents[3]
EXAMPLE = str(ROOT / "examples" / "train_ring.py")


def run_ranks(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    command = [sys.executable, *start, EXAMPLE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)


@pytest.fixture
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The example on one rank, in this process, which has loaded what it needs."""
    monkeypatch.setattr(sys, "argv", [EXAMPLE, *arguments])
    runpy.run_path(EXAMPLE, run_name="__main__")


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]


@pytest.mark.usefixtures("_on_a_cpu")
def test_one_loss_whatever_the_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a length that no number of ranks divides, so that they hold different numbers of positions."""
    sizes = ("--steps", "10", "--seq-len", "97", "--batch-size", "2")
    run_here(monkeypatch, *sizes)
    alone = losses(capsys.readouterr().out)
    done = run_ranks(4, *sizes, "--sequence-ranks", "2")
    assert done.returncode == 0, done.stderr
    spread = losses(done.stdout)
    assert len(alone) == 2
    assert alone[-1] < alone[0] < 5.6  # below the loss of a guess, ln 256, and falling
    assert all(abs(a - b) < 2e-4 for a, b in zip(alone, spread, strict=True))


def assert_one_line(stderr: str, told: str) -> None:
    said = [line for line in stderr.splitlines() if "train_ring.py: error: " in line]
    assert len(said) == 1, stderr
    assert told in said[0]
    assert 'train_ring.py", line' not in stderr  # what torchrun says of it is no traceback of ours


def test_a_length_too_short_for_the_ranks_is_one_line() -> None:
    done = run_ranks(2, "--seq-len", "3")
    assert done.returncode != 0
    assert_one_line(done.stderr, "--seq-len: total_length is 3: zigzag layout over 2 ranks")


@pytest.mark.usefixtures("_on_a_cpu")
def test_a_length_beyond_the_text_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_here(monkeypatch, "--seq-len", "99999999")
    assert_one_line(capsys.readouterr().err, "--seq-len is 99999999; with a text of ")
