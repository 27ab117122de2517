"""``ringtune probe --if-missing``: of all nodes of one kind one measures, and the others take its answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.exit_codes import ExitCode, ProbeFailure
from ringattn.errors import StoreError
from ringattn.profile.schema import Fingerprint
from ringattn.store.lease import Lease
from ringattn.store.lookup import LocalCopy
from ringattn.store.names import kind_of
from ringattn.store.store import Store

from ..store.options import signing_key

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts

POLL_S = 2.0
SAME_SILICON = ("exact", "same-silicon")  # what is measured on other silicon does not make a probe needless


@dataclass(slots=True)
class OncePerKind:
    """Search for a profile of one kind of machine in a store, and the right to measure it where there is none.

    ``cache`` is the user's cache folder, ``say`` takes notes for people.
    """

    store: Store
    place: str
    cache: Path
    facts: HardwareFacts
    world: int
    say: Callable[[str], None]
    lease_of: Callable[..., Lease] = Lease
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    exact: bool = False  # a profile of other software versions does for a node that does not wait, and is renewed
    measured: bool = False  # this node did
    said: set[str] = field(default_factory=set)  # notes on what lies in the store

    def run(self, measure: Callable[[Path | None], Path], wait_s: float | None) -> Path | None:
        """Return the file of the profile that all nodes of this kind take.

        ``measure`` returns the file of what it measured here; it gets that of an earlier profile of this silicon, if
        there is one. ``wait_s`` None: this node does not wait for another that measures.
        ProbeFailure where the time to wait is over.
        """
        if found := self.found():
            return found
        kind = kind_of(Fingerprint.of(self.facts))
        lease = self.lease_of(self.store.backend, f"{kind}-x{self.world}")
        end_s = self.clock() + (wait_s or 0.0)
        told = ""
        while True:
            try:
                if lease.acquire():
                    break
                now = f"{lease.holder.node or 'another node'} measures {kind}"
            except StoreError as error:
                if wait_s is None or not told:  # one that never answered is no store to wait for
                    raise
                now = f"{error.problem}; asked again until it answers"
            if now != told:
                self.say(f"{self.store.url}: {now}")
                told = now
            left_s = end_s - self.clock()
            if wait_s is None:
                return self.found(SAME_SILICON)
            if left_s <= 0:
                raise ProbeFailure(
                    f"{self.store.url}: no profile of {kind} after {wait_s:.0f} s; the heuristic serves meanwhile",
                    ExitCode.NO_PROFILE,
                )
            self.sleep(min(POLL_S, left_s))
            with suppress(StoreError):  # which the next attempt at the lease meets, and says
                if found := self.found():
                    return found
        with lease.kept():
            if found := self.found():  # measured and freed between the two looks
                return found
            push_measured(self.store, measure(self.found(SAME_SILICON)))
            self.measured = True
        if lease.lost:
            self.say(f"{self.store.url}: the lease could not be kept: {lease.lost}; the profile is there all the same")
        found = self.found()
        if found is None:
            raise ProbeFailure(f"{self.store.url}: the profile of {kind} that was put there is gone again")
        return found

    def found(self, tiers: tuple[str, ...] = ()) -> Path | None:
        """Return the file of the best profile for this node in the store, copied to the cache.

        It is of one of these tiers; without them of those that make a probe needless.
        """
        from ringattn.profile.resolve import resolve, tier_of

        copy = LocalCopy(self.place, self.cache, self.store.trust)
        fetched = copy.fetch(self.store, kind_of(Fingerprint.of(self.facts)), self.world)
        for note in fetched.notes:
            if note not in self.said:  # it is looked every few seconds
                self.said.add(note)
                self.say(note)
        tiers = tiers or (("exact",) if self.exact else SAME_SILICON)
        located = [
            entry
            for entry in copy.merged(fetched, self.world)
            if tier_of(entry.profile, self.facts, self.world)[0] in tiers
        ]
        return Path(resolve(located, self.facts, world=self.world).path) if located else None


def push_measured(store: Store, path: Path) -> None:
    """Put what was just measured into a store; minutes of measuring are not lost to one failed request."""
    from ringattn.profile.yaml_io import load_profile

    try:
        store.push(load_profile(path), str(path), signing_key())
    except StoreError as error:
        raise ProbeFailure(
            f"{error}; what was measured is in {path}: `ringtune push --store {store.url} {path}` sends it"
        ) from error
