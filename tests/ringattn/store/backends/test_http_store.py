"""Stores on a web server: what it refuses is told and not taken for a file that is not there."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine_samples import H100, dense_entry, measured

from ringattn.errors import StoreError
from ringattn.profile.schema import Fingerprint
from ringattn.store.backends.backend import open_backend
from ringattn.store.backends.bounded_backend import BoundedBackend
from ringattn.store.lookup import LocalCopy
from ringattn.store.names import ProfileName, kind_of
from ringattn.store.store import Store

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
KIND = kind_of(Fingerprint.of(H100))


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder; for a profile it answers ``status``, or hangs up where that is 0."""

    status = 200
    ended: threading.Event
    tells_sizes = True
    endless_s = -1.0  # between two parts of a page that never ends; below 0: pages end


class Handler(http.server.SimpleHTTPRequestHandler):
    def send_head(self):  # type: ignore[no-untyped-def]
        if self.server.endless_s >= 0:  # type: ignore[attr-defined]
            return self.send_for_ever(self.server.endless_s)  # type: ignore[attr-defined]
        if self.path.endswith(".yaml") and not self.server.tells_sizes:  # type: ignore[attr-defined]
            return self.send_in_parts(Path(self.translate_path(self.path)).read_bytes())
        status = self.server.status  # type: ignore[attr-defined]
        if self.path.endswith(".yaml") and status != 200:
            if status == 0:
                self.connection.close()
            else:
                self.send_error(status)
            return None
        return super().send_head()

    def send_in_parts(self, content: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        for part in (content[:100], content[100:]) if self.command == "GET" else ():
            self.wfile.write(part)
            self.wfile.flush()
            time.sleep(0.2)  # so that they arrive apart

    def send_for_ever(self, pause_s: float) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.server.ended.wait(pause_s):  # type: ignore[attr-defined]
                self.wfile.write(b"<a href='x'>x</a> " * (1 if pause_s else 2**16))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "served").mkdir()
    handler = functools.partial(Handler, directory=str(tmp_path / "served"))
    with Server(("127.0.0.1", 0), handler) as made:
        made.ended = threading.Event()
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.ended.set()
        made.shutdown()
        thread.join()


def store_of(server: Server) -> Store:
    return Store(open_backend(f"http://me:secret@127.0.0.1:{server.server_address[1]}"))


@pytest.fixture
def name(server: Server, tmp_path: Path) -> ProfileName:
    (pushed,) = Store(open_backend(str(tmp_path / "served"))).push(measured(H100, dense_entry()))
    return pushed


@pytest.mark.parametrize("status", [401, 403, 500, 503, 0])
def test_what_a_server_refuses_is_told(server: Server, name: ProfileName, tmp_path: Path, status: int) -> None:
    store = store_of(server)
    assert store.profile(name) == measured(H100, dense_entry())
    server.status = status
    with pytest.raises(StoreError, match=str(status) if status else None) as raised:
        store.content(name)
    assert "secret" not in str(raised.value)
    fetched = LocalCopy(store.url, tmp_path / "cache").fetch(store, KIND, 1)
    assert not fetched.profiles
    (note,) = fetched.notes
    assert name.digest in note
    assert "secret" not in note


@pytest.mark.parametrize("status", [404, 410])
def test_what_a_server_does_not_have_is_not_there(server: Server, name: ProfileName, status: int) -> None:
    server.status = status
    with pytest.raises(FileNotFoundError) as raised:
        store_of(server).content(name)
    assert "secret" not in str(raised.value)


def test_an_empty_folder_holds_nothing(server: Server, tmp_path: Path) -> None:
    (tmp_path / "served" / "profiles" / KIND).mkdir(parents=True)
    assert store_of(server).listed() == ((), ())
    assert store_of(server).listed(KIND) == ((), ())


def test_a_page_that_never_ends_is_given_up_by_its_size(server: Server) -> None:
    store = store_of(server)
    server.endless_s = 0.0
    with pytest.raises(
        StoreError, match=r"^http://me:\*\*\*@127\.0\.0\.1:\d+: profiles: answers with more than 16 MiB$"
    ):
        store.names()


def test_a_page_that_never_ends_is_given_up_by_its_time(server: Server) -> None:
    server.endless_s = 0.05
    backend = BoundedBackend(store_of(server).backend, 0.5)
    for ask in (lambda: backend.names("profiles"), backend.loose_files):
        with pytest.raises(StoreError, match=r"^http://me:\*\*\*@127\.0\.0\.1:\d+: did not answer within 0\.5 s$"):
            ask()


def test_a_file_whose_size_is_not_told_is_read_whole(server: Server, name: ProfileName) -> None:
    """Of such one read is what has arrived."""
    server.tells_sizes = False
    assert store_of(server).profile(name) == measured(H100, dense_entry())
