"""Two hosts, as network namespaces with a link between them, and torchrun's rendezvous over it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import LIMIT_S

ROOT = Path(__file__).parents[4]
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that reach each other, and nothing else."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the ip command")
    names = (f"ring{os.getpid()}a", f"ring{os.getpid()}b")
    links = (f"ve{os.getpid()}a", f"ve{os.getpid()}b")
    made = _ip("netns", "add", names[0])
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        steps = [("netns", "add", names[1]), ("link", "add", links[0], "type", "veth", "peer", "name", links[1])]
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            steps += [
                ("link", "set", link, "netns", name),
                ("-n", name, "addr", "add", f"{address}/24", "dev", link),
                ("-n", name, "link", "set", link, "up"),
                ("-n", name, "link", "set", "lo", "up"),
            ]
        for step in steps:
            done = _ip(*step)
            assert done.returncode == 0, (step, done.stderr)
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)
        _ip("link", "del", links[0])


def _torchrun(host: str, node: int, checked: Path) -> subprocess.Popen[str]:
    command = [
        "ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run",
        "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{ADDRESSES[0]}:29777", "--rdzv-id", "two-hosts", "--local-addr", ADDRESSES[node],
        "--rdzv-conf", f"is_host={1 - node},join_timeout={LIMIT_S:.0f}",
        str(ROOT / "tests" / "support" / "ring" / "two_hosts_main.py"), str(checked),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": f"ve{os.getpid()}{'ab'[node]}",
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
