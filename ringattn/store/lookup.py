"""Profiles of this machine out of the stores that are named, each kept in the user's cache folder: the edge.

A store is asked for the names of this machine's kind alone, and for the files among them that the cache lacks. One
that does not answer in time costs ``ANSWER_S`` once a process, and what the cache holds of it serves.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from ringattn.errors import ProfileError, RingAttentionError, StoreError
from ringattn.hardware.facts import HardwareFacts
from ringattn.profile.locations import FILE_VARIABLE, Located, cache_folder, collect, home_folder
from ringattn.profile.schema import Fingerprint, Profile
from ringattn.profile.yaml_io import dump_profile
from ringattn.store.backends.backend import Backend, absolute_place, open_backend
from ringattn.store.backends.endpoint import check_reachable
from ringattn.store.backends.folder import Folder
from ringattn.store.signatures.trust import CHECKSUM, Signatures, StoreRefused, Trust, trust_of
from ringattn.wording import plural

from .bounded import ANSWER_S, NoAnswerYet, Pending
from .merge import merge_profiles, same_machine_groups
from .names import PROFILES, ProfileName, kind_of, shown_url
from .store import MAX_FILES_OF_A_KIND, Store, others_note

STORE_VARIABLE = "RINGTUNE_STORE"


def store_places(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders and URLs of RINGTUNE_STORE, in order: parted by blanks, quoted as in a shell.

    A relative folder is of the working one, as `--store` has it.
    """
    try:
        return tuple(absolute_place(place) for place in shlex.split(environ.get(STORE_VARIABLE, "")) if place)
    except ValueError as error:
        raise StoreError(STORE_VARIABLE, f"cannot be taken apart: {error}; it holds folders and URLs") from None


def find_profiles(
    named: str | os.PathLike[str] | None,
    facts: HardwareFacts,
    *,
    world: int = 1,
    heuristics_only: bool = False,
    places: Sequence[str] | None = None,
) -> tuple[tuple[Located, ...], tuple[str, ...]]:
    """Return every profile of the search order, those in stores too, and a note for all that was skipped.

    As ``locations.collect``, but for a machine and a number of ranks, since a store is asked for these alone. A
    profile that is named binds, and no store is asked. ``places`` are those of RINGTUNE_STORE unless given.
    """
    if named is not None or heuristics_only or os.environ.get(FILE_VARIABLE):
        return collect(named, heuristics_only=heuristics_only, vendor=facts.vendor)
    stored = Stored()
    asking = asked_stores(facts, world, store_places(os.environ) if places is None else tuple(places))

    def answered() -> tuple[Located, ...]:
        nonlocal stored
        stored = asking()
        return stored.located

    located, notes = collect(vendor=facts.vendor, stored=answered)
    return located, (*notes, *stored.notes)


def asked_stores(facts: HardwareFacts, world: int, places: tuple[str, ...]) -> Callable[[], Stored]:
    """Ask stores for this machine's profiles, and return a function that waits for what they say."""
    if not places:
        return Stored
    cache, trust = cache_folder(os.environ, home_folder()), trust_of(os.environ, home_folder())
    pending = Pending(partial(stored_profiles, places, kind_of(Fingerprint.of(facts)), world, cache, trust))
    return partial(pending.answer, math.inf)


@dataclass(frozen=True, slots=True)
class Stored:
    """Profiles out of stores, a note for all that was skipped, and the places that could not be asked."""

    located: tuple[Located, ...] = ()
    notes: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()


@lru_cache(maxsize=64)
def stored_profiles(places: tuple[str, ...], kind: str, world: int, cache: Path, trust: Trust = CHECKSUM) -> Stored:
    """Return the profiles of one kind and number of ranks in stores, in order; asked once a process, all at once."""
    deadline_s = time.monotonic() + ANSWER_S
    copies = [LocalCopy(place, cache, trust) for place in places]
    questions = [Question(copy, kind, world) for copy in copies]
    notes: list[str] = []
    located: list[Located] = []
    unread: set[str] = set()
    for copy, question in zip(copies, questions, strict=True):
        found, fault = Fetched(), ""
        try:
            found = question.answer(deadline_s)
        except NoAnswerYet:
            fault = f"{copy.url}: did not answer within {ANSWER_S:g} s"
        except StoreRefused as error:
            notes.append(str(error))
            unread.add(copy.place)
            continue
        except StoreError as error:
            fault = str(error)
        if fault:
            unread.add(copy.place)
            found = copy.kept(kind, world)
            count = plural(len(found.profiles), "profile")
            notes.append(f"{fault}; {f'{count} read of it before will do' if found.profiles else 'skipped'}")
        located += copy.merged(found, world)
        notes += found.notes
    return Stored(tuple(located), tuple(notes), frozenset(unread))


class Question:
    """Question to one store, put in a thread of its own: for the profiles of a kind, into its copy."""

    def __init__(self, copy: LocalCopy, kind: str, world: int) -> None:
        self._copy, self._kind, self._world = copy, kind, world
        self._is_reachable = False
        self._opened, self._opened_s = threading.Event(), math.inf
        self._pending = Pending(self._ask)

    def _ask(self) -> Fetched:
        try:
            check_reachable(self._copy.place)
            self._is_reachable = True
            backend = open_backend(self._copy.place)
            self._copy.store.trust.prepare()
            self._opened_s = time.monotonic()
        finally:
            self._opened.set()
        return self._copy.fetch(Store(backend, self._copy.store.trust), self._kind, self._world)

    def answer(self, deadline_s: float) -> Fetched:
        """Return the answer; NoAnswerYet at the deadline, or 0.6 s after a client was imported, if that is later.

        The import of a client such as s3fs, or of sigstore, takes 0.4 s of this computer's time, and on a busy one more
        than there is.
        """
        try:
            return self._pending.answer(deadline_s)
        except NoAnswerYet:
            if not self._is_reachable:
                raise
        self._opened.wait()
        return self._pending.answer(self._opened_s + 0.6 * ANSWER_S)


