"""Store behind a URL, through fsspec: S3, GCS and whatever else fsspec has a package for."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from ringattn.errors import StoreError
from ringattn.store.names import LEASES, checked, shown_url
from ringattn.wording import needs_package

MAX_DEPTH = 4
# In these a put is seen whole or not at all, and can be made conditional on there being no such object.
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
_WEB = ("http", "https")
_NEED_A_PLACE = (*(scheme for scheme in _OBJECT_STORES if scheme != "memory"), *_WEB)


class Remote:
    """Files below a URL. fsspec is imported when one is made; the first question connects."""

    def __init__(self, url: str) -> None:
        self.url = shown_url(url).rstrip("/")
        self._given = url
        self._scheme, _, place = url.partition("://")
        if self._scheme in _NEED_A_PLACE and not place.split("/")[0]:
            raise StoreError(
                url, "names no bucket or server; a URL is as s3://bucket/ringtune or https://server/ringtune"
            )
        try:
            import fsspec
        except ImportError:
            raise StoreError(self.url, needs_package("URLs", "fsspec", "store")) from None
        try:
            fsspec.get_filesystem_class(self._scheme)
        except ImportError as error:  # which names the package to install
            package = f"fsspec and its package for {self._scheme}://"
            told = f"{needs_package('such URLs', package, 'store')}, and beside it: {error}"
            raise StoreError(self.url, " ".join(told.split())) from None
        except ValueError:
            close = get_close_matches(self._scheme, fsspec.available_protocols(), n=1)
            raise StoreError(
                self.url,
                f"fsspec knows no {self._scheme}://; use a folder, or a URL such as s3://, gs:// or https://"
                + (f"; is it {close[0]}://?" if close else ""),
            ) from None

    @cached_property
    def _connected(self) -> tuple[Any, str]:
        """The file system, which remembers no listings, and the path of the store in it."""
        import fsspec

        options: dict[str, Any] = {"use_listings_cache": False}
        if self._scheme in _WEB:
            from .http_client import bounded_client

            options["client_kwargs"] = bounded_client(fsspec.config.conf.get(self._scheme, {}))
        files, root = fsspec.core.url_to_fs(self._given, **options)
        return files, root.rstrip("/")

    def names(self, folder: str) -> tuple[str, ...]:
        try:
            with self._telling(folder):
                files, root = self._connected
                # An object store lists what is below a prefix at once. Others are walked, and would leave out what
                # cannot be reached.
                how = {} if self._scheme in _OBJECT_STORES else {"maxdepth": MAX_DEPTH, "on_error": "raise"}
                found = files.find(f"{root}/{folder}", **how)
        except FileNotFoundError:
            found = []
        inner = tuple(name for name in self._inner(found) if name != folder)  # as an empty page of a server is listed
        if not inner:
            self._check_there()
        return inner

    def loose_files(self) -> tuple[str, ...]:
        try:
            with self._telling("."):
                files, root = self._connected
                found = [entry["name"] for entry in files.ls(root, detail=True) if entry["type"] == "file"]
        except FileNotFoundError:
            return ()
        return self._inner(found)

    def is_bare(self) -> bool:
        return False  # nothing is mounted there

    def _inner(self, paths: Iterable[str]) -> tuple[str, ...]:
        _, root = self._connected
        inner = (path.removeprefix(f"{root}/") for path in paths if path.startswith(f"{root}/"))
        return tuple(sorted(name for name in inner if not any(part[:1] in ("", ".") for part in name.split("/"))))

    def _check_there(self) -> None:
        """Raise StoreError where the bucket, or the folder on a server, is not there: that is no empty store.

        A prefix in a bucket is there as soon as it is written to.
        """
        if self._scheme == "memory":
            return
        with self._telling("."):
            files, root = self._connected
            is_bucket = self._scheme in _OBJECT_STORES
            place = root.split("/")[0] if is_bucket else root
            there = files.exists(place)
        if not there:
            what = f"bucket {place}" if is_bucket else "folder"
            raise StoreError(self.url, f"no such {what}, or none that may be listed; check its name, or make it")

    def read(self, name: str, limit: int) -> bytes:
        with self._telling(checked(name, self.url)):
            files, root = self._connected
            content = bytearray()
            with files.open(f"{root}/{name}", "rb") as file:
                # Of a server that does not tell a file's size one read is what has arrived.
                while len(content) <= limit and (chunk := file.read(limit + 1 - len(content))):
                    content += chunk
        if len(content) > limit:
            raise StoreError(self.url, f"{name}: has more than {limit} bytes")
        return bytes(content)

    def put(self, name: str, content: bytes) -> None:
        with self._telling(checked(name, self.url), writing=True):
            files, root = self._connected
            if self._scheme in _OBJECT_STORES:
                files.pipe_file(f"{root}/{name}", content)
                return
            parent, _, leaf = f"{root}/{name}".rpartition("/")
            files.makedirs(parent, exist_ok=True)
            temporary = f"{parent}/.{leaf[:100]}.{secrets.token_hex(6)}.tmp"
            files.pipe_file(temporary, content)
            files.mv(temporary, f"{root}/{name}")

    def create(self, name: str, content: bytes) -> bool:
        with self._telling(checked(name, self.url), writing=True):
            files, root = self._connected
            try:
                files.pipe_file(f"{root}/{name}", content, mode="create")
            except FileExistsError:
                return False
        return True

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError), self._telling(checked(name, self.url)):
            files, root = self._connected
            files.rm_file(f"{root}/{name}")

    def other_writers(self, folder: str) -> str:
        return ""

    def lease_refusal(self) -> str:
        if self._scheme not in _OBJECT_STORES:
            return f"{self._scheme} cannot create a file on condition that there is none"
        trial = f"{LEASES}/trial-{secrets.token_hex(8)}"  # a server or package may be too old to honour the condition
        first, second = self.create(trial, b""), self.create(trial, b"")
        self.delete(trial)
        if not first or second:
            return "the server ignores the condition that a new object must not exist"
        return ""

    @contextmanager
    def _telling(self, name: str, *, writing: bool = False) -> Iterator[None]:
        """Turn whatever the package raises into one line: each has exceptions of its own.

        A file that is not there stays FileNotFoundError where one is not written.
        """
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            told: BaseException = error
            if isinstance(error, FileNotFoundError) and not writing:
                if _says_not_there(error):
                    raise FileNotFoundError(f"{self.url}: {name}: is not there") from None
                told = error.__cause__ or error
            why = " ".join(str(told).split()) or type(told).__name__
            raise StoreError(self.url, f"{name}: {why[:300]}") from error


def _says_not_there(error: FileNotFoundError) -> bool:
    """Tell whether a server said that it has no such file: fsspec says so too of one that refuses or breaks off."""
    if error.__cause__ is None or not type(error.__cause__).__module__.startswith("aiohttp"):
        return True
    return getattr(error.__cause__, "status", None) in (404, 410)
