"""Store in a folder that several hosts mount: no locks, no half-written files, no links."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ringattn.errors import StoreError
from ringattn.profile.access import other_writers
from ringattn.profile.whole_file import remove_stale, replace_file
from ringattn.store.names import checked

MAX_DEPTH = 4
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder:
    """Files below ``root``, which must exist: one that is not mounted is not made in its place.

    The root may be a link. Below it links are not followed, neither to files nor to folders.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def names(self, folder: str) -> tuple[str, ...]:
        found: list[str] = []
        with self._telling(folder):
            self._check_root()
            with suppress(FileNotFoundError):
                self._walk(folder, found, MAX_DEPTH)
        return tuple(sorted(found))

    def loose_files(self) -> tuple[str, ...]:
        with self._telling("."):
            self._check_root()
            with os.scandir(self.root) as entries:
                files = [e.name for e in entries if not e.name.startswith(".") and not e.is_dir(follow_symlinks=False)]
        return tuple(sorted(files))

    def is_bare(self) -> bool:
        with self._telling("."):
            self._check_root()
            with os.scandir(self.root) as entries:
                return next(entries, None) is None

    def _walk(self, folder: str, found: list[str], depth: int) -> None:
        with self._opened(folder) as descriptor, os.scandir(descriptor) as entries:
            inner = []
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                name = f"{folder}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    inner.append(name)
                else:
                    found.append(name)
        for name in inner if depth > 1 else ():
            with suppress(FileNotFoundError):  # gone since
                self._walk(name, found, depth - 1)

    def read(self, name: str, limit: int) -> bytes:
        parent, leaf = os.path.split(checked(name, self.url))
        with self._telling(name), self._opened(parent) as descriptor:
            # A pipe would wait for its writer: it is opened without waiting, and refused by its kind.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(leaf, flags, dir_fd=descriptor)
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise StoreError(self.url, f"{name}: is not a regular file")
                with os.fdopen(file, "rb", closefd=False) as opened:
                    content = opened.read(limit + 1)
            finally:
                os.close(file)
        if len(content) > limit:
            raise StoreError(self.url, f"{name}: has more than {limit} bytes")
        return content

    def put(self, name: str, content: bytes) -> None:
        parent, _ = os.path.split(checked(name, self.url))
        with self._telling(name, writing=True):
            with self._opened(parent, make=True):
                pass  # it is there, and no link
            target = self.root / name
            replace_file(target, content)
            remove_stale(target)

    def create(self, name: str, content: bytes) -> bool:
        parent, leaf = os.path.split(checked(name, self.url))
        with self._telling(name, writing=True), self._opened(parent, make=True) as descriptor:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                made = os.open(leaf, flags, 0o666, dir_fd=descriptor)
            except FileExistsError:
                return False
            try:
                with os.fdopen(made, "wb") as file:
                    file.write(content)
            except BaseException:  # a disk that is full, for one: what holds nothing is not there
                os.unlink(leaf, dir_fd=descriptor)
                raise
        return True

    def delete(self, name: str) -> None:
        parent, leaf = os.path.split(checked(name, self.url))
        with suppress(FileNotFoundError), self._telling(name), self._opened(parent) as descriptor:
            os.unlink(leaf, dir_fd=descriptor)

    def other_writers(self, folder: str) -> str:
        return other_writers(self.root / checked(folder, self.url))

    def lease_refusal(self) -> str:
        return ""  # O_EXCL is atomic on NFS since version 3, and on Lustre

    def _check_root(self) -> None:
        if self.root.is_dir():
            return
        if os.path.lexists(self.root):
            raise StoreError(self.url, "is a file or a broken link; a store is a folder or a URL")
        raise StoreError(self.url, "no such folder; mount it, or make it with mkdir -p")

    @contextmanager
    def _opened(self, folder: str, *, make: bool = False) -> Iterator[int]:
        """Open a folder of the store part by part, so that no part is a link; with ``make`` missing ones are made."""
        self._check_root()
        descriptor = os.open(self.root, _FOLDER)
        try:
            for part in filter(None, folder.split("/")):
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=descriptor)
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _telling(self, name: str, *, writing: bool = False) -> Iterator[None]:
        """Turn an OSError into one line; a file that is not there stays FileNotFoundError where one is not written."""
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not writing:
                raise
            links = isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP
            why = "is a link or lies behind one, which a store may not hold" if links else error.strerror
            raise StoreError(self.url, f"{name}: {why}") from error
