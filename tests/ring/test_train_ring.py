"""The training example gives one loss on one rank and on several, with FSDP2 along the other dimension."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "train_ring.py")


def run_losses(*command: str) -> list[float]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_one_loss_whatever_the_ranks() -> None:
    sizes = ("--steps", "10", "--seq-len", "96", "--batch-size", "2")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", EXAMPLE)
    alone = run_losses(EXAMPLE, *sizes)
    spread = run_losses(*torchrun, *sizes, "--sequence-ranks", "2")
    assert len(alone) == 2
    assert alone[-1] < alone[0] < 5.6  # below the loss of a guess, ln 256, and falling
    assert all(abs(a - b) < 2e-4 for a, b in zip(alone, spread, strict=True))
