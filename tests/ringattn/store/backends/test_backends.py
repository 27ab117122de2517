"""Back ends: what is written is whole, what is read is bounded, and no name or link leads out of the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringattn.errors import StoreError
from ringattn.store.backends.backend import Backend, open_backend
from ringattn.store.backends.folder import Folder
from ringattn.store.backends.remote import Remote
from ringattn.store.names import shown_url

pytest.importorskip("fsspec")
ROOT = Path(__file__).parents[4]


@pytest.fixture(params=["folder", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return open_backend(str(tmp_path) if request.param == "folder" else f"memory://{tmp_path.name}/store")


def test_what_is_put_is_read_listed_and_deleted(backend: Backend) -> None:
    assert backend.names("profiles") == ()
    for name in ("profiles/b/one.yaml", "profiles/a/two.yaml", "other/x"):
        backend.put(name, name.encode())
    assert backend.names("profiles") == ("profiles/a/two.yaml", "profiles/b/one.yaml")
    assert backend.names("profiles/a") == ("profiles/a/two.yaml",)
    assert backend.read("other/x", 100) == b"other/x"
    backend.put("other/x", b"new")
    assert backend.read("other/x", 3) == b"new"
    backend.delete("other/x")
    backend.delete("other/x")
    with pytest.raises(FileNotFoundError):
        backend.read("other/x", 100)


def test_one_creates_and_the_next_does_not(backend: Backend) -> None:
    assert backend.create("leases/k/00000001", b"first")
    assert not backend.create("leases/k/00000001", b"second")
    assert backend.read("leases/k/00000001", 100) == b"first"
    assert backend.lease_refusal() == ""
    assert backend.names("leases") == ("leases/k/00000001",)


def test_a_huge_file_is_refused_in_one_line(backend: Backend) -> None:
    backend.put("profiles/a/big", b"x" * 101)
    with pytest.raises(StoreError, match="has more than 100 bytes") as raised:
        backend.read("profiles/a/big", 100)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["../out", "a/../../out", "/etc/passwd", "a\0b", ".hidden", "a//b", "", "a/b/c/d/e", "a\n", "x" * 200]
)
def test_a_name_that_is_none_is_refused_in_one_line(backend: Backend, name: str, tmp_path: Path) -> None:
    (tmp_path.parent / "out").write_bytes(b"secret")
    for act in (
        lambda: backend.read(name, 100),
        lambda: backend.put(name, b""),
        lambda: backend.create(name, b""),
        lambda: backend.delete(name),
    ):
        with pytest.raises(StoreError, match="is no name in a store") as raised:
            act()
        assert str(raised.value).isprintable()
    assert (tmp_path.parent / "out").read_bytes() == b"secret"


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    root, secret = tmp_path / "store", tmp_path / "secret"
    (root / "profiles").mkdir(parents=True)
    secret.mkdir()
    (secret / "file").write_bytes(b"secret")
    (root / "profiles" / "link").symlink_to(secret / "file")
    (root / "profiles" / "inner").symlink_to("link")
    (root / "profiles" / "behind").symlink_to(secret)
    (root / "profiles" / "folder").mkdir()
    os.mkfifo(root / "profiles" / "pipe")
    store = Folder(root)
    for name in ("link", "inner", "behind/file", "pipe", "folder"):
        with pytest.raises(StoreError, match=f"profiles/{name}: is") as raised:
            store.read(f"profiles/{name}", 100)
        assert len(str(raised.value).splitlines()) == 1
    with pytest.raises(StoreError, match="lies behind one"):
        store.put("profiles/behind/new", b"")
    with pytest.raises(StoreError, match="lies behind one"):
        store.names("profiles/behind")
    assert "profiles/behind/file" not in store.names("profiles")
    assert [path.name for path in secret.iterdir()] == ["file"]


def test_a_store_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    store = Folder(tmp_path / "absent")
    for act in (lambda: store.names("profiles"), lambda: store.put("a/b", b""), lambda: store.create("a/b", b"")):
        with pytest.raises(StoreError, match="no such folder; mount it"):
            act()
    assert not (tmp_path / "absent").exists()


def test_a_place_names_its_back_end(tmp_path: Path) -> None:
    assert isinstance(open_backend(str(tmp_path)), Folder)
    assert open_backend(f"file://{tmp_path}").url == str(tmp_path)
    assert isinstance(open_backend("memory://x"), Remote)
    for place in ("s3://", "gs:///prefix", "http:///x", "https://"):
        with pytest.raises(StoreError, match=f"^{place}: names no bucket or server; "):
            open_backend(place)
    with pytest.raises(StoreError, match=r"is it s3://bucket/x\?$"):
        open_backend("s3:/bucket/x")
    with pytest.raises(StoreError, match="relative folder"):
        open_backend("some/folder")
    with pytest.raises(StoreError, match="nosuch"):
        open_backend("nosuch://bucket")
    assert shown_url("https://me:secret@host/x") == "https://me:***@host/x"


def test_a_url_without_fsspec_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(StoreError, match=r"install the extra: pip install '\.\[store\]'"):
        open_backend("s3://bucket/profiles")


def test_a_url_whose_package_is_missing_names_the_extra_and_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(scheme: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    with pytest.raises(StoreError, match=r"'\.\[store\]', and beside it: Install s3fs to access S3"):
        open_backend("s3://bucket/profiles")


def test_a_back_end_that_cannot_create_on_condition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    careless = Remote("memory://careless")
    monkeypatch.setattr(Remote, "create", lambda self, name, content: True)
    assert "ignores the condition" in careless.lease_refusal()
    monkeypatch.setattr(careless, "_scheme", "sftp")
    assert careless.lease_refusal().startswith("sftp cannot")


def test_a_back_end_without_whole_puts_renames_what_it_wrote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Remote(f"memory://{tmp_path.name}/sftp")
    monkeypatch.setattr(store, "_scheme", "sftp")
    files, _ = store._connected
    piped: list[str] = []
    real = files.pipe_file
    monkeypatch.setattr(files, "pipe_file", lambda path, content, **kw: (piped.append(path), real(path, content, **kw)))
    store.put("profiles/a/file", b"content")
    assert store.read("profiles/a/file", 100) == b"content"
    assert store.names("profiles") == ("profiles/a/file",)
    assert [path.rpartition("/")[2][0] for path in piped] == ["."]


def test_a_fault_of_the_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Exception):
        """An error of its own, as botocore has them."""

    def fail(*arguments: object, **keywords: object) -> None:
        raise Odd("no\ncredentials")

    store = Remote("memory://faulty")
    monkeypatch.setattr(store._connected[0], "find", fail)
    with pytest.raises(StoreError, match="memory://faulty: profiles: no credentials"):
        store.names("profiles")


def test_a_server_that_is_gone_is_no_empty_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec leaves out what it cannot list unless it is told otherwise."""
    fsspec = pytest.importorskip("fsspec")

    class Gone(fsspec.AbstractFileSystem):  # type: ignore[name-defined, misc]
        protocol = "gone"

        def ls(self, path: str, detail: bool = True, **keywords: object) -> list[object]:
            raise ConnectionRefusedError("nobody listens")

    fsspec.register_implementation("gone", Gone, clobber=True)
    with pytest.raises(StoreError, match="gone://server/x: profiles: nobody listens"):
        open_backend("gone://server/x").names("profiles")


KILLED = """
import os, signal, sys
from pathlib import Path
from ringattn.store.backends.folder import Folder
from ringattn.store.names import shown_url
Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
Folder(Path(sys.argv[1])).put("profiles/a/file", b"half")
"""


def test_a_killed_writer_leaves_nothing_to_see_and_the_next_cleans_up(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "profiles" / "a").iterdir()
    assert left.read_bytes() == b"half"
    store = Folder(tmp_path)
    assert store.names("profiles") == ()
    store.put("profiles/a/one", b"1")
    assert left.exists()  # it may be another writer's, at work
    long_ago = time.time() - 7200
    os.utime(left, (long_ago, long_ago))
    store.put("profiles/a/two", b"2")
    assert not left.exists()
    assert store.names("profiles") == ("profiles/a/one", "profiles/a/two")
