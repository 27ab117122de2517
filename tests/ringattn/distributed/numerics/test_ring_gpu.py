"""On all GPUs of this host: every schedule against one of them, and the memory that they write into on each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]


def _run(script: str) -> str:
    count = min(4, torch.cuda.device_count())
    if count < 2:
        pytest.skip("needs two GPUs")
    world = 4 if count == 4 else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "support" / "ring" / "rank_mains" / script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_nccl_as_on_one_gpu() -> None:
    assert "checked ring dense" in _run("schedules_main.py")


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_what_peers_copy_is_there_after_they_met() -> None:
    assert "checked 200 rounds" in _run("peer_memory_main.py")
