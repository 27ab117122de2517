"""Two hosts, as network namespaces with a link between them, and torchrun's rendezvous over it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from network_hosts import ADDRESSES, link_of, two_hosts
from patience import LIMIT_S

ROOT = Path(__file__).parents[4]


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    with two_hosts() as names:
        yield names


def _torchrun(host: str, node: int, checked: Path) -> subprocess.Popen[str]:
    command = [
        "ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run",
        "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{ADDRESSES[0]}:29777", "--rdzv-id", "two-hosts", "--local-addr", ADDRESSES[node],
        "--rdzv-conf", f"is_host={1 - node},join_timeout={LIMIT_S:.0f}",
        str(ROOT / "tests" / "support" / "ring" / "rank_mains" / "two_hosts_main.py"), str(checked),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": link_of(node),
    }
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_as_on_one_rank_over_two_hosts(hosts: tuple[str, str], tmp_path: Path) -> None:
    runs = [_torchrun(host, node, tmp_path) for node, host in enumerate(hosts)]
    try:
        texts = [run.communicate(timeout=LIMIT_S)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    for run, text in zip(runs, texts, strict=True):
        assert run.returncode == 0, text
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys("01", "4"), texts
