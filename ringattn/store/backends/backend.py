"""Back ends of a store: what each must be able to do, and which one serves a URL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from ringattn.errors import StoreError
from ringattn.profile.yaml_io import url_in

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


class Backend(Protocol):
    """Files by name, as ``names`` has them. Every method raises StoreError where the store cannot be used."""

    @property
    def url(self) -> str:
        """The store as messages show it, without a password."""

    def names(self, folder: str) -> tuple[str, ...]:
        """Return the names of the files below ``folder``, sorted; nothing for a folder that is not there.

        StoreError where the store itself is not there. Hidden files are left out, others are whatever they are.
        """

    def loose_files(self) -> tuple[str, ...]:
        """Return the names of the files that lie in the store itself and in none of its folders, sorted."""

    def is_bare(self) -> bool:
        """Return whether it is a folder without any entry, as that is on which a file system is not mounted."""

    def read(self, name: str, limit: int) -> bytes:
        """Return a whole file of at most ``limit`` bytes; FileNotFoundError where there is none."""

    def put(self, name: str, content: bytes) -> None:
        """Write a file in one step: a reader sees all of it, or what was there before."""

    def create(self, name: str, content: bytes) -> bool:
        """Make a file unless there is one; False where there is. Of several at once exactly one succeeds."""

    def delete(self, name: str) -> None:
        """Remove a file, which need not be there."""

    def other_writers(self, folder: str) -> str:
        """Return why others than root and this user may change what is in ``folder``; empty where none can be seen.

        Of what a server allows others nothing can be seen.
        """

    def lease_refusal(self) -> str:
        """Return why ``create`` cannot be relied on here; empty where it can."""


def absolute_place(place: str) -> str:
    """Return a URL as it is, and a folder from / on: a relative one is of the working folder now."""
    return place if url_in(place) else str(Path(place).absolute())


def open_backend(place: str) -> Backend:
    """Return the back end of a folder, written from / on, or of a URL. Neither is asked for anything yet.

    StoreError for a relative folder, and for a URL that no installed package serves.
    """
    from .folder import Folder

    scheme = _URL.match(place)
    if scheme is not None and scheme[1] not in ("file", "local"):
        from .remote import Remote

        return Remote(place)
    folder = Path(place[scheme.end() :] if scheme else place)
    if scheme is None and (url := url_in(place)):
        raise StoreError(place, f"is neither a folder, from / on, nor a URL; is it {url}?")
    if not folder.is_absolute():
        raise StoreError(place, "is a relative folder; write it from / on")
    return Folder(folder)
