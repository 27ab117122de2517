"""``ringtune probe --if-missing``: of all nodes of one kind one measures, and the others take its answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.exit_codes import ExitCode, ProbeFailure
from ringattn.errors import StoreError
from ringattn.profile.schema import Fingerprint
from ringattn.store.lease import Lease
from ringattn.store.lookup import LocalCopy
from ringattn.store.names import kind_of
from ringattn.store.store import Store

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts

POLL_S = 2.0
FITTING = ("exact", "same-silicon")  # what is measured on other silicon does not make a probe needless


@dataclass(slots=True)
class OncePerKind:
    """Search for a profile of one kind of machine in a store, and the right to measure it where there is none.

    ``cache`` is the user's cache folder, ``measure`` returns the file of a profile measured here, ``say`` takes notes
    for people.
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
    measured: bool = False  # this node did

    def run(self, measure: Callable[[], Path], wait_s: float | None) -> Path | None:
        """Return the file of the profile that all nodes of this kind take.

        ``wait_s`` None: another node measures, and this one does not wait for it. ProbeFailure where the time is over.
        """
        if found := self.found():
            return found
        kind = kind_of(Fingerprint.of(self.facts))
        lease = self.lease_of(self.store.backend, f"{kind}-x{self.world}")
        end_s = self.clock() + (wait_s or 0.0)
        told = ""
        while not lease.acquire():
            holder = lease.holder.node or "another node"
            if holder != told:
                self.say(f"{self.store.url}: {holder} measures {kind}")
                told = holder
            left_s = end_s - self.clock()
            if wait_s is None:
                return None
            if left_s <= 0:
                raise ProbeFailure(
                    f"{self.store.url}: no profile of {kind} after {wait_s:.0f} s; the heuristic serves meanwhile",
                    ExitCode.NO_PROFILE,
                )
            self.sleep(min(POLL_S, left_s))
            if found := self.found():
                return found
        with lease.kept():
            if found := self.found():  # measured and freed between the two looks
                return found
            self._push(measure())
            self.measured = True
        if lease.lost:
            self.say(f"{self.store.url}: the lease could not be kept: {lease.lost}; the profile is there all the same")
        found = self.found()
        if found is None:
            raise ProbeFailure(f"{self.store.url}: the profile of {kind} that was put there is gone again")
        return found

    def found(self) -> Path | None:
        """Return the file of the best profile of this silicon and number of ranks in the store, copied to the cache."""
        from ringattn.profile.resolve import resolve, tier_of

        copy = LocalCopy(self.place, self.cache)
        fetched = copy.fetch(self.store, kind_of(Fingerprint.of(self.facts)), self.world)
        for note in fetched.notes:
            self.say(note)
        located = [
            entry
            for entry in copy.merged(fetched, self.world)
            if tier_of(entry.profile, self.facts, self.world)[0] in FITTING
        ]
        return Path(resolve(located, self.facts, world=self.world).path) if located else None

    def _push(self, path: Path) -> None:
        """Put what was measured into the store; minutes of measuring are not lost to one failed request."""
        from ringattn.profile.yaml_io import load_profile

        profile = load_profile(path)
        try:
            self.store.push(profile, str(path))
        except StoreError as error:
            raise ProbeFailure(f"{error}; what was measured is in {path}: `ringtune push {path}` sends it") from error
