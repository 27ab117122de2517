"""A PostgreSQL server for tests, in a folder of its own, and Optuna's gRPC proxy in front of one of its databases."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
from patience import LIMIT_S

DEBIAN = Path("/usr/lib/postgresql")  # where Debian puts what is not on the path
PASSWORD = "open-sesame"
OPTIONS = "-c fsync=off -c full_page_writes=off -c max_connections=60 -c listen_addresses=localhost"


def binary(name: str) -> str | None:
    """Return the path of a program of PostgreSQL, None where it is not installed."""
    folders = (str(folder / "bin") for folder in sorted(DEBIAN.glob("*"), reverse=True))
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


def not_there(why: str) -> NoReturn:
    """Skip the test; in CI, which installs all of them, it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return int(listening.getsockname()[1])


def _server_user() -> str | None:
    """Return the user to run the server as: PostgreSQL refuses root."""
    if os.getuid() != 0:
        return None
    known = {user.pw_name for user in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: the URL of its first database, and how it is stopped and started again."""

    url: str
    stop: Callable[[], None]
    start: Callable[[], None]

    def new_database(self) -> str:
        """Return the URL of a new, empty database."""
        import psycopg

        name = f"search_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(f"create database {name}")
        return self.url.rpartition("/")[0] + f"/{name}"


@contextlib.contextmanager
def postgres_server() -> Iterator[Server]:
    """Yield a running server, which asks for a password; skip where PostgreSQL or its driver is not installed."""
    initdb, pg_ctl = binary("initdb"), binary("pg_ctl")
    if initdb is None or pg_ctl is None:
        not_there("PostgreSQL is not installed: apt-get install postgresql")
    if importlib.util.find_spec("psycopg") is None:
        not_there("PostgreSQL's driver is not installed: pip install 'psycopg[binary]'")
    user, port = _server_user(), free_port()
    # Not below the folder of pytest, which only its owner may enter.
    with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as folder:
        data, password = f"{folder}/data", Path(folder) / "password"
        password.write_text(PASSWORD)
        for path in (folder, password) if user is not None else ():
            shutil.chown(path, user)

        def run(*command: str) -> None:
            subprocess.run(command, user=user, cwd=folder, check=True, capture_output=True, text=True, timeout=LIMIT_S)

        def start() -> None:
            options = f"{OPTIONS} -c port={port} -c unix_socket_directories={folder}"
            run(pg_ctl, "start", "--pgdata", data, "--wait", "--log", f"{folder}/log", "--options", options)

        def stop() -> None:
            run(pg_ctl, "stop", "--pgdata", data, "--mode", "immediate")

        ways = ("--auth", "scram-sha-256", "--pwfile", str(password), "--no-sync")
        run(initdb, "--pgdata", data, "--username", "tester", *ways)
        start()
        try:
            yield Server(f"postgresql+psycopg://tester:{PASSWORD}@localhost:{port}/postgres", stop, start)
        finally:
            stop()


@contextlib.contextmanager
def grpc_proxy(storage: str) -> Iterator[str]:
    """Yield the URL of Optuna's proxy in front of ``storage``, a Python expression, in a process of its own."""
    if importlib.util.find_spec("grpc") is None:
        not_there("gRPC is not installed: pip install grpcio protobuf")
    port = free_port()
    serve = (
        "import optuna\n"
        "from optuna.storages import *\n"
        "from optuna.storages import get_storage\n"
        "from optuna.storages.journal import JournalFileBackend\n"
        f"optuna.storages.run_grpc_proxy_server({storage}, host='localhost', port={port})"
    )
    server = subprocess.Popen([sys.executable, "-c", serve], stderr=subprocess.DEVNULL)
    try:
        began_s = time.monotonic()
        while True:
            assert server.poll() is None, f"the proxy ended with {server.returncode}"
            assert time.monotonic() - began_s < LIMIT_S
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
                break
            time.sleep(0.05)
        yield f"grpc://localhost:{port}"
    finally:
        server.kill()
        server.wait()