@dataclass(slots=True)
class Fetched:
    """Profiles by the file they are in, and a note for each that was refused."""

    profiles: dict[str, Profile] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class LocalCopy:
    """Copy of what was read of a store, in the user's cache folder: it serves where the store does not answer."""

    def __init__(self, place: str, cache: Path, trust: Trust = CHECKSUM) -> None:
        self.place, self.url = place, shown_url(place)
        own = hashlib.sha256(place.encode("utf-8", "surrogatepass"))  # a folder's name may be any bytes
        self.root = cache / "stores" / own.hexdigest()[:16]
        self.store = Store(Folder(self.root), trust)

    def fetch(self, source: Store, kind: str, world: int) -> Fetched:
        """Return the profiles of one kind in the store, and make the copy agree with it.

        What the copy has is not asked for, unless any content is believed, which may change; a damaged file of it is
        fetched again. Raises StoreError where the store cannot be listed, or seems not to be mounted.
        """
        found = Fetched()
        if warning := source.exposure(kind):
            found.notes.append(warning)
        listed, others = source.listed(kind, world)
        if not listed and (why := self.missing(source.backend)):
            raise StoreError(source.url, why)  # an agreeing copy would be none
        if others:
            found.notes.append(others_note(source.url, others))
        if len(listed) > MAX_FILES_OF_A_KIND:
            found.notes.append(
                f"{source.url}: {len(listed)} files of {kind}, of which {MAX_FILES_OF_A_KIND} are read; "
                "`ringtune merge` removes those that no longer count"
            )
            listed = listed[:MAX_FILES_OF_A_KIND]
        for name in listed:
            kept = self._kept_content(name)
            path = str(self.root / str(name))
            try:
                content = source.content(name) if kept is None or not source.trust.asks_for_checksums else kept
                if content != kept:
                    signatures = source.signatures(name) if source.trust.asks_for_signatures else None
                    path = self._keep(name, content, found, signatures) or f"{source.url}/{name}"
                found.profiles[path] = source.parsed(content, name, path)
            except FileNotFoundError:
                continue  # forgotten since it was listed
            except RingAttentionError as error:
                found.notes.append(f"{error} (skipped)")
        if self.root.is_dir():
            self.store.forget([name for name in self.store.names(kind, world) if name not in listed])
        return found

    def missing(self, backend: Backend) -> str:
        """Return why the store seems not to be mounted: it is bare, and profiles of it are here; "" otherwise."""
        if not self.root.is_dir() or not backend.is_bare():
            return ""
        count = len(self.store.names())
        read = f"{plural(count, 'profile')} {'was' if count == 1 else 'were'} read of it before"
        return f"is an empty folder, and {read}; mount it, or remove {self.root} if it was emptied" if count else ""

    def kept(self, kind: str, world: int) -> Fetched:
        """Return what the copy holds of one kind."""
        found = Fetched()
        for name in self.store.names(kind, world) if self.root.is_dir() else ():
            path = str(self.root / str(name))
            try:
                if content := self._kept_content(name):
                    found.profiles[path] = self.store.parsed(content, name, path)
            except ProfileError as error:
                found.notes.append(f"{error} (skipped)")
        return found

    def merged(self, found: Fetched, world: int) -> list[Located]:
        """Return the profiles, those of one machine and software merged into one, which gets a file of its own."""
        located = []
        files = {id(profile): path for path, profile in found.profiles.items()}
        for group in same_machine_groups(found.profiles.values()):
            profile = merge_profiles(group).profile
            path = files.get(id(profile)) or self._written(profile, world, found) or files[id(group[-1])]
            located.append(Located(path, profile, "store"))
        return located

    def _written(self, profile: Profile, world: int, found: Fetched) -> str:
        content = dump_profile(profile).encode("utf-8")
        return self._keep(ProfileName.of(profile.fingerprint, world, content), content, found, folder="merged")

    def _keep(
        self,
        name: ProfileName,
        content: bytes,
        found: Fetched,
        signatures: Signatures | None = None,
        *,
        folder: str = PROFILES,
    ) -> str:
        """Write a file of the copy and return its path; where that fails a note says so, and "" is returned."""
        path = str(name).replace(PROFILES, folder, 1)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if signatures is not None:
                self.store.keep_signatures(name, signatures)
            self.store.backend.put(path, content)
        except (OSError, StoreError) as error:
            why = error.strerror if isinstance(error, OSError) else error.problem
            note = f"{self.root}: cannot be written ({why}), so {self.url} is read by every process"
            found.notes += [] if note in found.notes else [note]
            return ""
        return str(self.root / path)

    def _kept_content(self, name: ProfileName) -> bytes | None:
        try:
            return self.store.content(name)
        except (FileNotFoundError, StoreError):  # not there, damaged, or no cache folder at all: the store has it
            return None
