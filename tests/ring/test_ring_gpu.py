"""NCCL: every schedule on all GPUs of this host against one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_nccl_as_on_one_gpu() -> None:
    count = min(4, torch.cuda.device_count())
    if count < 2:
        pytest.skip("needs two GPUs")
    world = 4 if count == 4 else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("schedules_main.py"))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "checked ring dense" in done.stdout
