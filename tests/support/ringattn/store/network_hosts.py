"""Two hosts, as network namespaces with a link between them, and an S3-compatible server on one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from patience import LIMIT_S

ROOT = Path(__file__).parents[4]
ADDRESSES = ("10.213.77.1", "10.213.77.2")
NOBODY = "10.213.77.9"  # what is sent there is dropped
PORT = 9000
S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


def link_of(host: int) -> str:
    """The name of a host's end of the link."""
    return f"ve{os.getpid()}{'ab'[host]}"


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that reach each other, and nothing else; skips where there can be none."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the ip command")
    names = (f"ring{os.getpid()}a", f"ring{os.getpid()}b")
    made = _ip("netns", "add", names[0])
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        steps = [("netns", "add", names[1]), ("link", "add", link_of(0), "type", "veth", "peer", "name", link_of(1))]
        for number, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            steps += [
                ("link", "set", link_of(number), "netns", name),
                ("-n", name, "addr", "add", f"{address}/24", "dev", link_of(number)),
                ("-n", name, "link", "set", link_of(number), "up"),
                ("-n", name, "link", "set", "lo", "up"),
            ]
        for step in steps:
            done = _ip(*step)
            assert done.returncode == 0, (step, done.stderr)
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)
        _ip("link", "del", link_of(0))


def drop_what_is_sent_to_nobody(hosts: tuple[str, str]) -> None:
    """Let what the first host sends to NOBODY vanish, as behind a firewall: the second is not NOBODY, and no router."""
    shown = _ip("-n", hosts[1], "-brief", "link", "show", "dev", link_of(1))
    address = next(word for word in shown.stdout.split() if word.count(":") == 5)
    done = _ip("-n", hosts[0], "neigh", "add", NOBODY, "lladdr", address, "dev", link_of(0))
    assert done.returncode == 0, done.stderr


# One request at a time: what checks that an object is not there and then makes it is one step, as on S3.
_SERVER = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple(sys.argv[1], int(sys.argv[2]), DomainDispatcherApplication(create_backend_app), threaded=False)
"""
_READY = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1)"


@contextmanager
def s3_server(host: str | None = None, bucket: str = "bucket") -> Iterator[dict[str, str]]:
    """An S3-compatible server with one bucket, on the first of two hosts or here: the variables that reach it."""
    pytest.importorskip("moto", reason="an S3-compatible server")
    pytest.importorskip("s3fs")
    port = PORT
    if host is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    address = "127.0.0.1" if host is None else ADDRESSES[0]
    inside = [] if host is None else ["ip", "netns", "exec", host]
    where = [address, str(port)]
    server = subprocess.Popen(
        [*inside, sys.executable, "-c", _SERVER, *where], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        end_s = time.monotonic() + LIMIT_S
        while subprocess.run([*inside, sys.executable, "-c", _READY, *where], stderr=subprocess.DEVNULL).returncode:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < end_s, "the server does not listen"
            time.sleep(0.2)
        environment = {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://{address}:{port}"}
        make = f"import s3fs; s3fs.S3FileSystem().mkdir({bucket!r})"
        subprocess.run([*inside, sys.executable, "-c", make], env={**os.environ, **environment}, check=True)
        yield environment
    finally:
        server.kill()
        server.wait()
