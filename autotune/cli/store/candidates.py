"""Every profile that could serve this machine, with its tier and what differs: ``ringtune which --verbose``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts

OTHER_KINDS = 32  # of one vendor in a store, of which a profile is read to say in what they differ


@dataclass(frozen=True, slots=True)
class Candidate:
    """One measured profile: where it is, how it was found, its tier here (empty: none), and what differs."""

    path: str
    origin: str
    tier: str
    why: str


def candidates(facts: HardwareFacts, world: int, stores: tuple[str, ...], notes: list[str]) -> list[Candidate]:
    """Return all measured profiles of the search order, the best tiers first, then those of other kinds in stores."""
    from ringattn.profile.resolve import TIERS, tier_of
    from ringattn.store.lookup import find_profiles
    from ringattn.wording import plural

    located, _ = find_profiles(None, facts, world=world, places=stores or None)
    found = []
    for entry in located:
        if entry.profile.source == "measured":
            tier, why = tier_of(entry.profile, facts, world)
            lacks = (
                f"; it holds no plans for {plural(world, 'rank')}" if tier and not entry.profile.covers(world) else ""
            )
            found.append(Candidate(entry.path, entry.origin, tier or "", why + lacks))
    found += _of_other_kinds(facts, world, stores, notes)
    return sorted(found, key=lambda candidate: TIERS.index(candidate.tier) if candidate.tier else len(TIERS))


def _of_other_kinds(facts: HardwareFacts, world: int, stores: tuple[str, ...], notes: list[str]) -> Iterator[Candidate]:
    """Yield one profile for each other kind of this vendor in the stores, which the runtime does not look at."""
    from functools import partial

    from ringattn.errors import RingAttentionError, StoreError
    from ringattn.profile.locations import FILE_VARIABLE, home_folder
    from ringattn.profile.resolve import tier_of
    from ringattn.profile.schema import Fingerprint
    from ringattn.store.backends.backend import open_backend
    from ringattn.store.bounded import answered
    from ringattn.store.lookup import asked_stores, store_places
    from ringattn.store.names import kind_of
    from ringattn.store.signatures.trust import trust_of
    from ringattn.store.store import Store

    here, trust = kind_of(Fingerprint.of(facts)), trust_of(os.environ, home_folder())
    places = stores or store_places(os.environ)
    unread = frozenset() if os.environ.get(FILE_VARIABLE) else asked_stores(facts, world, places)().unread
    for place in places:
        if place in unread:  # which was said
            continue
        try:
            store = Store(open_backend(place), trust)
            answered(store.exposure, store.url)
            names = answered(partial(store.names, world=world), store.url)
        except StoreError as error:
            notes.append(str(error))
            continue
        others = {name.kind: name for name in names if name.kind != here}
        alike = [name for kind, name in sorted(others.items()) if kind.startswith(f"{facts.vendor}-")]
        for name in alike[:OTHER_KINDS]:
            try:
                tier, why = tier_of(answered(partial(store.profile, name), store.url), facts, world)
            except (FileNotFoundError, RingAttentionError) as error:
                notes.append(str(error))
                continue
            near = f"not looked at, of another kind; would be {tier}" if tier else "not looked at, of another kind"
            yield Candidate(f"{store.url}/{name}", "store", "", f"{near}: {why}")


def store_contents(facts: HardwareFacts) -> list[dict[str, object]]:
    """Return each store of RINGTUNE_STORE as a place of the search order, with this kind's profiles, for ``doctor``."""
    from pathlib import Path

    from ringattn.profile.locations import cache_folder, home_folder
    from ringattn.profile.schema import Fingerprint
    from ringattn.store.lookup import store_places, stored_profiles
    from ringattn.store.names import kind_of, shown_url
    from ringattn.store.signatures.trust import trust_of

    trust = trust_of(os.environ, home_folder())
    kind, cache = kind_of(Fingerprint.of(facts)), cache_folder(os.environ, home_folder())
    places: list[dict[str, object]] = []
    for place in store_places(os.environ):
        found = stored_profiles((place,), kind, 1, cache, trust)
        files = [
            {"file": Path(entry.path).name, "source": entry.profile.source, "error": ""} for entry in found.located
        ]
        error = "; ".join(found.notes)
        places.append({"origin": "store", "path": shown_url(place), "exists": True, "error": error, "files": files})
    return places


def candidate_lines(found: list[Candidate]) -> Iterator[str]:
    """Yield a line for each candidate."""
    for candidate in found:
        yield f"{candidate.tier or 'none':<13} {candidate.path} ({candidate.origin}): {candidate.why}"
