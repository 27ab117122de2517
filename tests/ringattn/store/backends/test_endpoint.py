"""Servers that are gone: found out before the client that talks to them is imported, and asked once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_samples import H100, dense_entry, measured

from ringattn.errors import StoreError
from ringattn.store.backends import endpoint
from ringattn.store.backends.endpoint import check_reachable, endpoint_of
from ringattn.store.backends.folder import Folder
from ringattn.store.lookup import asked_stores, find_profiles, stored_profiles
from ringattn.store.store import Store

pytest.importorskip("fsspec")
ROOT = Path(__file__).parents[4]
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*PROXIES, *map(str.upper, PROXIES), "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stored_profiles.cache_clear()
    yield
    stored_profiles.cache_clear()


@pytest.fixture
def closed_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


ONE = {"AWS_ENDPOINT_URL": "http://one:9000"}


@pytest.mark.parametrize(
    ("place", "variables", "configured", "found"),
    [
        ("https://host/path", {}, {}, ("host", 443)),
        ("http://me:secret@host:81/path", {}, {}, ("host", 81)),
        ("s3://bucket/x", {}, {}, None),
        ("s3://bucket/x", ONE, {}, ("one", 9000)),
        ("s3://bucket/x", {**ONE, "AWS_ENDPOINT_URL_S3": "https://two"}, {}, ("two", 443)),
        ("s3://bucket/x", ONE, {"endpoint_url": "http://three"}, ("three", 80)),
        ("s3://bucket/x", ONE, {"client_kwargs": {"endpoint_url": "http://four"}}, None),
        ("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://one:port"}, {}, None),
        ("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://[::1]:9000"}, {}, ("::1", 9000)),
        ("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://[::1"}, {}, None),
        ("s3://bucket/x", {"AWS_ENDPOINT_URL": "one:9000"}, {}, None),
        ("gs://bucket/x", ONE, {}, None),
        ("/some/folder", ONE, {}, None),
    ],
)
def test_the_server_is_that_of_the_client(
    place: str, variables: dict[str, str], configured: dict[str, Any], found: tuple[str, int] | None
) -> None:
    assert endpoint_of(place, variables, configured) == found


def test_a_server_behind_a_proxy_is_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert endpoint_of("s3://bucket/x", ONE, {}) is None
    assert endpoint_of("https://host/x", {}, {}) == ("host", 443)
    monkeypatch.setenv("no_proxy", "one")
    assert endpoint_of("s3://bucket/x", ONE, {}) == ("one", 9000)


def test_a_server_that_listens_is_not_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        check_reachable("s3://bucket/x")
    with pytest.raises(StoreError, match=r"s3://bucket/x: 127.0.0.1 port \d+ cannot be reached: Connection refused"):
        check_reachable("s3://bucket/x")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError(), "did not answer within 1 s"),
        (socket.gaierror(-2, "Name or service not known"), "one port 9000 cannot be reached: Name or service not"),
        (OSError(101, "Network is unreachable"), "one port 9000 cannot be reached: Network is unreachable"),
    ],
)
def test_a_server_that_cannot_be_reached_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise error

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one:9000")
    monkeypatch.setattr(endpoint.socket, "create_connection", fail)
    with pytest.raises(StoreError, match=f"s3://bucket/x: {said}") as raised:
        check_reachable("s3://bucket/x")
    assert str(raised.value).isprintable()


DEAD = """
import sys
from ringattn.store import lookup
from ringattn.store.lookup import find_profiles
from machine_samples import H100
from patience import LIMIT_S
lookup.ANSWER_S = LIMIT_S  # a refused connection was one without an answer in 1 s, under load
located, notes = find_profiles(None, H100)
assert located
(note,) = notes
assert note.startswith("s3://bucket/x: 127.0.0.1 port"), note
assert note.endswith("cannot be reached: Connection refused; skipped"), note
assert find_profiles(None, H100)[1] == notes
assert not {"s3fs", "botocore", "aiohttp"} & set(sys.modules)
"""


def test_a_dead_server_costs_no_import_of_its_client(tmp_path: Path, closed_port: int) -> None:
    """The import took more than all else."""
    pytest.importorskip("s3fs")
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{closed_port}",
        "RINGTUNE_STORE": "s3://bucket/x",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests/support/ringattn"))),
    }
    done = subprocess.run(
        [sys.executable, "-c", DEAD], env={**os.environ, **variables}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_which_asks_a_dead_server_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at other kinds waited for it a second time."""
    from autotune.cli.store.candidates import candidates

    asked: list[object] = []

    def fail(address: object, **keywords: object) -> None:
        asked.append(address)
        raise TimeoutError

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one:9000")
    monkeypatch.setattr(endpoint.socket, "create_connection", fail)
    notes: list[str] = []
    candidates(H100, 1, ("s3://bucket/x",), notes)
    assert (asked, notes) == ([("one", 9000)], [])


def test_the_folders_are_read_while_a_store_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.profile import locations

    (tmp_path / "shared").mkdir()
    Store(Folder(tmp_path / "shared")).push(measured(H100, dense_entry()))
    order: list[str] = []
    shipped = locations.shipped_folder
    monkeypatch.setattr(locations, "shipped_folder", lambda: (order.append("shipped"), shipped())[1])
    answer = asked_stores(H100, 1, (str(tmp_path / "shared"),))

    def waited() -> tuple[Any, ...]:
        order.append("waited")
        return answer().located

    located, _ = locations.collect(stored=waited)
    assert order == ["shipped", "waited"]
    origins = [entry.origin for entry in located]
    assert origins.index("store") < origins.index("shipped")
    assert [entry.origin for entry in find_profiles(None, H100, places=[str(tmp_path / "shared")])[0]] == origins
