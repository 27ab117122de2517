"""The training example gives one loss on one rank and on several, with FSDP2 along the other dimension."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from example_ranks import run_here, run_ranks

ROOT = Path(__file__).parents[4]
EXAMPLE = str(ROOT / "examples" / "train_ring.py")


@pytest.fixture
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]


@pytest.mark.usefixtures("_on_a_cpu")
def test_one_loss_whatever_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also of a length that no number of ranks divides, so that they hold different numbers of positions."""
    sizes = ("--steps", "10", "--seq-len", "97", "--batch-size", "2")
    run_here(EXAMPLE, monkeypatch, *sizes)
    alone = losses(capsys.readouterr().out)
    codes, out, err = run_ranks(EXAMPLE, 4, tmp_path, *sizes, "--sequence-ranks", "2")
    assert codes == [0] * 4, err
    spread = losses(out)
    assert len(alone) == 2
    assert alone[-1] < alone[0] < 5.6  # below the loss of a guess, ln 256, and falling
    assert all(abs(a - b) < 2e-4 for a, b in zip(alone, spread, strict=True))


def assert_one_line(stderr: str, told: str) -> None:
    said = [line for line in stderr.splitlines() if "train_ring.py: error: " in line]
    assert len(said) == 1, stderr
    assert told in said[0]
    assert 'train_ring.py", line' not in stderr


def test_a_length_too_short_for_the_ranks_is_one_line(tmp_path: Path) -> None:
    codes, _, err = run_ranks(EXAMPLE, 2, tmp_path, "--seq-len", "3")
    assert codes == [2, 2]
    assert_one_line(err, "--seq-len: total_length is 3: zigzag layout over 2 ranks")


@pytest.mark.usefixtures("_on_a_cpu")
def test_a_length_beyond_the_text_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_here(EXAMPLE, monkeypatch, "--seq-len", "99999999")
    assert_one_line(capsys.readouterr().err, "--seq-len is 99999999; with a text of ")
