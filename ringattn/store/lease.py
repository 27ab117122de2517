"""Lease of a name in a store: one process holds it and renews it, and a dead holder's lapses.

A lease is a series of numbered files, of which the highest counts. Taking, renewing and releasing it are one act:
create the next number, which of several processes exactly one can. A holder that was overtaken finds its next number
taken. Clocks of different hosts are never compared: a lease has lapsed when, by one's own clock, its number has not
changed for its whole term. A stale listing cannot make two holders, since numbers are created and not listed.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ringattn.errors import StoreError
from ringattn.store.backends.backend import Backend

from .beacon import this_node
from .names import LEASES, checked

TERM_S = 60.0
RENEWALS = 4  # in a term
_KEPT = 8  # numbers behind the highest: a listing that old is taken for the newest, not for a new series
_LIMIT = 4096  # bytes


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a lease: its node, and in how many seconds without renewal it lapses; 0 where it was released.

    ``token`` is of one process alone.
    """

    node: str
    term_s: float
    token: str = field(default="", compare=False)

    @classmethod
    def parse(cls, content: bytes) -> Holder:
        """Return what a file says; one that says nothing clear is taken for a holder with the usual term."""
        try:
            plain = json.loads(content)
            node, term_s, token = str(plain["node"])[:100], float(plain["term_s"]), str(plain.get("token", ""))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # killed before it had written
            return cls("", TERM_S)
        return cls(node, min(term_s, 10 * TERM_S) if term_s >= 0 else TERM_S, token)


class Lease:
    """Lease ``name`` as one process sees it. Not for two threads at once."""

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        node: str | None = None,
        term_s: float = TERM_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """StoreError where the back end cannot hold leases."""
        self._backend, self._clock, self._term_s = backend, clock, term_s
        self._folder = checked(f"{LEASES}/{name}", backend.url)
        self._node = this_node() if node is None else node
        self._token = secrets.token_hex(8)
        self._seen, self._seen_at = -1, 0.0
        self._held = 0  # the number this process created last; 0: it holds nothing
        self.holder = Holder("", 0.0)  # who held it when it was last looked at
        self.lost = ""  # why a renewal failed
        if refusal := backend.lease_refusal():
            raise StoreError(backend.url, f"cannot say who measures: {refusal}; use a folder, S3 or GCS, or probe once")

    def acquire(self) -> bool:
        """Take the lease if it is free or has lapsed; False while another holds it."""
        newest = self._newest()
        if newest != self._seen:
            self._seen, self._seen_at = newest, self._clock()
        self.holder = self._read(newest)
        is_own = self.holder.token == self._token  # that it was created was not told
        if not is_own and self._clock() - self._seen_at < self.holder.term_s:
            return False
        if not self._create(newest + 1, self._term_s):
            return False
        # Where the listing was old, the number may have been one that is long over and was removed.
        if self._newest() != newest + 1:
            return False
        self._held = newest + 1
        return True

    def renew(self) -> bool:
        """Renew the lease; False where another process has taken it over since."""
        assert self._held, "renewed without being held"
        if not self._create(self._held + 1, self._term_s):
            self._held = 0
            return False
        self._held += 1
        for name in self._backend.names(self._folder):
            number = _number(name)
            if 0 < number <= self._held - _KEPT:
                self._backend.delete(name)
        return True

    def release(self) -> None:
        """Free the lease, unless it was lost."""
        if self._held:
            self._create(self._held + 1, 0.0)
            self._held = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew the lease, which is held, until the block is left, and free it then.

        A store that does not answer is asked again at the next renewal; what went wrong last is in ``lost``.
        """
        left = threading.Event()

        def renew() -> None:
            while not left.wait(self._term_s / RENEWALS):
                try:
                    if not self.renew():
                        self.lost = "another node has taken over, for which this one seemed dead"
                        return
                    self.lost = ""
                except StoreError as error:
                    self.lost = str(error)

        renewing = threading.Thread(target=renew, name="ringtune-lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            left.set()
            renewing.join(self._term_s)
            if not renewing.is_alive():
                try:
                    self.release()
                except StoreError as error:  # it lapses; what the block raised is what counts
                    self.lost = str(error)

    def _create(self, number: int, term_s: float) -> bool:
        """Create a number; True also where this process had, and a lost answer was asked for again."""
        content = json.dumps({"node": self._node, "token": self._token, "term_s": term_s})
        if self._backend.create(f"{self._folder}/{number:08d}", content.encode("utf-8")):
            return True
        return self._read(number).token == self._token

    def _newest(self) -> int:
        return max((_number(name) for name in self._backend.names(self._folder)), default=0)

    def _read(self, number: int) -> Holder:
        if number == 0:
            return Holder("", 0.0)
        try:
            return Holder.parse(self._backend.read(f"{self._folder}/{number:08d}", _LIMIT))
        except FileNotFoundError:  # overtaken since
            return Holder("", TERM_S)


def _number(name: str) -> int:
    leaf = name.rpartition("/")[2]
    return int(leaf) if len(leaf) == 8 and leaf.isascii() and leaf.isdigit() else 0
