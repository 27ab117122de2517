"""The training example gives one loss on one rank and on several, with FSDP2 along the other dimension."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "train_ring.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=100)


def run_losses(*command: str) -> list[float]:
    done = run(*command)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_one_loss_whatever_the_ranks() -> None:
    sizes = ("--steps", "10", "--seq-len", "96", "--batch-size", "2")
    alone = run_losses(EXAMPLE, *sizes)
    spread = run_losses(*TORCHRUN, "4", EXAMPLE, *sizes, "--sequence-ranks", "2")
    assert len(alone) == 2
    assert alone[-1] < alone[0] < 5.6  # below the loss of a guess, ln 256, and falling
    assert all(abs(a - b) < 2e-4 for a, b in zip(alone, spread, strict=True))


def test_ranks_may_hold_different_numbers_of_positions() -> None:
    """A length that no number of ranks divides gives the loss that one rank has."""
    sizes = ("--steps", "5", "--seq-len", "97", "--batch-size", "2")
    alone = run_losses(EXAMPLE, *sizes)
    spread = run_losses(*TORCHRUN, "2", EXAMPLE, *sizes)
    assert len(alone) == 1
    assert all(abs(a - b) < 2e-4 for a, b in zip(alone, spread, strict=True))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ((*TORCHRUN, "2", EXAMPLE, "--seq-len", "3"), "--seq-len: total_length is 3: zigzag layout over 2 ranks"),
        ((EXAMPLE, "--seq-len", "99999999"), "--seq-len is 99999999; with a text of "),
    ],
    ids=["too-short-for-the-ranks", "longer-than-the-text"],
)
def test_what_cannot_be_is_one_line(command: tuple[str, ...], told: str) -> None:
    done = run(*command)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "train_ring.py: error: " in line]
    assert len(said) == 1, done.stderr
    assert told in said[0]
    assert 'train_ring.py", line' not in done.stderr  # what torchrun says of it is no traceback of ours
