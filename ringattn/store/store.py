"""Profiles in a store: each checked against its name when it is read, and pushed under the name of its content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ringattn.errors import ProfileError, StoreError, one_line
from ringattn.profile.access import exposed
from ringattn.profile.schema import Profile
from ringattn.profile.yaml_io import MAX_FILE_BYTES, dump_profile, parse_profile
from ringattn.store.backends.backend import Backend
from ringattn.store.signatures import sigstore_bundle, ssh_signature
from ringattn.store.signatures.ssh_signature import SignatureFault, sign
from ringattn.store.signatures.trust import CHECKSUM, Signatures, StoreRefused, Trust
from ringattn.wording import plural

from .names import PROFILES, ProfileName, checked, is_signature, kind_of

MAX_FILES_OF_A_KIND = 64  # for one number of ranks; each takes a request and some 20 ms to read


class NotInStore(StoreError):
    """Name of a profile that the store does not have."""


@dataclass(frozen=True, slots=True)
class SignedFile:
    """Bytes of a file, and of the Sigstore bundle beside it."""

    content: bytes
    bundle: bytes


@dataclass(frozen=True, slots=True)
class Store:
    """Profiles in one back end, of which those are read that ``trust`` believes."""

    backend: Backend
    trust: Trust = CHECKSUM

    @property
    def url(self) -> str:
        return self.backend.url

    def names(self, kind: str = "", world: int | None = None) -> tuple[ProfileName, ...]:
        """Return the names of profiles, sorted: all, or those of one kind and number of ranks. Opens no file."""
        return self.listed(kind, world)[0]

    def signed_names(self) -> frozenset[ProfileName]:
        """Return the names of the profiles beside which a signature lies, that holds or does not. Opens no file."""
        found = set(self.backend.names(PROFILES))
        names = (ProfileName.parse(name) for name in found)
        return frozenset(name for name in names if name is not None and {name.signature, name.bundle} & found)

    def listed(self, kind: str = "", world: int | None = None) -> tuple[tuple[ProfileName, ...], tuple[str, ...]]:
        """Return the names of profiles as ``names`` does, and those of files beside them that are no profile's."""
        folder = f"{PROFILES}/{kind}" if kind else PROFILES
        found = {name: ProfileName.parse(name) for name in self.backend.names(checked(folder, self.url))}
        profiles = sorted(name for name in found.values() if name is not None)
        # A signature is there before its profile, and alone where a push was killed between the two.
        known = {str(name) for name in profiles} | {name for name in found if is_signature(name)}
        others = tuple(name for name in found if name not in known)
        return tuple(name for name in profiles if world in (None, name.world)), others

    def exposure(self, kind: str = "") -> str:
        """Return a warning where others may change the profiles, or those of one kind; empty where none can be seen.

        StoreRefused where signatures are asked for: they could put an earlier signed profile in the place of a later.
        """
        folder = checked(f"{PROFILES}/{kind}" if kind else PROFILES, self.url)
        why = self.backend.other_writers(folder)
        if why and self.trust.asks_for_signatures:
            raise StoreRefused(self.url, exposed(why, refused=True))
        return f"{self.url}: {exposed(why, refused=False)}" if why else ""

    def named(self, text: str) -> ProfileName:
        """Return the one profile that a user means by a full name, a start of it, or a start of its hash.

        NotInStore where none is meant; StoreError for several, and for a text that could be no name.
        """
        text = checked(text.removeprefix(f"{PROFILES}/"), self.url)
        starts = (f"{PROFILES}/{text}",)
        found = [name for name in self.names() if str(name).startswith(starts) or name.digest.startswith(text)]
        if len(found) == 1:
            return found[0]
        told = "`ringtune list` prints the names"
        if not found:
            raise NotInStore(self.url, f"{text}: is not there; {told}")
        raise StoreError(self.url, f"{text}: means {plural(len(found), 'profile')}, {found[0].short} for one; {told}")

    def content(self, name: ProfileName) -> bytes:
        """Return a profile's bytes: those of its name unless any are believed, and signed where that is asked for.

        StoreError for others, FileNotFoundError for none.
        """
        content = self.backend.read(str(name), MAX_FILE_BYTES)
        if self.trust.asks_for_checksums and hashlib.sha256(content).hexdigest() != name.digest:
            raise StoreError(
                self.url, f"{name}: its content is not that of its name; `ringtune forget {name.short}` removes it"
            )
        if self.trust.asks_for_signatures:
            try:
                self.trust.signer(content, self.signatures(name))
            except SignatureFault as fault:
                raise StoreError(self.url, f"{name}: {fault}") from None
        return content

    def signatures(self, name: ProfileName) -> Signatures:
        """Return what lies beside a profile: its signature with a key, and its Sigstore bundle."""
        return Signatures(
            self._beside(name.signature, ssh_signature.MAX_BYTES), self._beside(name.bundle, sigstore_bundle.MAX_BYTES)
        )

    def _beside(self, name: str, limit: int) -> bytes | None:
        try:
            return self.backend.read(name, limit)
        except FileNotFoundError:
            return None

    def keep_signatures(self, name: ProfileName, signatures: Signatures) -> None:
        """Make what lies beside a profile these signatures, and no others."""
        for path, content in ((name.signature, signatures.ssh), (name.bundle, signatures.bundle)):
            if content is None:
                self.backend.delete(path)
            else:
                self.backend.put(path, content)

    def sign(self, name: ProfileName, key_file: Path) -> None:
        """Put a signature beside a profile, in place of an earlier one; StoreError where the key cannot be used."""
        content = replace(self, trust=CHECKSUM).content(name)
        self.backend.put(name.signature, self.signed(content, key_file, name.short))

    def signed(self, content: bytes, key_file: Path, name: str) -> bytes:
        """Return the signature of what ``name`` is to hold; StoreError where the key cannot be used."""
        try:
            return sign(content, key_file)
        except SignatureFault as fault:
            raise StoreError(self.url, f"{name}: cannot be signed: {fault}") from None

    def profile(self, name: ProfileName) -> Profile:
        """Return a profile, of the kind and ranks that its name says; ProfileError or StoreError else."""
        return self.parsed(self.content(name), name, f"{self.url}/{name}")

    def parsed(self, content: bytes, name: ProfileName, source: str) -> Profile:
        """Return the profile in the content of a file; ProfileError unless it is what the name says."""
        profile = parse_profile(content, source, checksum=self.trust.asks_for_checksums)
        if kind_of(profile.fingerprint) != name.kind:
            raise ProfileError(source, f"is of {kind_of(profile.fingerprint)}, not of the kind in its name")
        if {entry.workload.world for entry in profile.plans} != {name.world}:
            raise ProfileError(
                source, f"holds other rows than those for {plural(name.world, 'rank')}, as its name says"
            )
        return profile

    def push(self, profile: Profile, source: str = "profile", key_file: Path | None = None) -> tuple[ProfileName, ...]:
        """Write a profile as ``push_all`` does."""
        return self.push_all([(source, profile)], key_file)[0]

    def push_all(
        self,
        profiles: Sequence[tuple[str, Profile]],
        key_file: Path | None = None,
        bundles: Mapping[str, SignedFile] = MappingProxyType({}),
    ) -> tuple[tuple[ProfileName, ...], ...]:
        """Write profiles, one file for each number of ranks, beside what is there; return the names of each.

        With ``key_file`` they are signed, and no reader sees one before its signatures. Nothing is written before all
        can be. ProfileError where one is a heuristic or holds no plans, where what would be written is too large, and
        where a bundle signs something else; StoreError where the key cannot be used. ``profiles`` come with the names
        that messages and ``bundles`` have for them.
        """
        files: list[list[tuple[ProfileName, bytes, Signatures]]] = []
        for source, profile in profiles:
            if profile.source != "measured" or not profile.plans:
                raise ProfileError(
                    source, "holds no measured plans; a store takes measured profiles, folders the others"
                )
            files.append([])
            signed = bundles.get(source)
            for part in by_world(profile):
                content = dump_profile(part).encode("utf-8")
                if len(content) > MAX_FILE_BYTES:
                    raise ProfileError(source, f"would be {len(content)} bytes, above the limit of {MAX_FILE_BYTES}")
                if signed is not None and signed.content != content:
                    raise ProfileError(
                        f"{source}{sigstore_bundle.SUFFIX}",
                        "signs the file as it is, and the store would hold it written anew, or as one for each number "
                        "of ranks; move the bundle away, push, and sign what `ringtune list KIND` prints",
                    )
                name = ProfileName.of(part.fingerprint, part.plans[0].workload.world, content)
                signature = None if key_file is None else self.signed(content, key_file, name.short)
                bundle = None if signed is None else signed.bundle
                files[-1].append((name, content, Signatures(signature, bundle)))
        for name, content, signatures in (file for of_one in files for file in of_one):
            for path, beside in ((name.signature, signatures.ssh), (name.bundle, signatures.bundle)):
                if beside is not None:
                    self.backend.put(path, beside)
            self.backend.put(str(name), content)
        return tuple(tuple(name for name, _, _ in of_one) for of_one in files)

    def forget(self, names: Sequence[ProfileName]) -> None:
        """Remove profiles; whoever has one may push it again."""
        for name in names:
            self.backend.delete(str(name))
            self.backend.delete(name.signature)
            self.backend.delete(name.bundle)


def others_note(url: str, others: Sequence[str]) -> str:
    """Return what to say of files in a store whose names are no profile's."""
    are = f"{others[0]} is" if len(others) == 1 else f"{plural(len(others), 'file')}, {others[0]} for one, are"
    return one_line(
        f"{url}: {are} passed over: a profile's name in a store is {PROFILES}/KIND/xRANKS-SHA256.yaml, which "
        "`ringtune push FILE` gives it"
    )


def by_world(profile: Profile) -> tuple[Profile, ...]:
    """Return a profile as one for each number of ranks it has rows for, each with the link speeds of that number."""
    worlds = sorted({entry.workload.world for entry in profile.plans})
    return tuple(
        replace(
            profile,
            plans=tuple(entry for entry in profile.plans if entry.workload.world == world),
            fingerprint=replace(
                profile.fingerprint,
                link_speeds=tuple(speed for speed in profile.fingerprint.link_speeds if speed.world == world),
            ),
        )
        for world in worlds
    )
