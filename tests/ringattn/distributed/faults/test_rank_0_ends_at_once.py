"""Ranks that call with different inputs, of which rank 0, whose process holds the store, ends with its error."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from patience import LIMIT_S

ROOT = Path(__file__).parents[4]
PROGRAM = """
import os, time
import torch
import torch.distributed as dist
from ringattn import RingAttention
from ringattn.distributed.watchdog import Watchdog

dist.init_process_group("gloo")
module = RingAttention(4, 8, device="cpu", process_group=dist.group.WORLD)
if dist.get_rank() == 1:
    ordinary = Watchdog.wait_for

    def late(*arguments, **keywords):
        ordinary(*arguments, **keywords)
        time.sleep(0.5)

    Watchdog.wait_for = late
try:
    module(*[torch.randn(1 + dist.get_rank(), 16, 4, 8) for _ in range(3)])
except Exception as error:
    print(type(error).__name__, error, flush=True)
    os._exit(1)
"""


def test_every_rank_is_told_of_the_difference() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=os.environ
            | {
                "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            told, _ = rank.communicate(timeout=LIMIT_S)
            assert told.startswith("InputError ranks call with different inputs: rank 0 calls with batch 1"), told
    finally:
        for rank in ranks:
            rank.kill()
