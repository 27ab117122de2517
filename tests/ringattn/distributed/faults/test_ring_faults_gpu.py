"""NCCL: what goes wrong on one rank is told by the others within the group's timeout and 5 s, without a supervisor."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
TIMEOUT_S = 20.0  # of the group
START_S = 60.0


def told(fault: str, expected: str, world: int) -> float:
    """Seconds from the fault to the moment when every rank but 1 had said what is expected."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines: queue.Queue[tuple[int, float, str]] = queue.Queue()
    ranks = []

    def read(rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put((rank, time.monotonic(), line))

    for rank in range(world):
        environment = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "support" / "ring" / "rank_mains" / "faults_main.py"), fault],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | {name: str(value) for name, value in environment.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=read, args=(rank, process), daemon=True).start()
        ranks.append(process)
    try:
        return _seconds(lines, expected, {rank for rank in range(world) if rank != 1})
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _seconds(lines: queue.Queue[tuple[int, float, str]], expected: str, missing: set[int]) -> float:
    broken, said = None, []
    end = time.monotonic() + START_S
    while missing:
        try:
            rank, when, line = lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"ranks {missing} did not say {expected!r}:\n{''.join(said)}") from None
        said.append(f"{rank}: {line}")
        if "broken" in line and broken is None:
            broken, end = when, when + TIMEOUT_S + 5
        if expected in line:
            missing.discard(rank)
    assert broken is not None, "".join(said)
    return when - broken


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("killed", "rank 1 stopped responding"),
        ("killed_symmetric", "rank 1 stopped responding"),
        ("raises", "rank 1 failed: ValueError: kernel broke"),
        ("memory", "rank 1 failed: OutOfMemoryError"),
        ("profile", "one plan for all"),
        ("shape", "512 positions of"),
    ],
)
def test_every_other_rank_names_the_rank_and_the_cause(fault: str, expected: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert told(fault, expected, torch.cuda.device_count()) < TIMEOUT_S + 5
